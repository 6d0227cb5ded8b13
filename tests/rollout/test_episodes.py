"""Episodes token by token, with an engine and environments in this process: what is read, kept, masked and rewarded."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import scored_batch
from episode_cases import CHATML, FORGETTING, HERE, byte_tokenizer, pool_of, saying

from rlx.algorithms.advantages import token_rewards
from rlx.rollout.base import Request, request_seed
from rlx.rollout.episodes.dialogue import Dialogue
from rlx.rollout.episodes.episode import EpisodeLimits
from rlx.rollout.episodes.player import Draw, Player
from rlx.rollout.fake_engine import FakeEngines
from rlx.training.experience import build_batch
from rlx.types import Completion, Episode, Prompt, Sampling, ScoredCompletion, TaskRow

SAMPLING = Sampling(1.0, 1.0, -1, 200, (0,))
PROMPTS = [Prompt(7, (1, 2), "x", "answer"), Prompt(8, (1, 3), "y", "answer")]


def played(
    texts: dict[int, str],
    *,
    name: str = f"{HERE}Counting",
    template: str = CHATML,
    limits: EpisodeLimits | None = None,
    sampling: Sampling = SAMPLING,
    **dialogue: Any,
) -> tuple[list[Completion], list[Request], Any]:
    """The episodes of both prompts, two of each, in which the policy says these texts by the number of the turn."""
    tokenizer = byte_tokenizer(template)
    requests: list[Request] = []

    def turn(request: Request) -> str:
        requests.append(request)
        count = tokenizer.decode(request.prompt).count("<|assistant|>")
        return texts[count]

    environments = pool_of(name)

    def play(draw: Draw) -> Player:
        written = Dialogue(tokenizer, **dialogue)
        return Player(draw, environments, written, limits or EpisodeLimits(max_turns=4), run_seed=5)

    engines = FakeEngines(saying(tokenizer, turn), seed=5, play=play)
    engines.push(3)
    pending = engines.begin(PROMPTS, [sampling] * 2, 3)
    return engines.finish(pending, 3), requests, tokenizer


def test_an_episode_is_what_was_drawn_with_what_was_said_between() -> None:
    done, requests, tokenizer = played({1: "a", 2: "bc", 3: "stop"})
    assert [(each.prompt.id, each.sample) for each in done] == [(7, 0), (7, 1), (8, 0), (8, 1)]
    first = done[0]
    assert tokenizer.decode(first.prompt.token_ids) == "<|user|>go x<|end|>\n<|assistant|>"
    said = "a<|end|>\n<|user|>turn 1<|end|>\n<|assistant|>bc<|end|>\n<|user|>turn 2<|end|>\n<|assistant|>stop<|end|>"
    assert tokenizer.decode(first.token_ids) == said
    drawn = tokenizer.decode([token for token, own in zip(first.token_ids, first.drawn, strict=True) if own])
    assert drawn == "a<|end|>bc<|end|>stop<|end|>"
    assert first.num_drawn == 2 + 3 + 5 == sum(first.drawn)
    assert tokenizer.decode(first.said) == "stop<|end|>"
    assert first.finished and first.version == 3 and first.episode
    assert [turn.observation.text for turn in first.episode.turns] == ["turn 1", "turn 2", "turn 3"]
    assert first.episode.score == 0.5 + 1.0 + 1.5
    # The prompts of later turns extend the earlier ones: nothing is rendered again.
    of_first = [each.prompt for each in requests if tokenizer.decode(each.prompt).startswith("<|user|>go x")]
    assert sorted({len(each) for each in of_first}) == sorted(
        {len(first.prompt.token_ids) + turn.start for turn in first.episode.turns}
    )
    whole = first.prompt.token_ids + first.token_ids
    assert all(whole[: len(each)] == each for each in of_first)


def test_seeds_follow_from_the_turn_and_the_first_is_that_of_a_single_turn() -> None:
    _, requests, _ = played({1: "a", 2: "stop"})
    expected = {request_seed(5, 3, prompt, sample, turn) for prompt in (7, 8) for sample in (0, 1) for turn in (0, 1)}
    assert {each.seed for each in requests} == expected and len(expected) == 8
    assert request_seed(5, 3, 7, 1, 0) == request_seed(5, 3, 7, 1)


def test_log_probabilities_are_those_of_the_policys_tokens() -> None:
    done, _, _ = played({1: "a", 2: "stop"})
    first = done[0]
    kept = [logprob for logprob, own in zip(first.logprobs, first.drawn, strict=True) if own]
    assert kept == [-1, -2, -1, -2, -3, -4, -5]
    assert {logprob for logprob, own in zip(first.logprobs, first.drawn, strict=True) if not own} == {0.0}
    silent, _, _ = played({1: "a", 2: "stop"}, sampling=SAMPLING.greedy)
    assert silent[0].logprobs == ()
    batch = build_batch([silent[0]], 0)
    assert batch.rollout_logprobs.isnan()[0].tolist() == silent[0].drawn


@pytest.mark.parametrize(
    ("limits", "tokens", "turns"),
    [
        (EpisodeLimits(2), 200, ["a<|end|>", "bc<|end|>"]),
        (EpisodeLimits(9, turn_tokens=2), 200, ["a<|end|>", "bc", "st", "a<|end|>"]),
        (EpisodeLimits(9), 30, ["a<|end|>", "bc<|end|>"]),  # no room for a third turn
    ],
)
def test_episodes_are_cut_by_turns_and_by_tokens(limits: EpisodeLimits, tokens: int, turns: list[str]) -> None:
    sampling = Sampling(1.0, 1.0, -1, tokens, (0,))
    texts = {1: "a", 2: "bc", 3: "stxp", 4: "a", 5: "a", 6: "a", 7: "a", 8: "a", 9: "a"}
    done, _, tokenizer = played(texts, limits=limits, sampling=sampling)
    first = done[0]
    assert first.episode and not first.finished
    drawn = [tokenizer.decode(first.token_ids[turn.start : turn.stop]) for turn in first.episode.turns]
    assert drawn[: len(turns)] == turns
    assert len(first.token_ids) <= tokens and first.drawn[-1]  # nothing follows the last turn


def test_a_call_of_a_tool_is_answered_and_an_answer_without_one_is_scored() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    described = {"type": "function", "function": {"name": "add"}}
    done, _, tokenizer = played({1: call, 2: "It is 5"}, name=f"{HERE}ByTool", tools=[described])
    first = done[0]
    assert first.episode and first.finished
    text = f"{call}<|end|>\n<|tool|>5<|end|>\n<|assistant|>It is 5<|end|>"
    assert tokenizer.decode(first.token_ids) == text
    calls = [(turn.observation.calls, turn.observation.call_errors) for turn in first.episode.turns]
    assert calls == [(1, 0), (0, 0)]
    assert first.episode.score == 1.0


def test_where_the_template_changes_earlier_turns_a_new_context_begins() -> None:
    texts = {1: "<think>hm</think>a", 2: "<think>so</think>stop"}
    done, requests, tokenizer = played(texts, template=FORGETTING)
    first = done[0]
    assert first.episode and len(first.episode.contexts) == 1
    begin = first.episode.contexts[0]
    second = "<|user|>go x<|end|>\n<|assistant|>a<|end|>\n<|user|>turn 1<|end|>\n<|assistant|>"
    assert tokenizer.decode(first.token_ids[begin:]) == f"{second}<think>so</think>stop<|end|>"
    assert [turn.context for turn in first.episode.turns] == [0, 1]
    assert second in [tokenizer.decode(each.prompt) for each in requests]
    kept, _, _ = played(texts, template=FORGETTING, extends=True)
    assert kept[0].episode and kept[0].episode.contexts == ()
    assert "<think>hm</think>a<|end|>\n<|user|>turn 1" in tokenizer.decode(kept[0].token_ids)


def test_rewards_of_turns_are_where_turns_end() -> None:
    done, _, _ = played({1: "a", 2: "stop"})
    episode = done[0].episode
    assert episode
    scored = [ScoredCompletion(each, 2.0, False, {}) for each in done]  # 1.5 of the environment, 0.5 of a function
    batch = scored_batch(scored, 0)
    rewards = token_rewards(batch.scores, torch.zeros_like(batch.mask), batch.mask, 0.0, batch.turn_rewards)[0]
    ends = [turn.stop - 1 for turn in episode.turns]
    assert rewards[ends].tolist() == [0.5, 1.0 + 0.5]
    assert rewards.sum() == 2.0


def test_an_episode_is_read_back_from_its_text() -> None:
    done, _, _ = played({1: "a", 2: "stop"})
    assert done[0].episode
    assert Episode.of_json(done[0].episode.as_json()) == done[0].episode


def test_an_episode_of_an_older_version_is_read() -> None:
    said = '{"messages": [], "reward": 0.5, "done": true, "calls": 0, "call_errors": 0, "seconds": 0.25}'
    turn = f'{{"start": 0, "stop": 2, "version": 3, "observation": {said}, "context": 0}}'
    for repeatable, kind in (("false", "unrepeatable"), ("true", None)):
        rest = f'"contexts": [], "score": 0.5, "failure": "why", "is_repeatable": {repeatable}'
        found = Episode.of_json(f'{{"start": {said}, "turns": [{turn}], {rest}}}')
        assert (found.failure, found.kind, found.seconds, found.retries) == ("why", kind, 0.5, 0)
        assert (found.raised_at, found.told_failure) == ("", "why")


def test_an_episode_whose_first_messages_are_too_long_fails_alone() -> None:
    done, _, _ = played({0: "a", 1: "a"}, limits=EpisodeLimits(2, prompt_tokens=7))
    for each in done:
        assert each.episode and "first messages have 8 tokens" in each.episode.failure
        assert not each.finished and len(each.episode.turns) == 1


class Repeating:
    """Begins with the messages of the prompt, or with a system message of its own where they have none."""

    def reset(self, row: TaskRow, seed: int) -> list[Any]:
        own = [] if row.system else [{"role": "system", "content": "Own."}]
        return [*own, *row.asked]

    def step(self, action: str) -> tuple[str, float, bool]:
        return "more", 0.0, action == "stop"


def test_each_prompt_has_its_own_system_message_and_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    system, asked = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "and 3?"}
    chat = ({"role": "user", "content": "2?"}, {"role": "assistant", "content": "4"}, asked)
    own = [replace(PROMPTS[0], messages=(system, *chat)), replace(PROMPTS[1], messages=())]
    monkeypatch.setattr("test_episodes.PROMPTS", own)
    done, requests, tokenizer = played({1: "a", 2: "a", 3: "stop"}, name="test_episodes:Repeating")
    turns = "<|user|>2?<|end|>\n<|assistant|>4<|end|>\n<|user|>and 3?<|end|>\n<|assistant|>"
    openings = [tokenizer.decode(each.prompt.token_ids) for each in done]
    assert openings[::2] == [
        f"<|system|>Be brief.<|end|>\n{turns}",
        "<|system|>Own.<|end|>\n<|user|>y<|end|>\n<|assistant|>",
    ]
    assert any(tokenizer.decode(each.prompt).startswith(f"{openings[0]}a<|end|>\n<|user|>more") for each in requests)


class Odd:
    """Says what a template or a tokenizer may not take, at its beginning or in answer to a turn."""

    role = ""

    def reset(self, row: TaskRow, seed: int) -> Any:
        return {"role": Odd.role or "user", "content": "go"}

    def step(self, action: str) -> tuple[Any, float, bool]:
        return {"role": "user" if Odd.role else "nobody", "content": "half a character \ud800"}, 0.5, False


REFUSING = "{% for message in messages if message.role == 'nobody' %}{{ raise_exception('who?') }}{% endfor %}" + CHATML


@pytest.mark.parametrize("role", ["", "nobody"])
def test_an_episode_whose_words_the_template_refuses_fails_alone(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Odd, "role", role)
    done, _, _ = played({0: "a", 1: "a", 2: "stop"}, name="test_episodes:Odd", template=REFUSING)
    for each in done:
        assert each.episode and "the chat template does not take its messages" in each.episode.failure
        assert "who?" in each.episode.failure and not each.finished


def test_halves_of_characters_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Odd, "role", "user")
    done, _, tokenizer = played({1: "a", 2: "b", 3: "c", 4: "d"}, name="test_episodes:Odd")
    assert "half a character ?" in tokenizer.decode(done[0].token_ids) and not done[0].episode.failure  # type: ignore[union-attr]
