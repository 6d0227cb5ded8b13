"""The words that a sweep's options take, and the metric that ranks what was trained.

The options of a sweep are no settings of a run: they are in rlx.cli.sweep and rlx.api.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

import pydantic

from rlx.config.addresses import refuse_empty

DEFAULT_METRIC = "eval/accuracy"
"""metric that ranks checkpoints, runs and trials when nothing else is chosen"""
OF_THE_MACHINE = (
    *("storage", "ray_address", "tracking.uri", "wait_for_resources"),
    *("data.source", "data.ptx_source", "eval.source"),
    *("model.path", "model.critic_path", "model.reference_path", "reward.model"),
)
"""settings that may differ where a sweep is resumed: a file may lie elsewhere there, but has the same name"""
DEFAULT_ALPHA = 0.05
"""the chance that a race takes of dropping the best setting"""
Mode = Literal["max", "min"]
"""whether high or low values of a metric are good"""
SearchName = Literal["random", "grid", "optuna", "bayesopt", "hyperopt"]
SchedulerName = Literal["none", "asha", "hyperband", "median", "pbt", "race"]
ReuseName = Literal["none", "engines", "workers"]
RungUnit = Literal["steps", "tokens", "gpu-seconds"]
"""what schedulers compare trials at equal amounts of"""
PROGRESS: Mapping[RungUnit, str] = {"steps": "step", "tokens": "tokens/total", "gpu-seconds": "time/total"}
"""the metric of a run that tells how much of it the run has taken; seconds count once for each of its GPUs"""


def metric_name(given: str) -> str:
    """The name of a metric, of which papers write eval/NAME/pass@4: MLflow takes no @, and veRL writes _at_ there."""
    return given.replace("@", "_at_")


MetricName = Annotated[str, pydantic.AfterValidator(refuse_empty), pydantic.AfterValidator(metric_name)]
