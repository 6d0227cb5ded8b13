"""PPO on language models as experiments: Ray Tune sweeps, FSDP trainers, vLLM rollouts, MLflow records.

The public names:
    load_config   the settings of a YAML file, or the defaults, with changes
    train         trains one run to its last step
    resume        continues a run from its newest checkpoint
    tuner         prepares a sweep over a search space, as a ray.tune.Tuner; `tuner(...).fit()` runs it
    resume_tuner  prepares what is left of a sweep that was interrupted, in the same way
    load_model    loads the policy of a checkpoint as a model of transformers
    load_sweep    reads a sweep back from MLflow
    RunConfig     all settings of a run
    ConfigError   the error of a setting that cannot be used
    RewardError   the error of a reward function that fails
    RunError      the error of a run whose training failed
    __version__   the version of rlx

`help(rlx.train)` explains one of them. Each name is imported when it is first used, so that `import rlx` is fast and
needs neither torch nor Ray. The code is in the subpackages. Modules of rlx import from them, not from here.

Example:
    import rlx

    config = rlx.load_config(overrides={"train.steps": 60, "algorithm.kl_coef": 0.02})
    result = rlx.train(config)
    print(result.metrics["eval/accuracy"], result.checkpoint)
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlx.api import load_config, load_model, load_sweep, resume, resume_tuner, train, tuner
    from rlx.config.errors import ConfigError
    from rlx.config.run import RunConfig
    from rlx.rewards.custom import RewardError
    from rlx.runs.train_run import RunError

__version__ = "0.3.0"
__all__ = [
    "ConfigError",
    "RewardError",
    "RunConfig",
    "RunError",
    "__version__",
    "load_config",
    "load_model",
    "load_sweep",
    "resume",
    "resume_tuner",
    "train",
    "tuner",
]

_MODULES = {
    "ConfigError": "rlx.config.errors",
    "RewardError": "rlx.rewards.custom",
    "RunConfig": "rlx.config.run",
    "RunError": "rlx.runs.train_run",
    **dict.fromkeys(("load_config", "load_model", "load_sweep", "resume", "resume_tuner", "train", "tuner"), "rlx.api"),
}

# torch and Ray read these when they are imported, so they are set before any module of rlx imports them.
# A waiting thread must not spin on a core that an engine or another worker needs: it made the same work 20 x slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Ray's lines that match are not shown. Many small actors on few cores are normal for a run on a laptop, and the run
# itself reports an engine or a worker that died.
_REPEATED_WARNINGS = "worker processes have been started on node|A worker died or was killed|Task VLLMEngine[.]"
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", _REPEATED_WARNINGS)


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module 'rlx' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
