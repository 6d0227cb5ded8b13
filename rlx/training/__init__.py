"""PPO on one rank: the loop, and what it calls.

The package imports neither ray nor mlflow. Its caller passes live engines, reward models and a reporter
(`setup.inputs.TrainingInputs`), so it also runs in a plain process, with `rollout.fake_engine.FakeEngines` and
`reporting.MemoryReporter`. It leaves out formulas (rlx.algorithms), how engines work (rlx.rollout), files (rlx.storage)
and the start of processes (rlx.runs).

Imports of rlx: algorithms, config, data, mesh, models, rewards, rollout, samples, storage, types.

Example:
    from rlx.training import loop
    from rlx.training.setup.inputs import TrainingInputs
    from rlx.training.setup.rank import build_rank, close_rank

    def train(inputs: TrainingInputs) -> None:  # on every rank, after torch.distributed is initialized
        trainer, collector, checkpointer = build_rank(inputs)
        loop.train(trainer, collector, checkpointer, inputs.reporter)
        close_rank(trainer, collector, checkpointer, inputs.reporter)
"""
