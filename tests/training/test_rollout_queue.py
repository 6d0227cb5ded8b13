"""Rounds of generation ahead of training: what is begun when, how old it is, and what a checkpoint keeps of it."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import Tensor

from rlx.config.sections.rollout import EnvironmentConfig
from rlx.data.stream import PromptStream, TableRows
from rlx.rollout.base import PendingRollout
from rlx.storage import checkpoint_files
from rlx.storage.checkpoint_files import CheckpointReader
from rlx.storage.filesystem import Storage
from rlx.training.rollout_queue import RolloutQueue
from rlx.types import Completion, Episode, Observation, Prompt, Sampling, Turn

SAMPLING = Sampling(1.0, 1.0, -1, 4, (1,))
ROWS = 20
TABLE = pa.table(
    {
        "token_ids": pa.array([[row, row] for row in range(ROWS)], pa.list_(pa.int32())),
        "question": [f"question {row}" for row in range(ROWS)],
        "answer": [str(row) for row in range(ROWS)],
    }
)


class Engines:
    """Instead of real engines: a completion of prompt p by sampling k is [p, k], or [p] if k is 1; the log tells
    when what was asked for and waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def begin(self, prompts: Sequence[Prompt], samplings: Sequence[Sampling], version: int) -> PendingRollout:
        self.log.append(f"begin {len(prompts)} with {version}")
        return PendingRollout(prompts, samplings, version, [None] * len(prompts), list(range(len(prompts))))

    def wait(self, draw: PendingRollout, version: int) -> bool:
        self.finish(draw, version)
        return True

    def finish(self, draw: PendingRollout, version: int) -> list[Completion]:
        if not draw.is_complete:
            self.log.append(f"finish {len(draw.prompts)} of {draw.step}")
            draw.groups = [[self.drawn(p, k, draw.step) for k in range(len(draw.samplings))] for p in draw.prompts]
            draw.seconds = 2.0
        return draw.completions

    def drawn(self, prompt: Prompt, sample: int, version: int) -> Completion:
        tokens = (prompt.id, sample)[: 1 + (sample != 1)]
        return Completion(prompt, sample, tokens, (-1 / 3,) * len(tokens), sample == 0, version)


def stream(rank: int, ranks: int, position: int = 0) -> PromptStream:
    return PromptStream(TableRows(TABLE), 3, rank, ranks, position)


def rounds(rank: int = 0, ranks: int = 1, **choices: Any) -> RolloutQueue:
    settings: dict[str, Any] = {
        "samplings": lambda step: [SAMPLING] * 2,
        "prompts_per_step": 4,
        "num_chunks": 1,
        "max_staleness": 0,
    } | choices
    return RolloutQueue(Engines(), stream(rank, ranks), **settings)  # type: ignore[arg-type]


def log(of: RolloutQueue) -> list[str]:
    said: list[str] = of.engines.log  # type: ignore[attr-defined]
    of.engines.log = []  # type: ignore[attr-defined]
    return said


def step(of: RolloutQueue, number: int, steps: int = 10) -> list[Completion]:
    return [one for part in of.next(number, steps) for one in part]


def test_without_staleness_a_round_is_begun_when_it_is_needed() -> None:
    own = rounds()
    assert [one.prompt.id for one in step(own, 5)] == [p.id for p in stream(0, 1).next(4) for _ in range(2)]
    assert log(own) == ["begin 4 with 5", "finish 4 of 5"]
    own.wait(5)
    assert log(own) == [] and own.position() == 4


def test_parts_are_all_begun_before_the_first_is_waited_for() -> None:
    own = rounds(num_chunks=3)
    sizes = [len(part) for part in own.next(0, 10)]
    assert sizes == [2, 2, 4]  # two completions of one, one and two prompts
    said = log(own)
    assert said[:3] == ["begin 1 with 0", "begin 1 with 0", "begin 2 with 0"]
    assert said[3:] == ["finish 1 of 0", "finish 1 of 0", "finish 2 of 0"]


def test_one_step_ahead_the_next_round_is_drawn_while_this_one_trains() -> None:
    own = rounds(max_staleness=1)
    assert {one.version for one in step(own, 0)} == {0}
    assert log(own) == ["begin 4 with 0", "begin 4 with 0", "finish 4 of 0"]
    own.wait(0)
    assert log(own) == ["finish 4 of 0"]
    assert {one.version for one in step(own, 1)} == {0}
    assert log(own) == ["begin 4 with 1"] and own.seconds == 2.0  # of the second round


def test_rounds_without_logprobs_go_into_a_checkpoint() -> None:
    own = rounds(max_staleness=1, samplings=lambda step: [SAMPLING, SAMPLING.greedy])
    engines = own.engines
    drawn = engines.drawn  # type: ignore[attr-defined]
    engines.drawn = lambda *given: replace(drawn(*given), logprobs=())  # type: ignore[attr-defined]
    step(own, 0)
    own.wait(0)
    columns = {name: shard.local for name, shard in own.state().items()}
    (logprobs,) = (tensor for name, tensor in columns.items() if name.endswith("logprobs"))
    assert logprobs.shape[0] == 8 and not logprobs.any()


def test_rounds_of_another_environment_are_drawn_again() -> None:
    def asked(**environment: Any) -> Tensor:
        return rounds(environment=EnvironmentConfig.model_validate(environment).identity)._request(1)

    others = [asked(), asked(name="calculator"), asked(name="treasure"), asked(name="treasure", params={"rooms": 3})]
    assert all(not torch.equal(one, other) for one, other in itertools.combinations(others, 2))
    assert torch.equal(asked(name="treasure", timeout_s=9), asked(name="treasure"))


def test_engines_report_logprobs_every_few_steps() -> None:
    own = rounds(logprobs_every=3, samplings=lambda step: [SAMPLING, SAMPLING.greedy])
    asked: list[list[bool]] = []
    begin = own.engines.begin

    def noted(prompts: Sequence[Prompt], samplings: Sequence[Sampling], version: int) -> PendingRollout:
        asked.append([sampling.logprobs for sampling in samplings])
        return begin(prompts, samplings, version)

    own.engines.begin = noted  # type: ignore[method-assign]
    for number in range(4):
        step(own, number)
    assert asked == [[True, False], [False, False], [False, False], [True, False]]  # never of the greedy completion


def test_nothing_is_begun_that_no_step_trains_on() -> None:
    own = rounds(max_staleness=2)
    drawn = [step(own, number, steps=4) for number in range(4)]
    assert [completions[0].version for completions in drawn] == [0, 0, 0, 1]
    assert sum(line.startswith("begin") for line in log(own)) == 4
    assert own.position() == own.prompts.position == 16


def test_completions_that_are_too_old_are_never_handed_out() -> None:
    own = rounds(max_staleness=1)
    step(own, 0)
    with pytest.raises(RuntimeError, match="step 4: weights of step 0 are too old by 2"):
        step(own, 3)


def test_completions_are_drawn_as_the_step_that_trains_on_them_scores_them(tmp_path: Path) -> None:
    def cooling(number: int) -> list[Sampling]:
        return [replace(SAMPLING, temperature=1 / (1 + number))] * 2

    own, other, warm = (rounds(max_staleness=2, samplings=each) for each in (cooling, cooling, lambda _: cooling(0)))
    asked: list[float] = []
    begin = own.engines.begin

    def noted(prompts: Sequence[Prompt], samplings: Sequence[Sampling], version: int) -> PendingRollout:
        asked.append(1 / samplings[0].temperature - 1)
        return begin(prompts, samplings, version)

    own.engines.begin = noted  # type: ignore[method-assign]
    step(own, 0)
    own.wait(0)
    files, position = saved([own], tmp_path), own.position()
    restored(files, 1, 1, position, other, warm)
    assert step(other, 1) == step(own, 1)  # from the checkpoint
    assert {one.version for one in step(warm, 1)} == {1}  # drawn again
    assert asked == [0, 1, 2, 3]


def saved(ranks: Sequence[RolloutQueue], folder: Path) -> list[Storage]:
    files = [folder / f"rank_{rank}.safetensors" for rank in range(len(ranks))]
    for own, file in zip(ranks, files, strict=True):
        checkpoint_files.write_shards(own.state(), file)
    return [Storage.local(file) for file in files]


def restored(files: Sequence[Storage], step: int, wrote: int, position: int, *of: RolloutQueue) -> None:
    for own in of:
        own.prompts.seek(own.prompts.cursor(position))
        with CheckpointReader(files) as parts:
            own.restore(parts, step, wrote)


def test_a_checkpoint_keeps_what_was_drawn_ahead(tmp_path: Path) -> None:
    own, other = rounds(max_staleness=2), rounds(max_staleness=2)
    step(own, 0)
    own.wait(0)
    restored(saved([own], tmp_path), 1, 1, own.position(), other)
    for number in (1, 2, 3):
        assert step(other, number) == step(own, number)
    assert other.prompts.position == own.prompts.position


@pytest.mark.parametrize(("wrote", "reads"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_on_any_number_of_ranks(tmp_path: Path, wrote: int, reads: int) -> None:
    writers = [rounds(rank, wrote, max_staleness=1) for rank in range(wrote)]
    readers = [rounds(rank, reads, max_staleness=1) for rank in range(reads)]
    for own in writers:
        step(own, 0)
        own.wait(0)
    restored(saved(writers, tmp_path), 1, wrote, writers[0].position(), *readers)
    before, after = ([step(own, 1) for own in of] for of in (writers, readers))
    assert {one.prompt.id: one for rank in before for one in rank} == {
        one.prompt.id: one for rank in after for one in rank
    }
    assert [len(rank) for rank in after] == [8 // reads] * reads
    # Each rank has its every ranks-th prompt, as if it had asked for them itself.
    asked = [stream(rank, reads, position=4).next(4) for rank in range(reads)]
    assert [[one.prompt for one in rank[::2]] for rank in after] == asked


def as_episode(given: Completion) -> Completion:
    """The same as an episode of one turn that began with other tokens, and whose words are no ASCII."""
    said = Observation(
        ({"role": "tool", "name": "look", "content": f"größer {given.prompt.id}"},), 0.25, True, 1, 1, 0.5, 2
    )
    told = Episode(Observation(), (Turn(0, 1, given.version, said),), (), 0.25, "its process ended", "died")
    return replace(given, prompt=replace(given.prompt, token_ids=(7, given.prompt.id)), episode=told)


@pytest.mark.parametrize(("wrote", "reads"), [(1, 1), (2, 4), (4, 2)])
def test_a_checkpoint_keeps_what_environments_have_said(tmp_path: Path, wrote: int, reads: int) -> None:
    writers = [rounds(rank, wrote, max_staleness=1) for rank in range(wrote)]
    readers = [rounds(rank, reads, max_staleness=1) for rank in range(reads)]
    for own in writers:
        drawn = own.engines.drawn  # type: ignore[attr-defined]
        own.engines.drawn = lambda *given, drawn=drawn: as_episode(drawn(*given))  # type: ignore[attr-defined]
        step(own, 0)
        own.wait(0)
    restored(saved(writers, tmp_path), 1, wrote, writers[0].position(), *readers)
    before, after = ([step(own, 1) for own in of] for of in (writers, readers))
    found = [{(one.prompt.id, one.sample): one for rank in of for one in rank} for of in (before, after)]
    assert found[0] == found[1] and all(one.episode for one in found[1].values())
    told = {(one.episode.seconds, one.episode.retries, one.episode.kind) for one in found[1].values() if one.episode}
    assert told == {(0.5, 2, "died")}


def test_what_is_not_whole_is_drawn_again(tmp_path: Path) -> None:
    own, other = rounds(max_staleness=2), rounds(max_staleness=2)
    step(own, 0)
    assert own.state() == {} and own.position() == 4
    checkpoint_files.write_shards(own.state() | checkpoint_files.copy_shards({}, {}), tmp_path / "empty.safetensors")
    restored([Storage.local(tmp_path / "empty.safetensors")], 1, 1, own.position(), other)
    again = step(other, 1)
    assert {one.version for one in again} == {1}
    assert [one.prompt for one in again] == [one.prompt for one in step(own, 1)]


@pytest.mark.parametrize(
    "other",
    [
        {"samplings": lambda step: [SAMPLING] * 4},
        {"prompts_per_step": 8},
        {"samplings": lambda step: [SAMPLING.greedy] * 2},
    ],
)
def test_a_run_that_asks_for_something_else_draws_again(tmp_path: Path, other: dict[str, Any]) -> None:
    own, changed = rounds(max_staleness=1), rounds(max_staleness=1, **other)
    step(own, 0)
    own.wait(0)
    restored(saved([own], tmp_path), 1, 1, own.position(), changed)
    assert changed.position() == 4
    assert {one.version for one in step(changed, 1)} == {1}


def test_what_no_engine_was_left_for_is_not_kept_and_drawn_later(monkeypatch: pytest.MonkeyPatch) -> None:
    own = rounds(max_staleness=1)
    step(own, 0)
    monkeypatch.setattr(own.engines, "wait", lambda draw, version: False)
    own.wait(0)
    assert own.state() == {} and own.position() == 4
    assert len(step(own, 1)) == 8


def test_a_run_that_allows_less_staleness_draws_again_what_is_too_old(tmp_path: Path) -> None:
    own, other = rounds(max_staleness=2), rounds()
    step(own, 0)
    own.wait(0)
    restored(saved([own], tmp_path), 1, 1, own.position(), other)
    assert other.position() == 4
    assert {one.version for one in step(other, 1)} == {1}
