"""rlx's scheduler does what vLLM's own does: the same steps, blocks and outputs, in a process of their own."""

import multiprocessing
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import scheduler_cases


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """vLLM changes the process that imports it."""
    with ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), initializer=scheduler_cases.begin
    ) as pool:
        yield pool


@pytest.mark.parametrize("overlapped", [False, True], ids=["one after the other", "overlapped"])
@pytest.mark.parametrize("blocks", [400, 40], ids=["room", "no room"])
def test_steps_blocks_and_outputs_are_those_of_vllm(
    process: ProcessPoolExecutor, tiny_model: Path, overlapped: bool, blocks: int
) -> None:
    counts = Counter[str]()
    for seed in range(4):
        counts += process.submit(scheduler_cases.lockstep, str(tiny_model), overlapped, blocks, seed).result()
    assert counts["fast"] > counts["steps"] / 4
    assert min(counts[what] for what in ("aborts", "resets", "STOP", "LENGTH")) > 0
    assert counts["preempted"] > 0 or blocks == 400


@pytest.mark.slow
def test_an_engine_gives_the_same_completions_with_a_cache_for_half_of_its_requests(
    process: ProcessPoolExecutor, tiny_model: Path
) -> None:
    theirs, their_name, preempted = process.submit(scheduler_cases.completions, str(tiny_model), False).result()
    ours, our_name, ours_preempted = process.submit(scheduler_cases.completions, str(tiny_model), True).result()
    assert (their_name, our_name) == ("Scheduler", "DecodeScheduler")
    assert ours == theirs
    assert ours_preempted == preempted > 0
    assert len(theirs) == 39  # all but the aborted one
    assert {end[2] for end in theirs.values()} == {"stop", "length"}


def test_vllm_schedules_by_itself_where_rlx_cannot(process: ProcessPoolExecutor, tiny_model: Path) -> None:
    reasons = process.submit(scheduler_cases.refusals, str(tiny_model)).result()
    assert reasons.pop("") == ""
    assert reasons.pop("made") == "Scheduler"
    assert reasons["log"] == "statistics of each step"
    assert reasons["window"] == "the KV cache is not that of full attention alone"
    assert reasons["pipeline"] == "pipeline parallelism"


def test_vllm_has_what_is_used_of_it(process: ProcessPoolExecutor) -> None:
    assert process.submit(scheduler_cases.relied_on).result() == []
