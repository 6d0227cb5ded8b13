"""What an environment is: two forms of a class, the table of those that ship, and loading one by its name.

A class with `step` is a dialogue: it answers each turn of the policy. A class without is a set of tools: its public
methods are what the policy may call, and the first turn without a call ends the episode. No base class is needed.
Left out: where environments run (pool), and how their messages become tokens (rlx.rollout.episodes).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Protocol, TypeAlias, cast

from rlx.config.errors import ConfigError, nearest, one_line
from rlx.rewards.custom import module_here
from rlx.types import TaskRow, Utterance, sendable

Said: TypeAlias = "str | Utterance | Sequence[Utterance]"
"""what an environment says: text, which becomes a message of the user, or messages of a chat"""
LONGEST_ANSWER = 1_000_000
"""characters of what an environment says at once; the trainer's process reads them, and a million take seconds"""
Answered: TypeAlias = "tuple[Said, float, bool]"
"""(observation, reward, whether the episode has ended)"""

ENVIRONMENTS: Mapping[str, str] = {
    "calculator": "rlx.environments.calculator:Calculator",
    "python": "rlx.environments.python_tool:PythonTool",
    "guess_number": "rlx.environments.games.guess_number:GuessNumber",
    "treasure": "rlx.environments.games.treasure:Treasure",
    "code": "rlx.environments.code_task:CodeTask",
    "gymnasium": "rlx.environments.games.gymnasium_text:GymnasiumText",
}
"""the environments that ship, by name; any other is named module:Class"""
_OF_EPISODES = ("reset", "step", "score", "close")
"""public methods that are no tools"""


class DialogueEnvironment(Protocol):
    """An environment that answers each turn. Its methods may be `async`.

    `score(answer)` and `close()` are optional, as they are for tools.
    """

    def reset(self, row: TaskRow, seed: int) -> Said | Awaitable[Said]:
        """Begins an episode and returns the first messages.

        Args:
            row: the prompt that the episode is of.
            seed: equal for all episodes that are compared with one another, which should begin alike.
        """
        ...

    def step(self, action: str) -> Answered | Awaitable[Answered]:
        """Answers a turn of the policy, its text without special tokens.

        A parameter `seed`, if there is one, is given a number that follows from run, step, prompt, sample and turn; a
        parameter `version` that of the policy's weights, and a parameter `length` the turn's `TurnLength`.
        """
        ...


def load_environment(name: str) -> type[Any]:
    """The class that a name stands for: one of `ENVIRONMENTS`, or module:Class.

    Raises:
        ConfigError: there is no such class, its module fails, or it is no environment.
    """
    address = ENVIRONMENTS.get(name, name)
    path, _, attribute = address.partition(":")
    if not attribute:
        raise ConfigError(
            f"environment.name {name}: expected module:Class, or one of those that ship{nearest_of(name)}"
        )
    if path == "__main__":
        raise ConfigError(f"environment.name {name}: put {attribute} in a module, which other processes can import")
    if path.endswith(".py") or "/" in path:
        meant = f"{PurePath(path).stem}:{attribute}"
        raise ConfigError(f"environment.name {name}: expected module:Class, not a path: {meant}, from its folder")
    try:
        module = module_here(path)
    except Exception as error:
        raise ConfigError(f"environment.name {name}: {path} cannot be imported: {one_line(error, 300)}") from None
    found = getattr(module, attribute, None)
    if not isinstance(found, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise ConfigError(f"environment.name {name}: {path} has no class {attribute}{nearest(attribute, classes)}")
    check_class(name, found)
    return cast("type[Any]", found)


def nearest_of(name: str) -> str:
    """The environment that ships whose name is nearest, as the end of an error message."""
    return nearest(name, list(ENVIRONMENTS)) or f": {', '.join(ENVIRONMENTS)}"


def check_class(name: str, found: type[Any]) -> None:
    """Raises ConfigError if a class has neither `reset` and `step` nor a tool, or its number of threads is none."""
    threads = getattr(found, "threads_per_episode", 0)
    if not isinstance(threads, int) or threads < 0:
        given = threads if isinstance(threads, int) else type(threads).__name__
        meant = f"{found.__name__}.threads_per_episode is a number of the class, 0 or more"
        raise ConfigError(f"environment.name {name}: {meant}, not {given}")
    if has_steps(found):
        if not callable(getattr(found, "reset", None)):
            raise ConfigError(f"environment.name {name}: {found.__name__} has step but no reset(row, seed)")
        return
    tools = tool_methods(found)
    if not tools:
        raise ConfigError(
            f"environment.name {name}: {found.__name__} has neither step(action) nor a public method that is a tool"
        )
    for tool, method in tools.items():
        if not inspect.getdoc(method):
            raise ConfigError(f"environment.name {name}: the tool {tool} has no docstring, which tells the model of it")
    if not callable(getattr(found, "score", None)):
        raise ConfigError(f"environment.name {name}: {found.__name__} has tools but no score(answer)")


def has_steps(found: type[Any]) -> bool:
    """Whether a class is a dialogue, not a set of tools."""
    return callable(getattr(found, "step", None))


def threads_of(found: type[Any]) -> int:
    """Threads that an episode of a class has: the instance's own, and as many as the class says that it starts."""
    threads: int = getattr(found, "threads_per_episode", 0)
    return 1 + threads


def tool_methods(found: type[Any]) -> dict[str, Callable[..., Any]]:
    """The tools of a class by name, in the order in which they are written; class methods and wrapped ones are some.

    What a class has from a builtin one, such as `pop` of a `dict`, is none.
    """
    names = [name for each in reversed(found.__mro__) if each.__module__ != "builtins" for name in vars(each)]
    public = [name for name in dict.fromkeys(names) if name[0] != "_" and name not in _OF_EPISODES]
    given = {name: getattr(found, name) for name in public}
    return {name: each for name, each in given.items() if inspect.isroutine(each) and not inspect.isbuiltin(each)}


def messages_of(said: Any, role: str = "user") -> tuple[Utterance, ...]:
    """What an environment has said as messages, which are the same when they are read from JSON.

    Raises:
        TypeError: it is neither text nor messages.
        ValueError: it has more than LONGEST_ANSWER characters.
    """
    if isinstance(said, str):
        return _short(({"role": role, "content": sendable(said)},))
    given = [said] if isinstance(said, Mapping) else said
    if not isinstance(given, Sequence) or isinstance(given, bytes | bytearray | memoryview):
        raise TypeError(f"an observation is text or messages, not {type(said).__name__}")
    for message in given:
        if not isinstance(message, Mapping):
            raise TypeError(f"an observation is text or messages, not a {type(said).__name__} with {message!r:.80}")
        if not isinstance(message.get("role"), str):
            raise TypeError("a message has a role and a content")
        if not isinstance(message.get("content"), str):
            raise TypeError(f"the content of a message is text, not {type(message.get('content')).__name__}")
    return _short(tuple(dict(_checked(key, value) for key, value in message.items()) for message in given))


def _short(messages: tuple[Utterance, ...]) -> tuple[Utterance, ...]:
    if (length := sum(len(message["content"]) for message in messages)) > LONGEST_ANSWER:
        raise ValueError(f"an observation has {length} characters, more than {LONGEST_ANSWER}")
    return messages


def _checked(key: Any, value: Any) -> tuple[str, Any]:
    """A field of a message as JSON gives it back: checkpoints and pages keep it so, and it is compared with them."""
    if not isinstance(key, str):
        raise TypeError(f"the names of a message's fields are text, not {type(key).__name__} {key!r:.80}")
    if isinstance(value, str):
        return sendable(key), sendable(value)
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)  # JSON has no inf, and no nan is repeated
    except (TypeError, ValueError):
        kind = f"{type(value).__name__} {value!r:.80}"
        raise TypeError(f"the field {key} of a message is not JSON but {kind}") from None
    return sendable(key), json.loads(sendable(text))
