"""The default experiment: the settings that go with rlx's tiny model, which a config of it begins with.

The settings' own defaults suit models that people bring. The tiny model needs others, and they are in one file,
arithmetic.yaml. Left out: when a command says so (rlx.cli).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlx.config.loading import read_yaml

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
