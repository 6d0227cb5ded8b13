"""The one config tree: which settings go together, and how it is read from YAML and dotted keys.

The command line is command_line's.

Importing this needs neither torch nor Ray, so that a mistyped key is refused in a fraction of a second.
"""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rlx.config.errors import ConfigError, nearest, one_line
from rlx.config.run import RunConfig, is_dict, sections, setting_keys, settings
from rlx.config.sections import DEFAULT_SOURCE

# ---------------------------------------------------------------------------------------------------------------------
# Trees of plain values: YAML, dotted keys


def from_tree(tree: dict[str, Any], where: str = "config") -> RunConfig:
    """The validated config of a nested dict; ConfigError names the key, its place and the nearest valid one."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_explain(error)}") from None


def parse_yaml(text: str) -> Any:
    """What a YAML text stands for; ValueError says in one line why it is none."""
    try:
        return yaml.safe_load(text)
    except Exception as error:  # PyYAML has none of its own for what is not of its tag (!!bool x), nor for a 13th month
        raise ValueError(f"no valid YAML: {one_line(error)}") from None


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The tree in a YAML file; ConfigError if it is missing or no mapping."""
    try:
        tree = parse_yaml(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: no text file") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    if tree is not None and not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, found {type(tree).__name__}")
    return tree or {}


def with_overrides(tree: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a tree with dotted keys set, e.g. {"train.steps": 12}.

    An entry of a dict setting, e.g. "data.params.max_digits", is set in what the tree has there, or in its default.
    """
    merged: dict[str, Any] = _copied(dict(tree))
    # Shallow keys first: data.source decides the default of data.params, and a whole dict comes before its entries.
    for dotted in sorted(overrides, key=lambda key: key.count(".")):
        *parents, last = dotted.split(".")
        node = merged
        for depth, parent in enumerate(parents, 1):
            if parent not in node:
                node[parent] = _default_entries(".".join(parents[:depth]), node)
            node = node[parent]
            if not isinstance(node, dict):
                raise ConfigError(f"{dotted}: {'.'.join(parents[:depth])} is {_shown(node)}, it has nothing below it")
        node[last] = _copied(overrides[dotted])
    return merged


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except RecursionError:
        raise ConfigError("settings are nested too deeply") from None


def _shown(value: Any) -> str:
    """A value, or the start of it: a few lines of YAML may stand for millions of numbers."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 200
    try:
        return f"{short.repr(value):.300}"
    except ValueError:
        return "a number too long to show"


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown setting {key}{nearest(key, [*setting_keys(), *sections()])}"
    if first["type"] == "model_type":
        message = f"expected a section of settings, such as {next(k for k in settings() if k.startswith(f'{key}.'))}"
    else:
        message = first["msg"].removeprefix("Value error, ")
    if not key or (isinstance(first["input"], dict) and key in sections()):  # it may hold addresses with keys
        return message
    return f"{key} = {_shown(first['input'])}: {message[0].lower()}{message[1:]}"


def _default_entries(key: str, section: dict[str, Any]) -> dict[str, Any]:
    """What a part of the tree that is not given begins with: a dict setting with its default, all else with nothing."""
    field = settings().get(key)
    if field is None or not is_dict(field):
        return {}
    known = {"source": DEFAULT_SOURCE} | section
    return dict(field.get_default(call_default_factory=True, validated_data=known))
