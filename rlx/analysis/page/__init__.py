"""The page of a sweep: one HTML file that opens offline, with tables to sort, figures, and the curves of any metric.

`sections.render` writes it. Left out: the statistics and tables that it shows (rlx.analysis).

Example:
    from rlx.analysis.loading import load_sweep
    from rlx.analysis.page import sections
    from rlx.analysis.report import comparisons, evidence_of

    uri, metric = "sqlite:///storage/mlflow.db", "eval/accuracy"
    sweep = load_sweep(uri, "rlx")
    compared = comparisons(sweep, metric, "max")
    page = sections.render(sweep, compared, evidence_of(sweep, compared, uri, metric, "max"), "", uri, metric, "max")
"""
