"""Checkpoints written while training goes on, by one and two ranks, to a folder and to S3, and failures of it."""

import functools
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import s3
import torch
import torch.distributed as dist
from shared import OnRanks, Where

from rlx.storage import checkpoint_catalog, checkpoint_manifest, checkpoint_writer, rank_group
from rlx.storage.addresses import open_storage
from rlx.storage.checkpoint_catalog import Retention
from rlx.storage.checkpoint_files import CheckpointReader, Shard
from rlx.storage.checkpoint_manifest import Manifest
from rlx.storage.checkpoint_writer import CheckpointWriter
from rlx.storage.filesystem import Storage, StorageError, retry


def manifest(step: int, reward: float = 0.0) -> Manifest:
    return Manifest(
        rlx="0", step=step, ranks=dist.get_world_size(), metrics={"reward": reward}, tokens=0, kl={}, scores={},
        cursor={}, evaluation={}, mlflow_run_id=None, config={}, files={},
    )  # fmt: skip


def shards(step: int, size: int = 1000) -> dict[str, Shard]:
    """This rank's rows of a tensor that says which step it is of."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return {"x": Shard(torch.full((1, size), float(step)), (rank, 0), (ranks, size))}


def open_writer(where: Where, retention: Retention = Retention()) -> CheckpointWriter:  # noqa: B008 - it is frozen
    os.environ.update(where[1])
    checkpoint_catalog.SECOND_READ_S = 0.0  # this process is the test's own
    return CheckpointWriter(open_storage(where[0]), retention)


def saved(writer: CheckpointWriter, step: int, reward: float = 0.0, size: int = 1000) -> str:
    """Saves a checkpoint and waits for it; its name."""
    writer.save(shards(step, size), manifest(step, reward))
    writer.wait()
    finished = writer.finished_checkpoint()
    assert finished and writer.finished_checkpoint() is None
    return finished.folder.name


def content(
    writer: CheckpointWriter, found: checkpoint_catalog.CheckpointEntry | None
) -> tuple[str, float, int] | None:
    """A checkpoint's name, the number that fills it and how many there are of it."""
    if not found:
        return None
    assert found.manifest
    with CheckpointReader([found.folder / name for name in found.manifest.files]) as parts:
        x = parts.read_full("x")
    assert x.eq(x[0, 0]).all()
    return found.name, float(x[0, 0]), x.numel()


class ImmediateRetries:
    """Within it an action that fails is repeated at once; `waits` has the waits that were skipped."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def __enter__(self) -> "ImmediateRetries":
        self.patch = pytest.MonkeyPatch()
        for module in (checkpoint_writer, rank_group):
            self.patch.setattr(module, "retry", functools.partial(retry, wait=self.waits.append))
        return self

    def __exit__(self, *_: object) -> None:
        self.patch.undo()


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(StorageError) as refused:
        call()
    return str(refused.value)


# ---------------------------------------------------------------------------------------------------------------------


def save_two(rank: int, ranks: int, where: Where) -> dict[str, Any]:
    writer = open_writer(where)
    assert writer.finished_checkpoint() is None and writer.newest_checkpoint(print) is None
    first, second = saved(writer, 1), saved(writer, 2)
    writer.save(shards(3), manifest(3))
    writer.save(shards(4), manifest(4))  # waits for the writer before
    writer.wait()
    third, fourth = writer.finished_checkpoint(), writer.finished_checkpoint()
    assert third and fourth and 0 < fourth.seconds < 60 and writer.finished_checkpoint() is None
    names = [first, second, third.folder.name, fourth.folder.name]
    return {"names": names, "newest": content(writer, writer.newest_checkpoint(print)), "entries": entries(writer)}


def entries(writer: CheckpointWriter) -> list[tuple[str, list[str]]]:
    return [(entry.name, entry.folder.names()) for entry in checkpoint_catalog.list_checkpoints(writer.run)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_saved_checkpoint_is_complete_and_reported_once(ranks: int, on_ranks: OnRanks, where: Where) -> None:
    results = on_ranks(ranks, save_two, where)
    assert (open_storage(where[0]) / checkpoint_catalog.SAVED).exists()
    files = ["manifest.json", *(f"rank_{rank:05d}.safetensors" for rank in range(ranks))]
    assert (
        results
        == [
            {
                "names": ["step_000001", "step_000002", "step_000003", "step_000004"],
                "newest": ("step_000004", 4.0, 1000 * ranks),
                "entries": [(f"step_{step:06d}", files) for step in (1, 2, 3, 4)],
            }
        ]
        * ranks
    )


def save_beside(rank: int, ranks: int, where: Where) -> tuple[bool, bool]:
    """Whether saving returns before the checkpoint is complete, and it is reported without waiting."""
    writer = open_writer(where)
    started = time.monotonic()
    writer.save(shards(1, 2_000_000), manifest(1))
    soon = time.monotonic() - started < 1.0 and writer.finished_checkpoint() is None
    deadline = time.monotonic() + 30
    while not (finished := writer.finished_checkpoint()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return soon, finished is not None


@pytest.mark.slow
def test_training_goes_on_while_a_checkpoint_is_written(
    on_ranks: OnRanks, s3_server: str, s3_faults: tuple[str, s3.Proxy]
) -> None:
    address, proxy = s3_faults
    proxy.fail("slow", methods=["PUT"], times=4, seconds=1.0)
    assert on_ranks(1, save_beside, (address, s3.environment(s3_server))) == [(True, True)]


def save_rated(rank: int, ranks: int, where: Where) -> list[list[str]]:
    """Which are left after each; a fresh Saver on the same folder goes on after the third."""
    left, rewards = [], [0.1, 0.9, 0.2, 0.3, 0.4]
    for start in (0, 3):
        writer = open_writer(where, Retention(keep=1, best_by="reward", best_mode="max"))
        for step in range(start + 1, min(start + 3, len(rewards)) + 1):
            saved(writer, step, rewards[step - 1])
            dist.barrier()
            left.append(writer.run.names())
            dist.barrier()
    return left


@pytest.mark.slow
def test_the_newest_and_the_best_stay_also_after_a_resume(on_ranks: OnRanks, where: Where) -> None:
    kept = [[1], [2], [2, 3], [2, 4], [2, 5]]
    named = [[checkpoint_catalog.checkpoint_name(step) for step in steps] for steps in kept]
    expected = [[checkpoint_catalog.SAVED, *names] for names in named]
    assert on_ranks(2, save_rated, where) == [expected] * 2


def find(rank: int, ranks: int, where: Where) -> tuple[Any, list[str]]:
    messages: list[str] = []
    writer = open_writer(where)
    return content(writer, writer.newest_checkpoint(messages.append)), messages


def save_many(rank: int, ranks: int, where: Where, steps: int) -> None:
    writer = open_writer(where)
    for step in range(1, steps + 1):
        saved(writer, step)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_damaged_checkpoint_is_named_once_and_never_chosen(ranks: int, on_ranks: OnRanks, where: Where) -> None:
    on_ranks(2, save_many, where, 5)
    folder = open_storage(where[0])
    shard = "rank_00001.safetensors"
    for step, damage in ((3, "flip"), (4, "cut"), (5, "gone")):
        file = folder / checkpoint_catalog.checkpoint_name(step) / shard
        with folder.filesystem.open_input_stream(file.path) as stream:
            whole = stream.read()
        file.delete()
        if damage != "gone":
            changed = whole[:-1] if damage == "cut" else whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]
            with folder.filesystem.open_output_stream(file.path) as stream:
                stream.write(changed)
    (first, messages), *others = on_ranks(ranks, find, where)
    assert first == ("step_000002", 2.0, 2000)
    assert others == [(first, [])] * (ranks - 1)  # one rank says it
    assert len(messages) == 3
    for line, step, why in zip(messages, (5, 4, 3), ("is missing", "bytes, not", "its checksum differs"), strict=True):
        assert f"step_00000{step}" in line and shard in line and why in line and "\n" not in line
        assert line.startswith(f"checkpoint step_00000{step}: {shard} ")  # the checkpoint is named once
        assert line.endswith("; it is set aside, and the checkpoint before it is used")
    assert on_ranks(ranks, find, where) == [(first, [])] * ranks
    assert [entry.name for entry in checkpoint_catalog.complete_checkpoints(folder)] == ["step_000001", "step_000002"]


def test_without_a_finished_checkpoint_there_is_no_newest(on_ranks: OnRanks, where: Where) -> None:
    on_ranks(1, save_many, where, 2)
    for entry in checkpoint_catalog.list_checkpoints(open_storage(where[0])):
        (entry.folder / checkpoint_manifest.MANIFEST).delete()
    assert on_ranks(1, find, where) == [(None, [])]  # no message: a kill leaves unfinished checkpoints


def find_newest_error(rank: int, ranks: int, where: Where) -> tuple[str, list[str]]:
    messages: list[str] = []
    writer = open_writer(where)
    return refusal(lambda: writer.newest_checkpoint(messages.append)), messages


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_only_damaged_checkpoints_are_an_error_on_all_ranks(ranks: int, on_ranks: OnRanks, where: Where) -> None:
    on_ranks(1, save_many, where, 2)
    folder = open_storage(where[0])
    for entry in checkpoint_catalog.list_checkpoints(folder):
        (entry.folder / checkpoint_manifest.MANIFEST).write_text("no manifest")
    (text, messages), *others = on_ranks(ranks, find_newest_error, where)
    why = "manifest.json is not a manifest"
    assert text == f"no checkpoint in {folder} is complete; the oldest: checkpoint step_000001: {why}"
    aside = "it is set aside, and the checkpoint before it is used"
    assert messages == [f"checkpoint step_00000{step}: {why}; {aside}" for step in (2, 1)]
    assert others == [(text, [])] * (ranks - 1)
    assert all("manifest.json.damaged" in entry.folder.names() for entry in checkpoint_catalog.list_checkpoints(folder))


def find_late(rank: int, ranks: int, where: Where) -> tuple[Any, list[str]]:
    """A file of the newest is to be seen only after a while."""
    messages: list[str] = []
    writer = open_writer(where)
    file = Path(where[0], "step_000002", "rank_00000.safetensors")
    if rank == 0:
        file.rename(file.with_suffix(".late"))
    dist.barrier()

    def wait(_: float) -> None:
        if rank == 0:
            file.with_suffix(".late").rename(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", wait)
        found = writer.newest_checkpoint(messages.append)
    return content(writer, found), messages


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_that_seems_damaged_is_read_twice(ranks: int, on_ranks: OnRanks, tmp_path: Path) -> None:
    where = (str(tmp_path), {})
    on_ranks(1, save_many, where, 2)
    assert on_ranks(ranks, find_late, where) == [(("step_000002", 2.0, 1000), [])] * ranks


def test_a_checkpoint_of_another_format_is_an_error_and_stays_as_it_is(on_ranks: OnRanks, tmp_path: Path) -> None:
    where = (str(tmp_path), {})
    on_ranks(1, save_many, where, 2)
    file = tmp_path / "step_000002" / checkpoint_manifest.MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 1}))
    before = file.read_text()
    for text, messages in on_ranks(2, find_newest_error, where):
        written = "manifest.json has format 1, written by rlx 0: this version of rlx reads format 2 only"
        assert text == f"checkpoint {tmp_path}/step_000002: {written}"
        assert messages == []
    assert (
        file.read_text() == before
        and len(checkpoint_catalog.read_checkpoint(open_storage(str(tmp_path / "step_000001"))).files) == 1
    )


def verify_others(rank: int, ranks: int, where: Where, other: Path) -> tuple[Any, dict[str, str]]:
    """The content of another run's complete checkpoint, and the errors for its other ones."""
    writer = open_writer(where)
    found = writer.verified_checkpoint(open_storage(str(other / "step_000001")))
    places = [open_storage(str(other / checkpoint_catalog.checkpoint_name(step))) for step in (2, 3, 4)]
    return content(writer, found), {
        place.name: refusal(lambda place=place: writer.verified_checkpoint(place)) for place in places
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_another_runs_checkpoint_is_verified_or_an_error_on_all_ranks(
    ranks: int, on_ranks: OnRanks, tmp_path: Path
) -> None:
    other, shard = tmp_path / "other", "rank_00001.safetensors"
    on_ranks(2, save_many, (str(other), {}), 4)
    flipped = other / "step_000002" / shard
    data = flipped.read_bytes()
    flipped.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    (other / "step_000003" / shard).unlink()
    (other / "step_000004" / checkpoint_manifest.MANIFEST).unlink()
    before = sorted(path for path in other.rglob("*"))
    for found, messages in on_ranks(ranks, verify_others, (str(tmp_path / "run"), {}), other):
        assert found == ("step_000001", 1.0, 2000)
        whys = (f"{shard} is damaged: its checksum differs", f"{shard} is missing", "it was never finished")
        for (name, text), why in zip(messages.items(), whys, strict=True):
            assert text.startswith(f"{other}/{name}: checkpoint {name}: ") and text.endswith(why) and "\n" not in text
    assert sorted(path for path in other.rglob("*")) == before  # it is another's: nothing is set aside


def save_again(rank: int, ranks: int, where: Where) -> list[bool]:
    """Whether there was a manifest while this rank's file was written, each time."""
    writer, seen = open_writer(where), []
    write = checkpoint_writer.checkpoint_files.write_shards

    def watched(shards: Any, file: Path) -> None:
        seen.append(Path(where[0], "step_000001", checkpoint_manifest.MANIFEST).exists())
        write(shards, file)

    checkpoint_writer.checkpoint_files.write_shards = watched
    for _ in range(2):
        saved(writer, 1)
        dist.barrier()
        assert [entry.name for entry in checkpoint_catalog.complete_checkpoints(writer.run)] == ["step_000001"]
        dist.barrier()
    return seen


def test_a_step_that_is_written_again_is_not_a_checkpoint_meanwhile(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert on_ranks(2, save_again, (str(tmp_path), {})) == [[False, False]] * 2


def clear(rank: int, ranks: int, where: Where, temporary: str) -> list[str]:
    tempfile.tempdir = temporary
    mine = f"rlx-checkpoint-{os.getpid()}-mine"
    Path(temporary, mine).mkdir()
    open_writer(where)
    return sorted("mine" if path.name == mine else path.name for path in Path(temporary).iterdir())


def test_temporary_files_of_killed_processes_are_deleted(on_ranks: OnRanks, tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    temporary = tmp_path / "temporary"
    others = [f"rlx-checkpoint-{os.getpid()}-b", "rlx-checkpoint-x-c", f"other-{dead.pid}-d"]
    for name in (f"rlx-checkpoint-{dead.pid}-a", *others):
        (temporary / name).mkdir(parents=True)
        (temporary / name / "rank_00000.safetensors").write_text("half")
    assert on_ranks(1, clear, (str(tmp_path / "run"), {}), str(temporary)) == [sorted(["mine", *others])]


# ---------------------------------------------------------------------------------------------------------------------
# Failures


def save_until_broken(rank: int, ranks: int, where: Where) -> tuple[str, list[float], list[tuple[str, list[str]]]]:
    """The third save finds a file where its folder should be."""
    writer = open_writer(where)
    for step in (1, 2):
        saved(writer, step)
    if rank == 0:
        Path(where[0], "step_000003").write_text("in the way")
    dist.barrier()
    with ImmediateRetries() as retries:
        writer.save(shards(3), manifest(3))
        text = refusal(writer.wait)
    dist.barrier()
    assert writer.finished_checkpoint() is None
    saved(writer, 4)  # it goes on if the storage does
    return text, retries.waits, entries(writer)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_write_that_fails_for_good_is_raised_on_all_ranks(ranks: int, on_ranks: OnRanks, tmp_path: Path) -> None:
    results = on_ranks(ranks, save_until_broken, (str(tmp_path), {}))
    files = ["manifest.json", *(f"rank_{rank:05d}.safetensors" for rank in range(ranks))]
    for text, waits, left in results:
        assert text.startswith(f"writing checkpoint step_000003 to {tmp_path} failed 6 times: ")
        assert text.endswith("; the newest complete checkpoint is step_000002") and "\n" not in text
        assert waits == [1.0, 2.0, 4.0, 8.0, 16.0]
        assert left == [(f"step_00000{step}", files) for step in (1, 2, 4)]


def save_beside_what_stays(rank: int, ranks: int, where: Where) -> list[str]:
    """Step 1 cannot be deleted until the last save."""
    writer, delete, problems = open_writer(where, Retention(keep=1)), checkpoint_catalog._delete, []

    def refuse(folder: Storage) -> None:
        if folder.name == "step_000001":
            raise OSError(39, "Directory not empty", folder.path)
        delete(folder)

    for step in (1, 2, 3, 4):
        checkpoint_catalog._delete = refuse if step < 4 else delete
        with ImmediateRetries():
            writer.save(shards(step), manifest(step))
            writer.wait()
        finished = writer.finished_checkpoint()
        assert finished
        problems.append(finished.problem)
    return problems


def test_a_checkpoint_that_cannot_be_deleted_is_reported_once_and_tried_again(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    (problems,) = on_ranks(1, save_beside_what_stays, (str(tmp_path), {}))
    assert "Directory not empty" in problems[1] and [problems[0], *problems[2:]] == [""] * 3
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_000004"]


def fill_disk(rank: int, ranks: int, where: Where) -> tuple[str, list[tuple[str, list[str]]], Any]:
    """A checkpoint that fits, then one that does not."""
    writer = open_writer(where)
    saved(writer, 1)
    with ImmediateRetries():
        writer.save(shards(2, 1_000_000), manifest(2))
        text = refusal(writer.wait)
    dist.barrier()
    return text, entries(writer), content(writer, writer.newest_checkpoint(print))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk_spares_earlier_checkpoints_and_leaves_no_half_one(
    ranks: int, on_ranks: OnRanks, tmp_path: Path
) -> None:
    with s3.small_disk(tmp_path / "disk", "2m") as disk:
        results = on_ranks(ranks, fill_disk, (str(disk / "run"), {}))
        assert sorted(path.name for path in (disk / "run").glob("step_*")) == ["step_000001"]
    files = ["manifest.json", *(f"rank_{rank:05d}.safetensors" for rank in range(ranks))]
    for text, left, newest in results:
        assert "writing checkpoint step_000002" in text and "No space left on device" in text
        assert text.endswith("; the newest complete checkpoint is step_000001") and "\n" not in text
        assert left == [("step_000001", files)]
        assert newest == ("step_000001", 1.0, 1000 * ranks)


def break_one_rank(rank: int, ranks: int, where: Where) -> str:
    """The last rank alone cannot write."""
    writer = open_writer(where)
    if rank == ranks - 1:
        Path(where[0], "step_000001", f"rank_{rank:05d}.safetensors").mkdir(parents=True)
    dist.barrier()
    with ImmediateRetries():
        writer.save(shards(1), manifest(1))
        return refusal(writer.wait)


def test_the_failure_of_one_rank_is_raised_on_all(on_ranks: OnRanks, tmp_path: Path) -> None:
    first, second = on_ranks(2, break_one_rank, (str(tmp_path), {}))
    assert first == second
    assert "rank_00001.safetensors" in first and first.endswith("; there is no earlier checkpoint")
    assert list(tmp_path.iterdir()) == []


def save_hastily(rank: int, ranks: int, where: Where) -> list[float]:
    writer = open_writer(where)
    with ImmediateRetries() as retries:
        saved(writer, 1, size=2_000_000)
    return retries.waits


@pytest.fixture
def impatient(s3_faults: tuple[str, s3.Proxy], s3_server: str) -> Iterator[tuple[Where, s3.Proxy]]:
    """A failing S3, and nothing but the writer itself to try again."""
    address, proxy = s3_faults
    open_storage(address)
    yield (address, s3.environment(s3_server)), proxy


@pytest.mark.slow
def test_a_storage_that_fails_for_a_while_delays_a_checkpoint_and_no_more(
    on_ranks: OnRanks, impatient: tuple[Where, s3.Proxy]
) -> None:
    where, proxy = impatient
    proxy.fail("500", methods=["PUT"], times=2)
    on_ranks(1, save_hastily, where)
    assert len(proxy.failed) == 2
    proxy.fail("403", methods=["POST"], times=1)  # S3's client itself does not try this again
    ((waits),) = on_ranks(1, save_hastily, where)
    assert waits == [1.0]
    assert on_ranks(1, find, where) == [(("step_000001", 1.0, 2_000_000), [])]


def fail_remotely(rank: int, ranks: int, where: Where) -> tuple[str, list[float]]:
    writer = open_writer(where)
    with ImmediateRetries() as retries:
        writer.save(shards(2), manifest(2))
        return refusal(writer.wait), retries.waits


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_storage_that_fails_for_good_is_named_and_spares_earlier_checkpoints(
    ranks: int, on_ranks: OnRanks, impatient: tuple[Where, s3.Proxy]
) -> None:
    where, proxy = impatient
    on_ranks(ranks, save_many, where, 1)
    proxy.fail("403", methods=["POST"])
    for text, waits in on_ranks(ranks, fail_remotely, where):
        assert "the server does not know the key: check AWS_ACCESS_KEY_ID" in text
        assert (
            text.endswith("; the newest complete checkpoint is step_000001")
            or "earlier checkpoints are unchanged" in text
        )
        assert waits == [1.0, 2.0, 4.0, 8.0, 16.0] and "\n" not in text
        assert s3.KEY not in text and s3.SECRET not in text
    proxy.heal()
    assert on_ranks(ranks, find, where) == [(("step_000001", 1.0, 1000 * ranks), [])] * ranks


def find_refused(rank: int, ranks: int, where: Where) -> str:
    writer = open_writer(where)
    dist.barrier()
    if rank == 0:
        Path(where[0]).rename(f"{where[0]}-gone")
        Path(where[0]).write_text("no folder")
    dist.barrier()
    with ImmediateRetries():
        return refusal(lambda: writer.newest_checkpoint(print))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_storage_that_cannot_be_read_is_an_error_on_all_ranks(ranks: int, on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(1, save_many, (str(tmp_path / "run"), {}), 1)
    results = on_ranks(ranks, find_refused, (str(tmp_path / "run"), {}))
    assert all(text and "\n" not in text for text in results)
