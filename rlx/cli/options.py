"""The command line of every script: one option per setting, exit codes, and what a signal to end comes to.

Importing this needs neither torch nor Ray.
"""

from __future__ import annotations

import argparse
import signal
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

from rlx.config.errors import ConfigError, nearest
from rlx.config.loading import parse_yaml
from rlx.config.run import RunConfig, is_setting, sections, settings
from rlx.config.sections import flatten

_ended: list[int] = []  # signals that asked this process to end


def exit_code(script: Callable[[], int], interrupted: str = "interrupted") -> int:
    """What a script ends with: its own code; 1 after an error of one line; 130 after Ctrl-C and 143 after SIGTERM, and
    what to say of it."""
    try:
        return script()
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 128 + (_ended or [signal.SIGINT])[0]


def end_on_sigterm() -> None:
    """From now on SIGTERM, which batch systems send, does what Ctrl-C does. To be called once Ray is started: it has a
    way of its own."""

    def interrupt(number: int, frame: types.FrameType | None) -> None:
        _ended.append(number)
        on_interrupt = signal.getsignal(signal.SIGINT)  # Tune puts its own there; shells ignore it for what they start
        if not callable(on_interrupt):
            raise KeyboardInterrupt
        on_interrupt(signal.SIGINT, frame)

    signal.signal(signal.SIGTERM, interrupt)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """One option per setting, grouped by section, with its meaning and default: --train.steps, --algorithm.kl-coef."""
    groups = {name: parser.add_argument_group(name or "run") for name in ("", *sections())}
    defaults = flatten(RunConfig())
    for key, field in settings().items():
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
    given = {k: _value(text, settings()[k].annotation) for k, text in vars(args).items() if k in settings()}
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
        elif is_setting(key) and key not in settings():
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
        return parse_yaml(text)
    except ValueError:
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
        return ",".join("..." if part is Ellipsis else _metavar(part) for part in typing.get_args(kind))
    return str((typing.get_origin(kind) or kind).__name__).upper()
