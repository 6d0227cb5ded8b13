"""Environments of Gymnasium as dialogues: states as text, actions as words, and what is refused."""

from collections.abc import Iterator
from typing import Any

import gymnasium
import pytest
from gymnasium import spaces

from rlx.config.errors import ConfigError
from rlx.config.sections.rollout import EnvironmentConfig
from rlx.environments.games.gymnasium_text import GymnasiumText
from rlx.environments.trial import try_environment
from rlx.types import Prompt, TaskRow

ROW = TaskRow("not used", "down", 0)
MOVES = ["left", "down", "right", "up"]
LAKE = {"id": "FrozenLake-v1", "actions": MOVES}
SHORTEST = ["down", "I go Down.", "right, no: down? right", "right", "down", "right"]


def test_words_are_actions_and_colours_are_brackets() -> None:
    lake = GymnasiumText(**LAKE, options={"is_slippery": False})
    first = "FrozenLake-v1. Say one of left, down, right, up.\n[S]FFF\nFHFH\nFFFH\nHFFG"
    assert lake.reset(ROW, 0) == first
    assert lake.step("I stay") == ("no action", 0.0, False)
    said = [lake.step(turn) for turn in SHORTEST]
    assert said[0] == ("(Down)\nSFFF\n[F]HFH\nFFFH\nHFFG", 0.0, False)
    assert [(reward, done) for _, reward, done in said] == [(0.0, False)] * 5 + [(1.0, True)]
    assert lake.reset(ROW, 1) == first
    lake.close()


def test_all_chance_follows_from_the_seed() -> None:
    def played(seed: int) -> list[Any]:
        lake = GymnasiumText(**LAKE)  # slippery
        return [lake.reset(ROW, seed), *(lake.step(turn) for turn in SHORTEST * 3)]

    big = 2**63 - 5  # as rlx's seeds are
    assert played(big) == played(big)
    assert len({str(played(seed)) for seed in range(8)}) > 4


def test_a_state_that_is_not_drawn_is_printed_and_actions_are_numbers() -> None:
    cards = GymnasiumText("Blackjack-v1", task="Stick (0) or hit (1).")
    assert cards.reset(ROW, 3).startswith("Stick (0) or hit (1).\n(")
    state, reward, is_over = cards.step("0")
    assert state.startswith("(") and is_over and reward in (-1.0, 0.0, 1.0)


class Parrot(gymnasium.Env[str, str]):
    """Wants its state repeated; the episode is cut after three turns."""

    observation_space = spaces.Text(20)
    action_space = spaces.Text(5, charset="abc")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.turns = 0
        return "abc", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turns += 1
        return "bca", float(action == "abc"), False, self.turns == 3, {}


class Pictures(Parrot):
    observation_space = spaces.Box(0, 255, (64, 64, 3))  # type: ignore[assignment]
    action_space = spaces.Discrete(2)  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def parrot() -> Iterator[str]:
    gymnasium.register("Parrot-v0", lambda **_: Parrot())
    gymnasium.register("Pictures-v0", lambda **_: Pictures())
    yield "Parrot-v0"
    del gymnasium.registry["Parrot-v0"], gymnasium.registry["Pictures-v0"]


def test_text_is_an_action_if_it_is_in_the_space(parrot: str) -> None:
    made = GymnasiumText(parrot)
    assert made.reset(ROW, 0) == "Parrot-v0.\nabc"
    turns = [made.step(turn) for turn in (" abc ", "xyz", "abcabc", "a", "abc")]
    assert turns == [("bca", 1.0, False), *[("no action", 0.0, False)] * 2, ("bca", 0.0, False), ("bca", 1.0, True)]


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"id": "Nope-v1"}, "Nope-v1: .*doesn't exist"),
        ({"id": "Pendulum-v1"}, "Pendulum-v1: its actions are Box.*neither text nor a choice"),
        ({"id": "os:Nope-v1"}, "os:Nope-v1 names a module"),
        ({"id": "FrozenLake-v1", "options": {"slip": 1}}, "FrozenLake-v1: .*slip"),
        ({"id": "Pictures-v0"}, "Pictures-v0: its states are Box.*too many numbers to be read"),
        ({"id": 3}, "3: "),
        ({"id": "FrozenLake-v1", "actions": ["left"]}, "FrozenLake-v1: actions need 4 different names"),
        ({"id": "FrozenLake-v1", "actions": ["go left", "b", "c", "d"]}, "of one word each"),
    ],
)
def test_what_cannot_be_played_is_refused(params: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        GymnasiumText(**params)


@pytest.mark.slow
def test_a_wrong_environment_is_refused_before_a_run() -> None:
    prompts = [Prompt(0, (1,), "q", "down")]
    try_environment(EnvironmentConfig(name="gymnasium", params=LAKE), prompts)
    with pytest.raises(ConfigError, match=r"^environment.name gymnasium: raised ValueError: Pendulum-v1"):
        try_environment(EnvironmentConfig(name="gymnasium", params={"id": "Pendulum-v1"}), prompts)
