"""Search spaces: plain Python files whose space() returns the settings to vary, checked against the config.

Left out: how settings are suggested from a space (searchers).
"""

from __future__ import annotations

import base64
import importlib.util
import logging
import math
import shutil
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import to_jsonable_python
from ray import cloudpickle
from ray.tune.search.sample import Categorical, Domain, Float, Function, Integer, LogUniform, Quantized

from rlx.cluster.resources import ResourcePlan, plan_resources
from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, with_overrides
from rlx.config.rules import idle
from rlx.config.run import RunConfig
from rlx.config.sections.base import flatten
from rlx.config.sweep import Mode, SearchName
from rlx.runs import preflight, run_folder
from rlx.storage.filesystem import StorageError
from rlx.sweeps.choices import check_key, other_resources, refuse_many
from rlx.sweeps.records import SweepPlan

_LOG = logging.getLogger("rlx")
Space = dict[str, Any]
"""values or domains (tune.choice, tune.loguniform, ...) of settings, by dotted key"""
MODE: Mode = "max"
"""how searches compare trials: a larger DEFAULT_METRIC is better; `TrialSource` gives them any metric as that"""
SINGLE_VALUE = str | int | float | np.generic | None
"""types of choices that adaptive searches accept"""
_OF_PROMPTS = (
    *("source", "sources", "ptx_source", "params"),
    *("prompt_column", "answer_column", "system_column", "expected_pattern", "prompt_template"),
)
"""settings of the section `data` that say which prompts there are, or how they are read"""
_MISSING = object()
_ALONE = "a resume has a copy of this file alone: write in it what it reads or imports, and paths in full"
_LARGEST = 2**63  # searches draw whole numbers of 64 bits
_PLAIN = (str, int, float, np.generic, type(None), Mapping, list, tuple)


def load_space(path: str, tree: Mapping[str, Any], new: SweepPlan | None = None, tells: bool = False) -> Space:
    """The search space of a Python file, each setting checked against the config tree.

    Args:
        new: the plan of a sweep that has not begun; its lists may make more trials than a sweep has, whose values it
            would take minutes to check.
        tells: warn of settings that are varied and do nothing.

    Raises:
        ConfigError: no such file or function, an unknown setting, a value that the setting does not accept, or too many
            trials.
    """
    space = _call_space(path)
    for key in space:
        check_key(key, path)
    if new:
        refuse_many(replace(new, candidates=_combinations(space, new.search)))
    constants = {key: value for key, value in space.items() if _is_constant(value)}
    for key, domain in space.items():
        _check(key, domain, path, with_overrides(dict(tree), constants))
    if tells:
        _tell_idle(space, path, tree)
    return space


def _tell_idle(space: Space, path: str, tree: Mapping[str, Any]) -> None:
    """Warns of settings that are varied and do nothing, whichever other value of the space stands beside them."""
    values = {key: extremes(domain) for key, domain in space.items()}
    first = with_overrides(dict(tree), {key: each[0] for key, each in values.items()})
    found = list[dict[str, str]]()
    for change in ({key: value} for key, each in values.items() for value in each):
        with suppress(ConfigError):  # what does not go together is told where candidates are checked
            config = from_tree(with_overrides(first, change))
            found.append(idle(flatten(config), config.resolved_critic, config.resolved_rollout_correction))
    for key in varied_keys(space):
        if found and all(key in each for each in found):
            _LOG.warning(
                "warning: --space %s: %s does nothing with %s: trials that differ in nothing else are the same",
                path,
                key,
                found[0][key],
            )


def with_task(tree: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The config tree of a sweep of before entries of reward.functions were added to an environment's default.

    Where its search space has such entries, its trials had task: 1 beside them.
    """
    reward = tree.get("reward", {})
    if "functions" in reward or not any(key.startswith("reward.functions.") for key in load_space(path, tree)):
        return dict(tree)
    return {**tree, "reward": {**reward, "functions": {"task": 1.0}}}


def _combinations(space: Space, search: SearchName) -> int:
    """How many settings the lists of a space make, each of which is tried."""
    lists = (each for each in space.values() if _is_grid(each) or (search == "grid" and isinstance(each, Categorical)))
    return math.prod(len(extremes(each)) for each in lists)


def _call_space(path: str) -> Space:
    """The result of the file's space(), as a resume has it: from a copy of the file in a folder of its own.

    Raises:
        ConfigError: it has no such function, that returns no settings, or needs what lies beside the file.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"--space {path}: no such file")
    with tempfile.TemporaryDirectory(prefix="rlx-space-") as folder:
        try:
            space = _run(Path(shutil.copy(file, folder)), path)
        except ConfigError as error:
            _run(file, path)  # it may fail everywhere
            raise ConfigError(f"{str(error).replace(f'{folder}/', '')}; {_ALONE}") from None
    if space is _MISSING:
        raise ConfigError(f"--space {path}: no function space() that returns settings to vary")
    if not (isinstance(space, Mapping) and space):
        expected = 'settings to vary, as {"train.actor_lr": tune.loguniform(1e-6, 1e-4)}'
        raise ConfigError(f"--space {path}: space() returned {type(space).__name__} {space!r:.80}, expected {expected}")
    for key, domain in space.items():
        if _is_grid(domain) and not isinstance(values := domain["grid_search"], list | tuple | range | np.ndarray):
            raise ConfigError(f"--space {path}: {key}: grid_search takes a list of values, not {values!r:.40}")
    if beside := [key for key, domain in space.items() if Path(folder).name in repr(extremes(domain))]:
        raise ConfigError(f"--space {path}: {beside[0]} has paths in the folder of this file; {_ALONE}")
    return dict(space)


def _run(file: Path, path: str) -> Any:
    """The result of space() in a file; `_MISSING` if it has none. `path`: what errors call the file."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if not spec or not spec.loader:
        raise ConfigError(f"--space {path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        space = getattr(module, "space", None)
        if space is not None and not callable(space):
            kind = type(space).__name__
            raise ConfigError(f"--space {path}: space is a {kind}, expected a function that returns it: def space()")
        return space() if space else _MISSING
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # the file may raise anything
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        where = f":{lines[-1]}" if lines else ""
        raise ConfigError(f"--space {path}{where}: {type(error).__name__}: {error}") from None


@contextmanager
def space_file(space: object, name: str, folder: Path) -> Iterator[Path]:
    """The Python file of a search space; for domains it is NAME.py, which is deleted if the block raises.

    Raises:
        ConfigError: the space is neither domains nor a file.
    """
    if isinstance(space, str | Path):
        yield Path(space)
        return
    if not isinstance(space, Mapping):
        raise ConfigError(f"space {space!r:.40}: give domains by dotted key, or a Python file with a function space()")
    file = _write_space(space, name, folder)
    try:
        yield file
    except BaseException:  # also Ctrl-C
        file.unlink()
        with suppress(OSError):  # other sweeps have theirs in the folder
            folder.rmdir()
        raise


def _write_space(space: Mapping[str, Any], name: str, folder: Path) -> Path:
    """Writes a function space() that gives these domains: a sweep is resumed from it."""
    content = base64.b64encode(cloudpickle.dumps(dict(space))).decode()
    lines = [
        f'"""The search space of sweep {name}, as it was given to rlx.tuner: {", ".join(map(str, space))}."""\n',
        "import base64\n\nfrom ray import cloudpickle\n\n",
        f'def space():\n    return cloudpickle.loads(base64.b64decode("{content}"))\n',
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text("\n".join(lines))
    return folder / f"{name}.py"


def varied_keys(space: Space) -> list[str]:
    """The settings of a space that are not the same for all trials."""
    return [key for key, domain in space.items() if not _is_constant(domain)]


def _is_constant(domain: Any) -> bool:
    """Whether an entry of a space is the one value that all trials have."""
    return isinstance(domain, _PLAIN) and not _is_grid(domain)


def _is_grid(domain: Any) -> bool:
    """Whether an entry of a space is a list of values that are all tried."""
    return isinstance(domain, dict) and "grid_search" in domain


def _check(key: str, domain: Any, path: str, tree: Mapping[str, Any]) -> None:
    if isinstance(domain, Function):
        raise ConfigError(f"--space {path}: {key}: tune.sample_from hides its values: use a range or choices")
    if not extremes(domain):
        raise ConfigError(f"--space {path}: {key} has no values to choose from")
    if isinstance(domain, Integer | Float):
        _check_range(key, domain, path)
    for value in extremes(domain):
        if not isinstance(value, _PLAIN):
            raise ConfigError(f"--space {path}: {key}: no setting can be a {type(value).__name__}")
        from_tree(with_overrides(dict(tree), {key: value}), f"--space {path}")
    if isinstance(domain, Float):
        _check_between(key, domain, path, tree)


def _check_range(key: str, domain: Integer | Float, path: str) -> None:
    """Raises ConfigError for a range without ends, or with nothing between them: every trial would get the same end."""
    lower, upper = domain.lower, domain.upper
    if isinstance(domain, Integer) and max(abs(lower), abs(upper)) > _LARGEST:
        raise ConfigError(f"--space {path}: {key}: a range of whole numbers lies between -2**63 and 2**63")
    if math.isinf(lower):
        raise ConfigError(f"--space {path}: {key}: a normal distribution has no ends to check: use tune.uniform")
    none = f"--space {path}: {key} has no values to choose from between {lower:g} and {upper:g}"
    if lower > upper:
        raise ConfigError(f"{none}; the lower end comes first: {upper:g}, {lower:g}")
    first, last = extremes(domain)
    if lower == upper and (isinstance(domain, Float) or first > last):
        raise ConfigError(f"{none}; the value alone stands for itself: {lower:g}")
    if first > last:
        raise ConfigError(f"{none}: no multiple of {quantum(domain):g} is there")


def _check_between(key: str, domain: Float, path: str, tree: Mapping[str, Any]) -> None:
    """Raises ConfigError if a setting accepts the ends of a range, but no number beside the lower one: 1.0 is a whole
    number, 1.3 is none."""
    lower, upper = domain.lower, domain.upper
    value = nearest_in(domain, lower + (quantum(domain) or min(1.0, upper - lower) / 3))
    try:
        from_tree(with_overrides(dict(tree), {key: value}), f"--space {path}")
    except ConfigError as error:
        whole = f"tune.{'lograndint' if is_log(domain) else 'randint'}({math.ceil(lower)}, {math.floor(upper) + 1})"
        raise ConfigError(f"{error}; {whole} has whole numbers") from None


def check_resources(space: Space, path: str, tree: Mapping[str, Any], shared: ResourcePlan) -> None:
    """Refuses a space with whose settings a trial would need other resources than the ones that are reserved for it.

    Args:
        shared: what is reserved for each trial.

    Raises:
        ConfigError: a value of a setting needs other resources.
    """
    for key, domain in space.items():
        for value in extremes(domain):
            if plan_resources(from_tree(with_overrides(dict(tree), {key: value}))) != shared:
                raise other_resources(key, path)


def names_prompts(key: str) -> bool:
    """Whether a setting says which prompts a trial has, or how they are read."""
    section, name = f"{key}.".split(".")[:2]
    return section == "data" and name in _OF_PROMPTS


def check_candidates(candidates: Iterable[Mapping[str, Any]], path: str, tree: Mapping[str, Any]) -> None:
    """Refuses a space with settings of a trial that do not go together, or with prompts that a single run would refuse.

    Args:
        candidates: settings of trials, as far as they are known.

    Raises:
        ConfigError: settings, or the prompts that they name, cannot be used.
    """
    seen = {"[]"}  # those of the sweep itself, which are checked
    for settings in candidates:
        config = check_settings(path, tree, settings)
        named = repr([(key, settings[key]) for key in sorted(settings) if names_prompts(key)])
        if named not in seen:
            preflight.check_files(config.data, config.eval)
            run_folder.check_start(config)
            seen.add(named)


def check_settings(path: str, tree: Mapping[str, Any], settings: Mapping[str, Any]) -> RunConfig:
    """The config of a trial with these settings of a space; raises ConfigError if they do not go together."""
    return from_tree(with_overrides(dict(tree), settings), f"--space {path}")


def check_suggestion(path: str, tree: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raises ConfigError if a trial with these settings of a space would be refused, as far as a moment shows it.

    The prompts that a space names are checked before the sweep begins, see `check_candidates`.
    """
    config = check_settings(path, tree, settings)
    with suppress(StorageError):  # a full disk is no fault of the settings, and others would find it full, too
        preflight.check_quickly(config, has_prompts=True)


def extremes(domain: Any) -> list[Any]:
    """The values of a domain that show whether a setting accepts all of them: the ends of a range, or all choices."""
    if isinstance(domain, Categorical):
        return list(domain.categories)
    if isinstance(domain, Integer):
        step = quantum(domain)
        if step in (None, 1):
            return [domain.lower, domain.upper - 1]  # Ray excludes the upper end
        return [-(-domain.lower // step) * step, domain.upper // step * step]
    if isinstance(domain, Float):
        return [domain.lower, domain.upper]
    if _is_grid(domain):
        return list(domain["grid_search"])
    return [domain]


def values_of(space: Space, key: str, default: Any) -> list[Any]:
    """The `extremes` of a setting that trials may have; the default alone where the space does not vary it."""
    return extremes(space[key]) if key in space else [default]


def may_have(domain: Any, value: Any) -> bool:
    """Whether a trial can have a value of a domain, which a record in JSON may have kept: tuples are lists there."""
    if isinstance(domain, Integer | Float):
        low, high = extremes(domain)
        return isinstance(value, int | float) and bool(low <= value <= high)
    return _from_json(value) in map(_from_json, extremes(domain))


def _from_json(value: Any) -> Any:
    """A value as JSON brings it back."""
    return to_jsonable_python(value, fallback=lambda number: number.item())  # of NumPy


def quantum(domain: Integer | Float) -> Any:
    """The number of which all values of a quantized range are multiples; None for other ranges."""
    return domain.sampler.q if isinstance(domain.sampler, Quantized) else None


def is_log(domain: Integer | Float) -> bool:
    """Whether values of a range are sampled by their logarithms."""
    sampler = domain.sampler
    return isinstance(sampler.sampler if isinstance(sampler, Quantized) else sampler, LogUniform)


def nearest_in(domain: Integer | Float, value: float) -> float:
    """The number of a range that is nearest to a value: between its ends, and a multiple of its quantum."""
    low, high = extremes(domain)
    step = quantum(domain)
    value = round(value / step) * step if step else value
    if isinstance(domain, Integer):
        return int(min(max(value, low), high))
    value = float(f"{value:.15g}") if step else rounded(value, high - low)  # 0.3, not 0.30000000000000004
    return float(min(max(value, low), high))


def complete_settings(space: Space, suggested: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a trial: the constants of the space, and the suggested values.

    A number from a range is rounded, so that it reads the same everywhere.
    """
    constants = {key: value for key, value in space.items() if not isinstance(value, Domain | dict)}
    return constants | {key: _plain(value, space.get(key)) for key, value in suggested.items()}


def rounded(value: float, width: float) -> float:
    """A number with four significant digits, or with as many more as give a range of this width a hundred values."""
    places = 2 - math.floor(math.log10(width) + 1e-9)  # 1.2 - 1.1 is a little less than 0.1
    return min(float(f"{value:.4g}"), round(value, places), key=lambda each: abs(each - value))


def _plain(value: Any, domain: Any) -> Any:
    """A suggested value as a type of Python; of a range the nearest number, for searches go past ends and multiples."""
    value = value.item() if hasattr(value, "item") else value  # NumPy scalars
    return nearest_in(domain, value) if isinstance(domain, Integer | Float) else value
