"""A sweep read back from MLflow: statistics of its settings, tables, figures, and a page that holds them all.

Left out: running a sweep (rlx.sweeps).

Imports of rlx: algorithms, config, samples, storage, tracking.

Example:
    from rlx.analysis.loading import load_sweep
    from rlx.analysis.sentences import summary_sentence
    from rlx.analysis.statistics import group_trials

    sweep = load_sweep("sqlite:///storage/mlflow.db", "rlx")
    print(summary_sentence(group_trials(sweep, sweep.metric, sweep.mode), sweep.metric))
"""
