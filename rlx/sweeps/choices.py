"""What can be refused in a plan of a sweep before Ray is imported: choices that do not go together, a missing space,
settings in it that there are not.

Left out: what the search space contains once it has run (`plans.check_sweep`).
"""

from __future__ import annotations

import ast
import importlib.util
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from rlx.analysis.comparison.cost import Amount
from rlx.config.errors import ConfigError, meant, nearest
from rlx.config.run import dotted_keys, is_setting, may_change, sections, setting_keys
from rlx.config.sections.reward import CORRECTNESS
from rlx.config.sweep import DEFAULT_ALPHA, DEFAULT_METRIC, SchedulerName
from rlx.runs import preflight, run_folder
from rlx.sweeps.records import SweepPlan
from rlx.tracking.metrics import evaluated
from rlx.tracking.services.reachable import check_tracking

_LOG = logging.getLogger("rlx")
PAUSING: tuple[SchedulerName, ...] = ("hyperband", "pbt", "race")
"""schedulers that pause trials, so that all trials must exist from the start; each gets its newest checkpoint"""
_IN_STEPS: Mapping[SchedulerName, str] = {
    "none": "stops no trial",
    "hyperband": "has its settings wait for one another at equal steps",
    "pbt": "hands over checkpoints at equal steps",
    "race": "pairs seeds at equal steps",
}
"""schedulers whose rungs cannot be in tokens or GPU-seconds, and why"""
MOST_TRIALS = 100_000
"""of a sweep; their names have five digits"""
_PACKAGES = {"bayesopt": "bayes_opt", "hyperopt": "hyperopt"}
"""packages that a search needs and that rlx does not install by itself"""
_AVERAGE = "eval/ema/"
# Keys and prefixes of settings that decide the resources of a trial, which are the same for all trials. Others do so
# with some values only: `space.check_resources` finds them.
_RESOURCES = (
    "scaling.",
    "rollout.num_engines",
    "rollout.placement",
    "rollout.resources_per_engine",
    "rollout.tensor_parallel",
    "reward.model_replicas",
    "reward.resources_per_model",
    "ray_address",
)
# Keys and prefixes of settings that belong to the sweep: its trials are compared at the same steps by what the same
# evaluation measures there, and are recorded together. Reports repeat the newest evaluation, so a trial with others
# would be stopped by an old value.
_SHARED = ("name", "storage", "train.steps", "eval.", "tracking.", "checkpoint.init_")


def check_quickly(plan: SweepPlan) -> None:
    """Checks all of a new sweep that takes a moment.

    Raises:
        ConfigError: choices do not go together, the settings that trials share cannot be used, a tracker does not
            answer, or the checkpoint that trials start from is not complete.
    """
    check_choices(plan)
    preflight.check_quickly(plan.config)
    check_tracking(plan.config.tracking, plan.config.storage)
    run_folder.check_start(plan.config)


def check_choices(plan: SweepPlan) -> None:
    """Refuses choices as `refuse_choices` does, and warns of those that are of little use."""
    refuse_choices(plan)
    _tell_idle(plan)
    _tell_unrewarded(plan)


def refuse_choices(plan: SweepPlan) -> None:
    """Raises ConfigError if choices of a plan do not go together, or its space is no Python file with space()."""
    refuse_many(plan)
    _check_metric(plan)
    if "mlflow" not in plan.config.tracking.backends:
        raise ConfigError("tracking.backends: a sweep needs mlflow among them, which its analysis reads")
    if plan.scheduler in PAUSING and plan.max_concurrent:
        raise ConfigError(f"--max-concurrent: --scheduler {plan.scheduler} pauses and resumes its trials by itself")
    if plan.scheduler == "pbt" and (plan.search != "random" or plan.seeds > 1):
        raise ConfigError("--scheduler pbt changes settings by itself: leave --search and --seeds out")
    _check_race(plan)
    if plan.scheduler in PAUSING and plan.search not in ("random", "grid"):
        raise ConfigError(
            f"--scheduler {plan.scheduler} starts all settings at once: --search {plan.search} could learn nothing"
        )
    _check_rungs(plan)
    if plan.budget:
        Amount.of(plan.budget)
    package = _PACKAGES.get(plan.search)
    if package and importlib.util.find_spec(package) is None:
        raise ConfigError(f"--search {plan.search} needs the package {package}: pip install 'rlx[search]'")
    _check_space_file(plan.space)


def refuse_many(plan: SweepPlan) -> None:
    """Raises ConfigError for more trials than a sweep has: making and checking them would take minutes."""
    if plan.candidates * (plan.max_seeds or plan.seeds) > MOST_TRIALS:
        raise ConfigError(
            f"a sweep has at most {MOST_TRIALS:,} trials, those of all seeds counted: give fewer --trials, or a "
            "smaller --space"
        )


def _check_race(plan: SweepPlan) -> None:
    if plan.scheduler != "race":
        for option, value, default in (("max-seeds", plan.max_seeds, None), ("alpha", plan.alpha, DEFAULT_ALPHA)):
            if value != default:
                raise ConfigError(f"--{option} {value}: it is for --scheduler race")
    elif plan.seeds < 2:
        raise ConfigError("--scheduler race compares settings on the same seeds: --seeds 3, at least 2")
    elif plan.max_seeds is not None and plan.max_seeds < plan.seeds:
        raise ConfigError(f"--max-seeds {plan.max_seeds}: not below --seeds {plan.seeds}")
    elif not 0 < plan.alpha < 0.5:
        raise ConfigError(f"--alpha {plan.alpha}: a chance between 0 and 0.5")


def _check_rungs(plan: SweepPlan) -> None:
    if plan.rung_by == "steps":
        return
    if plan.scheduler in _IN_STEPS:
        others = ", ".join(name for name in get_args(SchedulerName) if name not in _IN_STEPS)
        raise ConfigError(
            f"--rung-by {plan.rung_by}: --scheduler {plan.scheduler} {_IN_STEPS[plan.scheduler]}; leave --rung-by out, "
            f"or take one of --scheduler {others}"
        )
    if plan.rung_by == "gpu-seconds" and not plan.gpus:
        raise ConfigError("--rung-by gpu-seconds: runs use no GPU; give --rung-by tokens")


def _tell_idle(plan: SweepPlan) -> None:
    """Warns of a scheduler that has nothing to decide, or little."""
    first, steps = plan.config.eval.every_of(plan.metric), plan.config.train.steps
    if plan.scheduler == "none" or 0 < first <= steps / 2:
        return
    if 0 < first < steps:
        problem = f"trials are first compared at step {first} of {steps}, so that it can spare only the steps after it"
    else:
        problem = "it has nothing to decide: trials are evaluated before the first and after the last step only"
    _LOG.warning("warning: --scheduler %s: %s; give a smaller --eval.every", plan.scheduler, problem)


def _check_metric(plan: SweepPlan) -> None:
    if _AVERAGE in plan.metric and not plan.config.train.ema_decay:
        raise ConfigError(f"--metric {plan.metric}: it needs train.ema_decay")
    choices = evaluated(plan.config.eval, plan.config.data, averaged=plan.config.train.ema_decay is not None)
    if plan.metric not in choices:
        raise ConfigError(
            f"--metric {plan.metric}: trials are compared by what every evaluation measures: {', '.join(choices)}"
            + nearest(plan.metric, choices)
        )


def _tell_unrewarded(plan: SweepPlan) -> None:
    """Warns of trials that are compared by what no reward asks for."""
    rewarded = {name for name, weight in plan.config.reward.functions.items() if weight}
    is_judged = plan.metric != DEFAULT_METRIC or plan.config.environment.name or rewarded & {*CORRECTNESS}
    if not is_judged:
        _LOG.warning(
            "warning: trials are compared by right answers (%s), which reward.functions does not reward: "
            "--metric eval/reward compares them by what it does",
            plan.metric,
        )


def tell_unscheduled(plan: SweepPlan, keys: Iterable[str]) -> None:
    """Warns of settings of which pbt may find changes that `rlx lineage` cannot write down."""
    unscheduled = [key for key in keys if not may_change(key)]
    if plan.scheduler == "pbt" and unscheduled:
        _LOG.warning(
            "warning: --scheduler pbt: %s can have no schedule: rlx lineage will refuse a trial in which it changed; "
            "leave it out of the space",
            ", ".join(unscheduled),
        )


def tell_few(plan: SweepPlan, known: Sequence[Mapping[str, Any]]) -> None:
    """Warns of a checked plan that compares fewer settings than it may seem to.

    Args:
        known: the settings of its candidates; none of a search that learns.
    """
    if repeating := len(known) - len({repr(sorted(each.items())) for each in known}):
        count = repeating * plan.seeds
        _LOG.warning("warning: %d of %d trials repeat another's settings", count, plan.total_trials)
    if plan.scheduler != "none" and plan.candidates == 1:
        _LOG.warning("warning: --scheduler %s: it has nothing to decide: the sweep tries one setting", plan.scheduler)


def check_key(key: Any, path: str) -> None:
    """Raises ConfigError if the space in a file cannot vary a setting of this name."""
    if key in sections():
        raise ConfigError(f"--space {path}: {dotted_keys(key)}")
    if not isinstance(key, str) or not is_setting(key):
        raise ConfigError(f"--space {path}: unknown setting {key}{meant(str(key), setting_keys())}")
    if key.startswith(_RESOURCES):
        raise other_resources(key, path)
    if key.startswith(_SHARED):
        raise ConfigError(f"--space {path}: {key} is the same for all trials of a sweep")


def other_resources(key: str, path: str) -> ConfigError:
    """The error of a space in a file that varies the resources of its trials."""
    return ConfigError(f"--space {path}: {key} changes the resources of a trial, which all trials share")


def _check_space_file(path: str) -> None:
    """Raises ConfigError if there is no such file, it is no Python, nothing in it has the name `space`, or a setting
    that it returns in so many words cannot be varied."""
    file = Path(path)
    if file.is_dir():
        raise ConfigError(f"--space {path}: a folder; expected a Python file with a function space()")
    if not file.is_file():
        beside = [each.stem for each in file.parent.glob("*.py")] if file.parent.is_dir() else []
        hint = nearest(file.stem, beside)  # all names have the same ending
        raise ConfigError(f"--space {path}: no such file{hint and f'{hint}.py'}")
    try:
        source = file.read_text()
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ConfigError(f"--space {path}:{error.lineno}: not Python: {error.msg}") from None
    except ValueError as error:  # bytes that are no text
        raise ConfigError(f"--space {path}: not a Python file: {error}") from None
    if "space" not in source:
        raise ConfigError(f"--space {path}: no function space() that returns settings to vary")
    for key in _written_keys(tree):
        check_key(key, path)


def _written_keys(tree: ast.Module) -> Iterator[Any]:
    """The keys of the dicts that stand after `return` in space(); those that are computed are not among them."""
    functions = (each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == "space")
    returns = (each.value for function in functions for each in ast.walk(function) if isinstance(each, ast.Return))
    keys = (key for value in returns if isinstance(value, ast.Dict) for key in value.keys)
    yield from (key.value for key in keys if isinstance(key, ast.Constant))
