"""From completions to scores, by hand: answers, weights, penalties; and what a step collects and reports."""

import math
from collections.abc import Sequence
from dataclasses import replace
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlx.config.loading import from_tree
from rlx.mesh import Mesh
from rlx.rewards.completions import CompletionScorer, SourceRewards
from rlx.runs import doctor
from rlx.samples.columns import Kind, StepCompletions
from rlx.samples.evaluations import AVERAGED, HELD_OUT, Outcomes
from rlx.training.collector import RolloutCollector, Selection, apply_length_penalty, new_selection, right_share
from rlx.training.loop import needs_more
from rlx.training.metrics import StepTimer, sample_rows
from rlx.training.reporting import MemoryReporter, failed_episodes
from rlx.types import Completion, Episode, Observation, Prompt, Response, Sampling, ScoredCompletion, Turn

TEXTS = {(1,): "so 4", (2, 2): "5", (3, 3, 3): "no idea"}
ALONE: Any = SimpleNamespace(is_leader=True, broadcast_from_leader=lambda value: value, dp_rank=0, dp_size=2)


class Tokenizer:
    """Decodes the completions of this file."""

    pad_token_id = None

    def batch_decode(self, rows: Sequence[tuple[int, ...]], skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens
        return [TEXTS[tuple(row)] for row in rows]


def completion(*ids: int, finished: bool = True) -> Completion:
    return Completion(Prompt(len(ids), (7,), "2 + 2", "4"), 0, ids, (-0.5,) * len(ids), finished, version=0)


COMPLETIONS = [completion(1), completion(2, 2), completion(3, 3, 3, finished=False)]


def is_answer(responses: Sequence[Response]) -> list[float]:
    return [float(response.answer == response.prompt.answer) for response in responses]


def num_tokens(responses: Sequence[Response]) -> list[float]:
    return [float(response.num_tokens) for response in responses]


def scorer() -> CompletionScorer:
    reward = from_tree(
        {"reward": {"functions": {"exact_match": 2.0, "length": 0.5}, "length_target": 3, "answer_pattern": r"\d+"}}
    ).reward
    source = SourceRewards(reward, {"exact_match": is_answer, "length": num_tokens})
    return CompletionScorer([source], Tokenizer(), ALONE)


def test_a_score_is_the_weighted_sum_over_the_functions() -> None:
    scored = scorer()(COMPLETIONS)
    assert [each.completion for each in scored] == COMPLETIONS
    assert [each.score for each in scored] == [2 * 1 + 0.5 * 1, 0.5 * 2, 0.5 * 3]
    assert [each.is_correct for each in scored] == [True, False, False]
    assert scored[2].scores_by_function == {"exact_match": 0.0, "length": 3.0}


def test_episodes_whose_environment_failed_are_no_wrong_answers() -> None:
    def answered(is_correct: bool, failure: str) -> ScoredCompletion:
        episode = Episode(Observation(), (), failure=failure)
        return ScoredCompletion(replace(COMPLETIONS[0], episode=episode), 0.0, is_correct, {})

    failed = answered(False, "it has died")
    assert right_share([answered(True, ""), failed, answered(False, ""), failed]) == 0.5
    assert math.isnan(right_share([failed, failed]))


@pytest.mark.parametrize("by_correct", [False, True])
def test_groups_are_alike_or_not_without_episodes_whose_environment_failed(by_correct: bool, alone: Mesh) -> None:
    def group(right: str, failed: str) -> list[ScoredCompletion]:
        rows = []
        for digit, mark in zip(right, failed, strict=True):
            episode = Episode(Observation(), (), failure="died" if mark == "x" else "")
            rows.append(ScoredCompletion(replace(COMPLETIONS[0], episode=episode), float(digit), digit == "1", {}))
        return rows

    selection = Selection(4, 3, alone, filtered=True, greedy=False, by_correct=by_correct)
    groups = [group("110", "..x"), group("100", "..x"), group("100", "xxx"), group("010", "xx.")]
    for each in groups:
        selection.add(each)
    assert (selection.varied, selection.count_missing()) == (1, 3)  # of four wanted, the second is varied
    assert selection.take() == [*groups[1], *groups[0], *groups[2], *groups[3]]


@pytest.mark.parametrize(("failure", "expected"), [("", [0.25, 0.25]), ("it has died", [1.0, 0.5])])
def test_a_greedy_episode_whose_environment_failed_is_no_baseline(
    failure: str, expected: list[float], alone: Mesh
) -> None:
    episode = Episode(Observation(), (), failure=failure)
    rows = [ScoredCompletion(COMPLETIONS[0], score, False, {}) for score in (1.0, 0.5)]
    rows.append(ScoredCompletion(replace(COMPLETIONS[0], episode=episode), 0.25, False, {}))
    selection = Selection(1, 2, alone, filtered=False, greedy=True)
    selection.add(rows)
    assert [each.greedy_score for each in selection.take()] == expected


def test_only_one_rank_of_a_replica_scores() -> None:
    class Other:
        is_leader = False

        def broadcast_from_leader(self, value: Any) -> Any:
            assert value is None
            raise LookupError("the leader's scores")

    own = scorer()
    with pytest.raises(LookupError, match="the leader's scores"):
        CompletionScorer(own.sources, own.tokenizer, Other())(COMPLETIONS)  # type: ignore[arg-type]


def test_each_source_has_its_own_functions_weights_and_pattern() -> None:
    first = scorer()
    reward = first.sources[0].reward.part({"length": 3.0}, None)
    second = SourceRewards(reward, {"length": num_tokens, "task": lambda each: [1.0] * len(each)})
    mixed = [
        replace(each, prompt=replace(each.prompt, source=n)) for each, n in zip(COMPLETIONS, (1, 0, 1), strict=True)
    ]
    scored = CompletionScorer([first.sources[0], second], first.tokenizer, ALONE)(mixed)
    assert [each.completion for each in scored] == mixed
    assert [each.score for each in scored] == [3 * 1, 0.5 * 2, 3 * 3]
    assert [each.is_correct for each in scored] == [True, False, True]  # `task` judges where nothing else does
    assert [sorted(each.scores_by_function) for each in scored] == [
        ["length", "task"],
        ["exact_match", "length"],
        ["length", "task"],
    ]


def test_length_penalties_by_hand() -> None:
    algorithm = from_tree(
        {"algorithm": {"missing_eos_penalty": 0.25, "overlong_buffer": 2, "overlong_penalty": 1.0}}
    ).algorithm
    scored = [ScoredCompletion(each, 1.0, True, {}) for each in COMPLETIONS]
    # The penalty rises from 0 at 1 token to 1 at 3 tokens; the last response was cut.
    assert [each.score for each in apply_length_penalty(scored, algorithm, 3)] == [1.0, 0.5, 1 - 1 - 0.25]


def test_dapo_punishes_the_last_fifth_of_the_longest_response() -> None:
    algorithm = from_tree({"algorithm": {"advantage": "dapo"}}).algorithm
    scored = [ScoredCompletion(each, 1.0, True, {}) for each in COMPLETIONS]  # 1, 2 and 3 tokens
    assert [each.score for each in apply_length_penalty(scored, algorithm, 10)] == [1.0, 1.0, 1.0]
    assert [each.score for each in apply_length_penalty(scored, algorithm, 3)] == [1.0, 1.0, 1.0]  # a fifth is no token
    long = [ScoredCompletion(completion(*[3] * n), 1.0, True, {}) for n in (8, 9, 10)]
    assert [each.score for each in apply_length_penalty(long, algorithm, 10)] == [1.0, 0.75, 0.5]
    # A right answer of full length lies half of the way between a wrong short one and a right short one, as in the
    # paper: -1, 0 and 1.


def test_tokens_of_the_environment_come_near_the_limit_too() -> None:
    algorithm = from_tree({"algorithm": {"advantage": "dapo"}}).algorithm
    whole = completion(*[3] * 10)
    observed = Episode(Observation(), (Turn(0, 4, 0, Observation()), Turn(9, 10, 0, Observation())), (), 1.0)
    scored = [ScoredCompletion(each, 1.0, True, {}) for each in (whole, replace(whole, episode=observed))]
    assert scored[1].completion.num_drawn == 5
    assert [each.score for each in apply_length_penalty(scored, algorithm, 10)] == [0.5, 0.5]


def test_an_answer_is_not_right_where_the_environment_has_failed() -> None:
    whole = Episode(Observation(), (Turn(0, 1, 0, Observation()),), (), 1.0)
    told = [replace(whole, failure=failure) for failure in ("", "it answers differently")]
    scored = scorer()([replace(completion(1), episode=each) for each in told])
    assert [(each.is_correct, each.completion.has_failed) for each in scored] == [(True, False), (False, True)]


class Engines:
    """Keeps the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def push(self, version: int, *, starting: bool = False, midway: bool = False) -> None:
        self.calls.append((version, starting, midway))

    def sleep(self) -> None:
        self.calls.append(("sleep",))


def collector(engines: Engines, **rollout: Any) -> RolloutCollector:
    config = from_tree({"rollout": rollout, "train": {"prompts_per_step": 8, "samples_per_prompt": 2}})
    trainer = SimpleNamespace(config=config, mesh=scorer().mesh, device=torch.device("cpu"))
    return RolloutCollector(
        trainer=trainer,  # type: ignore[arg-type]
        engines=engines,  # type: ignore[arg-type]
        queue=None,  # type: ignore[arg-type]
        sampling=Sampling(1.0, 1.0, -1, 4, (1,)),
        score=scorer(),
        evaluations=(),
    )


def test_requests_go_on_with_new_weights_only_when_rollouts_may_be_partial() -> None:
    engines = Engines()
    collector(engines).push_weights(3)
    partial = collector(engines, max_staleness=2, partial_rollouts=True)
    partial.push_weights(0, starting=True)
    partial.push_weights(1)
    partial.sleep_engines()  # they have a GPU of their own
    assert engines.calls == [(3, False, False), (0, True, False), (1, False, True)]


def test_a_selection_takes_a_replicas_share_of_the_prompts() -> None:
    selection = new_selection(collector(Engines()).trainer)
    assert (selection.wanted, selection.samples, selection.filtered, selection.greedy) == (4, 2, False, False)


def test_scores_have_the_penalties_of_the_step(alone: Mesh) -> None:
    own, selection = collector(Engines()), Selection(3, 1, alone, filtered=False, greedy=False)
    own.finish_scoring(own.score.begin(COMPLETIONS), selection)
    own.trainer.config = from_tree({"algorithm": {"missing_eos_penalty": 0.25}, "rollout": {"max_tokens": 8}})
    own.finish_scoring(own.score.begin(COMPLETIONS), selection)
    assert [each.score for each in selection.candidates] == [2.5, 1.0, 1.5, 2.5, 1.0, 1.25]
    assert selection.scoring_seconds > 0


def test_completions_become_a_batch_before_they_have_scores() -> None:
    own = collector(Engines())
    batch = own.build_batch(COMPLETIONS)
    assert batch.ids.tolist() == [[7, 1, 0, 0], [7, 2, 2, 0], [7, 3, 3, 3]]
    assert batch.scores.tolist() == [0, 0, 0]
    assert batch.with_scores(own.score(COMPLETIONS)).scores.tolist() == [2.5, 1.0, 1.5]


def test_completions_are_scored_while_the_trainer_goes_on() -> None:
    """The scores wait for the trainer here, which would wait for them for ever if it scored by itself."""
    own, went_on = scorer(), Event()

    def waiting(responses: Sequence[Response]) -> list[float]:
        return [float(went_on.wait(60))] * len(responses)

    source = SourceRewards(own.sources[0].reward, {"exact_match": waiting, "length": num_tokens})
    pending = CompletionScorer([source], Tokenizer(), ALONE).begin(COMPLETIONS)
    assert not pending.judged.done()
    went_on.set()
    scored, seconds = pending.result()
    assert [each.scores_by_function["exact_match"] for each in scored] == [1.0] * 3 and seconds > 0


def test_what_a_function_raises_is_raised_where_scores_are_waited_for() -> None:
    def failing(responses: Sequence[Response]) -> list[float]:
        raise LookupError("no scores")

    source = SourceRewards(scorer().sources[0].reward, {"exact_match": failing, "length": num_tokens})
    pending = CompletionScorer([source], Tokenizer(), ALONE).begin(COMPLETIONS)
    with pytest.raises(LookupError, match="no scores"):
        pending.result()


def test_answers_of_averaged_weights_are_not_written() -> None:
    kept, outcomes = list[StepCompletions](), Outcomes((), *[np.zeros(0)] * 6)
    own = replace(collector(Engines()), completions=SimpleNamespace(keep=kept.append))  # type: ignore[arg-type]
    for name in (HELD_OUT, AVERAGED, "sums"):
        own.keep_answers(3, name, own.score(COMPLETIONS), outcomes)
    assert [(each.kind, each.step, len(each.rows)) for each in kept] == [(Kind.HELD_OUT, 3, len(COMPLETIONS))]


@pytest.mark.parametrize(("rounds", "wanted", "expected"), [(0, 0, True), (1, 0, False), (1, 1, True), (2, 1, False)])
def test_rounds_go_on_until_there_are_enough_groups(rounds: int, wanted: int, expected: bool, alone: Mesh) -> None:
    config = from_tree({"algorithm": {"advantage": "grpo", "filter_groups": True, "filter_rounds": 2}})
    trainer: Any = SimpleNamespace(config=config)
    selection = Selection(wanted, 2, alone, filtered=True, greedy=False)
    selection.rounds = rounds
    assert needs_more(trainer, selection) is expected
    plain = Selection(1, 2, alone, filtered=False, greedy=False)
    plain.rounds = rounds
    assert needs_more(trainer, plain) is (rounds == 0)


def test_the_seconds_of_a_steps_parts_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 3.0, 3.0, 4.0, 10.0, 15.0, 20.0])
    monkeypatch.setattr("rlx.training.metrics.time", SimpleNamespace(perf_counter=lambda: next(times)))
    timer = StepTimer()
    with timer("update"):
        pass
    assert list(timer.waiting("rollout", ["a"])) == ["a"]
    assert timer.metrics() == {"time/update": 2.0, "time/rollout": 1.0 + 5.0, "time/step": 20.0}


def test_sample_rows_and_reports_are_kept_in_memory() -> None:
    rows = sample_rows([ScoredCompletion(COMPLETIONS[0], 2.5, True, {}, text="so 4")])
    assert rows == [{"score": 2.5, "answer": "4", "completion": "so 4", "prompt": "2 + 2"}]
    reporter = MemoryReporter()
    reporter.log({"x": 1.0}, 3)
    reporter.log_samples([], 3)
    reporter.log_samples(rows, 4)
    reporter.report({"x": 1.0, "step": 3}, is_last=False, checkpoints=[])
    reporter.notify("engine 0 is back")
    assert reporter.metrics == [{"x": 1.0, "step": 3}] and reporter.samples == [(4, rows)]
    assert (reporter.reports, reporter.messages) == ([{"x": 1.0, "step": 3}], ["engine 0 is back"])
    assert not reporter.should_stop(4)
    reporter.stopping = True
    assert reporter.should_stop(4)


def test_that_all_episodes_failed_is_said_once_in_a_row() -> None:
    told = set[str]()
    shares = [{"eval/failed_fraction": 1.0}, {"episode/failed_fraction": 1.0}, {"episode/failed_fraction": 1.0}]
    shares += [{"episode/failed_fraction": 0.5}, {"episode/failed_fraction": 1.0, "eval/failed_fraction": 1.0}]
    said = [[line.partition(" failed")[0] for line in failed_episodes(*each, told)] for each in enumerate(shares)]
    evaluation, step = "all episodes of the evaluation after step 0", "all episodes of step {}"
    assert said == [[evaluation], [step.format(1)], [], [], [step.format(4)]]


def test_the_doctor_learns_from_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them its advantages would all be 0, and it would ask nothing of the gradient."""
    monkeypatch.setattr(RolloutCollector, "next_round", lambda *given: iter([COMPLETIONS]))
    own = collector(Engines())
    own.trainer.step = 0
    assert doctor.generate(own.trainer, own).scores.tolist() == [2.5, 1.0, 1.5]
