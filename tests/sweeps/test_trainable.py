"""What Tune is told of a trial's steps and checkpoints, without the run below."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlx.config.loading import with_overrides
from rlx.runs import launch
from rlx.runs.launch import Parent
from rlx.runs.processes import RunProcesses
from rlx.runs.train_run import RunStopped
from rlx.storage.checkpoint_catalog import Manifest, checkpoint_name, commit
from rlx.storage.filesystem import Storage
from rlx.sweeps import trainable
from rlx.sweeps.records import SweepPlan, TrialRecord
from rlx.sweeps.trainable import Attempt, PPOTrial, RunThread, SharedInputs, current_attempt
from rlx.tracking import outbox
from rlx.tracking.services import mlflow
from rlx.tracking.services.mlflow import MLflowService
from rlx.tracking.tracker import OutboxTracker
from rlx.types import OnReport


class Steps:
    """Stands for a run of eight steps: gives its reports one after another."""

    is_done = False

    def __init__(self, *reports: tuple[dict[str, Any], str | None]) -> None:
        self._reports = iter(reports)

    def next_report(self) -> tuple[dict[str, Any], str | None]:
        report = next(self._reports)
        self.is_done = report[0]["step"] == 8
        return report


class Trial(PPOTrial):
    """A trial whose run is given by its test; nothing is held between its steps."""

    def setup(self, config: dict[str, Any]) -> None:  # type: ignore[override]
        self.thread, self.start, self.checkpoint, self.seen, self.unsaved = config["run"], "", "", -1, {}
        self.repeated: list[dict[str, Any]] = []
        self.processes = self

    def release(self, step: int) -> None:
        pass

    def cleanup(self) -> None:
        pass


class Continued(PPOTrial):
    """A trial of before a resume, whose run is not needed."""

    trial_name = "trial_00000"

    def setup(self, config: dict[str, Any]) -> None:  # type: ignore[override]
        self.plan, self.storage = config["plan"], config["storage"]
        self.shared = SharedInputs([], None, known=config["known"])
        self._begin()

    def cleanup(self) -> None:
        pass


def report(step: int, checkpoint: int | None = None) -> tuple[dict[str, Any], str | None]:
    path = None if checkpoint is None else f"/runs/trial_00000/step_{checkpoint:06d}"
    return {"step": step, "eval/accuracy": step / 8}, path


def test_a_checkpoint_that_is_complete_later_has_the_metrics_of_its_own_step(tmp_path: Path) -> None:
    trial = Trial({"run": Steps(report(1), report(2, checkpoint=1), report(3), report(4, checkpoint=4))})
    saved = []
    for number in range(4):
        if trial.train()["should_checkpoint"]:
            result = trial.save(str(tmp_path / str(number)))
            path = json.loads((tmp_path / str(number) / "pointer.json").read_text())["path"]
            metrics = result.metrics
            saved.append((path, metrics["step"], metrics["eval/accuracy"], metrics["training_iteration"]))
    assert saved == [("/runs/trial_00000/step_000001", 1, 1 / 8, 1), ("/runs/trial_00000/step_000004", 4, 4 / 8, 4)]


def test_tune_is_told_of_the_end_of_a_run_and_of_its_checkpoints() -> None:
    """By the keys that Tune and docs/cluster.md name."""

    def run(on_report: OnReport) -> None:
        for each in (report(7), report(8, checkpoint=8)):
            on_report(*each)

    stopped: list[bool] = []
    trial = Trial({"run": None})
    trial.thread = thread = RunThread(run, steps=8)
    keys = ("step", "done", "should_checkpoint", "checkpoint_path")
    told = [[each.get(key) for key in keys] for each in (trial.train(), trial.train())]
    assert told == [[7, False, False, None], [8, True, True, "/runs/trial_00000/step_000008"]]
    thread.end(lambda: stopped.append(True))
    assert not stopped  # it has done all of its steps


def test_a_trial_that_starts_from_another_is_saved_as_tune_does(tmp_path: Path) -> None:
    trial = Trial({"run": Steps(report(8))})
    trial.train()
    trial.checkpoint = "/runs/trial_00001/step_000004"  # of the other one, as `load_checkpoint` has left it
    assert trial.save(str(tmp_path)).metrics["step"] == 8


def test_a_trial_that_goes_on_repeats_its_newest_report_before_its_run_starts(tmp_path: Path) -> None:
    """It may be paused there: then Tune has its newest checkpoint, and the report does not come again."""
    plan = SweepPlan("s", {"train": {"steps": 8}}, "space.py", rung_by="tokens")
    record = TrialRecord(settings={}, reports=[(2, 0.25), (4, 0.5)], progress={2: 10.0, 4: 20.0})
    run = Storage.local(tmp_path / "sweeps" / "s" / "runs" / "trial_00000")
    parts = ("metrics", "kl", "scores", "cursor", "evaluation", "config", "files")
    empty: dict[str, Any] = {key: {} for key in parts}
    for step in (2, 4):
        manifest = Manifest(rlx="0", step=step, ranks=1, tokens=0, mlflow_run_id=None, **empty)
        commit(run / checkpoint_name(step), manifest)
    trial = Continued({"plan": plan, "storage": Storage.local(tmp_path), "known": {"trial_00000": record}})
    told = trial.train()
    assert (told["step"], told["tokens/total"], told["eval/accuracy"], trial.thread) == (4, 20.0, 0.5, None)
    trial.save(str(tmp_path / "saved"))
    assert json.loads((tmp_path / "saved" / "pointer.json").read_text())["path"] == f"{run.path}/step_000004"
    trial.reset_config(trial.config)
    trial.load_checkpoint(str(tmp_path / "saved"))
    assert (trial.repeated, trial.start) == ([], f"{run.path}/step_000004")


def test_a_trial_that_had_reported_its_last_step_hears_it_from_its_run(tmp_path: Path) -> None:
    plan = SweepPlan("s", {"train": {"steps": 8}}, "space.py")
    record = TrialRecord(settings={}, reports=[(4, 0.5), (8, 0.5)])
    trial = Continued({"plan": plan, "storage": Storage.local(tmp_path), "known": {"trial_00000": record}})
    assert trial.repeated == []


def test_a_trial_that_varies_an_entry_of_a_setting_continues_its_run(tmp_path: Path) -> None:
    functions = {"numeric": 1.0, "format": 0.5}
    tree = {"reward": {"functions": functions, "format_pattern": "x.*", "answer_pattern": "#(.+)"}}
    settings = {"reward.functions.format": 0.25}
    storage = Storage.local(tmp_path)
    run = storage / "sweeps" / "s" / "runs" / "trial_00000"
    (run / "config.yaml").write_text(json.dumps(with_overrides(tree, settings)))  # which is YAML, too
    (run / "run.json").write_text(json.dumps({"mlflow_run": "x"}))
    plan, record = SweepPlan("s", tree, "space.py"), TrialRecord(settings=settings)
    attempt = current_attempt(plan, storage, "trial_00000", record, "")
    assert attempt.start["reward.functions.format"] == 0.25


def test_a_trial_that_may_have_been_paused_or_interrupted_has_not_finished(
    tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is stopped, from its record's opening to its end; nothing trains."""
    shutil.copy(empty_database, tmp_path)
    service, storage = MLflowService(mlflow.default_uri(tmp_path)), Storage.local(tmp_path)
    plan, shared = SweepPlan("s", {}, "space.py"), SharedInputs([service], None)
    open_record(service, storage / "sweeps" / "s")

    def stopped(prepared: object, folder: Storage, *, parent: Parent, **more: object) -> None:
        record = open_record(service, folder, parent.folder)
        (folder / "config.yaml").write_text("{}")
        with launch._closing(record, "r", print, parent):
            raise RunStopped("by the test")

    monkeypatch.setattr(trainable, "_prepared", lambda *given: None)
    monkeypatch.setattr(launch, "run", stopped)
    for name, start in (("trial_00000", {}), ("trial_00000.2", {"checkpoint.init_from": "runs/trial_00001/step_4"})):
        attempt = Attempt("trial_00000", name, start)
        trainable.run_trial(plan, storage, {}, attempt, shared, RunProcesses(), lambda metrics, checkpoint: None)
    ids = [outbox.run_id(storage / "sweeps" / "s" / "runs" / name) for name in ("trial_00000", "trial_00000.2")]
    runs = [mlflow.client(service.uri).get_run(each) for each in ids]
    assert [run.info.status for run in runs] == ["FINISHED", "KILLED"]  # the first goes on as the second


def open_record(service: MLflowService, folder: Storage, parent: Storage | None = None) -> OutboxTracker:
    record = OutboxTracker([service], folder, "driver")
    record.open("rlx", folder.name, params={}, tags={}, parent=parent)
    record.flush()
    return record
