"""Builds the objects of one rank from a run's config.

`rank.build_rank` makes all of them: the models (models.py), what collects rollouts (rollouts.py), and trainer and
checkpointer. What needs Ray, vLLM or MLflow is passed in (`inputs.TrainingInputs`), so that a plain process can do it.
Left out: what the objects do, which is in the modules of rlx.training.

Example:
    from rlx.training.setup import models, rank

    print(rank.build_rank.__doc__, models.Models.__doc__)
"""
