"""Reads a config: trees of plain values from YAML files, dotted keys set in them, and the RunConfig of a tree.

A tree is a nested dict such as {"train": {"steps": 12}}. Every error is one line that names the setting, its value and
the nearest valid name. Left out: command-line options (rlx.cli.options).
"""

from __future__ import annotations

import copy
import glob
import os
import re
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rlx.config.addresses import any_secret, may_be_on_hub
from rlx.config.defaults import FOLLOWING, following_defaults
from rlx.config.errors import ConfigError, one_line, shortened
from rlx.config.run import RunConfig, dotted_keys, explained, first_mistake, is_dict, sections, settings
from rlx.config.sections.base import flatten
from rlx.config.sections.data import DEFAULT_SOURCE, DataConfig, EvalConfig, prompt_addresses
from rlx.config.sections.model import ModelConfig
from rlx.config.sections.rollout import EnvironmentConfig, RolloutConfig
from rlx.config.sections.scaling import ScalingConfig

_MOST_VALUES = 100_000
_MOVING = ("checkpoint.", "tracking.", "name", "storage", "ray_address", "wait_for_resources")
"""what a resume changes without changing what a step computes"""
_EXPECTED = 'expected settings by dotted key, such as {"train.steps": 3}'
_NOT_OF_TEXT = ("float_parsing", "int_parsing", "bool_parsing", "float_type", "tuple_type", "dict_type", "model_type")
"""errors of pydantic for a text where none can stand"""
_ENTRIES_LAST = tuple(f"{key}." for key in FOLLOWING)
_DOTTED = re.compile(r"(?<![\w.])[a-z_]+(?:\.\w+)+")


def from_tree(
    tree: dict[str, Any],
    origin: str = "config",
    given: Collection[str] = (),
    giver: str = "command line",
    file: str | Path | None = None,
) -> RunConfig:
    """The validated config of a tree.

    Args:
        origin: where the tree comes from; error messages start with it.
        given: dotted keys of the tree that come from elsewhere.
        giver: where these come from; messages about their values start with it.
        file: the YAML file that the tree comes from, if it is one: error messages start with it.

    Raises:
        ConfigError: an unknown setting, a bad value, or settings that do not work together; or paths lead only from
            the file's folder.
    """
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        mistake = first_mistake(error)
        problem = _in_brackets(mistake["input"]) if mistake["type"] in _NOT_OF_TEXT else None
        place = giver if _is_about(mistake, given, tree) else file or origin
        raise ConfigError(f"{place}: {explained(mistake, problem)}") from None
    if file:
        _check_beside(file, config.model, config.data, config.eval, given)
    return config


def _is_about(error: ErrorDetails, given: Collection[str], tree: Mapping[str, Any]) -> bool:
    """Whether an error is about the value of a key or, if settings do not go together, names the setting of one."""
    key = ".".join(str(part) for part in error["loc"])
    wrong = error["msg"].partition(": expected")[0]
    named = [key] if key and key not in sections() else _DOTTED.findall(wrong)  # name is a word as others are
    return any(_is_given(each, given, tree, wrong) for each in named)


def _is_given(key: str, given: Collection[str], tree: Mapping[str, Any], wrong: str) -> bool:
    """Whether keys have the value of a setting, or entries of it, unless what is wrong names others of its entries."""
    if any(f"{key}.".startswith(f"{each}.") for each in given):
        return True
    entries = {each.removeprefix(f"{key}.") for each in given if each.startswith(f"{key}.")}
    section, _, name = key.partition(".")
    whole = tree[section].get(name) if isinstance(tree.get(section), Mapping) else None
    named = {each for each in whole if _is_word(str(each), wrong)} if isinstance(whole, Mapping) else set()
    return bool(entries & named if named else entries)


def _is_word(name: str, text: str) -> bool:
    return bool(re.search(rf"(?<![\w.:]){re.escape(name)}(?![\w:])", text))


def _check_beside(
    file: str | Path, model: ModelConfig, data: DataConfig, evaluation: EvalConfig, given: Collection[str]
) -> None:
    """Checks that no path in a config file is meant to begin in the file's own folder.

    Args:
        given: dotted keys of paths that are not in the file.

    Raises:
        ConfigError: prompts or a model are not in the working folder, where relative paths begin, but beside the file.
    """
    models = {f"model.{key}": getattr(model, key) for key in ("path", "critic_path", "reference_path")}
    folders = {key: path for key, path in models.items() if path and not may_be_on_hub(path)}
    here, beside = Path.cwd(), Path(file).resolve().parent
    for setting, path in (prompt_addresses(data, evaluation) | folders).items():
        is_of_file = setting.partition(" ")[0] not in given  # data.sources 0 is of data.sources
        if is_of_file and ":" not in path and not _leads_from(here, path) and _leads_from(beside, path):
            raise ConfigError(
                f"{file}: {setting} {path} is not in the working folder, {os.getcwd()}, where relative paths begin, "
                f"but beside the config: {os.path.normpath(beside / path)}"
            )


def _leads_from(folder: Path, path: str) -> bool:
    """Whether a path from a folder exists or, as a glob with ** for any folders, matches anything."""
    return (folder / path).exists() or any(glob.iglob(path, root_dir=folder, recursive=True, include_hidden=True))


def steps_differ_in(tree: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    """The settings by which steps of two config trees differ in what they compute."""
    if tree == other:  # as those of most checkpoints are, which need not be read then
        return set()
    configs = [from_tree(dict(each)) for each in (tree, other)]
    # How many steps there are changes none of them, unless a rate falls until the last, or rounds that run ahead of
    # training begin for no step after the last.
    follow_end = any(each.train.lr_schedule != "constant" or each.rollout.max_staleness > 0 for each in configs)
    moving = _MOVING if follow_end else (*_MOVING, "train.steps")
    values, others = map(flatten, configs)
    return {key for key, value in values.items() if value != others[key] and not key.startswith(moving)}


def parse_yaml(text: str) -> Any:
    """The value of a YAML text.

    Raises:
        ValueError: the text is not valid YAML; the message is one line.
    """
    try:
        value = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"not valid YAML: {where}{' '.join(f'{error.problem}'.split())}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except Exception as error:  # PyYAML lets other errors through for a bad tag (!!bool x) or a 13th month
        raise ValueError(f"not valid YAML: {one_line(error)}") from None
    _check_size(value)
    return value


class _Loader(yaml.SafeLoader):
    """YAML with numbers as YAML 1.2 has them (010 is no octal number, 1:30 no seconds), no dates, and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuses a key that is there twice: the first would be lost without a word."""
        texts, values = dict[str, str](), dict[Any, str]()  # 0 and 0.0 are one key, and so may 1 and "1" be
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                value = self.construct_object(key)
                if (before := texts.get(key.value, values.get(value))) is not None:
                    also = "" if before == key.value else f", as {before} before"
                    raise ValueError(f"line {key.start_mark.line + 1}: {key.value} is there twice{also}")
                texts[key.value] = values[value] = key.value
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Makes values at once, where PyYAML refuses what contains itself."""
        return super().construct_object(node, deep=True)


_MERGE = "tag:yaml.org,2002:merge"
_NUMBERS = {
    "tag:yaml.org,2002:int": r"^[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$",
    "tag:yaml.org,2002:float": r"^([-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9_]+)([eE][-+][0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$",
}
"""PyYAML's own, without octal and sexagesimal ones"""
_NOT_IN_1_2 = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value")
"""dates, which the JSON of a resume has as text, and what `=` was"""
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag not in (*_NUMBERS, *_NOT_IN_1_2)]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), list("-+.0123456789"))


def _check_size(tree: Any) -> None:
    """Raises ValueError for more values than any config has: a few lines of aliases can stand for billions."""
    left, count = [tree], 0
    while left:
        value = left.pop()
        count += 1
        if count > _MOST_VALUES:
            raise ValueError(f"not a config: it has more than {_MOST_VALUES:,} values")
        if isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list | tuple | set):
            left += value


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The tree in a YAML file; an empty file is an empty tree.

    Raises:
        ConfigError: the file cannot be read, or does not contain a mapping.
    """
    try:
        tree = parse_yaml(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    if tree is not None and not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, found {type(tree).__name__}")
    return tree or {}


def _parts(key: str) -> list[str]:
    """The parts of a dotted key. An entry of a dict of no dicts is one part: a reward function package.module:name."""
    parts = key.split(".")
    field = settings().get(".".join(parts[:2]))  # of a section
    if len(parts) > 2 and field and is_dict(field) and typing.get_args(field.annotation)[1] is not Any:
        return [*parts[:2], ".".join(parts[2:])]
    return parts


def with_overrides(tree: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a tree with dotted keys set, e.g. {"train.steps": 12}.

    An entry of a setting that is a dict, e.g. "data.params.max_digits", is added to the dict in the tree, or to the
    setting's default if the tree has none.

    Raises:
        ConfigError: a key leads through a setting that has no entries, e.g. train.steps.x, or is no dotted key.
    """
    check_overrides(overrides)
    merged: dict[str, Any] = _deep_copy(dict(tree))
    # Shallow keys first: data.source decides the default of data.params, and a dict is set before its entries. Entries
    # of a default that follows other sections come last, when these are complete.
    for key in sorted(overrides, key=lambda key: (key.startswith(_ENTRIES_LAST), key.count("."))):
        *parents, last = _parts(key)
        node = merged
        for depth, parent in enumerate(parents, 1):
            prefix = ".".join(parents[:depth])
            if parent not in node:
                node[parent] = _default_entries(prefix, merged)
            node = node[parent]
            if not isinstance(node, dict):
                raise ConfigError(f"{key}: {prefix} is {shortened(node)}, which has no entries")
        node[last] = _deep_copy(overrides[key])
    return merged


def check_overrides(overrides: object) -> None:
    """Raises ConfigError for anything but a mapping of dotted keys: a section would replace the whole one of a tree."""
    if not isinstance(overrides, Mapping):
        raise ConfigError(f"overrides: {_EXPECTED}, not {type(overrides).__name__}")
    for key, value in overrides.items():
        if not isinstance(key, str):
            raise ConfigError(f"overrides: {_EXPECTED}; {key!r:.80} is no key")
        if key in sections():
            raise ConfigError(f"overrides: {dotted_keys(key, value)}{_in_dots(key, value)}")


def _in_dots(section: str, value: object) -> str:
    """The settings in a section's mapping as overrides, where they can be shown."""
    if not isinstance(value, Mapping) or not value or any_secret(value):
        return ""
    return f": overrides={shortened({f'{section}.{name}': each for name, each in value.items()})}"


def setting_at(flat: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key among settings as `flatten` gives them; None if there is none.

    The key may lead to an entry of a setting that is a dict, e.g. "data.params.max_digits".
    """
    if key in flat:
        return flat[key]
    parts = _parts(key)
    depth = next((i for i in range(len(parts) - 1, 0, -1) if ".".join(parts[:i]) in flat), 0)
    value = flat.get(".".join(parts[:depth]))
    for part in parts[depth:]:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _deep_copy(value: Any) -> Any:
    """A copy of a setting's value; a path becomes text, as settings have it."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    try:
        return copy.deepcopy(value)
    except RecursionError:
        raise ConfigError("settings are nested too deeply") from None


def _in_brackets(value: Any) -> str | None:
    """What is wrong with a list or a mapping that has remained text; None for anything else."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return None
    try:
        parse_yaml(value)
    except ValueError as error:
        is_open = sum(map(value.count, "[{")) > sum(map(value.count, "]}"))
        return "a bracket is not closed" if is_open else str(error)
    return "remove the quotes, which make it a text"


def _default_entries(key: str, tree: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a key that the tree does not have: the default of a setting that is a dict, otherwise none."""
    field = settings().get(key)
    if field is None or not is_dict(field):
        return {}
    if key in FOLLOWING and (entries := _following(tree).get(key)):
        return dict(entries)
    known = {"source": DEFAULT_SOURCE} | tree[key.partition(".")[0]]
    return dict(field.get_default(call_default_factory=True, validated_data=known))


def _following(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults that follow other settings of a tree; none while one of these cannot be read."""
    try:
        return following_defaults(
            ModelConfig.model_validate(tree.get("model", {})),
            ScalingConfig.model_validate(tree.get("scaling", {})),
            EnvironmentConfig.model_validate(tree.get("environment", {})),
            RolloutConfig.model_validate(tree.get("rollout", {})),
        )
    except ValidationError:  # `from_tree` will say which
        return {}
