"""The default experiment: the settings that go with rlx's tiny model, which a config of it begins with.

The settings' own defaults suit models that people bring. The tiny model needs others, and they are in one file,
arithmetic.yaml. Also here: which settings of a complete config have the defaults that follow other settings, and which
were changed and do nothing.
Left out: when a command says so (rlx.cli).
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlx.config.defaults import ENGINES, FOLLOWING
from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, read_yaml, with_overrides
from rlx.config.rules import idle
from rlx.config.run import settings
from rlx.config.sections.base import flatten

_LOG = logging.getLogger("rlx")
EXPERIMENT_FILE = Path(__file__).parent / "arithmetic.yaml"
TINY = "tiny"
"""the name of rlx's own model in `model.path`, with which the default experiment begins"""
OWN_MODELS = (TINY, "tiny-calculator")
"""the names of all models that rlx makes by itself"""
DEFAULT_EXPERIMENT = (
    "the default experiment: the tiny model with its settings (arithmetic.yaml); --model.path names another"
)
"""what a command says when settings are taken from there, because the model is the tiny one"""


def with_experiment(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A tree with the settings of the default experiment where it has none, if its model is the tiny one.

    A tree that names no model has that one. RunConfig itself does not do this: its defaults are the settings' own.
    """
    return over_experiment(tree) if has_tiny_model(tree) else dict(tree)


def takes_experiment(tree: Mapping[str, Any]) -> bool:
    """Whether `with_experiment` adds anything to a tree."""
    return with_experiment(tree) != tree


def has_tiny_model(tree: Mapping[str, Any]) -> bool:
    """Whether the model of a config tree is rlx's tiny one, named or not."""
    model = tree.get("model", {})
    return isinstance(model, Mapping) and model.get("path", TINY) == TINY


def over_experiment(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A tree with the settings of the default experiment where it has none, whatever its model is."""
    experiment = copy.deepcopy(_experiment())
    merged = {**experiment, **tree}
    for name, section in experiment.items():
        if isinstance(merged[name], Mapping):  # anything else is refused with the rest of the tree
            merged[name] = {**section, **merged[name]}
    return merged


@functools.cache
def _experiment() -> dict[str, Any]:
    return read_yaml(EXPERIMENT_FILE)


# ---------------------------------------------------------------------------------------------------------------------
# Defaults in a complete config


def followers(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that follow changes of a complete config, by dotted key, with their values after them.

    A saved config has every setting, also those that nobody gave. Of those whose defaults follow other settings, the
    ones that have their default take the new one; what was given otherwise, or is among the changes, stays.

    Raises:
        ConfigError: the settings do not work together after the changes.
    """
    before = flatten(from_tree(dict(tree)))
    free = keys_at_default(tree)
    now = flatten(from_tree(with_overrides(without(tree, free), changes), given=changes))
    asked = {key: _with_entries(key, before[key], changes) for key in free if key not in changes}
    return {key: now[key] for key, value in asked.items() if now[key] != value}


def following_engines(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `followers` that say how many engines a run has and what each takes; none if the changes are refused.

    Engines do not change what is computed, so that a run which goes on can have others.
    """
    with suppress(ConfigError):
        return {key: value for key, value in followers(tree, changes).items() if key in ENGINES}
    return {}


def tell_followers(values: Mapping[str, Any]) -> None:
    """Says which settings have followed others, if any have."""
    if values:
        _LOG.warning("defaults that follow what was given: %s", settings_text(values))


def settings_text(values: Mapping[str, Any]) -> str:
    """Settings by dotted key, and their values, as words of a line."""
    return ", ".join(f"{key} {value}" for key, value in values.items())


def keys_at_default(tree: Mapping[str, Any]) -> list[str]:
    """The settings of a config tree that have the defaults that follow its other settings.

    The number of engines is among them only with what each takes, since who chose the one has chosen the other, or
    where they are colocated, which leaves one number.
    """
    values = flatten(from_tree(dict(tree)))
    follow = [key for key, field in settings().items() if field.default_factory_takes_validated_data]
    found = [key for key in (*follow, *FOLLOWING) if _is_at_default(tree, key, values[key])]
    number, taken = ENGINES
    follows = taken in found or values["rollout.placement"] == "colocated"
    return [key for key in found if key != number or follows]


def idle_settings(values: Mapping[str, Any], critic: str, correction: str) -> list[str]:
    """A line for each setting that was changed and does nothing with the others.

    Not changed is what this model and algorithm have where nothing else is given, with the default experiment or
    without.

    Args:
        values: all settings by dotted key.
    """
    chosen = {"model": ("path", "critic", "lora_rank"), "algorithm": ("advantage", "policy_loss")}
    tree = {name: {key: values[f"{name}.{key}"] for key in keys} for name, keys in chosen.items()}
    usual = [flatten(from_tree(each)) for each in (tree, with_experiment(tree))]
    return [
        f"{key} {'unset' if values[key] is None else values[key]} does nothing with {reason}"
        for key, reason in idle(values, critic, correction).items()
        if all(values[key] != each[key] for each in usual)
    ]


def without(tree: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """A copy of a config tree without some settings of its sections."""
    return {
        name: {key: value for key, value in section.items() if f"{name}.{key}" not in keys}
        if isinstance(section, Mapping)
        else section
        for name, section in tree.items()
    }


def _is_at_default(tree: Mapping[str, Any], key: str, value: Any) -> bool:
    """Whether a setting has the value that it would have unset; the default experiment's are no such defaults."""
    section, _, name = key.partition(".")
    rest = without(tree, [key])
    if name in with_experiment(rest).get(section, {}):
        return False
    try:
        return bool(flatten(from_tree(rest))[key] == value)
    except ConfigError:
        return False


def _with_entries(key: str, value: Any, changes: Mapping[str, Any]) -> Any:
    """The value of a setting with the entries that changes give it, such as data.params.max_digits."""
    own = {name.removeprefix(f"{key}."): each for name, each in changes.items() if name.startswith(f"{key}.")}
    return {**value, **own} if own else value
