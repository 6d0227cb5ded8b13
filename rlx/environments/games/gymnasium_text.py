"""An environment of Gymnasium that can be read and answered in words, as a dialogue.

Its states are text, or it draws them as text (render mode "ansi"), or they are short enough to be printed; its actions
are text or have names. Left out: images, and actions that are several numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.types import TaskRow

_MARKED = re.compile(r"(?:\x1b\[[\d;]+m)+(.*?)(?:\x1b\[0m)+", re.DOTALL)  # codes of a terminal
_MOST = 64  # numbers of a state that is printed
_WORD = re.compile(r"[\w-]+")


class GymnasiumText:
    """One environment, by its id; a turn is an action, its reward is Gymnasium's. All chance follows from the seed."""

    def __init__(
        self, id: str, actions: Sequence[str] = (), task: str = "", options: Mapping[str, Any] | None = None
    ) -> None:
        """
        Args:
            id: as in `gymnasium.make`, e.g. FrozenLake-v1; one that is installed, not `module:id`.
            actions: names of the actions 0, 1, ... of a discrete space; none: their numbers.
            task: what the policy is told before the first state; none: the name and the actions.
            options: further arguments of the environment, e.g. {is_slippery: false}.

        Raises:
            ValueError: Gymnasium is missing, or the environment is unknown, or is of pictures or other actions.
        """
        self._environment = _made(str(id), dict(options or {}))
        space, states = self._environment.action_space, self._environment.observation_space
        if self._environment.render_mode != "ansi" and math.prod(states.shape or ()) > _MOST:
            raise ValueError(f"{id}: its states are {states}, too many numbers to be read")
        self._first = int(getattr(space, "start", 0))
        self._names = _names(id, space, actions)
        said = f" Say one of {', '.join(self._names)}." if self._names else ""
        self._task = task or f"{id.rpartition('/')[2]}.{said}"

    def reset(self, row: TaskRow, seed: int) -> str:
        """Begins; the question of the row is not used."""
        state, _ = self._environment.reset(seed=seed)
        return f"{self._task}\n{self._read(state)}"

    def step(self, action: str) -> tuple[str, float, bool]:
        """Does what the last word says that is an action; a turn without one changes nothing."""
        if (chosen := self._chosen(action)) is None:
            return "no action", 0.0, False
        state, reward, is_terminated, is_truncated, _ = self._environment.step(chosen)
        return self._read(state), float(reward), bool(is_terminated or is_truncated)

    def close(self) -> None:
        """Ends the environment."""
        self._environment.close()

    def _chosen(self, action: str) -> int | str | None:
        if not self._names:
            text = action.strip()
            return text if self._environment.action_space.contains(text) else None
        words = [word for word in _WORD.findall(action.lower()) if word in self._names]
        return self._names.index(words[-1]) + self._first if words else None

    def _read(self, state: Any) -> str:
        if isinstance(state, str):
            return state
        drawn = self._environment.render() if self._environment.render_mode == "ansi" else None
        return _MARKED.sub(r"[\1]", drawn).strip() if isinstance(drawn, str) else str(state)


def _made(id: str, options: dict[str, Any]) -> Any:
    if ":" in id:
        raise ValueError(f"{id} names a module: install it as a plugin of Gymnasium, or derive a class of your own")
    try:
        import gymnasium
    except ImportError:
        raise ValueError("gymnasium is not installed: pip install rlx[gymnasium]") from None
    try:
        made = gymnasium.make(id, disable_env_checker=True, **options)
        if made.render_mode or "ansi" not in made.metadata.get("render_modes", ()):
            return made
        return gymnasium.make(id, disable_env_checker=True, render_mode="ansi", **options)
    except (gymnasium.error.Error, TypeError) as error:
        raise ValueError(f"{id}: {error}") from None


def _names(id: str, space: Any, given: Sequence[str]) -> list[str]:
    """The names of a discrete space's actions; none for a space of texts."""
    from gymnasium import spaces

    if isinstance(space, spaces.Text):
        return []
    if not isinstance(space, spaces.Discrete):
        raise ValueError(f"{id}: its actions are {space}, neither text nor a choice")
    first, count = int(space.start), int(space.n)
    names = [str(name).lower() for name in given] or [str(first + index) for index in range(count)]
    if len(set(names)) != count or not all(_WORD.fullmatch(name) for name in names):
        raise ValueError(f"{id}: actions need {count} different names of one word each, not {list(given)}")
    return names
