"""The sections of a run's settings, one module each: every setting with its default, its meaning and its values.

`eval` stands with `data`, `parallel` with `scaling`, `checkpoint` and `tracking` in `records`. Left out: rules between
settings (rlx.config.rules), and whether a model folder, a prompt file or a GPU exists, which the packages check that
use them.

Example:
    from rlx.config.sections.train import TrainConfig

    print(TrainConfig(steps=12).prompts_per_step)
"""
