"""The page of a sweep: one HTML file that opens offline, with tables to sort, figures, and the curves of any metric.

`sections.render` writes it. Left out: the statistics and tables that it shows (rlx.analysis).
"""
