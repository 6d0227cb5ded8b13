"""The optimizers of `train.optimizer`: which weights each takes, and what it needs.

Left out: learning rates by step (rlx.training.update) and their state in checkpoints (rlx.storage.checkpoint_files).

Example:
    from rlx.config.sections.train import TrainConfig
    from rlx.training.optimizers.choice import OPTIMIZERS, make_optimizer

    assert set(OPTIMIZERS) == {"adamw", "muon", "adamw_8bit"}
    settings = TrainConfig(optimizer="muon")
    print(settings.actor_lr, make_optimizer.__doc__)
"""
