"""TODO rlx.sweeps.space."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ray import cloudpickle
from ray.tune.search.sample import Categorical, Domain, Float, Function, Integer, Quantized

from rlx.config.errors import ConfigError, nearest
from rlx.config.loading import from_tree, with_overrides
from rlx.config.run import is_setting, setting_keys

Space = dict[str, Any]
"""values or domains (tune.choice, tune.loguniform, ...) of settings, by dotted key"""

METRIC, MODE = "eval/accuracy", "max"
_SINGLE = str | int | float | np.generic | None
# What a trial needs of the cluster is the same for all trials of a sweep.
_PLANNED = (
    "scaling.",
    "rollout.num_engines",
    "rollout.placement",
    "rollout.resources_per_engine",
    "rollout.tensor_parallel",
    "reward.model_replicas",
    "reward.resources_per_model",
    "ray_address",
)
# What a sweep is made of: its trials are compared at the same step, and kept and recorded in one place.
_SHARED = ("name", "storage", "train.steps", "tracking.", "checkpoint.init_")


def load_space(path: str, tree: Mapping[str, Any]) -> Space:
    """The search space of a Python file with a function space(), each setting checked against the config tree.

    Raises:
        ConfigError: no such file or function, an unknown setting, or a value that the setting does not take.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"--space {path}: no such file")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if not spec or not spec.loader:
        raise ConfigError(f"--space {path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        space = dict(module.space()) if hasattr(module, "space") else None
    except Exception as error:  # whatever the file does
        raise ConfigError(f"--space {path}: {type(error).__name__}: {error}") from None
    if not space:
        raise ConfigError(f"--space {path}: it has no function space() that gives settings to vary")
    for key, domain in space.items():
        _check(key, domain, path, tree)
    return space


def write_space(space: Mapping[str, Any], name: str, folder: Path) -> Path:
    """Writes the Python file NAME.py with a function space() that gives these domains: a sweep is resumed from it."""
    content = base64.b64encode(cloudpickle.dumps(dict(space))).decode()
    lines = [
        f'"""The search space of sweep {name}, as it was given to rlx.tuner: {", ".join(map(str, space))}."""\n',
        "import base64\n\nfrom ray import cloudpickle\n\n",
        f'def space():\n    return cloudpickle.loads(base64.b64decode("{content}"))\n',
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text("\n".join(lines))
    return folder / f"{name}.py"


def space_fingerprint(path: str) -> str:
    """Changes when the file does."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def _check(key: str, domain: Any, path: str, tree: Mapping[str, Any]) -> None:
    if not isinstance(key, str) or not is_setting(key):
        raise ConfigError(f"--space {path}: unknown setting {key}{nearest(str(key), setting_keys())}")
    if key.startswith(_PLANNED):
        raise ConfigError(f"--space {path}: {key} changes what a trial needs of the cluster, which all trials share")
    if key.startswith(_SHARED):
        raise ConfigError(f"--space {path}: {key} is the same for all trials of a sweep")
    if isinstance(domain, Function):
        raise ConfigError(f"--space {path}: tune.sample_from hides what it gives to {key}: use a range or choices")
    if not extremes(domain):
        raise ConfigError(f"--space {path}: {key} has no values to choose from")
    for value in extremes(domain):
        from_tree(with_overrides(dict(tree), {key: value}), f"--space {path}")


def extremes(domain: Any) -> list[Any]:
    """Values that show whether a setting takes what a domain gives."""
    if isinstance(domain, Categorical):
        return list(domain.categories)
    if isinstance(domain, Integer):
        return [domain.lower, last(domain)]
    if isinstance(domain, Float):
        return [domain.lower, domain.upper]
    if isinstance(domain, dict) and "grid_search" in domain:
        return list(domain["grid_search"])
    return [domain]


def last(domain: Integer) -> int:
    """The largest value of a range of whole numbers: Ray leaves its end out, unless it is made of steps."""
    return int(domain.upper) - (not isinstance(domain.sampler, Quantized))


def complete_settings(space: Space, suggested: Mapping[str, Any]) -> dict[str, Any]:
    """A trial's settings: the space's constants, and what was suggested; a number from a range to four digits, so that
    it reads the same wherever it is shown."""
    constants = {key: value for key, value in space.items() if not isinstance(value, Domain | dict)}
    return constants | {key: _plain(value, space.get(key)) for key, value in suggested.items()}


def rounded(value: float) -> float:
    """To four significant digits."""
    return float(f"{value:.4g}")


def _plain(value: Any, domain: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value  # NumPy's
    return min(max(rounded(value), domain.lower), domain.upper) if isinstance(domain, Float) else value
