"""What TensorBoard's event files and W&B's offline files hold after resumes, kills and repeated records."""

import json
import math
import shutil
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree
from rlx.storage.filesystem import Storage
from rlx.tracking import tracker
from rlx.tracking.base import Failure, RunStatus, TrackingService, typed
from rlx.tracking.outbox import EntryKind, OutboxQueue, entries_of, run_id
from rlx.tracking.services import reachable
from rlx.tracking.services.reachable import check_packages
from rlx.tracking.services.tensorboard import TensorBoardService, events, run_at
from rlx.tracking.services.wandb import WandbService, as_config, nested
from rlx.tracking.tracker import OutboxTracker, services_of

LONG_S = 60.0


def recorded(service: TrackingService, folder: Storage, *steps: int, error: str = "") -> None:
    """One attempt of a run in a process of its own: it logs steps and ends; with an error, it fails."""
    run_at.cache_clear()
    record = OutboxTracker([service], folder, "rank_0")
    tags = {"rlx.kind": "run", "rlx.sweep": "s"}
    record.open("rlx", "s.trial_00000", params={"train.actor_lr": 1e-05, "model.path": "tiny"}, tags=tags)
    record.log_text("config.yaml", "seed: 1\n")
    record.log_text("completions.html", "<p>shown by services that show pages")
    for step in steps:
        record.log_samples([{"step": step, "prompt": "1 + 1 =\n", "response": "2 | 3"}], step)
        record.log({"reward/mean": step / 8, "kl/ref": 1.0}, step)
    record.end(RunStatus.FAILED if error else RunStatus.FINISHED, error)
    assert record.close(LONG_S) == 0


# ---------------------------------------------------------------------------------------------------------------------
# TensorBoard


@pytest.fixture
def folder(tmp_path: Path) -> Storage:
    return Storage.local(tmp_path / "run")


def all_events(folder: Path) -> list[Any]:
    return [event for file in sorted(folder.glob("events*")) for event in events(file)]


def scalars(folder: Path) -> list[tuple[int, str, float]]:
    values = [(event.step, each) for event in all_events(folder) for each in event.summary.value]
    return [(step, each.tag, each.simple_value) for step, each in values if each.HasField("simple_value")]


def expected(*steps: int) -> list[tuple[int, str, float]]:
    return [(step, *value) for step in steps for value in (("reward/mean", step / 8), ("kl/ref", 1.0))]


def texts(folder: Path) -> dict[str, str]:
    """The newest text of each name."""
    values = [each for event in all_events(folder) for each in event.summary.value]
    return {each.tag: each.tensor.string_val[0].decode() for each in values if each.tensor.string_val}


def test_tensorboard_gets_each_step_once_over_attempts(tmp_path: Path, folder: Storage) -> None:
    for steps in ((0, 1, 2), (1, 2, 3)):  # a resume repeats the steps since its checkpoint
        recorded(TensorBoardService(tmp_path / "tb"), folder, *steps)
    board = tmp_path / "tb" / "s" / "trial_00000"
    assert run_id(folder, "tensorboard") == "s/trial_00000"
    assert scalars(board) == expected(0, 1, 2, 3)
    assert texts(board)["tags/status/text_summary"] == "FINISHED"
    assert texts(board)["config.yaml/text_summary"] == "    seed: 1"
    assert not any("html" in name for name in texts(board))
    assert texts(board)["samples/text_summary"].splitlines()[2] == "| 3 | 1 + 1 =<br> | 2 \\| 3 |"
    tags = {value.tag for event in all_events(board) for value in event.summary.value}
    assert {"_hparams_/experiment", "_hparams_/session_start_info"} <= tags
    seconds = [event.wall_time for event in all_events(board)]
    assert min(seconds) > 1.7e9 and len(list(board.glob("events*"))) == 2


def test_a_run_of_tensorboard_that_goes_on_after_a_failure_is_running_without_an_error(
    tmp_path: Path, folder: Storage
) -> None:
    recorded(service := TensorBoardService(tmp_path / "tb"), folder, 0, error="no room")
    board = tmp_path / "tb" / "s" / "trial_00000"
    said = [texts(board)[f"tags/{tag}/text_summary"] for tag in ("status", "rlx.error")]
    assert said == ["FAILED", "no room"]
    driver = OutboxTracker([service], folder, "driver")
    driver.open("rlx", "s.trial_00000", params={}, tags={})
    driver.flush(LONG_S)
    said = [texts(board)[f"tags/{tag}/text_summary"] for tag in ("status", "rlx.error")]
    assert said == ["RUNNING", ""]
    driver.end(RunStatus.FAILED)
    assert driver.close(LONG_S) == 0
    assert texts(board)["tags/status/text_summary"] == "FAILED"  # though it was before


def test_a_run_of_tensorboard_that_never_failed_has_no_error(tmp_path: Path, folder: Storage) -> None:
    for steps in ((0,), (1,)):
        recorded(TensorBoardService(tmp_path / "tb"), folder, *steps)
    assert not any("error" in name for name in texts(tmp_path / "tb" / "s" / "trial_00000"))


def test_an_event_that_a_kill_has_cut_is_written_again(tmp_path: Path, folder: Storage) -> None:
    recorded(TensorBoardService(tmp_path / "tb"), folder, 0, 1)
    (file,) = (tmp_path / "tb" / "s" / "trial_00000").glob("events*")
    whole, (end,) = file.read_bytes(), [place for place, event in placed(file) if event.step == 1 and is_metric(event)]
    file.write_bytes(whole[: end - 5])
    recorded(TensorBoardService(tmp_path / "tb"), folder, 1, 2)
    assert scalars(file.parent) == expected(0, 1, 2)


def placed(file: Path) -> Iterator[tuple[int, Any]]:
    """Each event with the place in the file where it ends."""
    place, content = 0, file.read_bytes()
    for event in events(file):
        place += 16 + struct.unpack("<Q", content[place : place + 8])[0]
        yield place, event


def is_metric(event: Any) -> bool:
    return any(value.HasField("simple_value") for value in event.summary.value)


def test_a_record_that_was_sent_but_not_deleted_changes_nothing(tmp_path: Path, folder: Storage) -> None:
    service = TensorBoardService(tmp_path / "tb")
    recorded(service, folder, 0, 1)
    queue = OutboxQueue(entries_of(folder, "rank_0", "tensorboard"))
    queue.add(EntryKind.LOG, {"metrics": {"reward/mean": 1 / 8, "kl/ref": 1.0}, "step": 1, "at": 1})
    queue.save(0)
    assert tracker.send_pending([service], folder).count == 0
    assert scalars(tmp_path / "tb" / "s" / "trial_00000") == expected(0, 1)


def test_two_runs_of_one_name_have_folders_of_their_own(tmp_path: Path) -> None:
    service = TensorBoardService(tmp_path / "tb")
    options: Any = {"parent": None, "params": {}, "tags": {}, "at": 1}
    assert [service.make_run(key, "rlx", "one", **options) for key in "aba"] == ["one", "one-2", "one"]
    service.reopen_run("one-2", 2, {}, {})


def test_a_run_whose_folder_was_removed_begins_again(tmp_path: Path) -> None:
    """Also in the process that has written it, whose file is still open."""
    service = TensorBoardService(tmp_path / "tb")
    service.make_run("key", "rlx", "one", parent=None, params={"train.steps": "3"}, tags={}, at=1)
    for step in (1, 2, 3):
        service.writer("one").log({"reward/mean": 1.0}, step, step)
    shutil.rmtree(tmp_path / "tb")
    service.reopen_run("one", 4, {"train.steps": "3"}, {})
    service.writer("one").log({"reward/mean": 0.5}, 2, 5)
    assert scalars(tmp_path / "tb" / "one") == [(2, "reward/mean", 0.5)]
    service.reopen_run("one", 6, {"train.steps": "3"}, {})  # it has its key again
    assert service.writer("one").last_step == 2


def test_a_tag_that_comes_after_the_end_is_kept(tmp_path: Path, folder: Storage) -> None:
    """A sweep's driver says at which step a trial was stopped, when the trial is over."""
    service = TensorBoardService(tmp_path / "tb")
    recorded(service, folder, 0)
    driver = OutboxTracker([service], folder, "sweep")
    driver.set_tags({"rlx.stopped": "1"})
    assert driver.close(LONG_S) == 0
    board = tmp_path / "tb" / "s" / "trial_00000"
    assert texts(board)["tags/rlx.stopped/text_summary"] == "1" and scalars(board) == expected(0)
    assert len(list(board.glob("events*"))) == 2  # also within one second of the first


def test_an_end_that_comes_twice_is_written_once(tmp_path: Path, folder: Storage) -> None:
    recorded(TensorBoardService(tmp_path / "tb"), folder, 0)
    driver = OutboxTracker([TensorBoardService(tmp_path / "tb")], folder, "driver")
    driver.end(RunStatus.FINISHED)
    assert driver.close(LONG_S) == 0
    assert len(list((tmp_path / "tb" / "s" / "trial_00000").glob("events*"))) == 1


def test_a_run_of_tensorboard_that_has_finished_was_not_killed(tmp_path: Path, folder: Storage) -> None:
    recorded(service := TensorBoardService(tmp_path / "tb"), folder, 0)
    process = OutboxTracker([service], folder, "rank_0")
    process.log({"reward/mean": 0.5}, 1)  # late
    process.end(RunStatus.KILLED)
    assert process.close(LONG_S) == 0
    assert texts(tmp_path / "tb" / "s" / "trial_00000")["tags/status/text_summary"] == "FINISHED"


def test_a_tracker_of_steps_that_are_done_again_says_so(tmp_path: Path, folder: Storage) -> None:
    service = TensorBoardService(tmp_path / "tb")
    recorded(service, folder, 0, 1)
    for again in (False, True):
        writer = OutboxTracker([service], folder, "rank_0", again=again)
        writer.log({"reward/mean": 0.75}, 1)
        assert writer.close(LONG_S) == 0
    values = scalars(tmp_path / "tb" / "s" / "trial_00000")
    assert [value for step, name, value in values if (step, name) == (1, "reward/mean")] == [0.125, 0.75]


def test_a_folder_that_cannot_be_made_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^tracking\.backends tensorboard: .*file"):
        TensorBoardService(tmp_path / "file" / "tb").check("rlx")
    TensorBoardService(tmp_path / "tb").check("rlx")
    assert (tmp_path / "tb").is_dir()


def test_values_and_names_of_any_kind_are_written(tmp_path: Path) -> None:
    service = TensorBoardService(tmp_path / "tb")
    run_id = service.make_run("k", "rlx", "one", parent=None, params={}, tags={}, at=1)
    service.writer(run_id).log({"reward/mean": math.nan, "reward/m:f": math.inf}, 0, 1)
    (_, first, missing), (_, second, endless) = scalars(tmp_path / "tb" / "one")
    assert (first, second, math.isnan(missing), endless) == ("reward/mean", "reward/m_f", True, math.inf)
    assert service.failure(ValueError("no number")) is Failure.REFUSED
    assert service.failure(OSError("disk full")) is Failure.AWAY


# ---------------------------------------------------------------------------------------------------------------------
# W&B

_BLOCK, _HEADER = 32768, 7  # of W&B's files: a log of records in LevelDB's format


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of an offline run."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, parts = file.read_bytes(), _HEADER, b""
    while place + _HEADER <= len(content):
        if _BLOCK - place % _BLOCK < _HEADER:  # the rest of a block is empty
            place += _BLOCK - place % _BLOCK
        size, kind = struct.unpack("<HB", content[place + 4 : place + _HEADER])
        parts += content[place + _HEADER : place + _HEADER + size]
        place += _HEADER + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def finished(file: Path) -> list[Any]:
    """The records of an offline run once W&B's own process has written the last, which it does after `finish`."""
    deadline = time.monotonic() + LONG_S
    while not (records := list(wandb_records(file))) or records[-1].WhichOneof("record_type") != "exit":
        assert time.monotonic() < deadline, [record.WhichOneof("record_type") for record in records]
        time.sleep(0.05)
    return records


def history(records: list[Any]) -> list[dict[str, Any]]:
    rows = [record.history for record in records if record.WhichOneof("record_type") == "history"]
    return [{item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in row.item} for row in rows]


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WandbService:
    """W&B without its server and without a key."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    return WandbService(tmp_path)


@pytest.mark.slow
def test_wandb_offline_keeps_steps_settings_and_id_over_attempts(
    tmp_path: Path, folder: Storage, offline: WandbService
) -> None:
    offline.check("rlx")  # which needs no key
    recorded(offline, folder, 0, 1, 2)
    time.sleep(1.1)  # W&B names an attempt's folder by the second: a resume of a run takes longer than one
    recorded(WandbService(tmp_path), folder, 1, 2, 3)
    key = (folder / "run.json").read_json()["key"]
    assert run_id(folder, "wandb") == f"rlx/{key}"
    files = sorted((tmp_path / "wandb").glob(f"offline-run-*-{key}/run-{key}.wandb"))
    attempts = [finished(file) for file in files]
    rows = [[(row["_step"], row["reward/mean"]) for row in history(records)] for records in attempts]
    # `wandb sync` sends the files of a run in the order of their start; steps that W&B has already are ignored.
    assert rows == [[(0, 0.0), (1, 1 / 8), (2, 2 / 8)], [(1, 1 / 8), (2, 2 / 8), (3, 3 / 8)]]
    assert all(row["samples._type"] == "table-file" and row["samples.nrows"] == 1 for row in history(attempts[0]))
    (made,) = [record.run for record in attempts[0] if record.WhichOneof("record_type") == "run"][:1]
    assert (made.run_id, made.project, made.display_name, made.run_group) == (key, "rlx", "s.trial_00000", "s")
    settings = {item.key: json.loads(item.value_json) for item in made.config.update if item.key}
    assert settings["train"] == {"actor_lr": 1e-05} and settings["model"] == {"path": "tiny"}
    exits = [record.exit.exit_code for record in attempts[1] if record.WhichOneof("record_type") == "exit"]
    assert exits == [0]
    assert [file.read_text() for file in tmp_path.glob("wandb/offline-*/files/rlx/config.yaml")] == ["seed: 1\n"] * 2


@pytest.mark.slow
def test_wandb_keeps_all_tags_and_a_run_that_goes_on_has_no_error(
    tmp_path: Path, folder: Storage, offline: WandbService
) -> None:
    recorded(offline, folder, 0, error="no room")
    time.sleep(1.1)  # as above
    driver = OutboxTracker([offline], folder, "driver")
    driver.open("rlx", "s.trial_00000", params={}, tags={})
    driver.set_tags({"rlx.stopped": "1"})
    driver.end(RunStatus.FINISHED)
    assert driver.close(LONG_S) == 0
    first, second = (config(finished(file)) for file in sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb")))
    assert first | {"train": {"actor_lr": 1e-05}, "rlx_kind": "run", "rlx_sweep": "s", "rlx_error": "no room"} == first
    assert second == {"rlx_error": "", "rlx_stopped": 1}  # W&B keeps the keys that it has and are not among these


@pytest.mark.slow
def test_a_run_of_wandb_that_has_finished_was_not_killed(
    tmp_path: Path, folder: Storage, offline: WandbService
) -> None:
    recorded(offline, folder, 0)
    time.sleep(1.1)  # as above
    process = OutboxTracker([offline], folder, "rank_0")
    process.log_text("late.txt", "")
    process.end(RunStatus.KILLED)
    assert process.close(LONG_S) == 0
    attempts = [finished(file) for file in sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))]
    exits = [
        each.exit.exit_code for records in attempts for each in records if each.WhichOneof("record_type") == "exit"
    ]
    assert exits == [0, 0]


def config(records: list[Any]) -> dict[str, Any]:
    """The config that the records of an attempt send, without W&B's own part: keys are replaced as a whole."""
    updates = [record.run.config.update for record in records if record.WhichOneof("record_type") == "run"]
    updates += [record.config.update for record in records if record.WhichOneof("record_type") == "config"]
    values = {item.key: json.loads(item.value_json) for update in updates for item in update}
    return {key: value for key, value in values.items() if key and not key.startswith("_")}


def test_wandb_says_that_there_is_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(ConfigError, match="no key for W&B: `wandb login` asks for it, WANDB_API_KEY holds it"):
        WandbService(tmp_path).check("rlx")


def test_settings_are_nested_and_typed() -> None:
    assert nested({"a.b": "1e-05", "a.c": "True", "d": "x", "e": "3"}) == {
        "a": {"b": 1e-05, "c": True},
        "d": "x",
        "e": 3,
    }
    assert as_config({"rlx.kind": "run", "rlx.seeds": "2"}) == {"rlx_kind": "run", "rlx_seeds": 2}
    assert [typed(text) for text in ("1.0.0", "None", "-2")] == ["1.0.0", "None", -2]


# ---------------------------------------------------------------------------------------------------------------------
# The setting


def test_backends_name_services_and_missing_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = from_tree({"tracking": {"backends": ["mlflow", "tensorboard", "wandb"]}}).tracking
    assert [service.name for service in services_of(every, str(tmp_path))] == list(every.backends)
    monkeypatch.setattr(reachable.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"tracking.backends tensorboard: needs the package tensorboardX: pip install"
    ):
        check_packages(every)
    for wrong in ([], ["mlflow", "mlflow"], ["mlfow"]):
        with pytest.raises(ConfigError, match=r"tracking\.backends"):
            from_tree({"tracking": {"backends": wrong}})


def test_records_in_the_working_folder_of_a_job_are_refused(tmp_path: Path) -> None:
    job = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_1" / "storage"
    local, server = (from_tree({"tracking": {"uri": uri}}).tracking for uri in (None, "http://mlflow:5000"))
    with pytest.raises(ConfigError, match=r"^tracking.uri: records would be in .*_ray_pkg_1/storage, the work"):
        services_of(local, str(job))
    assert [service.name for service in services_of(server, str(job))] == ["mlflow"]
    assert not job.exists()
