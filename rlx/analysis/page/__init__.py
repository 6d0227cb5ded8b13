"""The page of a sweep: one HTML file that opens offline, with tables to sort, figures, and the curves of any metric.

`sections.render` writes it. Left out: the statistics and tables that it shows (rlx.analysis).

Example:
    from rlx.analysis.loading import load_sweep
    from rlx.analysis.page import sections
    from rlx.analysis.statistics import group_trials

    uri = "sqlite:///storage/mlflow.db"
    sweep = load_sweep(uri, "rlx")
    compared = {"settings": group_trials(sweep)}
    page = sections.render(sweep, compared, "", uri, "eval/accuracy", "max")
"""
