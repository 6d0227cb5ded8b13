"""Reward functions of the user, named `module:function`, with the signature that TRL gives reward functions.

Left out: whether the returned scores are valid, which `scoring.score` checks.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import logging
import math
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from rlx.config.errors import ConfigError, nearest
from rlx.config.sections.reward import RewardConfig, late_mark
from rlx.rewards.child import ChildError, ChildProcess, ChildTimeout
from rlx.types import MarkedScores, Response, Scorer

_LOG = logging.getLogger("rlx")
_KEYWORDS = ("prompts", "completions", "answers")


class RewardError(ValueError):
    """A reward function failed, or returned invalid scores; the text is one line that names the function."""

    def __init__(self, text: str, details: str = "") -> None:
        super().__init__(text)
        self.details = details  # what it was called with, and its traceback


def load_function(name: str) -> Callable[..., Any]:
    """Imports the function that `module:function` names.

    It is called as `function(prompts, completions, answers)`, by keyword, with lists of text: questions, whole
    completions, expected answers.

    Raises:
        ConfigError: it does not exist, its module fails, or it cannot be called like this.
    """
    path, _, attribute = name.partition(":")
    module = _module(name, path)
    callables = [key for key, value in vars(module).items() if callable(value)]
    if not hasattr(module, attribute):
        of_file = f" ({file})" if (file := getattr(module, "__file__", None)) else ""  # an installed one comes first
        raise ConfigError(f"reward.functions {name}: {path}{of_file} has no {attribute}{nearest(attribute, callables)}")
    function = getattr(module, attribute)
    if not callable(function):
        kind = type(function).__name__
        hint = nearest(attribute, callables)
        raise ConfigError(f"reward.functions {name}: {attribute} is not a function but {kind}{hint}")
    if _is_async(function) or _is_async(type(function).__call__):
        raise ConfigError(
            f"reward.functions {name}: {attribute} is async, expected a function that returns its scores: "
            "asyncio.run in it awaits what is async"
        )
    _check_signature(name, function)
    return function


def check_functions(config: RewardConfig) -> None:
    """Imports all functions of the user.

    Raises:
        ConfigError: see `load_function`.
    """
    for name in config.functions:
        if ":" in name:
            load_function(name)


def module_here(path: str) -> ModuleType:
    """Imports a module of a package, or of the working folder, which shadows no package."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    importlib.invalidate_caches()
    return importlib.import_module(path)


def _module(name: str, path: str) -> ModuleType:
    try:
        return module_here(path)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if not f"{path}.".startswith(f"{missing}."):  # the module exists, and something in it fails
            raise ConfigError(f"reward.functions {name}: importing {path} failed: {brief(error)}") from error
        raise ConfigError(f"reward.functions {name}: no module {missing}{_nearest_module(str(missing))}") from None


def _nearest_module(path: str) -> str:
    parent = path.rpartition(".")[0]
    folders = getattr(sys.modules[parent], "__path__", []) if parent else None
    return nearest(path, [module.name for module in pkgutil.iter_modules(folders, parent and f"{parent}.")])


def _is_async(function: Callable[..., Any]) -> bool:
    """Whether a function returns something to await instead of a result."""
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def _check_signature(name: str, function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise ConfigError(f"reward.functions {name}: a built-in function without a signature") from None
    try:
        signature.bind(**{key: [] for key in _KEYWORDS})
    except TypeError as error:
        hints = [nearest(key, _KEYWORDS) for key in signature.parameters if key not in _KEYWORDS]
        raise ConfigError(
            f"reward.functions {name}: must take {', '.join(_KEYWORDS)} by keyword: {error}{max(hints, default='')}"
        ) from None


def custom_scorer(name: str, config: RewardConfig) -> Scorer:
    """The scorer that calls the function `module:function` in a child process.

    What it raises, that it takes longer than reward.timeout_s, or that it ends its process, becomes a RewardError.
    """

    def scorer(responses: Sequence[Response]) -> Any:
        columns = {
            "prompts": [response.prompt.question for response in responses],
            "completions": [response.text for response in responses],
            "answers": [response.prompt.answer for response in responses],
        }
        count, late = len(responses), 0.0
        try:
            scores = _process_of(name).call(columns, config.timeout_s)
        except ChildError as error:
            if not (isinstance(error, ChildTimeout) and config.on_timeout == "zero"):
                details = f"{error.trace}\ncalled with\n{json.dumps(columns, indent=1)}\n"
                raise RewardError(f"reward {name}: {error}, for {describe_batch(responses)}", details) from None
            _LOG.warning("reward %s: %s: 0 for %s", name, error, describe_batch(responses))
            scores, late = [0.0] * count, 1.0
        return MarkedScores(scores, {late_mark(name): [late] * count}) if config.on_timeout == "zero" else scores

    return scorer


@functools.cache
def _process_of(name: str) -> ChildProcess:
    """The child process that calls a function, for all scorers of this process: one may load a model."""
    return ChildProcess(functools.partial(_caller, name))


@contextmanager
def closing_process(name: str) -> Iterator[None]:
    """Ends the child process of a function afterwards, and what it has loaded with it."""
    try:
        yield
    finally:
        _process_of(name).close()


def _caller(name: str) -> Callable[[dict[str, list[str]]], Any]:
    """Runs in the child process."""
    function = load_function(name)
    return lambda columns: portable(function(**columns))


@dataclass(frozen=True)
class Unusable:
    """Stands for something that is no score."""

    text: str

    def __repr__(self) -> str:
        return self.text


def portable(returned: Any) -> Any:
    """What a function returned as floats, which any process can read; `Unusable` for what is no finite number."""
    if isinstance(returned, Mapping | Set | str | bytes):  # lists of them would have their keys or bytes for scores
        return Unusable(f"a {type(returned).__name__}, {brief(returned)}")
    try:
        values = iter(returned)
    except TypeError:  # not even a sequence
        return Unusable(brief(returned))
    return [float(value) if is_finite(value) else Unusable(brief(value)) for value in values]


def is_finite(value: Any) -> bool:
    """Whether a value is a finite number; those of NumPy and PyTorch are numbers too, text is none."""
    try:
        return math.isfinite(value)
    except Exception:
        return False


def describe_batch(responses: Sequence[Response]) -> str:
    """A batch of responses for an error: how many, and the first prompt."""
    prompt = responses[0].prompt
    return f"{len(responses)} responses, from prompt {prompt.id} ({brief(prompt.question)}) on"


def brief(value: object) -> str:
    """The start of the repr of a value, on one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 120 else f"{text[:117]}..."
