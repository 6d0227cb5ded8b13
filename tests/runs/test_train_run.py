"""Ray's own configs as rlx makes them, and what Ray Train is given by real runs of one process."""

import time
from pathlib import Path
from typing import Any

import pytest
import ray
from run_cases import small

from rlx.cluster.resources import plan_resources
from rlx.runs import preflight, train_run
from rlx.runs.mailbox import (
    CHECKPOINT_PATH,
    IS_LAST,
    Box,
    ControllerStarted,
    StepReport,
    WorkersFailed,
    start_mailbox,
)
from rlx.storage.filesystem import Storage


class Sent:
    """Stands for a mailbox: keeps what is sent."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def send(self, event: Any, *, wait: bool = False) -> None:
        if not isinstance(event, ControllerStarted):
            self.events.append(event)


@pytest.fixture
def relay(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Any]]:
    sent = Sent()
    made = train_run._Relay(sent)  # type: ignore[arg-type]
    made._is_known = True  # here is no controller
    return made, sent.events


def test_the_configs_are_rays_with_the_values_of_rlx(tiny_model: Path, tmp_path: Path) -> None:
    given = {
        "scaling__label_selector": {"market": "!spot"}, "scaling__max_failures": 7, "scaling__preemption_grace_s": 9.0,
        "scaling__max_preemption_failures": 2, "scaling__placement_strategy": "SPREAD",
        "scaling__accelerator_type": "H200", "rollout__resources_per_engine.GPU": 1,
    }  # fmt: skip
    config = small(tiny_model, tmp_path, "configs", scaling__use_gpu=True, **given)
    prepared = preflight.PreparedRun(config, str(tiny_model), plan_resources(config))
    made = train_run.make_trainer(prepared, Storage.local(tmp_path / "runs" / "configs"), Box(None, "box"))
    scaling, run = made.scaling_config, made.run_config
    assert (scaling.num_workers, scaling.use_gpu, scaling.placement_strategy) == (2, True, "SPREAD")
    assert (scaling.label_selector, scaling.accelerator_type) == ({"market": "!spot"}, "H200")
    assert scaling.resources_per_worker["CPU"] == 0.5 and 0 < scaling.resources_per_worker["memory"] <= 2**24
    assert (run.name, run.storage_path) == ("configs", str(tmp_path / "runs"))
    failures = run.failure_config
    assert (failures.max_failures, failures.max_preemption_failures, failures.preemption_grace_s) == (7, 2, 9.0)


def test_a_checkpoint_of_an_earlier_step_goes_with_the_next_step(relay: tuple[Any, list[Any]]) -> None:
    made, events = relay
    made.after_report(None, [{"step": 3, IS_LAST: False}], None)
    made.after_report(None, [{"step": 2, CHECKPOINT_PATH: "/run/step_000002"}], None)
    made.after_report(None, [{"step": 4, IS_LAST: True, CHECKPOINT_PATH: "/run/step_000004"}], None)
    made.after_report(None, [{"step": 5, IS_LAST: False}], None)
    made.after_report(None, [{"step": 5, CHECKPOINT_PATH: "/run/step_000005"}], None)
    made.after_report(None, [{"step": 6, IS_LAST: True}], None)
    assert events == [
        StepReport({"step": 3}, False, None),
        StepReport({"step": 4}, True, "/run/step_000004"),
        StepReport({"step": 5}, False, None),
        StepReport({"step": 6}, True, "/run/step_000005"),
    ]


@pytest.mark.parametrize(
    ("error", "is_fatal"), [(ValueError("no such setting"), True), (RuntimeError("engine 0 died"), False)]
)
def test_only_an_error_that_would_come_again_ends_the_run(
    error: Exception, is_fatal: bool, relay: tuple[Any, list[Any]]
) -> None:
    made, events = relay
    text = f"worker 1: {type(error).__name__}: {error}"
    if is_fatal:
        with pytest.raises(RuntimeError, match="no such setting"):
            made.after_exception(None, {1: error})
    else:
        made.after_exception(None, {1: error})
    assert events == [WorkersFailed(text, is_fatal)]


@pytest.mark.slow
def test_a_late_report_of_the_job_before_is_not_taken_for_one_of_this_job(ray_cluster: None) -> None:
    """A stopped job's workers say that they have ended, and its last report comes by another way, through Train."""
    run = object.__new__(train_run.TrainRun)
    run.box, run._job, run._seen, run._is_job_over = Box.new(start_mailbox()), 2, 0, False
    for report in (StepReport({"step": 4}, True, None, 1), StepReport({"step": 1}, False, None, 2)):
        run.box.send(report)
    run.box.send(StepReport({"step": 2}, True, None, 2), wait=True)
    assert [report.metrics["step"] for report in run._reports([], print, time.monotonic() + 30)] == [1, 2]
    ray.kill(run.box.actor)
