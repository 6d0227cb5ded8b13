"""What Tune is told of a trial's steps and checkpoints, without the run below."""

import json
from pathlib import Path
from typing import Any

from rlx.runs.mailbox import CHECKPOINT_PATH
from rlx.sweeps.trainable import PPOTrial


class Steps:
    """Stands for a run: gives its reports one after another."""

    def __init__(self, *reports: dict[str, Any]) -> None:
        self._reports = iter(reports)

    def next_report(self) -> dict[str, Any]:
        return next(self._reports)


class Trial(PPOTrial):
    """A trial whose run is given by its test; nothing is held between its steps."""

    def setup(self, config: dict[str, Any]) -> None:  # type: ignore[override]
        self.thread, self.start, self.checkpoint, self.seen, self.unsaved = config["run"], "", "", -1, {}
        self.replayed: list[dict[str, Any]] = []
        self.processes = self

    def release(self, step: int) -> None:
        pass

    def cleanup(self) -> None:
        pass


def report(step: int, checkpoint: int | None = None) -> dict[str, Any]:
    path = {} if checkpoint is None else {CHECKPOINT_PATH: f"/runs/trial_00000/step_{checkpoint:06d}"}
    return {"step": step, "eval/accuracy": step / 8, **path}


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


def test_a_trial_that_starts_from_another_is_saved_as_tune_does(tmp_path: Path) -> None:
    trial = Trial({"run": Steps(report(8))})
    trial.train()
    trial.checkpoint = "/runs/trial_00001/step_000004"  # of the other one, as `load_checkpoint` has left it
    assert trial.save(str(tmp_path)).metrics["step"] == 8
