"""Disks that are full where a command begins, where records wait, and where Ray keeps its own files.

Checkpoints on a full disk are in test_saving.py, the analysis in analysis/test_report.py, exports in
runs/test_export.py.
"""

import contextlib
import functools
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3
from shared import LIKE_TINY, mlflow_history

from rlx.cluster.watch import lack_of_room, lacks_room_for_objects
from rlx.runs import preflight
from rlx.storage.filesystem import Storage, StorageError, retry
from rlx.tracking import outbox
from rlx.tracking.services.mlflow import MLflowService
from rlx.tracking.tracker import OutboxTracker


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    with s3.small_disk(tmp_path / "disk", "64k") as disk:
        fill(disk)
        yield disk


def fill(disk: Path) -> None:
    """Writes until nothing more fits."""
    free = os.statvfs(disk)
    (disk / "fill").write_bytes(b"x" * free.f_bavail * free.f_frsize)


def rlx(*words: str, seconds: float = 60, **environment: str) -> tuple[int, list[str]]:
    """The exit code of a command, and the lines of its stderr; nothing of it is left."""
    command = [str(Path(sys.executable).with_name("rlx")), *words]
    done = subprocess.run(
        command, text=True, capture_output=True, check=False, timeout=seconds, env=os.environ | environment
    )
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode, done.stderr.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(("command", "what"), [("train", "run 'ppo-1'"), ("sweep", "sweep 'sweep-1'")])
def test_a_start_on_a_full_disk_is_one_line_and_leaves_nothing(command: str, what: str, full_disk: Path) -> None:
    code, lines = rlx(command, "--storage", str(full_disk))
    assert code == 1 and len(lines) == 1
    assert lines[0].startswith(f"error: {what} cannot be claimed in {full_disk}/")
    assert lines[0].endswith("No space left on device")
    assert [path for path in full_disk.rglob("*") if path.is_file()] == [full_disk / "fill"]


@pytest.mark.slow
def test_a_disk_that_fills_between_the_claim_and_the_first_step_ends_the_start(
    tmp_path: Path, tiny_model: Path
) -> None:
    words = ["train", "--name", "mine", *LIKE_TINY, "--model.path", str(tiny_model), "--train.steps", "2"]
    with s3.small_disk(tmp_path / "disk", "40m") as disk:
        command = [str(Path(sys.executable).with_name("rlx")), *words, "--storage", str(disk)]
        with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
            assert run.stdout
            lines = []
            for line in run.stdout:
                lines.append(line.rstrip())
                if line.startswith("starting: Ray cluster"):  # the claim was made before
                    fill(disk)
        assert (run.returncode, lines[-1]) == (
            1,
            f"error: storage {disk}/runs/mine: cannot write there: [Errno 28] No space left on device",
        )
        assert not [line for line in lines if "Traceback" in line]
        assert [path for path in disk.rglob("*") if path.is_file()] == [disk / "fill"]  # also no claim


def test_a_disk_without_room_for_the_tiny_model_is_refused_before_it_is_made(full_disk: Path) -> None:
    with pytest.raises(StorageError, match=rf"^storage {full_disk}/models/tiny-.* the tiny model takes about 8\.0 MiB"):
        preflight.model_folder("tiny", str(full_disk))
    assert list(full_disk.iterdir()) == [full_disk / "fill"]


@pytest.mark.slow
def test_a_full_disk_below_ray_is_refused_before_ray_waits_for_itself(full_disk: Path, tmp_path: Path) -> None:
    code, lines = rlx("train", "--storage", str(tmp_path / "storage"), RAY_TMPDIR=str(full_disk))
    assert code == 1 and len(lines) == 1
    assert lines[0].startswith(
        f"error: Ray needs room in {full_disk}, where 0.0 MiB are free: free 32 MiB, or set RAY_TMP"
    )
    assert not list(tmp_path.rglob("models")) and not [path for path in tmp_path.rglob("*") if path.name == "ray"]


def test_a_run_ends_where_its_outbox_alone_is_full_and_loses_nothing_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlx.storage.filesystem.retry", functools.partial(retry, wait=lambda seconds: None))
    (tmp_path / "run").mkdir()
    with s3.small_disk(tmp_path / "run" / "outbox", "64k") as disk:
        (disk / "rank_0").mkdir()
        tracker = OutboxTracker([MLflowService("http://127.0.0.1:9")], Storage.local(tmp_path / "run"), "rank_0")
        fill(disk)
        tracker.log({"reward/mean": 1.0}, 1)
        full = rf"^writing {disk}/rank_0/\d+\.json failed 6 times: .*No space left on device"
        with pytest.raises(StorageError, match=full):
            tracker.flush(0.0)
        (disk / "fill").unlink()
        tracker.flush(0.0)
        fill(disk)
        tracker.log({"reward/mean": 2.0}, 2)
        with pytest.raises(StorageError, match=full):
            tracker.close(0.0)
        for thread in threading.enumerate():  # its thread ends all the same
            if thread.name == f"tracking {disk}/rank_0":
                thread.join(30)
                assert not thread.is_alive()
        (saved,) = (disk / "rank_0").iterdir()
        assert json.loads(saved.read_text())["content"]["step"] == 1


def test_ray_that_dies_of_a_full_disk_says_so(full_disk: Path, tmp_path: Path) -> None:
    assert lack_of_room(full_disk).startswith(f": {full_disk} is full, free some or set RAY_TMPDIR")
    assert lack_of_room(tmp_path) == lack_of_room(tmp_path / "gone") == ""
    assert lacks_room_for_objects(full_disk) and not lacks_room_for_objects(tmp_path / "gone")


@pytest.mark.slow
def test_a_run_whose_outbox_alone_is_full_ends_in_one_line_and_its_resume_records_all(
    tmp_path: Path, tiny_model: Path
) -> None:
    sizes = ["--train.prompts-per-step", "8", "--eval.num-prompts", "12", "--checkpoint.every", "2"]
    words = [*LIKE_TINY, *sizes, "--model.path", str(tiny_model), "--train.steps", "12", "--storage", str(tmp_path)]
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    with s3.small_disk(folder / "outbox", "64k") as disk:
        (disk / "rank_0").mkdir()
        fill(disk)
        command = [str(Path(sys.executable).with_name("rlx")), "train", "--name", "mine", *words]
        with (
            contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None)) as database,
            subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run,
        ):
            assert run.stdout
            lines = []
            for line in run.stdout:
                lines.append(line.rstrip())
                if line.startswith("step 1/"):  # from now on nobody else can write there
                    database.execute("BEGIN EXCLUSIVE")
        assert run.returncode == 1 and "Traceback" not in "\n".join(lines), "\n".join(lines)
        assert lines[-1].startswith("error: ") and f"writing {disk}/" in lines[-1], (
            lines
        )  # of the rank or of the driver
        assert "No space left on device" in lines[-1]
        (disk / "fill").unlink()
        code, said = rlx("train", "--resume", "mine", "--storage", str(tmp_path), seconds=300)
        assert code == 0, said
    recorded = mlflow_history(tmp_path, outbox.run_id(Storage.local(folder)))
    assert {step: len(values) for step, values in recorded["reward/mean"].items()} == dict.fromkeys(range(1, 13), 1)


STANDSTILL = """
import threading, time
import numpy, ray
from rlx.cluster import connection, watch

watch._LOOK_AT_DISK_S = 0.5
connection.start_cluster(object_store_memory=80 << 20)
watch.end_with_ray(lambda: "go on like this", lambda text: print(text, flush=True), lambda: None)
open("{disk}/fill", "wb").write(b"x" * ({mib} << 20))
try:
    kept = [ray.put(numpy.zeros(30 << 20, numpy.uint8)) for _ in range(4)]
    print("had room", flush=True)
except ray.exceptions.OutOfDiskError:
    print("refused", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("mib", "is_full"), [(270, True), (1, False)])
def test_objects_that_fit_nowhere_are_told_of(mib: int, is_full: bool) -> None:
    with s3.small_disk(Path(tempfile.mkdtemp()) / "disk", "300m") as disk:
        command = ["timeout", "60", sys.executable, "-c", STANDSTILL.format(disk=disk, mib=mib)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | {"RAY_TMPDIR": str(disk)}
        ) as run:
            assert run.stdout
            told = f"warning: Ray's object store is full, and so is {disk}, where it would keep more"
            said = next((line for line in run.stdout if line.startswith((told, "had room", "refused"))), "nothing")
            run.kill()
        assert said.startswith((told, "refused") if is_full else "had room")  # Ray may say it itself, or stand still
