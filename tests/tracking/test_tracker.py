"""Records outlive an MLflow server that is down: a real server is killed and started, a proxy before it fails."""

import json
import os
import queue
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import s3
from ray.exceptions import RayError
from shared import Where

from rlx.config.errors import ConfigError
from rlx.config.run import RunConfig
from rlx.config.sections.base import flatten
from rlx.runs import launch
from rlx.runs.train_run import RunLostError
from rlx.storage.addresses import open_storage
from rlx.storage.filesystem import Storage
from rlx.sweeps import tuner
from rlx.tracking import outbox
from rlx.tracking.base import ERROR_TAG, RunStatus, TrackedRun
from rlx.tracking.outbox import EntryKind, OutboxQueue
from rlx.tracking.services import mlflow, mlflow_errors
from rlx.tracking.services.mlflow import MLflowService
from rlx.tracking.services.tensorboard import TensorBoardRun, TensorBoardService
from rlx.tracking.tracker import OutboxTracker, send_pending

LONG_S = 60.0  # for what comes much sooner where nothing is wrong
AT_ONCE_S = 1.0  # for 50 calls; one answer of a server may take the 2 s of `answers_in_5_s`, or never come


class Server:
    """An `mlflow server` on a port of its own, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, s3.free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def up(self) -> None:
        """Starts the server unless it runs, and waits until it answers."""
        if self._process:
            return
        command = [str(Path(sys.executable).with_name("mlflow")), "server", "--workers", "1", "--port", str(self.port)]
        command += ["--backend-store-uri", f"sqlite:///{self.folder}/server.db"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        with (self.folder / "server.txt").open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            )
        s3._await(f"{self.uri}/health", self._process)

    def down(self) -> None:
        if self._process:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    shutil.copy(empty_database, server.folder / "server.db")
    yield server
    server.down()


@pytest.fixture
def proxy(server: Server) -> Iterator[s3.Proxy]:
    server.up()
    proxy = s3.Proxy(server.uri)
    yield proxy
    proxy.close()


@pytest.fixture(autouse=True)
def answers_in_5_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest wait for one answer, which would be 10 s."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


@pytest.fixture
def database(empty_database: Path, tmp_path: Path) -> str:
    shutil.copy(empty_database, tmp_path)
    return mlflow.default_uri(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Storage:
    return Storage.local(tmp_path / "runs" / "one")


class Messages(queue.Queue[str]):
    """The messages of a tracker."""

    def next(self) -> str:
        return self.get(timeout=LONG_S)

    def all(self) -> list[str]:
        return [self.get_nowait() for _ in range(self.qsize())]


def open_run(tracker: OutboxTracker, name: str = "one", parent: Storage | None = None) -> None:
    tracker.open("rlx", name, params={"a.b": 0.5}, tags={"rlx.kind": "run"}, parent=parent)


def opened_tracker(uri: str, folder: Storage, messages: Messages | None = None) -> OutboxTracker:
    """A tracker whose run exists in MLflow."""
    tracker = OutboxTracker([MLflowService(uri)], folder, "rank_0", (messages or Messages()).put)
    open_run(tracker)
    deadline = time.monotonic() + LONG_S
    while not tracker.run_id and time.monotonic() < deadline:  # `flush` waits no longer once an attempt has failed
        time.sleep(0.02)
    tracker.flush(LONG_S)  # the id is known a moment before the entry is gone
    assert tracker.run_id
    return tracker


def rows(step: int) -> list[dict[str, Any]]:
    return [{"step": step, "prompt": f"{step} + {i} =", "score": float(i)} for i in range(3)]


def log_steps(tracker: OutboxTracker, *steps: int) -> None:
    for step in steps:
        tracker.log_samples(rows(step), step)
        tracker.log({"reward/mean": step / 8, "kl/ref": 1.0}, step)


def logged(uri: str, folder: Storage) -> list[tuple[int, float]]:
    """Step and value of each point that MLflow has of one metric."""
    return [(point.step, point.value) for point in mlflow.history(uri, run_id(folder), "reward/mean")]


def expected(*steps: int) -> list[tuple[int, float]]:
    return [(step, step / 8) for step in steps]


def run_id(folder: Storage) -> str:
    run_id = outbox.run_id(folder)
    assert run_id
    return run_id


def tracked_run(uri: str, folder: Storage) -> TrackedRun:
    return mlflow.get_run(uri, run_id(folder))


def table(uri: str, folder: Storage, step: int) -> dict[str, Any]:
    return dict(json.loads(mlflow.read_artifact(uri, run_id(folder), f"samples/step_{step:06d}.json")))


def outbox_files(folder: Storage, writer: str = "rank_0") -> dict[str, str]:
    """The files of an outbox."""
    outbox = folder / "outbox" / writer
    return {name: (outbox / name).read_text() for name in outbox.names()}


def test_a_working_service_gets_every_record_and_the_outbox_stays_empty(database: str, folder: Storage) -> None:
    messages = Messages()
    tracker = opened_tracker(database, folder, messages)
    log_steps(tracker, 0, 1, 2)
    tracker.log_text("config.yaml", "seed: 1\n")
    tracker.set_tags({"rlx.winner": "yes"})
    tracker.end(RunStatus.FINISHED)
    assert tracker.close(LONG_S) == 0
    assert logged(database, folder) == expected(0, 1, 2)
    assert table(database, folder, 2)["data"] == [list(row.values()) for row in rows(2)]
    run = tracked_run(database, folder)
    assert (run.status, run.name, run.params) == ("FINISHED", "one", {"a.b": "0.5"})
    assert {"rlx.kind": "run", "rlx.winner": "yes"}.items() <= run.tags.items()
    listed = json.loads(run.tags["mlflow.loggedArtifacts"])
    assert listed == [{"path": f"samples/step_{step:06d}.json", "type": "table"} for step in range(3)]
    assert folder.names() == ["run.json"]
    assert messages.all() == []


@pytest.mark.slow  # a server of its own starts twice
def test_a_run_that_starts_while_the_server_is_down_is_created_when_it_is_up(server: Server, tmp_path: Path) -> None:
    server.down()
    messages, sweep, trial = Messages(), Storage.local(tmp_path / "sweep"), Storage.local(tmp_path / "trial")
    began = time.time() * 1000
    parent = OutboxTracker([MLflowService(server.uri)], sweep, "driver", messages.put)
    driver = OutboxTracker([MLflowService(server.uri)], trial, "driver", messages.put)
    worker = OutboxTracker([MLflowService(server.uri)], trial, "rank_0", messages.put)
    open_run(driver, "trial", sweep)
    log_steps(worker, 0, 1)
    driver.end(RunStatus.FINISHED)
    asked = time.time() * 1000
    open_run(parent, "sweep")
    assert messages.next() == (  # once, from the tracker that the others wait for
        f"MLflow at {server.uri} takes no records (connection refused): training goes on, "
        f"they are kept in {sweep.path}/outbox"
    )
    assert (outbox.run_id(trial), driver.run_id) == (None, None)
    worker.flush()
    driver.flush()
    assert outbox.pending(trial) == 4 + 2
    server.up()
    assert [tracker.close(LONG_S) for tracker in (parent, driver, worker)] == [0, 0, 0]
    run = tracked_run(server.uri, trial)
    assert run.parent_id == outbox.run_id(sweep)
    assert run.end_ms
    assert (run.status, began <= run.start_ms <= run.end_ms <= asked) == ("FINISHED", True)
    assert logged(server.uri, trial) == expected(0, 1)
    assert outbox.pending(trial) == 0
    assert messages.all() == [f"MLflow at {server.uri} takes records again"]


@pytest.mark.slow  # kills things
def test_nothing_is_lost_when_the_server_is_killed_and_started_again(server: Server, folder: Storage) -> None:
    server.up()
    tracker = opened_tracker(server.uri, folder)
    log_steps(tracker, 0, 1)
    tracker.flush(LONG_S)
    server.down()
    log_steps(tracker, 2, 3)
    tracker.log_text("events.txt", "it went on")
    tracker.flush()
    assert sorted(outbox_files(folder)) == [f"{number:06d}.json" for number in range(1, 6)]
    server.up()
    log_steps(tracker, 4)
    assert tracker.close(LONG_S) == 0
    assert logged(server.uri, folder) == expected(0, 1, 2, 3, 4)
    assert table(server.uri, folder, 3)["columns"] == ["step", "prompt", "score"]
    assert outbox_files(folder) == {}


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        pytest.param("500", "too many 500 error responses", marks=pytest.mark.slow),  # is asked several times
        ("reset", "connection |remote end closed"),  # by the moment at which it breaks
        pytest.param("hang", "timed out", marks=pytest.mark.slow),  # waits for it several times
    ],
)
def test_training_waits_for_no_broken_server(kind: s3.Kind, cause: str, proxy: s3.Proxy, folder: Storage) -> None:
    messages = Messages()
    tracker = opened_tracker(proxy.address, folder, messages)
    proxy.fail(kind)
    started = time.monotonic()
    log_steps(tracker, *range(25))
    assert time.monotonic() - started < AT_ONCE_S
    assert re.search(rf"takes no records \(({cause})", messages.next())
    started = time.monotonic()
    tracker.flush()
    assert time.monotonic() - started < 10 * AT_ONCE_S
    assert len(outbox_files(folder)) == 50
    proxy.heal()
    assert tracker.close(LONG_S) == 0
    assert logged(proxy.address, folder) == expected(*range(25))
    assert messages.all() == [f"MLflow at {proxy.address} takes records again"]


def test_a_single_failure_is_not_notified(proxy: s3.Proxy, folder: Storage) -> None:
    messages = Messages()
    tracker = opened_tracker(proxy.address, folder, messages)
    proxy.fail("reset", times=1)
    log_steps(tracker, 0)
    assert tracker.close(LONG_S) == 0
    assert len(proxy.failed) == 1
    assert messages.all() == []
    assert logged(proxy.address, folder) == expected(0)


def test_a_lost_answer_stores_no_record_twice(proxy: s3.Proxy, folder: Storage) -> None:
    tracker = opened_tracker(proxy.address, folder)
    proxy.fail("slow", times=1, methods=("POST",), seconds=6)  # it is done, but its answer comes too late
    tracker.log({"reward/mean": 0.5}, 4)
    assert tracker.close(LONG_S) == 0
    assert logged(proxy.address, folder) == expected(4)
    assert len([line for line in proxy.asked if line.endswith("runs/log-batch")]) == 1 + 2  # the first is of settings


WRITER = """
import sys
from rlx.storage.addresses import open_storage
from rlx.tracking.services.mlflow import MLflowService
from rlx.tracking.services.tensorboard import TensorBoardRun, TensorBoardService
from rlx.tracking.tracker import OutboxTracker
tracker = OutboxTracker([MLflowService(sys.argv[1])], open_storage(sys.argv[2]), "rank_0", lambda message: None)
for step in (2, 3):
    tracker.log({"reward/mean": step / 8}, step)
tracker.flush()
tracker.log({"reward/mean": 4 / 8}, 4)
print("kept", flush=True)
"""


def start_writer(proxy: s3.Proxy, folder: Storage, then: str) -> subprocess.Popen[str]:
    """A process that has logged steps 2, 3 and 4 and saved the first two; then it executes more code."""
    command = [sys.executable, "-c", WRITER + then, proxy.address, folder.path]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline() == "kept\n"
    return process


@pytest.mark.slow
def test_a_kill_while_the_server_is_down_neither_loses_nor_repeats_a_record(proxy: s3.Proxy, folder: Storage) -> None:
    first = opened_tracker(proxy.address, folder)
    log_steps(first, 0, 1)
    assert first.close(LONG_S) == 0
    proxy.fail("reset")
    process = start_writer(proxy, folder, "input()")
    process.kill()
    process.communicate()
    assert len(outbox_files(folder)) == 2
    proxy.heal()
    again = OutboxTracker([MLflowService(proxy.address)], folder, "rank_0", Messages().put)
    again.log({"reward/mean": 3 / 8}, 3)  # from the checkpoint after step 2 on
    again.log({"reward/mean": 4 / 8}, 4)
    assert again.close(LONG_S) == 0
    assert logged(proxy.address, folder) == expected(0, 1, 2, 3, 4)
    assert outbox_files(folder) == {}


@pytest.mark.slow
def test_a_process_ends_at_once_and_quietly_while_the_server_hangs(proxy: s3.Proxy, folder: Storage) -> None:
    opened_tracker(proxy.address, folder).close(LONG_S)
    proxy.fail("hang")
    process = start_writer(proxy, folder, "")
    started = time.monotonic()
    out, errors = process.communicate(timeout=LONG_S)
    assert (process.returncode, out, errors) == (0, "", "")
    assert time.monotonic() - started < 5


@pytest.mark.slow
def test_an_entry_that_was_sent_but_not_deleted_is_stored_once(proxy: s3.Proxy, folder: Storage) -> None:
    proxy.fail("500")
    first = OutboxTracker([MLflowService(proxy.address)], folder, "rank_0", Messages().put)
    open_run(first)
    log_steps(first, 0, 1)
    first.end(RunStatus.FINISHED)
    first.close(0)
    files = outbox_files(folder)
    proxy.heal()
    assert send_pending([MLflowService(proxy.address)], folder).count == 0
    ended = tracked_run(proxy.address, folder).end_ms
    for name, text in files.items():
        (folder / "outbox" / "rank_0" / name).write_text(text)
    assert send_pending([MLflowService(proxy.address)], folder).count == 0
    run = tracked_run(proxy.address, folder)
    assert logged(proxy.address, folder) == expected(0, 1)
    assert (run.status, run.end_ms) == ("FINISHED", ended)
    assert "rlx.attempt" not in run.tags


@pytest.mark.slow
def test_a_tracker_waits_for_the_last_attempt_of_the_previous_one(proxy: s3.Proxy, folder: Storage) -> None:
    proxy.fail("slow", seconds=0.3)
    first = OutboxTracker([MLflowService(proxy.address)], folder, "rank_0", Messages().put)
    open_run(first, "slowly")
    while not proxy.failed:
        time.sleep(0.01)
    assert first.close(0) == 1
    assert send_pending([MLflowService(proxy.address)], folder, patience_s=LONG_S).count == 0
    experiment = tracked_run(proxy.address, folder).experiment_id
    assert len(mlflow.client(proxy.address).search_runs([experiment], "attributes.run_name = 'slowly'")) == 1


def test_a_run_whose_id_was_lost_is_found_again(database: str, folder: Storage) -> None:
    first = opened_tracker(database, folder)
    first_id = first.run_id
    first.close(LONG_S)
    key = (folder / "run.json").read_json()["key"]
    (folder / "run.json").write_text(json.dumps({"mlflow_run": None, "key": key}))
    second = opened_tracker(database, folder)
    assert (second.run_id, second.close(LONG_S)) == (first_id, 0)
    assert len(mlflow.client(database).search_runs([tracked_run(database, folder).experiment_id])) == 1


def test_a_resumed_run_repeats_no_step_and_counts_its_attempts(database: str, folder: Storage) -> None:
    old = MLflowService(database).make_run("a key", "rlx", "old", parent=None, params={"a.b": "0.5"}, tags={}, at=1)
    (folder / "run.json").write_text(json.dumps({"mlflow_run": old}))  # as it was written before there was a key
    for attempt in (2, 3):
        tracker = opened_tracker(database, folder)
        assert (tracked_run(database, folder).status, tracker.run_id) == ("RUNNING", outbox.run_id(folder))
        log_steps(tracker, *range(attempt))
        tracker.end(RunStatus.FAILED)
        assert tracker.close(LONG_S) == 0
        assert tracked_run(database, folder).tags["rlx.attempt"] == str(attempt)
    assert logged(database, folder) == expected(0, 1, 2)
    assert tracked_run(database, folder).status == "FAILED"


def test_a_resume_with_other_settings_says_so(database: str, folder: Storage) -> None:
    first = {key: str(value) for key, value in flatten(RunConfig()).items()}
    tags = {"rlx.kind": "run", "rlx.folder": folder.path}
    for steps, changed in (("4", None), ("4", None), ("6", "train.steps 6"), ("4", "")):
        tracker = OutboxTracker([MLflowService(database)], folder, "driver", Messages().put)
        tracker.open("rlx", "one", params={**first, "train.steps": steps}, tags=tags)
        assert tracker.close(LONG_S) == 0
        found = tracked_run(database, folder)
        assert found.tags.get("rlx.changed") == changed and found.params["train.steps"] == "4"
        assert f": {steps} steps of " in found.tags["mlflow.note.content"]


def test_a_run_in_a_storage_that_was_moved_says_what_it_does_not_keep(
    database: str, folder: Storage, tmp_path: Path
) -> None:
    opened_tracker(database, folder).close(LONG_S)
    (moved := tmp_path / "moved").mkdir()
    shutil.copy(tmp_path / "mlflow.db", moved)
    uri, messages = mlflow.default_uri(moved), Messages()
    tracker = opened_tracker(uri, Storage.local(moved / "runs" / "two"), messages)
    tracker.log_text("config.yaml", "seed: 1")
    assert tracker.close(LONG_S) == 0 and mlflow.artifact_names(uri, str(tracker.run_id)) == []
    (message,) = messages.all()
    assert f"experiment 'rlx' keeps them in {tmp_path}/mlartifacts, not beside its database" in message
    assert "--tracking.experiment NAME makes another experiment here" in message


def test_a_run_that_fails_says_why(database: str, folder: Storage) -> None:
    for error, said in ((ValueError("no room\nfor it"), "no room for it"), (RayError("a node"), "Ray failed: a node")):
        with suppress(type(error), RunLostError), launch._closing(opened_tracker(database, folder), "r", folder, print):
            raise error
        assert tracked_run(database, folder).status == "FAILED"
        assert tracked_run(database, folder).tags[ERROR_TAG] == said


def test_a_run_that_has_failed_and_goes_on_has_no_error(database: str, folder: Storage) -> None:
    for status, error in ((RunStatus.FAILED, "no room"), (RunStatus.FINISHED, ""), (RunStatus.FAILED, "again")):
        tracker = opened_tracker(database, folder)
        assert ERROR_TAG not in tracked_run(database, folder).tags
        tracker.end(status, error)
        assert tracker.close(LONG_S) == 0
        assert tracked_run(database, folder).tags.get(ERROR_TAG, "") == error


@pytest.mark.slow
def test_a_refused_record_is_dropped_and_the_next_one_is_sent(database: str, folder: Storage) -> None:
    messages = Messages()
    tracker = opened_tracker(database, folder, messages)
    tracker.log({"no such name: *?": 1.0}, 0)
    log_steps(tracker, 1)
    assert tracker.close(LONG_S) == 0
    assert logged(database, folder) == expected(1)
    (message,) = messages.all()
    assert message.startswith("MLflow refused a record, which is left out: Invalid value")


@pytest.mark.parametrize("kind", ["run", "experiment"])
def test_records_wait_while_the_run_or_its_experiment_is_deleted(kind: str, database: str, folder: Storage) -> None:
    messages = Messages()
    tracker, client = opened_tracker(database, folder, messages), mlflow.client(database)
    experiment = tracked_run(database, folder).experiment_id
    delete, restore, its_id, command = {
        "run": (client.delete_run, client.restore_run, tracker.run_id, "runs restore --run-id"),
        "experiment": (client.delete_experiment, client.restore_experiment, experiment, "experiments restore -x"),
    }[kind]
    delete(its_id)
    log_steps(tracker, 0, 1)
    tracker.end(RunStatus.FINISHED)
    new = "; without its outbox a resume begins a new one" if kind == "run" else ""
    assert f"{command} {its_id}` restores it{new}): training goes on, they are kept in" in messages.next()
    assert tracker.close(0) == 5
    restore(its_id)
    assert send_pending([MLflowService(database)], folder, patience_s=LONG_S).count == 0
    assert logged(database, folder) == expected(0, 1) and tracked_run(database, folder).status == "FINISHED"


def test_records_wait_while_a_run_in_a_folder_of_files_is_deleted(
    folder: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri, messages = f"file://{tmp_path}/mlruns", Messages()
    tracker = opened_tracker(uri, folder, messages)
    mlflow.client(uri).delete_run(tracker.run_id)
    log_steps(tracker, 0)
    assert "restores it" in messages.next()
    assert tracker.close(0) == 2


def test_a_resume_waits_while_an_experiment_in_a_folder_of_files_is_deleted(
    folder: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri, messages = f"file://{tmp_path}/mlruns", Messages()
    assert opened_tracker(uri, folder).close(LONG_S) == 0
    mlflow.client(uri).delete_experiment(tracked_run(uri, folder).experiment_id)
    again = OutboxTracker([MLflowService(uri)], folder, "rank_0", messages.put)
    open_run(again)
    assert "experiment 'rlx' is deleted" in messages.next()
    assert (again.close(LONG_S), again.is_away) == (1, False)


def test_a_resume_of_a_deleted_run_creates_a_new_one(database: str, folder: Storage) -> None:
    messages = Messages()
    tracker = opened_tracker(database, folder)
    assert tracker.close(LONG_S) == 0
    mlflow.client(database).delete_run(tracker.run_id)
    again = OutboxTracker([MLflowService(database)], folder, "rank_0", messages.put)
    open_run(again)
    log_steps(again, 0, 1)
    assert again.close(LONG_S) == 0
    told = f"MLflow run {tracker.run_id} is not in {database}: what comes now is recorded in a new one"
    assert messages.all() == [told] and logged(database, folder) == expected(0, 1)


def test_a_deleted_run_is_not_waited_for_and_begins_anew_without_its_outbox(database: str, folder: Storage) -> None:
    tracker = opened_tracker(database, folder)
    mlflow.client(database).delete_run(tracker.run_id)
    log_steps(tracker, 0)
    started = time.monotonic()
    assert (tracker.close(LONG_S), tracker.is_away) == (2, False)
    left = send_pending([MLflowService(database)], folder, Messages().put, LONG_S)
    assert (left.count, left.is_away) == (2, False) and time.monotonic() - started < LONG_S / 2
    (folder / "outbox").delete()
    again = opened_tracker(database, folder)
    log_steps(again, 1)
    assert again.close(LONG_S) == 0 and again.run_id != tracker.run_id
    assert logged(database, folder) == expected(1)


@pytest.mark.parametrize("is_purged", [False, True])
def test_a_deleted_trial_keeps_back_no_records_of_the_others(database: str, tmp_path: Path, is_purged: bool) -> None:
    sweep, service, ids = Storage.local(tmp_path / "sweep"), MLflowService(database), list[str]()
    for name in ("s-0001", "s-0002"):
        trial = opened_tracker(database, folder := sweep / "runs" / name)
        ids.append(str(trial.run_id))
        trial.close(LONG_S)
        queue = OutboxQueue(outbox.entries_of(folder, "rank_0", "mlflow"))
        queue.add(EntryKind.END, {"status": "FINISHED", "at": 5})
        queue.save(0)  # the service was away
    mlflow.client(database).delete_run(ids[0])
    if is_purged:  # as `mlflow gc` does
        mlflow.client(database)._tracking_client.store._hard_delete_run(ids[0])
    started = time.monotonic()
    tuner.send_pending([service], sweep)
    assert [outbox.pending(sweep / "runs" / name) for name in ("s-0001", "s-0002")] == [1, 0]
    assert mlflow.get_run(database, ids[1]).status == "FINISHED" and time.monotonic() - started < 15


def test_a_resume_of_a_run_whose_experiment_is_deleted_waits_for_it(database: str, folder: Storage) -> None:
    messages = Messages()
    tracker, client = opened_tracker(database, folder), mlflow.client(database)
    assert tracker.close(LONG_S) == 0
    experiment = tracked_run(database, folder).experiment_id
    client.delete_experiment(experiment)
    again = OutboxTracker([MLflowService(database)], folder, "rank_0", messages.put)
    open_run(again)
    command = f"MLFLOW_TRACKING_URI={database} mlflow experiments restore -x {experiment}"
    assert f"takes no records (experiment 'rlx' is deleted: `{command}` restores it)" in messages.next()
    started = time.monotonic()
    assert (again.close(LONG_S), again.is_away) == (1, False)
    assert send_pending([MLflowService(database)], folder, Messages().put, LONG_S).count == 1
    assert time.monotonic() - started < LONG_S / 2
    client.restore_experiment(experiment)
    assert send_pending([MLflowService(database)], folder, Messages().put, LONG_S).count == 0
    assert outbox.run_id(folder) == tracker.run_id


def test_a_killed_run_goes_on_in_mlflow_where_it_was_although_its_run_was_deleted(
    database: str, folder: Storage
) -> None:
    """Only the worker has left records: a run of its own would hold the steps after the last that was sent."""
    driver, client = opened_tracker(database, folder), mlflow.client(database)
    client.delete_run(driver.run_id)
    worker = OutboxTracker([MLflowService(database)], folder, "worker", Messages().put)
    log_steps(worker, 0)
    assert (worker.close(LONG_S), driver.close(LONG_S)) == (2, 0)
    told = Messages()
    again = [OutboxTracker([MLflowService(database)], folder, name, told.put) for name in ("rank_0", "worker")]
    open_run(again[0])
    assert "restores it" in told.next() and [each.close(LONG_S) for each in again] == [1, 2]
    client.restore_run(driver.run_id)
    assert send_pending([MLflowService(database)], folder, Messages().put, LONG_S).count == 0
    assert outbox.run_id(folder) == driver.run_id and logged(database, folder) == expected(0)


@pytest.mark.slow
def test_records_wait_on_any_storage_until_they_are_sent(where: Where, database: str) -> None:
    folder, nobody = open_storage(where[0]), f"http://127.0.0.1:{s3.free_port()}"
    driver = OutboxTracker([MLflowService(nobody)], folder, "driver", Messages().put)
    worker = OutboxTracker([MLflowService(nobody)], folder, "rank_0", Messages().put)
    open_run(driver)
    log_steps(worker, 0, 1)
    assert (worker.close(0), driver.close(0), outbox.pending(folder)) == (4, 1, 5)
    again = OutboxTracker([MLflowService(nobody)], folder, "rank_0", Messages().put)
    log_steps(again, 2)
    assert (again.close(0), outbox.pending(folder)) == (6, 7)
    assert send_pending([MLflowService(nobody)], folder, Messages().put, 0.5).count == 7
    assert send_pending([MLflowService(database)], folder).count == 0
    assert logged(database, folder) == expected(0, 1, 2)
    assert outbox.pending(folder) == 0


def test_an_entry_that_its_writer_deletes_meanwhile_is_skipped(
    database: str, folder: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_run(
        tracker := OutboxTracker(
            [MLflowService(f"http://127.0.0.1:{s3.free_port()}")], folder, "driver", Messages().put
        )
    )
    assert tracker.close(0) == 1
    entry_names = outbox.entry_names
    monkeypatch.setattr(outbox, "entry_names", lambda folder: [*entry_names(folder), "000009.json"])  # a deleted file
    again = OutboxTracker([MLflowService(database)], folder, "driver", Messages().put)
    assert again.close(LONG_S) == 0 and again.run_id


def test_close_reports_nothing_left_only_when_the_outbox_is_empty(
    database: str, folder: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_run(
        tracker := OutboxTracker(
            [MLflowService(f"http://127.0.0.1:{s3.free_port()}")], folder, "driver", Messages().put
        )
    )
    log_steps(tracker, 0)
    assert tracker.close(0) == 3
    delete = Storage.delete

    def slowly(file: Storage) -> None:
        time.sleep(0.2)
        delete(file)

    monkeypatch.setattr(Storage, "delete", slowly)
    assert (send_pending([MLflowService(database)], folder, patience_s=LONG_S).count, outbox.pending(folder)) == (0, 0)


def test_a_tracker_without_services_records_nothing(folder: Storage) -> None:
    tracker = OutboxTracker((), folder, "rank_1")
    log_steps(tracker, 0)
    tracker.flush(LONG_S)
    assert (tracker.close(LONG_S), tracker.run_id, folder.exists()) == (0, None, False)


def test_a_service_that_is_away_keeps_no_other_waiting(database: str, folder: Storage, tmp_path: Path) -> None:
    nobody, board = f"http://127.0.0.1:{s3.free_port()}", TensorBoardService(tmp_path / "tensorboard")
    tracker = OutboxTracker([MLflowService(nobody), board], folder, "rank_0", Messages().put)
    open_run(tracker)
    log_steps(tracker, 0, 1)
    deadline = time.monotonic() + LONG_S
    while TensorBoardRun(tmp_path / "tensorboard" / "one").last_step < 1:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert tracker.close(0.5) == 1 + 4
    assert (folder / "outbox").names() == ["rank_0"] and outbox.run_id(folder) is None
    assert outbox.run_id(folder, "tensorboard") == "one"
    again = OutboxTracker([MLflowService(database), board], folder, "rank_0", Messages().put)
    log_steps(again, 2)
    assert (again.close(LONG_S), again.run_id) == (0, outbox.run_id(folder))
    assert logged(database, folder) == expected(0, 1, 2)
    assert set((folder / "run.json").read_json()) == {"mlflow_run", "tensorboard_run", "key"}


def test_a_service_that_is_dropped_leaves_its_records_where_they_are(folder: Storage, tmp_path: Path) -> None:
    nobody, board = f"http://127.0.0.1:{s3.free_port()}", TensorBoardService(tmp_path / "tensorboard")
    first = OutboxTracker([MLflowService(nobody), board], folder, "rank_0", Messages().put)
    open_run(first)
    assert first.close(0.5) == 1
    assert (send_pending([board], folder).count, outbox.pending(folder)) == (0, 1)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[1", "{}", "[]", '{"kind": "rm", "content": {}}', '{"kind": [], "content": {}}'),
        *('{"kind": "log", "content": []}', '{"kind": "log", "content": {"metrics": {"a": "b"}, "step": 1, "at": 1}}'),
        '{"kind": "log", "content": {"metrics": {}, "step": 1, "at": 1, "new": 2}}',
        *('{"kind": "end", "content": {"status": "GONE", "at": 1}}', '{"kind": "open", "content": {"at": 1}}'),
    ],
)
def test_a_damaged_record_is_named_and_the_next_is_sent(text: str, database: str, folder: Storage) -> None:
    opened_tracker(database, folder).close(LONG_S)
    damaged = folder / "outbox" / "rank_0" / "000007.json"
    damaged.write_text(text)
    messages = Messages()
    tracker = OutboxTracker([MLflowService(database)], folder, "rank_0", messages.put)
    log_steps(tracker, 0)
    assert tracker.close(LONG_S) == 0
    assert messages.all() == [f"{damaged.path} is damaged: it is not sent to MLflow"]
    assert logged(database, folder) == expected(0)


def test_what_is_no_record_in_an_outbox_keeps_nothing_waiting(database: str, folder: Storage) -> None:
    """A desktop puts files into folders that it shows."""
    opened_tracker(database, folder).close(LONG_S)
    (folder / "outbox" / ".DS_Store").write_text("x")
    assert (outbox.pending(folder), outbox.unfinished_writers(folder)) == (0, [])
    entry = folder / "outbox" / "rank_0" / "000001.json"
    entry.filesystem.create_dir(entry.path)
    messages = Messages()
    assert send_pending([MLflowService(database)], folder, messages.put, LONG_S).count == 0
    assert messages.all() == [f"{entry.path} is damaged: it is not sent to MLflow"]


@pytest.mark.parametrize("text", ["", "[1", "7"])
def test_a_damaged_run_record_is_refused(text: str, database: str, folder: Storage) -> None:
    (folder / "run.json").write_text(text)
    tracker = OutboxTracker([MLflowService(database)], folder, "driver", Messages().put)
    with pytest.raises(ConfigError, match=r"run\.json is damaged: it is not what rlx wrote"):
        open_run(tracker)
    assert tracker.close(0) == 0


def test_a_password_is_neither_said_nor_kept(folder: Storage) -> None:
    messages = Messages()
    tracker = OutboxTracker(
        [MLflowService(f"http://me:pass@word@127.0.0.1:{s3.free_port()}")], folder, "driver", messages.put
    )
    open_run(tracker)
    message = messages.next()
    assert tracker.close(0) == 1
    assert "http://127.0.0.1:" in message
    assert "word@" not in message
    assert not any(
        secret in text for text in outbox_files(folder, "driver").values() for secret in ("pass", "127.0.0.1")
    )
    error = ValueError("API request to https://me:secret@there/api failed\nfor some reason")
    assert mlflow_errors.cause(error) == "API request to https://there/api failed for some reason"


def test_a_request_is_short_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of commands that only read: a server that accepts and does not answer would be waited for silently."""
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "45")
    mlflow.client(f"http://127.0.0.1:{s3.free_port()}")
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "0"
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "45"


@pytest.mark.slow  # MLflow waits 20 s for a lock
def test_a_tracker_waits_for_a_locked_database(database: str, folder: Storage, tmp_path: Path) -> None:
    messages = Messages()
    tracker = opened_tracker(database, folder, messages)
    with sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        log_steps(tracker, 0)
        assert "takes no records (database is locked)" in messages.next()
        other.execute("ROLLBACK")
    assert tracker.close(LONG_S) == 0
    assert logged(database, folder) == expected(0)


def test_close_waits_for_an_answer_no_longer_than_its_patience(proxy: s3.Proxy, folder: Storage) -> None:
    tracker = opened_tracker(proxy.address, folder)
    proxy.fail("hang")
    log_steps(tracker, 0)
    started = time.monotonic()
    assert tracker.close(0.5) == 2
    assert time.monotonic() - started < 2


def test_a_run_that_mlflow_refuses_is_promised_no_resume(database: str, folder: Storage) -> None:
    told = Messages()
    tracker = OutboxTracker([MLflowService(database)], folder, "rank_0", told.put)
    tracker.open("x" * 501, "one", params={}, tags={})  # longer than MLflow takes
    assert "refuses the run, and with it its records" in told.next()
    launch._send_rest(tracker, "one", folder, told.put)
    assert told.next() == f"1 records for MLflow wait in {folder.path}/outbox"


@pytest.mark.parametrize("writer", ["driver", "rank_0"])
def test_a_run_that_is_deleted_in_mlflow_is_promised_no_resume(writer: str, database: str, folder: Storage) -> None:
    told, driver = Messages(), opened_tracker(database, folder)
    mlflow.client(database).delete_run(driver.run_id)
    if writer == "driver":
        driver.end(RunStatus.FINISHED)
    else:
        worker = OutboxTracker([MLflowService(database)], folder, "worker", Messages().put)
        log_steps(worker, 0)
        worker.close(LONG_S)
    launch._send_rest(driver, "one", folder, told.put)
    assert told.all()[-1] == f"{outbox.pending(folder)} records for MLflow wait in {folder.path}/outbox"


def test_a_run_whose_service_is_away_is_promised_that_a_resume_sends_its_records(
    folder: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_PATIENCE_S", 0.1)
    nobody, told = MLflowService(f"http://127.0.0.1:{s3.free_port()}"), Messages()
    open_run(tracker := OutboxTracker([nobody], folder, "driver", Messages().put))
    launch._send_rest(tracker, "one", folder, told.put)
    assert told.all() == [f"1 records for MLflow wait in {folder.path}/outbox: --resume one sends them"]
