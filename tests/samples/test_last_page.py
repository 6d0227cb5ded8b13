"""The small page of a run that has ended: what it shows, how long it takes, and that it fails nobody."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_cases import Letters, scored, step

from rlx.cluster.resources import plan_resources
from rlx.config.loading import from_tree
from rlx.runs import launch
from rlx.runs.preflight import PreparedRun
from rlx.runs.train_run import RunError
from rlx.samples import reader
from rlx.samples.columns import COMPLETIONS, Kind, StepCompletions, TrainedTokens
from rlx.samples.last_page import FILE, last_page
from rlx.samples.writer import CompletionWriter, Keeping
from rlx.storage.addresses import open_storage
from rlx.storage.filesystem import Storage
from rlx.tracking import outbox
from rlx.tracking.services.tensorboard import TensorBoardService
from rlx.tracking.tracker import OutboxTracker
from rlx.types import Completion, Prompt, ScoredCompletion


def keep(folder: Storage, *steps: StepCompletions) -> None:
    writer = CompletionWriter(folder, Keeping(1.0, 0, 0, 1), Letters(), pytest.fail)
    for each in steps:
        writer.keep(each)
        assert writer.wait()
    writer.close()


def test_the_page_of_a_run_shows_its_first_its_middle_and_its_last_step(tmp_path: Path) -> None:
    run = open_storage(str(tmp_path))
    keep(run, *map(step, range(1, 6)), StepCompletions(Kind.HELD_OUT, 5, 8, [scored(0), scored(2)]))
    text = last_page(run, "a") or ""
    assert "Completions of run a</title>" in text and f"{tmp_path}/completions" in text
    for number in range(1, 6):
        assert (f"a \\u00b7 training \\u00b7 step {number}" in text) == (number in (1, 3, 5))
    assert "a \\u00b7 held-out \\u00b7 step 5" in text and "All 14 completions of 4 steps" in text


def test_nothing_kept_and_a_damaged_file_are_no_page(tmp_path: Path) -> None:
    run = open_storage(str(tmp_path))
    assert last_page(run, "a") is None
    keep(run, step(1))
    (file,) = (tmp_path / COMPLETIONS).iterdir()
    file.write_text("damaged")
    assert last_page(run, "a") is None


def test_a_storage_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(run := open_storage(str(tmp_path)), step(1), step(2))
    read: list[int] = []

    def slow(folder: Storage, kept: reader.KeptStep) -> Any:
        read.append(kept.number)
        time.sleep(0.8)
        return table

    table = reader.read(run, reader.kept_steps(run)[0])
    monkeypatch.setattr(reader, "read", slow)
    started = time.monotonic()
    assert last_page(run, "a", patience_s=0.1) is None and time.monotonic() - started < 0.7
    time.sleep(1.0)
    assert read == [1]  # the thread does not go on with the second step


def long_step(number: int, prompts: int, samples: int, tokens: int) -> StepCompletions:
    """A step of many long completions that were all trained on."""
    count, random = prompts * samples, np.random.default_rng(number)
    rows = []
    for i in range(count):
        ids = tuple(random.integers(97, 123, tokens).tolist())
        logprobs = tuple(random.normal(-1, 0.5, tokens).tolist())
        done = Completion(
            Prompt(i // samples, (63,), f"question {i // samples}", "yes"), i % samples, ids, logprobs, True, 0
        )
        rows.append(ScoredCompletion(done, 1.0, True, {"task": 1.0}, text="text", answer="no"))
    grid = random.normal(-1, 0.5, (count, tokens)).astype(np.float32)
    return StepCompletions(Kind.TRAINING, number, prompts, rows, TrainedTokens(grid, grid, grid, np.ones(count)))


@pytest.mark.slow
def test_the_page_of_long_completions_is_small_and_made_in_time(tmp_path: Path) -> None:
    run = open_storage(str(tmp_path))
    keep(run, *(long_step(number, 32, 8, 512) for number in (1, 2, 3)))
    started = time.process_time()
    text = last_page(run, "a", patience_s=60.0)
    assert text and len(text) < 4_000_000 and time.process_time() - started < 4


@pytest.mark.parametrize(
    ("share", "ends_with", "has_page"),
    [(1.0, None, True), (1.0, RunError("lost"), True), (1.0, KeyboardInterrupt(), False), (0.0, None, False)],
)
def test_a_run_adds_its_page_however_it_ends(
    share: float, ends_with: BaseException | None, has_page: bool, tmp_path: Path
) -> None:
    """But not while a person waits after Ctrl-C."""
    keep(run := open_storage(str(tmp_path)), step(1))
    config = from_tree({"name": "a", "tracking": {"completions": share}})
    record = OutboxTracker([TensorBoardService(tmp_path)], run, "driver")  # its run is not open: records wait
    prepared = PreparedRun(config, "", plan_resources(config))
    with suppress(RunError, KeyboardInterrupt), launch._adding_page(record, prepared, run):
        if ends_with:
            raise ends_with
    record.close(0)
    waiting = outbox.entries_of(run, "driver", "tensorboard")
    assert [(waiting / name).read_json()["content"]["name"] for name in waiting.names()] == [FILE] * has_page
