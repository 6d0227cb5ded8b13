"""What Tune's callback shows and records of trials, without a cluster: real trials of Tune and real files."""

import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError
from ray.tune import TuneError
from ray.tune.experiment import Trial

from rlx.config.errors import ConfigError
from rlx.config.sections.records import BackendName
from rlx.config.sweep import SchedulerName
from rlx.runs.run_folder import holds_run
from rlx.storage.filesystem import Storage
from rlx.sweeps import callback
from rlx.sweeps.callback import DriverState, SweepCallback, TrialLog
from rlx.sweeps.records import SweepPlan, TrialRecord, TrialRecords, TrialState
from rlx.sweeps.schedulers.schedule import Schedule
from rlx.tracking.base import Failure, Reach, RunStatus
from rlx.tracking.tracker import OutboxTracker

METRIC = "eval/score"
STEPS = 8  # an evaluation every 4
DIED = "Traceback\nray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\nmore of it"
UNAVAILABLE = str(ActorUnavailableError("RpcError: connection reset", bytes(16)))  # what Tune writes, without the type
NODE_DIED = "The actor died because its node has died. Node Id: 3a, Node Ip: 127.0.0.3\nthe actor's node was terminated"


@dataclass
class Service:
    """A tracking service in this process: what runs were told, by their names. It is its runs' writer as well."""

    tags: dict[str, dict[str, str]] = field(default_factory=dict)
    ends: dict[str, list[RunStatus]] = field(default_factory=dict)
    run: str = ""
    opened: dict[str, dict[str, Any]] = field(default_factory=dict)
    name: BackendName = "mlflow"
    reach = Reach.ANYWHERE
    title = address = "a service"

    def make_run(self, key: str, experiment: str, name: str, **more: Any) -> str:
        self.opened[name] = more
        return name

    def reopen_run(self, run_id: str, at: int, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        pass

    def missing(self) -> str:
        return ""

    def writer(self, run_id: str) -> "Service":
        return Service(self.tags, self.ends, run_id)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self.tags.setdefault(self.run, {}).update(tags)

    def end(self, status: RunStatus, at: int) -> None:
        self.ends.setdefault(self.run, []).append(RunStatus(status))

    def failure(self, error: Exception) -> Failure:
        return Failure.REFUSED

    def cause(self, error: Exception) -> str:
        return str(error)


class Sweep:
    """A sweep of two trials, as Tune's controller would drive its callback."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.service = Storage.local(folder), Service()
        self.records = TrialRecords(self.folder)
        schedule = Schedule(STEPS, 4, {})
        self.log = TrialLog([self.service], self.folder, self.records, schedule, METRIC)  # type: ignore[list-item]
        self.driver = DriverState()
        plan = SweepPlan("s", {"train": {"steps": STEPS}}, "space.py")
        self.callback = SweepCallback(plan, self.log, self.driver)
        self.trials = [self._trial(number) for number in range(2)]
        self.open_run(self.folder, "s")

    def _trial(self, number: int) -> Trial:
        name = f"trial_{number:05d}"
        self.records.write(name, TrialRecord(settings={"train.actor_lr": 1e-3}))
        self.open_run(self.folder / "runs" / name, name)
        return Trial("t", config={"train.actor_lr": 1e-3}, stub=True, trial_name_creator=lambda trial: name)

    def open_run(self, folder: Storage, name: str) -> None:
        """As its own process does."""
        (folder / "config.yaml").write_text("{}") if folder.path != self.folder.path else None
        tracker = OutboxTracker([self.service], folder, "rank_0")  # type: ignore[list-item]
        tracker.open("rlx", name, params={}, tags={})
        tracker.close(5)

    def start(self, *numbers: int) -> None:
        for number in numbers:
            self.trials[number].set_status(Trial.RUNNING)
            self.callback.on_trial_start(1, self.trials, self.trials[number])

    def report(self, number: int, step: int, score: float, **more: float) -> None:
        result = {"step": step, METRIC: score, "time/eval": 0.1, **more}
        self.trials[number].update_last_result(result)
        self.callback.on_trial_result(1, self.trials, self.trials[number], result)

    def complete(self, number: int) -> None:
        self.trials[number].set_status(Trial.TERMINATED)
        self.callback.on_trial_complete(1, self.trials, self.trials[number])

    def fail(self, number: int, *errors: str) -> None:
        """Each error ended the trial once; without one, its process was killed."""
        for error in errors or [DIED]:
            self.trials[number].handle_error(TuneError(error))
        self.trials[number].set_status(Trial.ERROR)
        self.callback.on_trial_error(1, self.trials, self.trials[number])

    def end(self) -> None:
        self.callback.on_experiment_end(self.trials)

    def record(self, number: int) -> TrialRecord:
        """As a resume reads it: from the file."""
        self.log.flush()
        return TrialRecords(self.folder).read(f"trial_{number:05d}")


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sweep]:
    monkeypatch.setattr(callback, "request_resources", lambda bundles: None)  # there is no cluster
    monkeypatch.setattr(Trial, "local_path", str(tmp_path))  # instead of a folder in Ray's session
    before = signal.getsignal(signal.SIGINT)
    yield Sweep(tmp_path)
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def seen(sweep: Sweep) -> list[tuple[str, dict[str, Any], str]]:
    """What whoever watches is told: trial, metrics, state."""
    calls: list[tuple[str, dict[str, Any], str]] = []
    sweep.driver.watch = lambda trial, settings, metrics, state: calls.append((trial, dict(metrics), str(state)))
    return calls


def test_only_evaluations_that_training_changed_are_recorded(sweep: Sweep) -> None:
    sweep.start(0)
    sweep.report(0, 4, 0.25)
    sweep.report(0, 6, 0.9)  # between evaluations, as a best checkpoint of another period would have it
    sweep.callback.on_trial_result(1, sweep.trials, sweep.trials[0], {"step": 8, METRIC: 0.9})  # its evaluation is old
    assert sweep.record(0).reports == [(4, 0.25)]


@pytest.mark.parametrize(("takes_s", "is_written"), [(0.2, True), (30.0, False)])
def test_a_trial_goes_on_when_its_evaluation_is_written_or_the_storage_is_too_slow(
    takes_s: float, is_written: bool, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep.start(0)
    sweep.log.flush()
    monkeypatch.setattr(callback, "_WRITING_S", 5.0 if is_written else 0.1)
    ended, write = threading.Event(), Storage.write_text

    def slowly(file: Storage, text: str) -> None:
        ended.wait(takes_s)
        write(file, text)

    monkeypatch.setattr(Storage, "write_text", slowly)
    sweep.report(0, 4, 0.25)
    written = TrialRecords(sweep.folder).read("trial_00000").reports
    ended.set()
    assert written == [(4, 0.25)] * is_written


def test_tokens_of_a_report_are_recorded_where_rungs_are_in_them(sweep: Sweep) -> None:
    sweep.start(0)
    sweep.log.schedule = replace(sweep.log.schedule, rung_by="tokens")
    sweep.report(0, 4, 0.25, **{"tokens/total": 640.0})
    assert (sweep.record(0).reports, sweep.record(0).progress) == ([(4, 0.25)], {4: 640.0})


def test_a_step_that_is_done_again_replaces_what_followed_it(sweep: Sweep) -> None:
    sweep.start(0)
    sweep.report(0, 4, 0.25)
    sweep.report(0, 8, 0.5)
    sweep.report(0, 4, 0.75)  # it went on from a checkpoint of step 0
    assert sweep.record(0).reports == [(4, 0.75)]


def test_a_report_has_the_settings_that_a_scheduler_has_just_given(sweep: Sweep) -> None:
    sweep.start(0)
    sweep.trials[0].set_config({"train.actor_lr": 5e-4})
    sweep.report(0, 4, 0.25)
    assert sweep.record(0).settings == {"train.actor_lr": 5e-4}


@pytest.mark.parametrize(("step", "state"), [(8, TrialState.FINISHED), (4, TrialState.STOPPED)])
def test_a_trial_that_ends_before_its_last_step_was_stopped(
    step: int, state: TrialState, sweep: Sweep, seen: list[tuple[str, dict[str, Any], str]]
) -> None:
    sweep.start(0)
    sweep.report(0, step, 0.5)
    sweep.complete(0)
    assert (sweep.record(0).state, sweep.record(0).message) == (state, "")
    tags = {"trial_00000": {"rlx.stopped": "4"}} if step == 4 else {}
    assert sweep.service.tags == tags
    metrics = {"step": step, METRIC: 0.5, "time/eval": 0.1}
    assert [(trial, told) for trial, _, told in seen] == [
        ("trial_00000", "running"),
        ("trial_00000", "running"),
        ("trial_00000", state.value),
    ]
    assert [metrics.items() <= told.items() for _, told, _ in seen] == [False, True, True]


@pytest.mark.parametrize("scheduler", ["asha", "race"])
@pytest.mark.parametrize("status", [Trial.RUNNING, Trial.PAUSED])
def test_a_trial_that_a_scheduler_stops_has_ended_at_once(status: str, scheduler: SchedulerName, sweep: Sweep) -> None:
    sweep.callback.plan = replace(sweep.callback.plan, scheduler=scheduler)
    sweep.start(0)
    sweep.report(0, 4, 0.5)
    sweep.trials[0].set_status(status)
    sweep.callback.on_trial_complete(1, sweep.trials, sweep.trials[0])
    assert (sweep.record(0).state, sweep.service.ends) == (TrialState.STOPPED, {"trial_00000": [RunStatus.FINISHED]})


def test_the_first_end_of_a_trial_is_the_one_that_is_kept(sweep: Sweep) -> None:
    sweep.start(0)
    sweep.report(0, 8, 0.5)
    sweep.complete(0)
    sweep.log.end_trial(sweep.trials[0], TrialState.FAILED, "its node is gone")
    assert (sweep.record(0).state, sweep.record(0).message) == (TrialState.FINISHED, "")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (DIED, ["its process was killed"]),
        (UNAVAILABLE, ["its process was killed"]),
        (NODE_DIED, ["its process was killed"]),
        ("Traceback\nrlx.runs.train_run.RunLostError: Ray Train's controller died", ["Ray Train's controller died"]),
        ("Traceback\nrlx.runs.train_run.RunError: the loss is NaN at step 3", []),  # as it will be again
    ],
)
def test_a_trial_that_was_lost_is_told_of_before_it_goes_on(
    error: str, told: list[str], sweep: Sweep, caplog: pytest.LogCaptureFixture
) -> None:
    sweep.start(0)
    sweep.trials[0].handle_error(TuneError(error))
    sweep.callback.on_trial_recover(iteration=1, trials=sweep.trials, trial=sweep.trials[0])  # as Tune calls it
    end = "it is started again, from its newest checkpoint if it has one"
    assert caplog.messages == [f"trial_00000: {reason} - {end}" for reason in told]


def test_a_trial_that_fails_is_shown_and_its_run_ends_at_once(
    sweep: Sweep, seen: list[tuple[str, dict[str, Any], str]]
) -> None:
    sweep.start(0, 1)
    sweep.fail(0)
    assert (sweep.record(0).state, sweep.record(0).message) == (TrialState.FAILED, "its process was killed")
    assert sweep.service.ends == {"trial_00000": [RunStatus.FAILED]}
    assert sweep.service.tags == {"trial_00000": {"rlx.error": "its process was killed"}}
    assert seen[-1][::2] == ("trial_00000", "failed")


@pytest.mark.parametrize(
    ("errors", "message"),
    [
        (["Traceback\n  File x\nrlx.runs.train_run.RunError: the loss is NaN at step 3"], "the loss is NaN at step 3"),
        (["Traceback\nValueError: rlx.runs: odd"], "ValueError: rlx.runs: odd"),
        ([DIED], "its process was killed"),
        (["A worker process has died\nrlx.runs.train_run.RunError: a worker was lost"], "a worker was lost"),
        ([f"ValueError: {'x' * 600}"], f"ValueError: {'x' * 488}"),
        ([""], "its process was killed"),
        ([UNAVAILABLE], "its process was killed"),
        ([NODE_DIED], "its process was killed"),
        ([DIED, "Traceback\nrlx.config.errors.ConfigError: no step 4"], "no step 4"),  # of a trial that was tried again
        (["Traceback\nValueError: odd", DIED], "its process was killed"),
    ],
)
def test_the_reason_of_a_failure_is_one_line(errors: list[str], message: str, sweep: Sweep) -> None:
    sweep.start(0)
    sweep.fail(0, *errors)
    assert sweep.record(0).message == message


Drive = Callable[[Sweep], None]


def both_finish(sweep: Sweep) -> None:
    sweep.start(0, 1)
    for number in (0, 1):
        sweep.report(number, 8, 0.5)
        sweep.complete(number)


def one_fails(sweep: Sweep) -> None:
    both_finish(sweep)
    sweep.fail(1)


def both_fail(sweep: Sweep) -> None:
    sweep.start(0, 1)
    sweep.fail(0)
    sweep.fail(1)


def the_rest_fails(sweep: Sweep) -> None:
    """The first trial has finished before a resume."""
    sweep.records.write("trial_00000", TrialRecord(settings={}, state=TrialState.FINISHED))
    sweep.start(1)
    sweep.fail(1)


def one_is_interrupted(sweep: Sweep) -> None:
    sweep.start(0, 1)
    sweep.report(0, 8, 0.5)
    sweep.complete(0)


def one_waits(sweep: Sweep) -> None:
    one_is_interrupted(sweep)
    del sweep.callback.statuses["trial_00001"]
    sweep.trials[1].set_status(Trial.PENDING)


FINISHED, FAILED, KILLED = RunStatus.FINISHED, RunStatus.FAILED, RunStatus.KILLED


@pytest.mark.parametrize(
    ("drive", "ends", "interrupted"),
    [
        (both_finish, {"trial_00000": FINISHED, "trial_00001": FINISHED, "s": FINISHED}, False),
        (one_fails, {"trial_00000": FINISHED, "trial_00001": FAILED, "s": FINISHED}, False),
        (both_fail, {"trial_00000": FAILED, "trial_00001": FAILED, "s": FAILED}, False),
        (the_rest_fails, {"trial_00001": FAILED, "s": FINISHED}, False),
        (one_is_interrupted, {"trial_00000": FINISHED, "trial_00001": KILLED, "s": KILLED}, True),
        (one_waits, {"trial_00000": FINISHED, "s": KILLED}, True),
    ],
)
def test_runs_end_with_the_status_of_their_trials(
    drive: Drive, ends: dict[str, RunStatus], interrupted: bool, sweep: Sweep
) -> None:
    for number in (0, 1):
        sweep.trials[number].set_status(Trial.TERMINATED)
    drive(sweep)
    sweep.end()
    assert {name: statuses[-1] for name, statuses in sweep.service.ends.items()} == ends
    assert sweep.driver.interrupted is interrupted


def test_the_newest_run_of_a_trial_is_the_one_that_ends(sweep: Sweep) -> None:
    newest = sweep.folder / "runs" / "trial_00000.2"
    sweep.open_run(newest, "trial_00000.2")
    sweep.start(0)
    sweep.fail(0)
    sweep.log.flush()
    assert sweep.service.ends == {"trial_00000.2": [RunStatus.FAILED]}


def test_a_trial_that_fails_before_its_run_begins_is_recorded_with_its_settings(sweep: Sweep) -> None:
    run = sweep.folder / "runs" / "trial_00001"
    for name in ("run.json", "config.yaml"):
        (run / name).delete()
    sweep.start(1)
    sweep.fail(1, "Traceback\nrlx.config.errors.ConfigError: it must be a multiple")
    sweep.log.flush()
    assert sweep.service.ends == {"s.trial_00001": [RunStatus.FAILED]}
    assert sweep.service.tags["s.trial_00001"]["rlx.error"] == "it must be a multiple"
    opened = sweep.service.opened["s.trial_00001"]
    assert (opened["params"]["train.actor_lr"], opened["params"]["train.steps"]) == ("0.001", str(STEPS))
    assert (opened["tags"]["rlx.trial"], opened["parent"]) == ("trial_00001", "s")
    assert not holds_run(run)  # so that --restart-errored begins it
    sweep.service.opened.clear()
    sweep.open_run(run, "trial_00001")
    assert holds_run(run) and not sweep.service.opened  # with the same MLflow run


@pytest.mark.parametrize(
    ("settings", "recorded"),
    [
        ({"data.source": "sums.jsonl"}, {"data.source": "{}/sums.jsonl"}),
        ({"train.adam_betas": [0.8, 0.9]}, {"train.adam_betas": "(0.8, 0.9)"}),
        ({"train.steps": "none", "train.seed": 7}, {"train.steps": "none", "train.seed": "7"}),  # no run has these
    ],
)
def test_a_trial_without_a_run_is_recorded_with_the_settings_that_its_run_would_have(
    settings: dict[str, Any], recorded: dict[str, str], sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sums.jsonl").write_text("{}")
    for name in ("run.json", "config.yaml"):
        (sweep.folder / "runs" / "trial_00001" / name).delete()
    sweep.trials[1].set_config(settings)
    sweep.start(1)
    sweep.fail(1, "Traceback\nrlx.config.errors.ConfigError: no such column")
    sweep.log.flush()
    params = sweep.service.opened["s.trial_00001"]["params"]
    assert {key: params[key] for key in recorded} == {key: text.format(tmp_path) for key, text in recorded.items()}
    assert params["name"] == "s.trial_00001"


@pytest.mark.parametrize("fails", ["watch", "records"])
def test_a_sweep_goes_on_when_showing_or_recording_fails(
    fails: str, sweep: Sweep, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no(*args: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(*(sweep.driver, "watch", no) if fails == "watch" else (sweep.records, "write", no))
    sweep.start(0)
    sweep.report(0, 4, 0.25)
    assert set(caplog.messages) == {"the sweep goes on: OSError: no space left"}


def test_a_copy_refuses_to_run_and_records_nothing(sweep: Sweep) -> None:
    copy: SweepCallback = pickle.loads(pickle.dumps(sweep.callback))  # as Tuner.restore has it
    name, way_on = sweep.folder.name, "rlx.resume_tuner('s')"
    with pytest.raises(ConfigError) as raised:
        copy.setup()
    assert str(raised.value) == (
        f"Tuner.restore reads the results of sweep {name!r} alone: {way_on}.fit() continues it"
    )
    sweep.callback.setup()  # the original does not refuse
    copy.on_trial_error(1, sweep.trials, sweep.trials[0])
    copy.log.end_sweep(RunStatus.KILLED)
    copy.log.flush()
    assert sweep.service.ends == {}
    assert (copy.steps, copy.log.metric, copy.log.schedule) == (STEPS, METRIC, sweep.log.schedule)


class Rooms:
    """Counts how often it was asked, and by how many open trials."""

    def __init__(self, is_due: bool) -> None:
        self.is_due, self.asked = is_due, list[int]()

    def trials(self, open_trials: int) -> int:
        self.asked.append(open_trials)
        return 1


@pytest.mark.parametrize(("is_due", "asked"), [(True, [1]), (False, [])])
def test_the_room_is_asked_for_the_trials_that_are_not_over(is_due: bool, asked: list[int], sweep: Sweep) -> None:
    sweep.driver.room = rooms = Rooms(is_due)
    sweep.start(0)
    sweep.trials[1].set_status(Trial.ERROR)
    sweep.callback.on_step_begin(1, sweep.trials)
    assert rooms.asked == asked


def test_an_interrupt_is_told_of_before_tune_ends_its_trials_and_ctrl_c_is_as_before_in_the_end(
    sweep: Sweep, caplog: pytest.LogCaptureFixture
) -> None:
    before, calls = signal.getsignal(signal.SIGINT), list[tuple[int, int]]()
    signal.signal(signal.SIGINT, lambda number, frame: calls.append((number, len(caplog.messages))))  # Tune's
    sweep.callback.on_step_begin(0, sweep.trials)
    sweep.callback.on_step_begin(1, sweep.trials)  # which installs no second handler
    signal.raise_signal(signal.SIGINT)
    said = "interrupted: ending the trials, which takes some seconds; interrupt again to end at once"
    assert (calls, caplog.messages) == ([(signal.SIGINT, 1)], [said])
    sweep.driver.end()
    assert signal.getsignal(signal.SIGINT) is before


def test_the_autoscaler_is_asked_for_nothing_once_a_sweep_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Any]()
    monkeypatch.setattr(callback, "request_resources", lambda bundles: asked.append(bundles))
    DriverState().end()
    assert asked == [[]]


def test_after_a_deleted_trial_the_service_is_waited_for(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(self: Service, status: RunStatus, at: int) -> None:
        if self.run == str(sweep.trials[0]):
            raise LookupError("it is deleted")
        self.ends.setdefault(self.run, []).append(RunStatus(status))

    monkeypatch.setattr(Service, "end", end)
    monkeypatch.setattr(Service, "failure", lambda self, error: Failure.DELETED)
    sweep.start(0, 1)
    started = time.monotonic()
    sweep.complete(0)
    sweep.log.flush()
    assert time.monotonic() - started < callback._PATIENCE_S / 2 and sweep.log._patience_s == callback._PATIENCE_S
    sweep.complete(1)
    sweep.end()
    assert str(sweep.trials[0]) not in sweep.service.ends and str(sweep.trials[1]) in sweep.service.ends


@pytest.mark.slow
def test_a_service_that_is_away_is_waited_for_once(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 500 trials each would else wait at the end of a sweep."""

    def away(*_: Any) -> None:
        raise ConnectionError("it is away")

    monkeypatch.setattr(callback, "_PATIENCE_S", 2.0)
    sweep.log._patience_s = 2.0
    monkeypatch.setattr(Service, "end", away)
    monkeypatch.setattr(Service, "failure", lambda self, error: Failure.AWAY)
    sweep.start(0, 1)
    sweep.complete(0)
    sweep.complete(1)
    started = time.monotonic()
    sweep.end()
    assert time.monotonic() - started < 3.9  # one of three waits
    kept = [
        folder / "outbox" for folder in (sweep.folder, *(sweep.folder / "runs" / str(each) for each in sweep.trials))
    ]
    assert all(each.exists() for each in kept)  # for the next resume
