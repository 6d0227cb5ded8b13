"""From what a person writes to the one config tree: YAML files, dotted keys, the command line, errors of one line.

Importing this needs neither torch nor Ray, so that a mistyped key is refused in a fraction of a second.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import functools
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from rlx.settings import DEFAULT_SOURCE, Section
from rlx.settings import RunConfig as RunConfig


class ConfigError(ValueError):
    """A setting that cannot be used; the text is one line for the person who typed it."""


# ---------------------------------------------------------------------------------------------------------------------
# Trees of plain values: YAML, dotted keys


def from_tree(tree: dict[str, Any], where: str = "config") -> RunConfig:
    """The validated config of a nested dict; ConfigError names the key, its place and the nearest valid one."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_explain(error)}") from None


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The tree in a YAML file; ConfigError if it is missing or no mapping."""
    try:
        tree = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: no text file") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: no valid YAML: {' '.join(str(error).split())}") from None
    if tree is not None and not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, found {type(tree).__name__}")
    return tree or {}


def with_overrides(tree: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a tree with dotted keys set, e.g. {"train.steps": 12}.

    An entry of a dict setting, e.g. "data.params.max_digits", is set in what the tree has there, or in its default.
    """
    merged = copy.deepcopy(dict(tree))
    # Shallow keys first: data.source decides the default of data.params, and a whole dict comes before its entries.
    for dotted in sorted(overrides, key=lambda key: key.count(".")):
        *parents, last = dotted.split(".")
        node = merged
        for depth, parent in enumerate(parents, 1):
            if parent not in node:
                node[parent] = _default_entries(".".join(parents[:depth]), node)
            node = node[parent]
            if not isinstance(node, dict):
                raise ConfigError(f"{dotted}: {'.'.join(parents[:depth])} is {node!r}, it has nothing below it")
        node[last] = copy.deepcopy(overrides[dotted])
    return merged


def flatten(config: Section, prefix: str = "") -> dict[str, Any]:
    """Every setting under its dotted key; dict-valued settings stay whole."""
    flat: dict[str, Any] = {}
    for key in type(config).model_fields:
        value = getattr(config, key)
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Section) else {f"{prefix}{key}": value}
    return flat


def nearest(word: str, choices: Sequence[str]) -> str:
    """A hint: "; nearest: X", or nothing when no choice is close."""
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f"; nearest: {close[0]}" if close else ""


def setting_keys() -> list[str]:
    """The dotted keys of all settings."""
    return list(_settings())


def is_setting(key: str) -> bool:
    """Whether a dotted key is a setting, or an entry of a dict-valued one, e.g. data.params.max_digits."""
    parents = (name for name, field in _settings().items() if _is_dict(field))
    return key in _settings() or any(key.startswith(f"{name}.") for name in parents)


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown setting {key}{nearest(key, [*setting_keys(), *_sections()])}"
    if first["type"] == "model_type":
        message = f"expected a section of settings, such as {next(k for k in _settings() if k.startswith(f'{key}.'))}"
    else:
        message = first["msg"].removeprefix("Value error, ")
    return f"{key} = {first['input']!r}: {message[0].lower()}{message[1:]}" if key else message


def _sections() -> dict[str, type[Section]]:
    annotations = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    return {name: a for name, a in annotations.items() if isinstance(a, type) and issubclass(a, Section)}


@functools.cache
def _settings() -> dict[str, FieldInfo]:
    """The fields of the settings by dotted key, those of the run itself first."""
    own = {name: field for name, field in RunConfig.model_fields.items() if name not in _sections()}
    return own | {f"{name}.{k}": f for name, section in _sections().items() for k, f in section.model_fields.items()}


def _is_dict(field: FieldInfo) -> bool:
    return typing.get_origin(field.annotation) is dict


def _default_entries(key: str, section: dict[str, Any]) -> dict[str, Any]:
    """What a part of the tree that is not given begins with: a dict setting with its default, all else with nothing."""
    field = _settings().get(key)
    if field is None or not _is_dict(field):
        return {}
    known = {"source": DEFAULT_SOURCE} | section
    return dict(field.get_default(call_default_factory=True, validated_data=known))


# ---------------------------------------------------------------------------------------------------------------------
# The command line


def add_settings(parser: argparse.ArgumentParser) -> None:
    """One option per setting, grouped by section, with its meaning and default: --train.steps, --algorithm.kl-coef."""
    groups = {name: parser.add_argument_group(name or "run") for name in ("", *_sections())}
    defaults = flatten(RunConfig())
    for key, field in _settings().items():
        groups[key.rpartition(".")[0]].add_argument(
            f"--{key.replace('_', '-')}",
            dest=key,
            default=argparse.SUPPRESS,
            metavar=_metavar(field.annotation),
            help=f"{field.description} (default: {defaults[key]})".replace("%", "%%"),
        )


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Splits a command line into the parser's own options and the settings given, by dotted key.

    Underscores and hyphens are alike in option names. ConfigError on an unknown option, with the nearest.
    """
    entries, words = _split_entries(argv)
    args, unknown = parser.parse_known_args(words)
    if unknown and unknown[0].startswith("--"):
        known = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
        option = unknown[0].partition("=")[0]
        raise ConfigError(f"unknown option {option}{nearest(option, known)}")
    if unknown:
        raise ConfigError(f"unexpected argument {unknown[0]!r}")
    given = {k: _value(text, _settings()[k].annotation) for k, text in vars(args).items() if k in _settings()}
    return args, given | entries


def _split_entries(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Entries of dict settings, which no parser can list, by dotted key; and the other words, with hyphens."""
    entries, others = {}, []
    words = iter(argv)
    for word in words:
        option, equals, text = word.partition("=")
        key = option.removeprefix("--").replace("-", "_")
        if not option.startswith("--"):
            others.append(word)
        elif is_setting(key) and key not in _settings():
            text = text if equals else next(words, "")
            if not text or (text.startswith("--") and not equals):
                raise ConfigError(f"{option}: expected a value")
            entries[key] = _plain(text)
        else:
            others.append(option.replace("_", "-") + equals + text)
    return entries, others


def _value(text: str, annotation: Any) -> Any:
    """The text of an option as a plain value; pydantic judges it. Text stays text where a string is asked for."""
    kinds = [typing.get_origin(kind) or kind for kind in _kinds(annotation)]
    if types.NoneType in kinds and text.lower() in ("none", "null"):
        return None
    if str in kinds or Literal in kinds:
        return text
    return _plain(f"[{text}]" if tuple in kinds and not text.startswith("[") else text)


def _plain(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _kinds(annotation: Any) -> Iterator[Any]:
    """The alternatives of a type, without what Annotated adds to them."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for choice in typing.get_args(annotation):
            yield from _kinds(choice)
    elif typing.get_origin(annotation) is Annotated:
        yield from _kinds(typing.get_args(annotation)[0])
    else:
        yield annotation


def _metavar(annotation: Any) -> str:
    kind = next(_kinds(annotation))
    if typing.get_origin(kind) is Literal:
        return "{" + ",".join(typing.get_args(kind)) + "}"
    if typing.get_origin(kind) is tuple:
        return ",".join(_metavar(part) for part in typing.get_args(kind))
    return str((typing.get_origin(kind) or kind).__name__).upper()
