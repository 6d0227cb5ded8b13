"""Episodes that are played again: their environments are asked only for what they have not said before."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from episode_cases import CHATML, byte_tokenizer, pool_of, saying

from rlx.environments.pool import EnvironmentPool
from rlx.rollout.base import Request
from rlx.rollout.episodes.dialogue import Dialogue
from rlx.rollout.episodes.episode import EpisodeLimits, GeneratedTurn
from rlx.rollout.episodes.kept import KeptEnvironments
from rlx.rollout.episodes.player import Environments, Player
from rlx.types import Completion, KeptEpisode, Prompt, Sampling, TaskRow

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


def played(
    environments: Environments,
    says: Callable[[Request], str] = words,
    version: int = STEP,
    step: int = STEP,
    prompts: Sequence[Prompt] = PROMPTS,
    **more: Any,
) -> list[Completion]:
    answer = saying(TOKENIZER, says)

    async def draw(request: Request, engine: int | None) -> GeneratedTurn:
        return GeneratedTurn(answer(request), version, 0, 0.0)

    player = Player(draw, environments, Dialogue(TOKENIZER), EpisodeLimits(max_turns=3), run_seed=5, **more)
    pending = player.begin(prompts, [SAMPLING], step)
    player.finish(pending)
    player.loop.close()
    return pending.completions


def kept(completions: Sequence[Completion], environments: EnvironmentPool) -> KeptEnvironments:
    episodes = [(each.episode, each.token_ids) for each in completions if each.episode]
    found = {own.begun_with: KeptEpisode(ids, own.as_json()) for own, ids in episodes}
    return KeptEnvironments(environments, lambda: found, Dialogue(TOKENIZER))


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


@pytest.mark.parametrize(
    "changed",
    [
        {"step": STEP + 1},
        {"prompts": [replace(each, question="z") for each in PROMPTS]},
        {"prompts": [replace(each, answer="z") for each in PROMPTS]},
        {"prompts": [replace(each, messages=({"role": "system", "content": "be brief"},)) for each in PROMPTS]},
    ],
    ids=["begun at another step", "question", "answer", "system prompt"],
)
def test_an_episode_that_began_with_something_else_is_not_taken(changed: dict[str, Any]) -> None:
    first, expected = played(noted_pool(2)), played(noted_pool(2), **changed)
    assert played(kept(first, noted_pool(2)), **changed) == expected
    assert len([call for call in Noted.calls if "reset" in call]) == 2


def test_another_text_of_the_same_length_is_asked_for() -> None:
    first = played(noted_pool(2))
    expected = played(noted_pool(2), lambda request: words(request).replace("2", "x"))
    again = played(kept(first, noted_pool(2)), lambda request: words(request).replace("2", "x"))
    assert again == expected and Noted.calls.count("step wx") == 2


def test_an_episode_that_is_cut_earlier_is_scored_anew() -> None:
    first = played(noted_pool(9))
    environments = kept(first, noted_pool(9))
    sampling = replace(SAMPLING, max_tokens=len(first[0].token_ids) - 1)
    answer = saying(TOKENIZER, words)

    async def draw(request: Request, engine: int | None) -> GeneratedTurn:
        return GeneratedTurn(answer(request), STEP, 0, 0.0)

    player = Player(draw, environments, Dialogue(TOKENIZER), EpisodeLimits(max_turns=3), run_seed=5)
    pending = player.begin(PROMPTS, [sampling], STEP)
    player.finish(pending)
    player.loop.close()
    assert Noted.calls.count("score w2") + Noted.calls.count("score w3") == 2


def test_answers_that_were_kept_take_no_time_and_those_that_are_asked_are_checked() -> None:
    first = played(noted_pool(2))
    slow = [replace(turn, observation=replace(turn.observation, seconds=9.0)) for turn in first[0].episode.turns]  # type: ignore[union-attr]
    old = [replace(each, episode=replace(each.episode, turns=tuple(slow))) for each in first if each.episode]
    again = played(kept(old, noted_pool(2)))
    assert again[0].episode and again[0].episode.seconds == 0.0
    played(kept(first, noted_pool(2)), other_from(2), checked_share=1.0)
    assert len([call for call in Noted.calls if "reset" in call]) == 4  # with a second instance each


def test_an_environment_that_does_not_repeat_what_it_said_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    first = played(noted_pool(9))
    monkeypatch.setattr(Noted, "mood", "?")
    again = played(kept(first, noted_pool(9)), other_from(2))
    assert [each.episode and each.episode.kind for each in again] == ["unrepeatable"] * 2
