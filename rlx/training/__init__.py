"""PPO on one rank: the loop, and what it calls.

The package imports neither ray nor mlflow. Engines, reward models and the reporter are handed to it alive
(`setup.TrainingInputs`), so it also runs in a plain process, with `rollout.fake_engine.FakeEngines` and
`reporting.MemoryReporter`. It leaves out formulas (rlx.algorithms), how engines work (rlx.rollout), files (rlx.storage)
and the start of processes (rlx.runs). It may import the packages of the two floors below it.

Example:
    inputs = setup.TrainingInputs(
        config, model_path, device, tables, folder, reporter, connect_engines, connect_scorers
    )
    trainer, collector, checkpointer = setup.build(inputs)  # torch.distributed is initialized before
    loop.train(trainer, collector, checkpointer, reporter)
    setup.close(trainer, collector, checkpointer, reporter)
    print(reporter.reports[-1]["reward/mean"])
"""
