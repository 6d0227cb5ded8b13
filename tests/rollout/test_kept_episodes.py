"""Episodes that are played again: their environments are asked only for what they have not said before."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import pytest
from episode_cases import CHATML, byte_tokenizer, pool_of, saying

from rlx.environments.pool import EnvironmentPool
from rlx.rollout.base import Request
from rlx.rollout.episodes.dialogue import Dialogue
from rlx.rollout.episodes.episode import EpisodeLimits
from rlx.rollout.episodes.kept import KeptEnvironments
from rlx.rollout.episodes.player import Drawn, Environments, Player
from rlx.types import Completion, KeptEpisode, Prompt, Sampling, TaskRow, episode_name

TOKENIZER = byte_tokenizer(CHATML)
SAMPLING = Sampling(1.0, 1.0, -1, 200, (0,))
PROMPTS = [Prompt(7, (65,), "x", "a"), Prompt(8, (65,), "y", "b")]
STEP = 3


class Noted:
    """Notes each call; ends after its last turn, or is cut before and scored."""

    calls: ClassVar[list[str]] = []
    mood: ClassVar[str] = ""

    def __init__(self, ends: int = 9) -> None:
        self.ends, self.turns, self.calls[:] = ends, 0, [*self.calls]

    def reset(self, row: TaskRow, seed: int) -> str:
        self.calls.append(f"reset {row.question}")
        return f"go {row.question}"

    def step(self, action: str, seed: int) -> tuple[str, float, bool]:
        self.calls.append(f"step {action}")
        self.turns += 1
        return f"{action}?{self.mood} {seed}", 0.1 * self.turns, self.turns == self.ends

    def score(self, answer: str) -> float:
        self.calls.append(f"score {answer}")
        return 0.7


def words(request: Request) -> str:
    """What the policy says: the number of its turn."""
    return f"w{TOKENIZER.decode(request.prompt).count('<|assistant|>')}"


def other_from(turn: int) -> Callable[[Request], str]:
    """A policy that says something else from this turn on."""
    return lambda request: words(request) + "!" * (int(words(request)[1:]) >= turn)


def played(environments: Environments, says: Callable[[Request], str] = words, version: int = STEP) -> list[Completion]:
    answer = saying(TOKENIZER, says)

    async def draw(request: Request, engine: int | None) -> Drawn:
        return Drawn(answer(request), version, 0, 0.0)

    player = Player(draw, environments, Dialogue(TOKENIZER), EpisodeLimits(max_turns=3), run_seed=5)
    pending = player.begin(PROMPTS, [SAMPLING], STEP)
    player.finish(pending)
    player.loop.close()
    return pending.completions


def kept(completions: Sequence[Completion], environments: EnvironmentPool) -> KeptEnvironments:
    found = {}
    for each in completions:
        assert each.episode
        name = episode_name(STEP, each.prompt.id, each.sample)
        found[name] = KeptEpisode(each.prompt.question, each.prompt.answer, each.token_ids, each.episode)
    return KeptEnvironments(environments, found, Dialogue(TOKENIZER))


def noted_pool(ends: int) -> EnvironmentPool:
    Noted.calls.clear()
    return pool_of("test_kept_episodes:Noted", params={"ends": ends}, retries=0)


@pytest.mark.parametrize(("ends", "score"), [(2, 0.1 + 0.2 + 0.7), (9, 0.1 + 0.2 + 0.3 + 0.7)], ids=["ended", "cut"])
def test_no_environment_is_asked_for_what_it_has_said(ends: int, score: float) -> None:
    first = played(noted_pool(ends))
    assert Noted.calls and first[0].episode and first[0].episode.score == pytest.approx(score)
    again = played(kept(first, noted_pool(ends)))
    assert again == first and Noted.calls == []


@pytest.mark.parametrize("turn", [1, 2, 3])
def test_an_environment_goes_on_from_where_the_policy_says_something_else(turn: int) -> None:
    first = played(noted_pool(9))
    expected = played(noted_pool(9), other_from(turn))
    again = played(kept(first, noted_pool(9)), other_from(turn))
    assert again == expected != first
    assert sorted(Noted.calls)[:2] == ["reset x", "reset y"]
    assert [call for call in Noted.calls if "w1" in call] == ["step w1" + "!" * (turn == 1)] * 2


def test_a_longer_episode_asks_from_its_new_turns_on() -> None:
    first = played(noted_pool(9))
    short = [
        replace(each, episode=each.episode and replace(each.episode, turns=each.episode.turns[:1])) for each in first
    ]
    assert played(kept(short, noted_pool(9))) == first
    assert Noted.calls.count("step w2") == 2


def test_turns_of_other_weights_are_asked_for() -> None:
    first = played(noted_pool(2))
    played(kept(first, noted_pool(2)), version=STEP + 1)
    assert Noted.calls


def test_an_episode_of_another_question_is_not_taken() -> None:
    first = played(noted_pool(2))
    moved = [replace(each, prompt=replace(each.prompt, question="z")) for each in first]
    assert played(kept(moved, noted_pool(2))) == first
    assert sorted(Noted.calls)[:2] == ["reset x", "reset y"]


def test_an_environment_that_does_not_repeat_what_it_said_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    first = played(noted_pool(9))
    monkeypatch.setattr(Noted, "mood", "?")
    again = played(kept(first, noted_pool(9)), other_from(2))
    assert [each.episode and each.episode.kind for each in again] == ["unrepeatable"] * 2
