"""Episodes whose engines or environments fail: what is kept, what is had once more, and what it is scored with."""

import time
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from episode_cases import CHATML, HERE, byte_tokenizer, pool_of, saying

from rlx.actors import PromptRefusedError
from rlx.environments.pool import EnvironmentPool
from rlx.rollout.base import Request
from rlx.rollout.episodes.dialogue import Dialogue
from rlx.rollout.episodes.episode import EpisodeLimits, EpisodeSeeds, GeneratedTurn, OpenEpisode
from rlx.rollout.episodes.player import Draw, NoEngineError, PendingEpisodes, Player
from rlx.types import Completion, Observation, Prompt, Sampling, TaskRow

TOKENIZER = byte_tokenizer(CHATML)
SAMPLING = Sampling(1.0, 1.0, -1, 200, (0,))
PROMPTS = [Prompt(7, tuple(TOKENIZER("prompt").input_ids), "x", "answer"), Prompt(8, (65,), "y", "answer")]


class Failing:
    """Fails where its argument says, each time."""

    def __init__(self, at: str = "") -> None:
        self.at, self.turns = at, 0

    def reset(self, row: TaskRow, seed: int) -> str:
        self._fail("reset")
        return "go"

    def step(self, action: str) -> tuple[str, float, bool]:
        self.turns += 1
        self._fail(f"step {self.turns}")
        return "on", 0.25, False

    def score(self, answer: str) -> float:
        self._fail("score")
        return 10.0 + len(answer)

    def _fail(self, where: str) -> None:
        if where == self.at:
            raise LookupError(where)


def turns(request: Request) -> str:
    return "ab" if TOKENIZER.decode(request.prompt).count("<|assistant|>") < 2 else "cde"


class Engines:
    """Draws turns at once by an engine whose number is that of its lives; `dies` says at which draws none is left."""

    def __init__(self, dies: Callable[[int], bool] = lambda number: False) -> None:
        self.requests: list[tuple[Request, int | None]] = []
        self.version, self._dies, self._count = 3, dies, 0
        self.answer = saying(TOKENIZER, turns)

    async def draw(self, request: Request, engine: int | None) -> GeneratedTurn:
        self._count += 1
        if self._dies(self._count):
            raise NoEngineError
        self.requests.append((request, engine))
        return GeneratedTurn(self.answer(request), self.version, self.version, 1.0)


def player_of(draw: Draw, environments: EnvironmentPool, **more: Any) -> Player:
    return Player(draw, environments, Dialogue(TOKENIZER), EpisodeLimits(max_turns=3), run_seed=5, **more)


def played(at: str, prompts: list[Prompt] = PROMPTS[:1], **more: Any) -> tuple[list[Completion], EnvironmentPool]:
    environments = pool_of("test_player:Failing", params={"at": at})
    player = player_of(Engines().draw, environments, **more)
    pending = player.begin(prompts, [SAMPLING], 3)
    player.finish(pending)
    player.loop.close()
    return pending.completions, environments


def test_an_episode_that_is_cut_has_the_score_of_its_last_turn() -> None:
    (done,), _ = played("")
    assert done.episode and not done.finished and len(done.episode.turns) == 3
    assert done.episode.score == 3 * 0.25 + 10 + len("cde")


def test_an_environment_that_does_not_begin_leaves_one_turn_on_the_prompt_itself() -> None:
    (done,), environments = played("reset")
    assert done.episode and done.episode.failure == "raised LookupError: reset" and not done.finished
    assert done.episode.kind == "raised" and done.episode.raised_at.startswith(f"{__file__}:")
    assert done.prompt == PROMPTS[0]
    assert TOKENIZER.decode(done.token_ids) == "ab<|end|>" and done.drawn == [True] * 3
    assert (done.episode.start, done.episode.score) == (Observation(), 0.0)
    assert environments.failures == {"raised": 2}


def test_an_environment_that_fails_later_ends_the_episode_with_the_turn_it_has_not_answered() -> None:
    (done,), _ = played("step 2")
    assert done.episode and done.episode.failure == "raised LookupError: step 2" and not done.finished
    assert done.episode.kind == "raised"
    assert TOKENIZER.decode(done.token_ids) == "ab<|end|>\n<|user|>on<|end|>\n<|assistant|>cde<|end|>"
    assert done.episode.score == 0.25 and [turn.observation.done for turn in done.episode.turns] == [False, True]


def test_an_environment_that_cannot_score_a_cut_episode_fails_it_alone() -> None:
    (done,), _ = played("score")
    assert done.episode and done.episode.failure == "raised LookupError: score"
    assert done.episode.kind == "raised"
    assert len(done.episode.turns) == 3 and done.episode.score == 3 * 0.25 and not done.finished


class Flaky(Failing):
    """Fails once in `reset`, once in its second turn, and once in `score`."""

    failed: ClassVar[set[str]] = set()

    def _fail(self, where: str) -> None:
        if where != "step 1" and where not in Flaky.failed:
            Flaky.failed.add(where)
            time.sleep(0.01)
            raise LookupError(where)
        if where == "score":
            time.sleep(0.05)


def test_an_episode_has_the_retries_of_all_its_calls() -> None:
    Flaky.failed = {"step 3"}
    player = player_of(Engines().draw, pool_of("test_player:Flaky"))
    pending = player.begin(PROMPTS[:1], [SAMPLING], 3)
    player.finish(pending)
    player.loop.close()
    (done,) = pending.completions
    assert done.episode and not done.has_failed and done.episode.retries == 3
    assert done.episode.start.retries == 1
    assert [turn.observation.retries for turn in done.episode.turns] == [0, 1, 1]  # the last turn's with the score's
    assert done.episode.turns[-1].observation.seconds >= 0.05
    assert done.episode.score == 3 * 0.25 + 10 + len("cde")


def test_a_failed_episode_is_not_repeated_and_a_good_one_is() -> None:
    class Counted:
        def __init__(self, pool: EnvironmentPool) -> None:
            self.pool, self.checks = pool, list[bool]()
            self.start, self.step, self.finish = pool.start, pool.step, pool.finish

        async def close(self, key: str, check: bool = False) -> bool:
            self.checks.append(check)
            return await self.pool.close(key, check)

    for at, share, expected in (("", 1.0, [True]), ("", 0.0, [False]), ("step 1", 1.0, [False])):
        counted = Counted(pool_of("test_player:Failing", params={"at": at}))
        player = player_of(Engines().draw, counted, checked_share=share)  # type: ignore[arg-type]
        player.finish(player.begin(PROMPTS[:1], [SAMPLING], 3))
        player.loop.close()
        assert counted.checks == expected


def test_an_episode_goes_on_where_it_was_when_no_engine_was_left() -> None:
    (kept,), _ = played("")
    engines = Engines(lambda number: number in (2, 3))
    player = player_of(engines.draw, pool_of("test_player:Failing"))
    pending = player.begin(PROMPTS[:1], [SAMPLING], 3)
    assert pending.playing
    pending.playing.result(5.0)
    assert not pending.is_complete and len(engines.requests) == 1
    player.finish(pending)  # none is left again
    assert not pending.is_complete and pending.completions == []
    engines.version = 4
    player.finish(pending)
    player.loop.close()
    (done,) = pending.completions
    assert done.token_ids == kept.token_ids and done.logprobs == kept.logprobs
    assert done.episode and [turn.version for turn in done.episode.turns] == [3, 4, 4] and done.version == 3
    assert [engine for _, engine in engines.requests] == [None, 3, 4]


def test_the_seconds_of_a_rollout_are_the_mean_over_its_episodes() -> None:
    player = player_of(Engines().draw, pool_of("test_player:Failing"))
    pending = player.begin(PROMPTS, [SAMPLING] * 2, 3)
    player.finish(pending)
    player.loop.close()
    assert pending.seconds == pytest.approx(3.0)  # three turns of a second each
    player.finish(pending)  # over: nothing is played again
    assert len(pending.completions) == 4


class Lying:
    """Says something else to each instance."""

    instances = 0

    def reset(self, row: TaskRow, seed: int) -> str:
        Lying.instances += 1
        return "go"

    def step(self, action: str) -> tuple[str, float, bool]:
        return f"on {Lying.instances}", 1.0, True


def test_an_episode_that_comes_out_differently_has_failed() -> None:
    for share in (0.0, 1.0):
        player = player_of(Engines().draw, pool_of("test_player:Lying"), checked_share=share)
        pending = player.begin(PROMPTS[:1], [SAMPLING], 3)
        player.finish(pending)
        player.loop.close()
        (done,) = pending.groups[0] or ()
        assert done.episode and done.episode.kind == ("unrepeatable" if share else None)
        assert ("answers differently" in done.episode.failure) is done.has_failed is (share == 1.0)


def test_a_refused_turn_ends_the_rollout_with_its_error() -> None:
    async def draw(request: Request, engine: int | None) -> GeneratedTurn:
        raise PromptRefusedError("engine 0 refused a prompt: too long")

    player = player_of(draw, pool_of(f"{HERE}Counting"))
    with pytest.raises(PromptRefusedError, match="too long"):
        player.finish(player.begin(PROMPTS, [SAMPLING], 3))
    player.loop.close()


def opened(limits: EpisodeLimits, sampling: Sampling = SAMPLING) -> OpenEpisode:
    episode = OpenEpisode("0", EpisodeSeeds(5, 3, PROMPTS[0], 1), sampling, limits, Dialogue(TOKENIZER))
    episode.begin(Observation(({"role": "user", "content": "go"},)))
    return episode


@pytest.mark.parametrize(
    ("turn_tokens", "max_tokens", "min_tokens", "asked"),
    [(None, 50, 0, (50, 0)), (7, 50, 3, (7, 3)), (7, 50, 9, (7, 7)), (60, 50, 0, (50, 0)), (None, 1, 2, (1, 1))],
)
def test_a_turn_is_asked_for_within_its_limit_and_that_of_the_episode(
    turn_tokens: int | None, max_tokens: int, min_tokens: int, asked: tuple[int, int]
) -> None:
    sampling = Sampling(1.0, 1.0, -1, max_tokens, (0,), min_tokens=min_tokens)
    request = opened(EpisodeLimits(3, turn_tokens), sampling).request()
    assert (request.sampling.max_tokens, request.sampling.min_tokens) == asked
    assert TOKENIZER.decode(request.prompt) == "<|user|>go<|end|>\n<|assistant|>"


def test_an_answer_that_leaves_no_token_for_the_policy_is_not_kept() -> None:
    # "ab" and its stop token are 3; "on" between is \n <|user|> o n <|end|> \n <|assistant|>: 7.
    for most, over in ((10, True), (11, False)):
        episode = opened(EpisodeLimits(3), Sampling(1.0, 1.0, -1, most, (0,)))
        episode.add_turn(GeneratedTurn(saying(TOKENIZER, turns)(episode.request()), 3, 0, 0.0))
        episode.add_observation(Observation(({"role": "user", "content": "on"},)))
        assert (episode.is_over, len(episode.token_ids)) == (over, 3 if over else 10)
        assert len(episode.messages) == (2 if over else 3)


def test_seeds_of_a_prompts_episodes_begin_alike_and_then_differ() -> None:
    one, other = (EpisodeSeeds(5, 3, PROMPTS[0], sample) for sample in (0, 1))
    later = EpisodeSeeds(5, 4, PROMPTS[0], 0)
    assert one.of_start == other.of_start == later.of_start != EpisodeSeeds(6, 3, PROMPTS[0], 0).of_start
    assert len({seeds.of_turn(turn) for seeds in (one, other, later) for turn in (0, 1)}) == 6
    assert one.of_answer(1) == one.of_turn(1) % 2**32
    many = [EpisodeSeeds(5, step, PROMPTS[0], 0) for step in range(400)]
    assert [sum(each.is_among(share) for each in many) for share in (0.0, 1.0)] == [0, 400]
    assert 60 < sum(each.is_among(0.2) for each in many) < 100  # 80 +- 8


def test_a_rollout_is_complete_only_when_all_its_episodes_are_over() -> None:
    pending = PendingEpisodes(PROMPTS, [SAMPLING], 3, [None, None], [0, 1])
    pending.open = [opened(EpisodeLimits(1)), opened(EpisodeLimits(1))]
    for number, episode in enumerate(pending.open, 1):
        episode.add_turn(GeneratedTurn(saying(TOKENIZER, turns)(episode.request()), 3, 0, 0.0))
        episode.add_observation(Observation(reward=1.0))
        pending.collect()
        assert pending.is_complete == (number == 2)
    assert [len(group or ()) for group in pending.groups] == [1, 1] and pending.open == []
