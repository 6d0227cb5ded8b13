"""Reward functions of the user, named `module:function`, with the signature that TRL gives reward functions.

Left out: whether the returned scores are valid, which `scoring.score` checks.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from rlx.config.errors import ConfigError, nearest
from rlx.types import Response, Scorer

_KEYWORDS = ("prompts", "completions", "answers")


class RewardError(ValueError):
    """A reward function failed, or returned invalid scores; the text is one line that names the function."""


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
        raise ConfigError(f"reward.functions {name}: {path} has no {attribute}{nearest(attribute, callables)}")
    function = getattr(module, attribute)
    if not callable(function):
        kind = type(function).__name__
        hint = nearest(attribute, callables)
        raise ConfigError(f"reward.functions {name}: {attribute} is not a function but {kind}{hint}")
    _check_signature(name, function)
    return function


def _module(name: str, path: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # finds a file in the working folder; last, so that it shadows no package
    importlib.invalidate_caches()
    try:
        return importlib.import_module(path)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if not f"{path}.".startswith(f"{missing}."):  # the module exists, and something in it fails
            raise ConfigError(f"reward.functions {name}: importing {path} failed: {brief(error)}") from error
        raise ConfigError(f"reward.functions {name}: no module {missing}{_nearest_module(str(missing))}") from None


def _nearest_module(path: str) -> str:
    parent = path.rpartition(".")[0]
    folders = getattr(sys.modules[parent], "__path__", []) if parent else None
    return nearest(path, [module.name for module in pkgutil.iter_modules(folders, parent and f"{parent}.")])


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


def custom_scorer(name: str) -> Scorer:
    """The scorer that calls the function `module:function`, and turns what it raises into a RewardError.

    Raises:
        ConfigError: see `load_function`.
    """
    function = load_function(name)

    def scorer(responses: Sequence[Response]) -> Any:
        try:
            return function(
                prompts=[response.prompt.question for response in responses],
                completions=[response.text for response in responses],
                answers=[response.prompt.answer for response in responses],
            )
        except Exception as error:
            raise RewardError(f"reward {name}: raised {brief(error)}") from error

    return scorer


def brief(value: object) -> str:
    """The start of the repr of a value, on one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 120 else f"{text[:117]}..."
