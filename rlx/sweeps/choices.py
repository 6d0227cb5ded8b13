"""What can be refused in a plan of a sweep before Ray is imported: choices that do not go together, a missing space.

Left out: what the search space contains (`plans.check_sweep`).
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from rlx.config.errors import ConfigError, nearest
from rlx.config.sections import SchedulerName
from rlx.sweeps.records import SweepPlan
from rlx.tracking.metrics import METRICS

PAUSING: tuple[SchedulerName, ...] = ("hyperband", "pbt")
"""schedulers that pause trials, so that all trials must exist from the start; each gets its newest checkpoint"""
_PACKAGES = {"bayesopt": "bayes_opt", "hyperopt": "hyperopt"}
"""packages that a search needs and that rlx does not install by itself"""
_AVERAGE = "eval/ema/"


def check_choices(plan: SweepPlan) -> None:
    """Raises ConfigError if choices of a plan do not go together, or its space is no Python file with space()."""
    _check_metric(plan)
    if plan.scheduler in PAUSING and plan.max_concurrent:
        raise ConfigError(f"--max-concurrent: --scheduler {plan.scheduler} pauses and resumes its trials by itself")
    if plan.scheduler == "pbt" and (plan.search != "random" or plan.seeds > 1):
        raise ConfigError("--scheduler pbt changes settings by itself: leave --search and --seeds out")
    package = _PACKAGES.get(plan.search)
    if package and importlib.util.find_spec(package) is None:
        raise ConfigError(f"--search {plan.search} needs the package {package}: pip install 'rlx[search]'")
    _check_space_file(plan.space)


def _check_metric(plan: SweepPlan) -> None:
    if _AVERAGE in plan.metric and not plan.config.train.ema_decay:
        raise ConfigError(f"--metric {plan.metric}: it needs train.ema_decay")
    choices = [name for name in METRICS if name.startswith("eval/")]
    if plan.metric not in choices:
        raise ConfigError(
            f"--metric {plan.metric}: trials are compared by what every evaluation measures: {', '.join(choices)}"
            + nearest(plan.metric, choices)
        )


def _check_space_file(path: str) -> None:
    """Raises ConfigError if there is no such file, it is no Python, or nothing in it has the name `space`."""
    file = Path(path)
    if not file.is_file():
        beside = [each.name for each in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise ConfigError(f"--space {path}: no such file{nearest(file.name, beside)}")
    try:
        source = file.read_text()
        ast.parse(source)
    except SyntaxError as error:
        raise ConfigError(f"--space {path}:{error.lineno}: not Python: {error.msg}") from None
    except ValueError as error:  # bytes that are no text
        raise ConfigError(f"--space {path}: not a Python file: {error}") from None
    if "space" not in source:
        raise ConfigError(f"--space {path}: no function space() that returns settings to vary")
