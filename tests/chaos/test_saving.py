"""Ranks that are killed while they save: reported checkpoints are complete, and the next ranks go on from them."""

import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import s3
import torch
import torch.distributed as dist
from shared import Where

from rlx.storage import checkpoint_catalog
from rlx.storage.addresses import open_storage
from rlx.storage.checkpoint_catalog import CheckpointState, Retention
from rlx.storage.checkpoint_files import CheckpointReader, Shard
from rlx.storage.checkpoint_manifest import Manifest
from rlx.storage.checkpoint_writer import CheckpointWriter
from rlx.storage.filesystem import Storage

RANKS, KEPT = 2, 2
SIZES = {"large": 600_000, "small": 7}  # numbers per rank
START_S = 120.0  # longest wait for the first checkpoint of a group


def manifest(step: int) -> Manifest:
    """The third step is the best."""
    return Manifest(
        rlx="0", step=step, ranks=RANKS, metrics={"reward": -abs(step - 3.0)}, tokens=step, kl={}, scores={},
        cursor={}, evaluation={}, mlflow_run_id=None, config={}, files={},
    )  # fmt: skip


def save_forever(rank: int, where: Where, scratch: str, reports: str) -> None:
    """Goes on from the newest checkpoint; writes the name of each finished one to a file, a line each."""
    torch.set_num_threads(1)
    os.environ.update(where[1])
    tempfile.tempdir = scratch  # leftovers of uploads stay visible to the test
    dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=rank, world_size=RANKS)
    writer = CheckpointWriter(open_storage(where[0]), Retention(KEPT, "reward"))
    damaged: list[str] = []
    newest = writer.newest_checkpoint(damaged.append)
    assert damaged == []
    step = newest.step if newest else 0
    live = {name: torch.empty(1, size) for name, size in SIZES.items()}
    with open(reports, "a", buffering=1) as report:
        while True:
            step += 1
            for tensor in live.values():
                tensor.fill_(step)
            staged = {name: Shard(t.clone(), (rank, 0), (RANKS, t.shape[1])) for name, t in live.items()}
            writer.save(staged, manifest(step))
            while not (finished := writer.finished_checkpoint()):
                time.sleep(0.001)
            if rank == 0:
                report.write(f"{finished.folder.name}\n")


class Group:
    """The ranks as processes."""

    def __init__(self, where: Where, folder: Path) -> None:
        folder.mkdir()
        self.reports = folder / "reports"
        self.reports.touch()
        context = multiprocessing.get_context("forkserver")
        arguments = (where, str(folder), str(self.reports))
        self.processes = [context.Process(target=save_forever, args=(rank, *arguments)) for rank in range(RANKS)]
        for process in self.processes:
            process.start()

    def reported(self) -> list[int]:
        """The steps of the checkpoints that were reported as finished."""
        return [int(line.removeprefix("step_")) for line in self.reports.read_text().split()]

    def wait_for(self, count: int) -> float:
        """Waits until so many are reported; returns the seconds that each took after the first."""
        deadline, first = time.monotonic() + START_S, 0.0
        while (count_now := len(self.reported())) < count:
            assert all(process.is_alive() for process in self.processes) and time.monotonic() < deadline
            first = first or (time.monotonic() if count_now else 0.0)
            time.sleep(0.001)
        return (time.monotonic() - first) / max(count - 1, 1)

    def kill(self, order: list[int]) -> list[int | None]:
        """Sends SIGKILL to all ranks in this order; returns their exit codes."""
        for rank in order:
            self.processes[rank].kill()
        for process in self.processes:
            process.join()
        return [process.exitcode for process in self.processes]


@pytest.fixture
def start(on_ranks: Any, tmp_path: Path) -> Iterator[Callable[[Where], Group]]:
    """Starts groups (from the processes that on_ranks prepares) and kills what is left of them at the end."""
    started: list[Group] = []

    def begin(where: Where) -> Group:
        started.append(Group(where, tmp_path / f"group-{len(started)}"))
        return started[-1]

    yield begin
    for group in started:
        group.kill(list(range(RANKS)))


def checked(folder: Storage) -> int:
    """The step of the newest complete checkpoint, after its every byte was verified."""
    newest = checkpoint_catalog.complete_checkpoints(folder)[-1]
    assert newest.manifest
    checkpoint_catalog.verify(newest, newest.manifest.files)
    assert newest.manifest.tokens == newest.step
    with CheckpointReader([newest.folder / name for name in newest.manifest.files]) as parts:
        assert sorted(parts.names) == sorted(SIZES)
        for name, size in SIZES.items():
            assert parts.read_full(name).equal(torch.full((RANKS, size), float(newest.step)))
    return newest.step


@pytest.mark.parametrize(
    "moments", [3, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])], ids=["few", "many"]
)
@pytest.mark.parametrize("where", ["folder", pytest.param("s3", marks=pytest.mark.slow)], indirect=True)
def test_a_kill_at_any_moment_costs_nothing_that_was_reported(
    moments: int, where: Where, start: Callable[[Where], Group]
) -> None:
    dice = random.Random(moments)
    folder = open_storage(where[0])
    cut_short, before = 0, 0
    for _ in range(moments):
        group = start(where)
        seconds = group.wait_for(3)
        time.sleep(dice.uniform(0.0, 2.0) * seconds)
        last = group.reported()[-1]
        assert group.kill(dice.sample(range(RANKS), RANKS)) == [-9] * RANKS
        newest = checked(folder)
        assert group.reported()[0] == before + 1  # it goes on where the group before was killed
        assert last <= newest <= group.reported()[-1] + 1
        states = {entry.state for entry in checkpoint_catalog.list_checkpoints(folder)}
        assert states <= {CheckpointState.COMPLETE, CheckpointState.UNFINISHED}  # none is damaged
        cut_short += CheckpointState.UNFINISHED in states
        before = newest
    assert cut_short or moments < 20  # some were killed while they wrote
    group = start(where)
    group.wait_for(KEPT + 1)
    group.kill([0, 1])
    # Older unfinished checkpoints are deleted by now.
    assert {entry.step for entry in checkpoint_catalog.list_checkpoints(folder)} >= {3, checked(folder)}
    assert not [
        entry for entry in checkpoint_catalog.list_checkpoints(folder) if entry.problem and entry.step <= before
    ]


FULL_DISK = """
import sys, torch
from pathlib import Path
from rlx.storage import checkpoint_files as checkpoint
shards = {"x": checkpoint.Shard(torch.ones(1_000_000), (0,), (1_000_000,))}
checkpoint.write_shards({"x": checkpoint.Shard(torch.ones(1000), (0,), (1000,))}, Path(sys.argv[1], "fits"))
try:
    checkpoint.write_shards(shards, Path(sys.argv[1], "much"))
except OSError as error:
    print("OSError:", error)
"""


@pytest.mark.parametrize(
    "size", ["2m", pytest.param("64k", marks=pytest.mark.slow), pytest.param("3900k", marks=pytest.mark.slow)]
)
def test_a_disk_that_is_full_is_an_error_and_no_crash(size: str, tmp_path: Path) -> None:
    """A library that maps the file into memory would be killed by SIGBUS here."""
    with s3.small_disk(tmp_path / "disk", size) as disk:
        ended = subprocess.run(
            [sys.executable, "-c", FULL_DISK, str(disk)], capture_output=True, text=True, check=False
        )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(f"OSError: {disk}/much: ") and "No space left on device" in ended.stdout
