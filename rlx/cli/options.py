"""What all commands share: one option per setting, exit codes, and the reaction to signals.

Left out: the options that one command has besides the settings. Imports neither torch nor Ray.
"""

from __future__ import annotations

import argparse
import atexit
import re
import signal
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from rlx.cli.arguments import elsewhere_option, meant_option, similar_option
from rlx.config.errors import EMPTY, ConfigError, called_here, meant, nearest
from rlx.config.loading import parse_yaml
from rlx.config.run import RunConfig, is_setting, sections, settings
from rlx.config.sections.base import flatten

_received: list[int] = []
"""signals that asked this process to end, in order"""


# ---------------------------------------------------------------------------------------------------------------------
# How a command ends


def exit_code(command: Callable[[], int]) -> int:
    """Runs a command and returns its exit code.

    An error is printed as one line and gives 1. Ctrl-C gives 130, SIGTERM 143 and SIGHUP 129, after one line; the
    command may say how to go on as the text of its KeyboardInterrupt. A second one ends the command's own clean-up;
    what the process does at its exit, such as ending Ray, is done whatever comes.
    """
    try:
        return command()
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {_described(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        way_on = str(error)
        received = signal_received() or signal.SIGINT
    except SystemExit as stop:
        if stop.code != signal.SIGTERM:  # by Ray's own handler, which is there while Ray starts
            raise
        received, way_on = signal.SIGTERM, ""
    finally:
        atexit.unregister(_ignore_signals)  # of a command before in this process
        atexit.register(_ignore_signals)  # what was registered last is called first
    print(f"interrupted: {way_on}" if way_on else "interrupted", file=sys.stderr)
    return 128 + received


def _ignore_signals() -> None:
    """Lets Ray end its processes: an interrupt would leave them to themselves, after a traceback."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _described(error: Exception) -> str:
    """The text of an error; if it is about a file, the file and what is wrong with it, without the error's number."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def end_on_signals() -> None:
    """Makes SIGTERM, which batch systems send, and SIGHUP, of a terminal that was closed, act like Ctrl-C.

    SIGHUP stays ignored where it is, as under nohup. Call it again after Ray has started, which installs a handler.
    """

    def interrupt(number: int, frame: types.FrameType | None) -> None:
        _received.append(number)
        on_interrupt = signal.getsignal(signal.SIGINT)  # Tune installs its own; shells ignore it for background jobs
        if not callable(on_interrupt):
            raise KeyboardInterrupt
        on_interrupt(signal.SIGINT, frame)

    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, interrupt)


def signal_received() -> int | None:
    """The first signal since `end_on_signals` that tells this process to end; None: there was none."""
    return _received[0] if _received else None


# ---------------------------------------------------------------------------------------------------------------------
# Settings as options


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line, as all others of rlx are."""

    def error(self, message: str) -> typing.NoReturn:
        """Ends the command with exit code 2; the line says what is wrong, and where all options are."""
        hint = ""
        if choice := _CHOICE.search(message):
            hint = meant(choice[1].lower(), re.findall(r"'([^']*)'", choice[2]))
        elif unknown := re.match(r"unrecognized arguments: (--[^ =]+)", message):
            hint = similar_option(unknown[1], _names_of(self))
        self.exit(2, f"error: {message.removeprefix('argument ')}{hint} ({self.prog} --help shows all options)\n")


_CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)$")
"""what argparse says of a word that is none of an option's"""


class _Noted(argparse.Action):
    """Stores an option's value, and notes in `noted` that it was given: the value may equal the default."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: object, option: object = None) -> None:
        setattr(namespace, self.dest, values)
        namespace.noted = namespace.noted | {self.dest}


class NotingParser(CommandParser):
    """A parser that also gives `noted`: which options with a value were given, whatever their values are."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register("action", None, _Noted)
        self.set_defaults(noted=frozenset())


def settings_parser(description: str, usage: str) -> argparse.ArgumentParser:
    """A parser with `--config FILE` and one option per setting; `usage`: its options, as --help shows them."""
    parser = CommandParser(description=description, usage=f"%(prog)s {usage}", allow_abbrev=False, add_help=False)
    add_help(parser)
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings; the command line overrides it")
    add_settings(parser)
    return parser


def add_help(parser: argparse.ArgumentParser) -> None:
    """Adds --help [WORD] to a parser without help of its own."""
    shown = "show all options; with a word the settings about it, with a section (train, reward, ...) its settings"
    parser.add_argument("-h", "--help", action=_Help, nargs="?", metavar="WORD", help=shown)


class _Help(argparse.Action):
    """Prints the help of all options, or of the settings about a word, and ends the command."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        part = parser
        if values:
            part = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False)
            add_settings(part, _about(values))
        part.print_help()
        parser.exit()


def _about(word: str) -> list[str]:
    """The settings of a section, or those that have a word in their names or texts, or are called so elsewhere.

    Raises:
        ConfigError: there is none.
    """
    name = word.lower().replace("-", "_")
    alias, _ = called_here(name, settings())
    if name in sections():
        return [key for key in settings() if key.startswith(f"{name}.")]
    found = [
        key
        for key, field in settings().items()
        if key == alias or name in key or word.lower() in str(field.description).lower()
    ]
    if not found:
        raise ConfigError(f"--help {word}: no setting is about that{nearest(word, list(sections()))}")
    return found


def add_settings(parser: argparse.ArgumentParser, keys: Collection[str] | None = None) -> None:
    """Adds one option per setting, e.g. --algorithm.kl-coef, in groups by section, with its meaning and default.

    Args:
        keys: the settings by dotted key; None: all.
    """
    groups = {name: parser.add_argument_group(name or "run") for name in ("", *sections())}
    defaults = flatten(RunConfig())
    for key, field in settings().items():
        if keys is not None and key not in keys:
            continue
        groups[key.rpartition(".")[0]].add_argument(
            f"--{key.replace('_', '-')}",
            dest=key,
            default=argparse.SUPPRESS,
            metavar=_metavar(field.annotation),
            help=f"{field.description} (default: {defaults[key]})".replace("%", "%%"),
        )


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Splits a command line into the command's own options and the given settings by dotted key.

    Option names may be written with underscores or hyphens.

    Raises:
        ConfigError: an unknown option, an unexpected argument, or an option without its value.
    """
    entries, arguments = _split_entries(argv)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        _refuse(unknown[0], parser)
    _refuse_empty(args, parser)
    texts = {key: text for key, text in vars(args).items() if key in settings()}
    given = {key: _value(text, settings()[key].annotation) for key, text in texts.items() if key != "name"}
    named = {"name": texts["name"]} if "name" in texts else {}  # a run may be called "none"
    return args, named | given | entries


def _refuse(argument: str, parser: argparse.ArgumentParser) -> typing.NoReturn:
    known = _names_of(parser)
    if not argument.startswith("--"):
        key, equals, value = argument.lstrip("+").partition("=")
        hint = f"; here it is --{key} {value}" if equals and is_setting(key.replace("-", "_")) else ""
        hint = hint or (meant_option(f"-{argument}", known) if re.match("-[a-z]", argument) else "")
        hint = hint or (elsewhere_option(key, known) if equals else "")  # as veRL's settings are written
        raise ConfigError(f"unexpected argument {argument!r}{hint}")
    name = argument.partition("=")[0]
    raise ConfigError(f"unknown option {name}{meant_option(name, known)}")


def _names_of(parser: argparse.ArgumentParser) -> list[str]:
    # argparse has no public list of a parser's options.
    return [option for action in parser._actions for option in action.option_strings if option.startswith("--")]


def _refuse_empty(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Raises ConfigError for an empty value, such as that of an unset shell variable, unless the option may have it."""
    for action in parser._actions:
        is_empty = getattr(args, action.dest, None) == "" != action.const
        if is_empty and not _may_be_empty(settings().get(action.dest)):
            raise ConfigError(f"{action.option_strings[0]}: {EMPTY}")


def _may_be_empty(setting: FieldInfo | None) -> bool:
    """Whether a setting may have an empty text: lists, prompts and patterns may."""
    kinds = _kinds(setting.annotation) if setting else []
    if setting is None or str not in kinds:
        return tuple in kinds
    annotation: Any = Annotated[setting.annotation, setting]
    try:
        TypeAdapter(annotation).validate_python("")
    except ValidationError:
        return False
    return True


def _split_entries(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Splits off the entries of settings that are dicts, e.g. --data.params.x 3, which argparse cannot list.

    Returns them by dotted key, and all other arguments, option names with hyphens.
    """
    entries, others = {}, []
    arguments = iter(argv)
    for argument in arguments:
        option, equals, text = argument.partition("=")
        key = option.removeprefix("--").replace("-", "_")
        if not option.startswith("--"):
            others.append(argument)
        elif is_setting(key) and key not in settings():
            text = text if equals else next(arguments, "")
            if not text or (text.startswith("--") and not equals):
                raise ConfigError(f"{option}: expected a value")
            entries[key] = _parse(text)
        else:
            others.append(option.replace("_", "-") + equals + text)
    return entries, _joined(others)


def _joined(arguments: Sequence[str]) -> list[str]:
    """The arguments with values that begin with a hyphen, such as the pattern -?[0-9]+, joined to their settings.

    argparse takes them for options.
    """
    joined: list[str] = []
    for argument in arguments:
        is_value = re.match(r"-(?!-|h$)", argument)
        if is_value and joined and joined[-1].removeprefix("--").replace("-", "_") in settings():
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


# ---------------------------------------------------------------------------------------------------------------------
# Values of options


def _value(text: str, annotation: Any) -> Any:
    """The value of an option for a setting of a type; pydantic validates it later.

    The text itself where the setting accepts strings, otherwise the text read as YAML.
    """
    kinds = _kinds(annotation)
    if types.NoneType in kinds and text.lower() in ("none", "null"):
        return None
    if str in kinds or Literal in kinds:
        return text
    for alternative in _alternatives(annotation):
        if typing.get_origin(alternative) is tuple:
            return _texts(text) if str in _kinds(typing.get_args(alternative)[0]) else _items(text)
    value = _parse(text)
    return _whole(value) if int in kinds and isinstance(value, str) else value


def _kinds(annotation: Any) -> list[Any]:
    """What the values of a type may be: bool, str, tuple, Literal, ..."""
    return [typing.get_origin(alternative) or alternative for alternative in _alternatives(annotation)]


def _items(text: str) -> Any:
    """The list that a text such as `1, 2` or `[1, 2]` stands for; the text itself where YAML reads it otherwise."""
    if _has_bracket(text):
        return _parse(text)
    items = _parse(f"[{text}]")
    return items if isinstance(items, list) else text


def _texts(text: str) -> list[Any]:
    """The texts of a list, as they are typed, with commas between two of them and spaces around these.

    With a bracket first, or a text that a quote begins, YAML reads it where that is a list (`["[END]"]`), or texts.
    """
    if _has_bracket(text) or re.search(r"(^|,)\s*[\"']", text):
        items = _items(text)
        if isinstance(items, list) and (_has_bracket(text) or all(isinstance(each, str) for each in items)):
            return items
    typed = re.split(" *, *", re.sub(", *$", "", text))
    return typed if all(typed) else [text] if text else []


def _has_bracket(text: str) -> bool:
    return text.lstrip().startswith("[")


def _whole(text: str) -> int | str:
    """The number that a text like 1e3 stands for, which YAML takes for text; other text as it is."""
    try:
        return int(float(text)) if float(text).is_integer() else text
    except (ValueError, OverflowError):
        return text


def _parse(text: str) -> Any:
    try:
        return parse_yaml(text)
    except ValueError:
        return text


def _alternatives(annotation: Any) -> Iterator[Any]:
    """The members of a union, or the type itself, without the metadata of Annotated."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for member in typing.get_args(annotation):
            yield from _alternatives(member)
    elif typing.get_origin(annotation) is Annotated:
        yield from _alternatives(typing.get_args(annotation)[0])
    else:
        yield annotation


def _metavar(annotation: Any) -> str:
    """What --help shows for a type, e.g. FLOAT,FLOAT or {reward,loss}."""
    first = next(_alternatives(annotation))
    if typing.get_origin(first) is Literal:
        return "{" + ",".join(typing.get_args(first)) + "}"
    if typing.get_origin(first) is tuple:
        return ",".join("..." if item is Ellipsis else _metavar(item) for item in typing.get_args(first))
    return str((typing.get_origin(first) or first).__name__).upper()
