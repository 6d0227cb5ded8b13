"""MLflow records that outlive a server that is down: a real one, killed and started; a proxy before it that fails."""

import json
import os
import queue
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3
from conftest import Where

from rlx.config.errors import ConfigError
from rlx.storage.addresses import open_storage
from rlx.storage.filesystem import Storage
from rlx.tracking import mlflow, outbox, tracker
from rlx.tracking.tracker import Tracker

LONG_S = 60.0  # for what comes much sooner where nothing is wrong
AT_ONCE_S = 1.0  # for 50 calls; a server's answer alone may take the 2 s of `answers_in_2_s`, or never come


class Server:
    """An `mlflow server` on a port of its own, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, s3.free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def up(self) -> None:
        """Started, if it is not there, and answering."""
        if self._process:
            return
        words = [str(Path(sys.executable).with_name("mlflow")), "server", "--workers", "1", "--port", str(self.port)]
        words += ["--backend-store-uri", f"sqlite:///{self.folder}/server.db"]
        words += ["--artifacts-destination", str(self.folder / "artifacts")]
        with (self.folder / "server.txt").open("w") as log:
            self._process = subprocess.Popen(
                words,
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
    one = Server(tmp_path_factory.mktemp("server"))
    shutil.copy(empty_database, one.folder / "server.db")
    yield one
    one.down()


@pytest.fixture
def proxy(server: Server) -> Iterator[s3.Proxy]:
    server.up()
    one = s3.Proxy(server.uri)
    yield one
    one.close()


@pytest.fixture(autouse=True)
def answers_in_2_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest wait for one answer, which would be 10 s."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


@pytest.fixture
def database(empty_database: Path, tmp_path: Path) -> str:
    shutil.copy(empty_database, tmp_path)
    return mlflow.default_uri(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Storage:
    return Storage.here(tmp_path / "runs" / "one")


class Said(queue.Queue[str]):
    """What a tracker has said."""

    def next(self) -> str:
        return self.get(timeout=LONG_S)

    def all(self) -> list[str]:
        return [self.get_nowait() for _ in range(self.qsize())]


def begin(one: Tracker, name: str = "one", parent: Storage | None = None) -> None:
    one.open("rlx", name, params={"a.b": 0.5}, tags={"rlx.kind": "run"}, parent=parent)


def begun(uri: str, folder: Storage, said: Said | None = None) -> Tracker:
    """A tracker whose run is made."""
    one = Tracker(uri, folder, "rank_0", (said or Said()).put)
    begin(one)
    one.flush(LONG_S)
    assert one.run_id
    return one


def rows(step: int) -> list[dict[str, Any]]:
    return [{"step": step, "prompt": f"{step} + {i} =", "score": float(i)} for i in range(3)]


def log(one: Tracker, *steps: int) -> None:
    for step in steps:
        one.log_samples(rows(step), step)
        one.log({"reward/mean": step / 8, "kl/ref": 1.0}, step)


def logged(uri: str, folder: Storage) -> list[tuple[int, float]]:
    """Step and value of each point that MLflow has of one metric."""
    points = mlflow.client(uri).get_metric_history(outbox.run_id(folder), "reward/mean")
    return [(point.step, point.value) for point in points]


def expected(*steps: int) -> list[tuple[int, float]]:
    return [(step, step / 8) for step in steps]


def found(uri: str, folder: Storage) -> Any:
    return mlflow.client(uri).get_run(outbox.run_id(folder))


def table(uri: str, folder: Storage, step: int, where: Path) -> dict[str, Any]:
    name = f"samples/step_{step:06d}.json"
    where.mkdir(exist_ok=True)
    text = Path(mlflow.client(uri).download_artifacts(outbox.run_id(folder), name, str(where))).read_text()
    return dict(json.loads(text))


def kept(folder: Storage, writer: str = "rank_0") -> dict[str, str]:
    """The files of an outbox."""
    outbox = folder / "outbox" / writer
    return {name: (outbox / name).read_text() for name in outbox.names()}


def test_all_is_sent_and_nothing_kept_while_records_are_taken(database: str, folder: Storage, tmp_path: Path) -> None:
    said = Said()
    one = begun(database, folder, said)
    log(one, 0, 1, 2)
    one.log_text("config.yaml", "seed: 1\n")
    one.set_tags({"rlx.winner": "yes"})
    one.end("FINISHED")
    assert one.close(LONG_S) == 0
    assert logged(database, folder) == expected(0, 1, 2)
    assert table(database, folder, 2, tmp_path / "down")["data"] == [list(row.values()) for row in rows(2)]
    run = found(database, folder)
    assert (run.info.status, run.info.run_name, run.data.params) == ("FINISHED", "one", {"a.b": "0.5"})
    assert {"rlx.kind": "run", "rlx.winner": "yes"}.items() <= run.data.tags.items()
    listed = json.loads(run.data.tags["mlflow.loggedArtifacts"])
    assert listed == [{"path": f"samples/step_{step:06d}.json", "type": "table"} for step in range(3)]
    assert folder.names() == ["run.json"]
    assert said.all() == []


def test_a_run_begun_while_the_server_is_down_is_there_once_it_is_up(server: Server, tmp_path: Path) -> None:
    server.down()
    said, sweep, trial = Said(), Storage.here(tmp_path / "sweep"), Storage.here(tmp_path / "trial")
    began = time.time() * 1000
    above = Tracker(server.uri, sweep, "driver", said.put)
    driver, worker = Tracker(server.uri, trial, "driver", said.put), Tracker(server.uri, trial, "rank_0", said.put)
    begin(driver, "trial", sweep)
    log(worker, 0, 1)
    driver.end("FINISHED")
    asked = time.time() * 1000
    begin(above, "sweep")
    assert said.next() == (  # once, by the one that all wait for
        f"MLflow at {server.uri} takes no records (connection refused): training goes on, "
        f"they are kept in {sweep.path}/outbox"
    )
    assert (outbox.run_id(trial), driver.run_id) == (None, None)
    worker.flush()
    driver.flush()
    assert outbox.pending(trial) == 4 + 2
    server.up()
    assert [one.close(LONG_S) for one in (above, driver, worker)] == [0, 0, 0]
    run = found(server.uri, trial)
    assert run.data.tags["mlflow.parentRunId"] == outbox.run_id(sweep)
    assert (run.info.status, began <= run.info.start_time <= run.info.end_time <= asked) == ("FINISHED", True)
    assert logged(server.uri, trial) == expected(0, 1)
    assert outbox.pending(trial) == 0
    assert said.all() == [f"MLflow at {server.uri} takes records again"]


def test_nothing_is_lost_when_the_server_is_killed_and_started_again(
    server: Server, folder: Storage, tmp_path: Path
) -> None:
    server.up()
    one = begun(server.uri, folder)
    log(one, 0, 1)
    one.flush(LONG_S)
    server.down()
    log(one, 2, 3)
    one.log_text("events.txt", "it went on")
    one.flush()
    assert sorted(kept(folder)) == [f"{number:06d}.json" for number in range(1, 6)]
    server.up()
    log(one, 4)
    assert one.close(LONG_S) == 0
    assert logged(server.uri, folder) == expected(0, 1, 2, 3, 4)
    assert table(server.uri, folder, 3, tmp_path / "down")["columns"] == ["step", "prompt", "score"]
    assert kept(folder) == {}


@pytest.mark.parametrize(
    ("kind", "cause"), [("500", "too many 500 error responses"), ("reset", "connection "), ("hang", "timed out")]
)
def test_training_waits_for_no_server(kind: s3.Kind, cause: str, proxy: s3.Proxy, folder: Storage) -> None:
    said = Said()
    one = begun(proxy.address, folder, said)
    proxy.fail(kind)
    started = time.monotonic()
    log(one, *range(25))
    assert time.monotonic() - started < AT_ONCE_S
    assert f"takes no records ({cause}" in said.next()
    started = time.monotonic()
    one.flush()
    assert time.monotonic() - started < 10 * AT_ONCE_S
    assert len(kept(folder)) == 50
    proxy.heal()
    assert one.close(LONG_S) == 0
    assert logged(proxy.address, folder) == expected(*range(25))
    assert said.all() == [f"MLflow at {proxy.address} takes records again"]


def test_one_failure_alone_is_no_news(proxy: s3.Proxy, folder: Storage) -> None:
    said = Said()
    one = begun(proxy.address, folder, said)
    proxy.fail("reset", times=1)
    log(one, 0)
    assert one.close(LONG_S) == 0
    assert len(proxy.failed) == 1
    assert said.all() == []
    assert logged(proxy.address, folder) == expected(0)


def test_an_answer_that_is_lost_doubles_nothing(proxy: s3.Proxy, folder: Storage) -> None:
    one = begun(proxy.address, folder)
    proxy.fail("slow", times=1, methods=("POST",), seconds=3)  # it is done, but its answer comes too late
    one.log({"reward/mean": 0.5}, 4)
    assert one.close(LONG_S) == 0
    assert logged(proxy.address, folder) == expected(4)
    assert len([line for line in proxy.asked if line.endswith("runs/log-batch")]) == 1 + 2  # the first is of settings


WRITER = """
import sys
from rlx.storage.addresses import open_storage
from rlx.tracking.tracker import Tracker
one = Tracker(sys.argv[1], open_storage(sys.argv[2]), "rank_0", lambda words: None)
for step in (2, 3):
    one.log({"reward/mean": step / 8}, step)
one.flush()
one.log({"reward/mean": 4 / 8}, 4)
print("kept", flush=True)
"""


def writing(proxy: s3.Proxy, folder: Storage, then: str) -> subprocess.Popen[str]:
    """A process that has logged steps 2, 3 and 4 and kept the first two, and does something then."""
    words = [sys.executable, "-c", WRITER + then, proxy.address, folder.path]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "kept\n"
    return process


def test_a_kill_while_the_server_is_down_loses_and_doubles_nothing(proxy: s3.Proxy, folder: Storage) -> None:
    first = begun(proxy.address, folder)
    log(first, 0, 1)
    assert first.close(LONG_S) == 0
    proxy.fail("reset")
    process = writing(proxy, folder, "input()")
    process.kill()
    process.communicate()
    assert len(kept(folder)) == 2
    proxy.heal()
    again = Tracker(proxy.address, folder, "rank_0", Said().put)
    again.log({"reward/mean": 3 / 8}, 3)  # from the checkpoint after step 2 on
    again.log({"reward/mean": 4 / 8}, 4)
    assert again.close(LONG_S) == 0
    assert logged(proxy.address, folder) == expected(0, 1, 2, 3, 4)
    assert kept(folder) == {}


def test_a_process_ends_at_once_and_quietly_while_the_server_hangs(proxy: s3.Proxy, folder: Storage) -> None:
    begun(proxy.address, folder).close(LONG_S)
    proxy.fail("hang")
    process = writing(proxy, folder, "")
    started = time.monotonic()
    out, errors = process.communicate(timeout=LONG_S)
    assert (process.returncode, out, errors) == (0, "", "")
    assert time.monotonic() - started < 5


def test_what_was_sent_but_not_forgotten_is_there_once(proxy: s3.Proxy, folder: Storage) -> None:
    proxy.fail("500")
    first = Tracker(proxy.address, folder, "rank_0", Said().put)
    begin(first)
    log(first, 0, 1)
    first.end("FINISHED")
    first.close(0)
    files = kept(folder)
    proxy.heal()
    assert tracker.send_pending(proxy.address, folder) == 0
    ended = found(proxy.address, folder).info.end_time
    for name, text in files.items():
        (folder / "outbox" / "rank_0" / name).write_text(text)
    assert tracker.send_pending(proxy.address, folder) == 0
    run = found(proxy.address, folder)
    assert logged(proxy.address, folder) == expected(0, 1)
    assert (run.info.status, run.info.end_time) == ("FINISHED", ended)
    assert "rlx.attempt" not in run.data.tags


def test_a_tracker_waits_for_the_last_attempt_of_the_one_before(proxy: s3.Proxy, folder: Storage) -> None:
    proxy.fail("slow", seconds=0.3)
    first = Tracker(proxy.address, folder, "rank_0", Said().put)
    begin(first, "slowly")
    while not proxy.failed:
        time.sleep(0.01)
    assert first.close(0) == 1
    assert tracker.send_pending(proxy.address, folder, patience_s=LONG_S) == 0
    experiment = found(proxy.address, folder).info.experiment_id
    assert len(mlflow.client(proxy.address).search_runs([experiment], "attributes.run_name = 'slowly'")) == 1


def test_a_run_whose_id_was_lost_is_found_again(database: str, folder: Storage) -> None:
    first = begun(database, folder)
    known = first.run_id
    first.close(LONG_S)
    key = (folder / "run.json").read_json()["key"]
    (folder / "run.json").write_text(json.dumps({"mlflow_run": None, "key": key}))
    second = begun(database, folder)
    assert (second.run_id, second.close(LONG_S)) == (known, 0)
    assert len(mlflow.client(database).search_runs([found(database, folder).info.experiment_id])) == 1


def test_a_resumed_run_repeats_no_step_and_counts_its_attempts(database: str, folder: Storage) -> None:
    old = mlflow.make_run(database, "a key", "rlx", "old", parent=None, params={"a.b": "0.5"}, tags={}, at=1)
    (folder / "run.json").write_text(json.dumps({"mlflow_run": old}))  # as it was written before there was a key
    for attempt in (2, 3):
        one = begun(database, folder)
        assert (found(database, folder).info.status, one.run_id) == ("RUNNING", outbox.run_id(folder))
        log(one, *range(attempt))
        one.end("FAILED")
        assert one.close(LONG_S) == 0
        assert found(database, folder).data.tags["rlx.attempt"] == str(attempt)
    assert logged(database, folder) == expected(0, 1, 2)
    assert found(database, folder).info.status == "FAILED"


def test_a_refused_record_is_left_out_and_the_next_is_not(database: str, folder: Storage) -> None:
    said = Said()
    one = begun(database, folder, said)
    one.log({"no such name: *?": 1.0}, 0)
    log(one, 1)
    assert one.close(LONG_S) == 0
    assert logged(database, folder) == expected(1)
    (words,) = said.all()
    assert words.startswith("MLflow refused a record, which is left out: Invalid value")


def test_a_run_that_was_deleted_ends_nothing_and_a_resume_makes_a_new_one(server: Server, folder: Storage) -> None:
    server.up()
    said = Said()
    one = begun(server.uri, folder, said)
    gone = one.run_id
    mlflow.client(server.uri).delete_run(gone)
    one.log({"reward/mean": 0.0}, 0)
    one.log({"reward/mean": 0.125}, 1)
    assert one.close(LONG_S) == 0
    (words,) = said.all()
    assert words.startswith("MLflow refused a record, which is left out: ")
    again = begun(server.uri, folder, said)
    log(again, 0, 1)
    assert again.close(LONG_S) == 0
    assert said.all() == [f"MLflow run {gone} is not in {server.uri}: what comes now is recorded in a new one"]
    assert logged(server.uri, folder) == expected(0, 1)


def test_records_wait_on_any_storage_until_someone_sends_them(where: Where, database: str) -> None:
    folder, nobody = open_storage(where[0]), f"http://127.0.0.1:{s3.free_port()}"
    driver, worker = Tracker(nobody, folder, "driver", Said().put), Tracker(nobody, folder, "rank_0", Said().put)
    begin(driver)
    log(worker, 0, 1)
    assert (worker.close(0), driver.close(0), outbox.pending(folder)) == (4, 1, 5)
    again = Tracker(nobody, folder, "rank_0", Said().put)
    log(again, 2)
    assert (again.close(0), outbox.pending(folder)) == (6, 7)
    assert tracker.send_pending(nobody, folder, Said().put, 0.5) == 7
    assert tracker.send_pending(database, folder) == 0
    assert logged(database, folder) == expected(0, 1, 2)
    assert outbox.pending(folder) == 0


def test_what_its_writer_sends_after_all_is_not_missed(
    database: str, folder: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(one := Tracker(f"http://127.0.0.1:{s3.free_port()}", folder, "driver", Said().put))
    assert one.close(0) == 1
    there = outbox.entry_names
    monkeypatch.setattr(outbox, "entry_names", lambda outbox: [*there(outbox), "000009.json"])  # gone since
    again = Tracker(database, folder, "driver", Said().put)
    assert again.close(LONG_S) == 0 and again.run_id


def test_nothing_is_left_only_once_the_outbox_is_empty(
    database: str, folder: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(one := Tracker(f"http://127.0.0.1:{s3.free_port()}", folder, "driver", Said().put))
    log(one, 0)
    assert one.close(0) == 3
    delete = Storage.delete

    def slowly(file: Storage) -> None:
        time.sleep(0.2)
        delete(file)

    monkeypatch.setattr(Storage, "delete", slowly)
    assert (tracker.send_pending(database, folder, patience_s=LONG_S), outbox.pending(folder)) == (0, 0)


def test_without_a_writer_nothing_happens(database: str, folder: Storage) -> None:
    one = Tracker(database, folder, None)
    begin(one)
    log(one, 0)
    one.flush(LONG_S)
    assert (one.close(LONG_S), one.run_id, folder.exists()) == (0, None, False)


@pytest.mark.parametrize("text", ["", "[1", "{}", '{"kind": "rm", "content": {}}', '{"kind": [], "content": {}}', "[]"])
def test_a_damaged_record_is_named_and_the_next_is_sent(text: str, database: str, folder: Storage) -> None:
    begun(database, folder).close(LONG_S)
    damaged = folder / "outbox" / "rank_0" / "000007.json"
    damaged.write_text(text)
    said = Said()
    one = Tracker(database, folder, "rank_0", said.put)
    log(one, 0)
    assert one.close(LONG_S) == 0
    assert said.all() == [f"{damaged.path} is damaged: it is not sent to MLflow"]
    assert logged(database, folder) == expected(0)


@pytest.mark.parametrize("text", ["", "[1", "7"])
def test_a_damaged_run_record_is_refused(text: str, database: str, folder: Storage) -> None:
    (folder / "run.json").write_text(text)
    one = Tracker(database, folder, "driver", Said().put)
    with pytest.raises(ConfigError, match=r"run\.json is damaged: it is not what rlx wrote"):
        begin(one)
    assert one.close(0) == 0


def test_a_password_is_neither_said_nor_kept(folder: Storage) -> None:
    said = Said()
    one = Tracker(f"http://me:pass@word@127.0.0.1:{s3.free_port()}", folder, "driver", said.put)
    begin(one)
    words = said.next()
    assert one.close(0) == 1
    assert "http://127.0.0.1:" in words
    assert "word@" not in words
    assert not any(secret in text for text in kept(folder, "driver").values() for secret in ("pass", "127.0.0.1"))
    error = ValueError("API request to https://me:secret@there/api failed\nfor some reason")
    assert mlflow.cause(error) == "API request to https://there/api failed for some reason"


def test_one_attempt_is_short_unless_a_person_wants_it_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "45")
    mlflow.send_briefly()
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "0"
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "45"


@pytest.mark.slow  # MLflow waits 20 s for a lock
def test_a_locked_database_is_waited_for(database: str, folder: Storage, tmp_path: Path) -> None:
    said = Said()
    one = begun(database, folder, said)
    with sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        log(one, 0)
        assert "takes no records (database is locked)" in said.next()
        other.execute("ROLLBACK")
    assert one.close(LONG_S) == 0
    assert logged(database, folder) == expected(0)


def test_the_answer_of_a_server_is_waited_for_no_longer_than_asked(proxy: s3.Proxy, folder: Storage) -> None:
    one = begun(proxy.address, folder)
    proxy.fail("hang")
    log(one, 0)
    started = time.monotonic()
    assert one.close(0.5) == 2
    assert time.monotonic() - started < 2
