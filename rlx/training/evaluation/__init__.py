"""Evaluation: which questions are asked when, what came of each, and the metrics of that.

`sets` has the questions of one rank: the held-out prompts with one greedy answer each, and those of eval.sets with
several. `evaluate` asks those that are due; `outcomes` gives every rank all outcomes, and computes metrics from them.

Left out: how answers are generated (rlx.training.collector) and scored (rlx.rewards), formulas
(rlx.algorithms.sampled_answers), and the files of outcomes (rlx.samples.evaluations).

Example:
    from rlx.config.sections.data import EvalSetConfig
    from rlx.samples import evaluations
    from rlx.storage.addresses import open_storage
    from rlx.training.evaluation.outcomes import eval_metrics

    run = open_storage("storage/runs/try1", create=False)
    outcomes = evaluations.read_outcomes(run, evaluations.EvaluationFile(20, "held"))
    print(eval_metrics(EvalSetConfig(name="held", samples=4), outcomes))
"""
