"""Files of completions: written beside training, on a folder and on S3, and what happens when that fails."""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import s3
from sample_cases import Letters, scored, step
from shared import Where

from rlx.config.errors import ConfigError
from rlx.samples import reader, writer
from rlx.samples.columns import COMPLETIONS, CompletionFile, Kind, StepCompletions
from rlx.samples.writer import CompletionWriter, Keeping, discard_after
from rlx.storage.addresses import open_storage
from rlx.storage.filesystem import Storage, StorageError, write_bytes


def writer_at(run: Storage, share: float = 1.0, said: list[str] | None = None, rank: int = 0) -> CompletionWriter:
    messages = [] if said is None else said
    return CompletionWriter(run, Keeping(share, 0, rank, 2), Letters(), messages.append)


@pytest.fixture
def run(where: Where, monkeypatch: pytest.MonkeyPatch) -> Storage:
    for name, value in where[1].items():
        monkeypatch.setenv(name, value)
    return open_storage(where[0])


def test_completions_of_all_ranks_are_read_in_one_order(run: Storage) -> None:
    first, second = writer_at(run), writer_at(run, rank=1)
    whole = step()
    second.keep(StepCompletions(Kind.TRAINING, 5, 8, whole.rows[:2]))
    second.keep(StepCompletions(Kind.HELD_OUT, 5, 8, whole.rows[:1]))
    first.keep(StepCompletions(Kind.TRAINING, 5, 8, whole.rows[2:]))
    first.close()
    second.close()
    held_out, training = reader.kept_steps(run)
    assert (held_out.kind, held_out.number, held_out.missing) == (Kind.HELD_OUT, 5, 1)
    assert (training.kind, training.number, training.missing) == (Kind.TRAINING, 5, 0)
    rows = reader.completions(reader.read(run, training))
    assert [(row.group, row.sample) for row in rows] == [(10, 0), (10, 1), (11, 0), (11, 1)]
    assert rows[3].rewards == {"task": 1.5, "length": -1.0} and rows[3].tokens == ("d", "e")
    assert rows[0].mismatch is None and rows[0].mean_advantage is None


def test_mismatch_and_mean_advantage_by_hand(tmp_path: Path) -> None:
    run = open_storage(str(tmp_path))
    own = writer_at(run)
    own.keep(step())
    own.close()
    rows = reader.completions(reader.read(run, reader.kept_steps(run)[0]))
    assert rows[1].mismatch == (1.5, 2.5)  # -1.5 by the engine; -3 and -4 by the trainer
    assert rows[1].mean_advantage == 1.75


def test_a_share_of_the_prompts_is_kept_and_in_evaluations_the_same(tmp_path: Path) -> None:
    run = open_storage(str(tmp_path))
    own, rows = writer_at(run, share=0.5), [scored(i % 4) for i in range(4)]
    for number in range(1, 4):
        own.keep(StepCompletions(Kind.TRAINING, number, 8, rows, step().trained))
        own.keep(StepCompletions(Kind.HELD_OUT, number, 8, rows))
        assert own.wait()
    kept = [(each.kind, set(reader.read(run, each)["group"].to_pylist())) for each in reader.kept_steps(run)]
    evaluations = [groups for kind, groups in kept if kind == Kind.HELD_OUT]
    assert evaluations[0] == evaluations[1] == evaluations[2]
    training = [groups for kind, groups in kept if kind == Kind.TRAINING]
    assert not all(groups == training[0] for groups in training)
    for each in reader.kept_steps(run):
        for row in reader.completions(reader.read(run, each)):
            assert (row.advantages is None) == (each.kind == Kind.HELD_OUT or row.sample + row.group == 12)


def test_what_a_killed_run_has_left_after_its_checkpoint_is_deleted(run: Storage) -> None:
    own = writer_at(run)
    for number in (1, 2, 3):
        own.keep(step(number))
        assert own.wait()
    (run / COMPLETIONS / "step_000002-00000-of-00002.parquet.77.part").write_text("half")
    (run / COMPLETIONS / "notes.txt").write_text("of a person")
    discard_after(run, 2, pytest.fail)
    names = [f"step_00000{number}-00000-of-00002.parquet" for number in (1, 2)]
    assert (run / COMPLETIONS).names() == ["notes.txt", *names]
    discard_after(run / "other", 0, pytest.fail)  # there is nothing


def test_another_number_of_ranks_does_no_harm(tmp_path: Path) -> None:
    run = open_storage(str(tmp_path))
    own = writer_at(run)
    own.keep(step())
    own.close()
    file = run / COMPLETIONS / str(CompletionFile(5, Kind.TRAINING, 0, 1))
    write_bytes(file, (Path(run.path) / COMPLETIONS / str(CompletionFile(5, Kind.TRAINING, 0, 2))).read_bytes())
    (kept,) = reader.kept_steps(run)
    assert kept.missing == 0 and len(reader.read(run, kept)) == 4


# ---------------------------------------------------------------------------------------------------------------------
# Trouble


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts follow one another at once."""
    original = writer.retry
    monkeypatch.setattr(writer, "retry", lambda action, what: original(action, what, lambda seconds: None))


def test_a_storage_that_fails_costs_its_steps_alone(
    s3_faults: tuple[str, s3.Proxy], no_pauses: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, proxy = s3_faults
    said: list[str] = []
    run = open_storage(address)
    own = writer_at(run, said=said)
    own.keep(step(1))
    assert own.wait()
    proxy.fail("403", methods=s3.WRITES)
    for number in (2, 3):
        own.keep(step(number))
        assert own.wait()
    proxy.heal()
    own.keep(step(4))
    own.close()
    assert [each.number for each in reader.kept_steps(run)] == [1, 4]
    assert own.lost == [2, 3]
    refused, again, at_the_end = said
    assert refused.startswith("completions of step 2 are not kept, training goes on: ") and "\n" not in refused
    assert again == "completions are kept again; those of 2 steps are missing"
    assert at_the_end == "completions of 2 steps were not kept: 2 to 3"


def test_training_never_waits_for_a_storage_that_hangs(
    s3_faults: tuple[str, s3.Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, proxy = s3_faults
    said: list[str] = []
    own = writer_at(open_storage(address), said=said)
    proxy.fail("hang")
    started = time.monotonic()
    for number in range(1, writer.MAX_WAITING + 3):
        own.keep(step(number))
    assert time.monotonic() - started < 2
    assert own.lost == [writer.MAX_WAITING + 1, writer.MAX_WAITING + 2]
    assert said == ["completions of step 5 are not kept, training goes on: the storage is slower than training"]
    assert not own.wait(0.1)
    own.close(patience_s=0.2)
    assert said[-1] == "completions of 6 steps were not kept: 1 to 6"
    proxy.heal()


def test_a_full_disk_ends_nothing_and_leaves_no_half_file(tmp_path: Path, no_pauses: None) -> None:
    with s3.small_disk(tmp_path / "disk", "1m") as disk:
        said: list[str] = []
        run = open_storage(str(disk / "run"))
        own = writer_at(run, said=said)
        own.keep(step(1))
        assert own.wait()
        (disk / "other").write_bytes(os.urandom(2**20 - 2**17))  # 960 KiB of 1 MiB are in use
        (disk / "rest").write_bytes(os.urandom(2**16))
        own.keep(step(2))
        own.close()
        assert said[0].endswith(f"less than 5% of the disk of {run.path}/completions would stay free")
        assert [each.number for each in reader.kept_steps(run)] == [1]
        assert len((run / COMPLETIONS).names()) == 1


def test_a_failed_write_leaves_no_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_storage(str(tmp_path))
    monkeypatch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        write_bytes(run / COMPLETIONS / "x", b"abc")
    assert (run / COMPLETIONS).names() == []


@pytest.fixture
def kept_file(tmp_path: Path) -> Iterator[tuple[Storage, Path]]:
    run = open_storage(str(tmp_path))
    own = writer_at(run)
    own.keep(step())
    own.close()
    yield run, next(Path(run.path, COMPLETIONS).iterdir())


def changed(file: Path, name: str, column: list[Any] | None) -> None:
    """Gives a file another column of that name, or none."""
    table = pq.read_table(file).drop_columns([name])
    pq.write_table(table if column is None else table.append_column(name, [column]), file)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.write_bytes(file.read_bytes()[:-20]),
        lambda file: file.write_text(json.dumps({"a": 1})),
        lambda file: changed(file, "score", None),
        lambda file: changed(file, "score", ["high"] * 4),
        lambda file: changed(file, "tokens", ["a"] * 4),
        lambda file: changed(file, "tokens", [["a"]] * 4),
        lambda file: changed(file, "kind", ["odd"] * 4),
    ],
    ids=["cut", "no parquet", "no column", "another type", "no lists", "too few tokens", "another kind"],
)
def test_a_damaged_file_is_named_in_one_line(kept_file: tuple[Storage, Path], spoil: Any) -> None:
    run, file = kept_file
    spoil(file)
    with pytest.raises(ConfigError) as caught:
        reader.read(run, reader.kept_steps(run)[0])
    assert str(caught.value).startswith(f"{file} is damaged, or another version of rlx wrote it: ")
    assert "\n" not in str(caught.value)


def test_a_closed_writer_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    own = writer_at(open_storage(str(tmp_path)))
    own.keep(step())
    (thread,) = set(threading.enumerate()) - before
    own.close()
    thread.join(5)
    assert not thread.is_alive()


def test_a_folder_that_cannot_be_read_is_said_and_ends_nothing(
    s3_faults: tuple[str, s3.Proxy], no_pauses: None
) -> None:
    address, proxy = s3_faults
    run = open_storage(address)
    proxy.fail("403")
    said: list[str] = []
    discard_after(run, 3, said.append)
    for line, name in zip(said, ("completions", "evaluations"), strict=True):
        assert line.startswith(f"{name} of steps after 3 are left from before: reading ") and "\n" not in line
    proxy.heal()
    assert reader.kept_steps(run) == []
    assert issubclass(StorageError, ValueError)


@pytest.mark.parametrize(
    ("free_gib", "total_gib", "reserved"), [(4000, 100_000, ""), (4, 100, "5%"), (40, 100_000, "50 GiB")]
)
def test_a_part_of_the_disk_is_left_to_checkpoints(
    free_gib: int, total_gib: int, reserved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(total=total_gib << 30, free=free_gib << 30)
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda _: usage)
    refused = pytest.raises(StorageError, match=f"^less than {reserved} of the disk") if reserved else nullcontext()
    with refused:
        writer.check_reserve(Storage.local(tmp_path), 1000)
