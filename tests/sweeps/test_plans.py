"""A recorded sweep as a resume finds it, and the Tuner that runs it once; no trial runs here."""

import json
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ray import tune

from rlx.analysis.loading import RACE_FILE
from rlx.config.errors import ConfigError
from rlx.config.sweep import OF_THE_MACHINE
from rlx.storage.filesystem import Storage
from rlx.storage.signatures import SIGNATURE, Signer
from rlx.sweeps import plans, trainable, tuner
from rlx.sweeps.callback import DriverState
from rlx.sweeps.records import (
    PLAN_FILE,
    SweepPlan,
    TrialRecord,
    TrialRecords,
    TrialState,
    find_sweep,
    plan_content,
    read_plan,
    trial_name,
)
from rlx.sweeps.tuner import SweepTuner
from rlx.tracking import outbox
from rlx.tracking.services import mlflow

SPACE = "SPACE = {}\n"
TREE: dict[str, Any] = {"train": {"steps": 3}, "data": {"source": "/gone/sums.jsonl"}, "model": {"path": "org/model"}}


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    """A storage with the sweep s, which this user has recorded."""
    made = Storage.local(tmp_path)
    record(made, SweepPlan("s", TREE, str(tmp_path / "mine.py")))
    return made


def record(storage: Storage, plan: SweepPlan) -> None:
    folder, content = storage / "sweeps" / plan.name, plan_content(plan)
    (folder / "sweep.json").write_text(json.dumps(content))
    (folder / "space.py").write_text(SPACE)
    (folder / SIGNATURE).write_text(Signer.new().sign({"plan": content, "space": SPACE}))


# ---------------------------------------------------------------------------------------------------------------------
# What a resume may change


def test_a_plan_is_kept_under_the_names_that_its_file_has_always_had() -> None:
    kept = {
        "name": "s", "tree": TREE, "space": "space.py", "trials": 2, "search": "random", "scheduler": "none",
        "seeds": 3, "max_seeds": None, "alpha": 0.05, "max_concurrent": None, "reuse": "engines",
        "metric": "eval/accuracy", "mode": "max", "budget": None, "rung_by": "steps", "defaults": 3,
    }  # fmt: skip
    plan = SweepPlan("s", TREE, "space.py", candidates=2, seeds=3)
    assert plan.config.train.steps == 3  # what a plan has worked out is no part of it
    assert json.dumps(plan_content(plan), indent=1) == json.dumps(kept, indent=1)
    assert read_plan(kept) == plan
    assert (plan.candidates, plan.total_trials) == (2, 6)


def test_a_sweep_goes_on_with_the_addresses_of_today(storage: Storage) -> None:
    now = plans.continued_sweep(storage, "s", {"ray_address": "auto", "data.source": "/here/sums.jsonl"})
    assert (now.config.ray_address, now.config.data.source) == ("auto", "/here/sums.jsonl")
    assert (now.name, now.config.train.steps, now.config.model.path) == ("s", 3, "org/model")
    assert Path(now.space).read_text() == SPACE
    assert Path(now.space).name == "mine.py"  # errors and MLflow name the file as its author did
    saved = json.loads((storage / "sweeps" / "s" / "sweep.json").read_text())
    assert saved["tree"] == TREE  # the record is what it was


def test_without_addresses_of_today_it_has_those_of_before(storage: Storage) -> None:
    assert plans.continued_sweep(storage, "s", {}).config.data.source == "/gone/sums.jsonl"


def test_a_setting_of_the_experiment_cannot_change(storage: Storage) -> None:
    with pytest.raises(ConfigError) as raised:
        plans.continued_sweep(storage, "s", {"train.steps": 4, "ray_address": "auto", "seed": 2})
    assert str(raised.value) == (
        f"seed cannot change when a sweep is resumed; only {', '.join(OF_THE_MACHINE)} can"  # the first of them
    )


def test_an_address_of_today_that_is_none_is_of_who_gave_it(storage: Storage) -> None:
    for giver in ("command line", "overrides"):
        with pytest.raises(ConfigError, match=rf"^{giver}: tracking\.uri = 3: input should be a valid string"):
            plans.continued_sweep(storage, "s", {"tracking.uri": 3}, giver=giver)


def test_a_file_of_another_name_is_other_data(storage: Storage) -> None:
    with pytest.raises(ConfigError, match=r"^data\.source is /gone/sums\.jsonl in "):
        plans.continued_sweep(storage, "s", {"data.source": "/here/products.jsonl"})


def test_a_sweep_that_is_not_there_has_its_nearest_name(storage: Storage) -> None:
    record(storage, SweepPlan("rates", TREE, "mine.py"))
    with pytest.raises(ConfigError, match=r"no sweep rate in .*rates"):
        plans.continued_sweep(storage, "rate", {})


def test_the_plan_of_another_sweep_is_damaged(storage: Storage) -> None:
    for name in ("sweep.json", "space.py", SIGNATURE):
        content = (storage / "sweeps" / "s" / name).read_text()
        (storage / "sweeps" / "copied" / name).write_text(content)
    with pytest.raises(ConfigError, match=r"^sweep .*/copied is damaged: it is not what rlx wrote$"):
        plans.continued_sweep(storage, "copied", {})


def test_code_of_somebody_else_does_not_run_until_it_is_trusted(storage: Storage) -> None:
    (storage / "sweeps" / "s" / "space.py").write_text("SPACE = {1: 2}\n")
    with pytest.raises(ConfigError, match=r"^this user did not write sweep 's'.*--trust runs them$"):
        plans.continued_sweep(storage, "s", {})
    assert Path(plans.continued_sweep(storage, "s", {}, trust=True).space).read_text() == "SPACE = {1: 2}\n"
    assert plans.continued_sweep(storage, "s", {}).name == "s"  # from then on it is this user's


def test_another_sweep_is_refused_the_name_of_one_that_is_kept(storage: Storage, tmp_path: Path) -> None:
    kept = plans.continued_sweep(storage, "s", {"ray_address": "auto", "data.source": "/here/sums.jsonl"})
    assert tuner._of_trials(kept) == tuner._of_trials(plans.saved_sweep(storage, "s"))
    (tmp_path / "other.py").write_text("def space():\n    return {'train.actor_lr': 1e-3}\n")
    changes = {"candidates": 9}, {"tree": kept.tree | {"seed": 9}}, {"space": str(tmp_path / "other.py")}
    for change in changes:
        with pytest.raises(ConfigError, match=r"^sweep 's' exists in .*: --resume s continues it$"):
            tuner.make_tuner(replace(kept, **change), storage)


# ---------------------------------------------------------------------------------------------------------------------
# Failed trials


@pytest.mark.parametrize(
    ("from_scratch", "has_run", "expected"),
    [
        (False, True, {"reports": [(4, 0.5)], "attempts": 1}),
        (True, True, {"reports": [], "attempts": 2}),  # a run of its own, beside the one that failed
        (True, False, {"reports": [], "attempts": 1}),  # it failed before it had a run
    ],
)
def test_failed_trials_are_open_again_and_no_others(
    from_scratch: bool, has_run: bool, expected: dict[str, Any], storage: Storage
) -> None:
    folder, settings = storage / "sweeps" / "s", {"train.actor_lr": 1e-3}
    records = TrialRecords(folder)
    stopped = TrialRecord(settings=settings, state=TrialState.STOPPED, reports=[(4, 0.25)])
    failed = TrialRecord(settings=settings, state=TrialState.FAILED, reports=[(4, 0.5)], message="out of memory")
    records.write("trial_00000", stopped)
    records.write("trial_00001", failed)
    records.flush()
    run = folder / "runs" / "trial_00001"
    if has_run:
        for file in ("run.json", "config.yaml"):
            (run / file).write_text("{}")
        (run / trainable._FAILURE).write_text("out of memory")
    plan = plans.saved_sweep(storage, "s")
    assert plans.restart_failed(plan, storage, from_scratch=from_scratch) == ["trial_00001"]
    found = TrialRecords(folder).all()
    assert found["trial_00000"] == stopped
    assert found["trial_00001"] == TrialRecord(settings=settings, **expected)
    assert not (run / trainable._FAILURE).exists()
    assert plans.restart_failed(plan, storage) == []


@pytest.mark.parametrize("from_scratch", [False, True])
def test_a_further_attempt_that_failed_before_it_began_runs_again(from_scratch: bool, storage: Storage) -> None:
    plan, runs = plans.saved_sweep(storage, "s"), storage / "sweeps" / "s" / "runs"
    for file in ("run.json", "config.yaml"):
        (runs / "trial_00001" / file).write_text("{}")
    record_failure(storage, attempts=1)
    plans.restart_failed(plan, storage, from_scratch=True)
    (runs / "trial_00001.2" / trainable._FAILURE).write_text("no such file")  # as `run_trial` leaves it
    record_failure(storage, attempts=2)
    plans.restart_failed(plan, storage, from_scratch=from_scratch)
    known = TrialRecords(storage / "sweeps" / "s").read("trial_00001")
    attempt = trainable.current_attempt(plan, storage, "trial_00001", known, "")
    assert (attempt.name, trainable.failure_of(runs / attempt.name)) == ("trial_00001.2", None)


def record_failure(storage: Storage, attempts: int) -> None:
    records = TrialRecords(storage / "sweeps" / "s")
    failed = TrialRecord(settings={}, state=TrialState.FAILED, message="no such file", attempts=attempts)
    records.write("trial_00001", failed)
    records.flush()


# ---------------------------------------------------------------------------------------------------------------------
# The Tuner

PENDING = "TUNE_MAX_PENDING_TRIALS_PG"


@pytest.fixture
def place(tmp_path: Path, empty_database: Path) -> Path:
    """A storage that has MLflow's database already."""
    shutil.copy(empty_database, tmp_path)
    return tmp_path


def made_tuner(tmp_path: Path, **options: Any) -> SweepTuner:
    (tmp_path / "space.py").write_text("def space():\n    return {'train.actor_lr': 1e-5}\n")
    run_config = tune.RunConfig(name="tune", storage_path=str(tmp_path))
    plan = SweepPlan("s", TREE | {"storage": str(tmp_path)}, str(tmp_path / "space.py"), **options)
    folder = Storage.local(tmp_path) / "sweeps" / "s"
    (folder / PLAN_FILE).write_text(json.dumps(plan_content(plan)))
    return SweepTuner(
        plan,
        folder,
        lambda config: None,
        DriverState(),
        run_config=run_config,
    )


@pytest.mark.parametrize(("candidates", "most"), [(4, "200"), (90, "270")])  # of 3 seeds
def test_tune_may_start_all_trials_while_it_runs_and_the_variable_is_as_before(
    candidates: int, most: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[str | None]()
    monkeypatch.setattr(tune.Tuner, "fit", lambda self: seen.append(os.environ.get(PENDING)))
    monkeypatch.delenv(PENDING, raising=False)
    made_tuner(place, candidates=candidates, seeds=3).fit()
    assert (seen, PENDING in os.environ) == ([most], False)
    monkeypatch.setenv(PENDING, "7")
    made_tuner(place, candidates=candidates, seeds=3).fit()
    assert (seen, os.environ[PENDING]) == ([most, most], "7")


def test_a_tuner_runs_once_and_gives_its_claim_back_also_after_an_error(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back = list[str]()

    def fail(self: tune.Tuner) -> None:
        given_back.append("runs")
        raise RuntimeError("the cluster is gone")

    monkeypatch.setattr(tune.Tuner, "fit", fail)
    monkeypatch.delenv(PENDING, raising=False)
    made = made_tuner(place)
    made.hold(partial(given_back.append, "given back"))
    with pytest.raises(RuntimeError, match="the cluster is gone"):
        made.fit()
    assert (given_back, PENDING in os.environ) == (["runs", "given back"], False)
    with pytest.raises(ConfigError) as raised:
        made.fit()
    way_on = f"rlx.resume_tuner('s', storage='{place}')"
    assert str(raised.value) == f"a Tuner runs once: {way_on} makes one for what is left of the sweep"
    assert given_back == ["runs", "given back"]


def status_in_mlflow(folder: Storage) -> str:
    uri = mlflow.default_uri(Path(folder.path).parents[1])
    return mlflow.get_run(uri, str(outbox.run_id(folder))).status


def test_the_run_of_a_sweep_begins_with_the_fit_and_goes_on_with_the_next_one(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[str]()

    def fail(self: SweepTuner) -> None:
        seen.append(status_in_mlflow(self._folder))
        raise RuntimeError("the cluster is gone")

    monkeypatch.setattr(tune.Tuner, "fit", fail)
    made = [made_tuner(place, seeds=2) for _ in range(2)]
    assert outbox.run_id(made[0]._folder) is None
    for each in made:
        with pytest.raises(RuntimeError, match="the cluster is gone"):
            each.fit()
        assert status_in_mlflow(each._folder) == "FAILED"
    assert seen == ["RUNNING", "RUNNING"]
    run = mlflow.get_run(mlflow.default_uri(place), str(outbox.run_id(made[0]._folder)))
    assert (run.params["trials"], run.tags["rlx.seeds"], run.tags["rlx.attempt"]) == ("8", "2", "2")


def test_a_race_is_kept_by_its_tuner_once_all_trials_have_ended(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune.Tuner, "fit", lambda self: None)
    uri = mlflow.default_uri(place)
    for state in (TrialState.OPEN, TrialState.FINISHED):
        made = made_tuner(place, candidates=2, seeds=2, scheduler="race")
        records = TrialRecords(made._folder)
        for number in range(4):
            records.write(trial_name(number), TrialRecord(settings={"seed": number}, state=state, reports=[(3, 0.5)]))
        records.flush()
        made.fit()
        run = str(outbox.run_id(made._folder))
        assert mlflow.artifact_names(uri, run) == ([RACE_FILE] if state is TrialState.FINISHED else [])
    assert "tied: after 2 seeds none is shown to be behind" in mlflow.read_artifact(uri, run, RACE_FILE)


def test_failures_are_one_line_each() -> None:
    results = {
        "trial_00000": TrialRecord(settings={}, state=TrialState.FINISHED),
        "trial_00001": TrialRecord(settings={}, state=TrialState.FAILED, message="out of memory"),
        "trial_00002": TrialRecord(settings={}, state=TrialState.STOPPED),
    }
    assert tuner.failures(results) == ["trial_00001: out of memory"]


@pytest.mark.parametrize(
    ("states", "interrupted", "is_whole"),
    [
        ([TrialState.FINISHED, TrialState.FAILED], False, True),
        ([TrialState.FINISHED, TrialState.STOPPED], True, False),
        ([TrialState.FINISHED, TrialState.OPEN], False, False),  # the signal came while no trial ran
        ([TrialState.FINISHED], False, False),  # one of two has not begun
    ],
)
def test_a_sweep_that_is_not_over_was_interrupted(
    states: list[TrialState], interrupted: bool, is_whole: bool, storage: Storage
) -> None:
    plan, folder = SweepPlan("s", TREE, "space.py", candidates=2), storage / "sweeps" / "s"
    records = TrialRecords(folder)
    for number, state in enumerate(states):
        records.write(f"trial_{number:05d}", TrialRecord(settings={}, state=state))
    records.flush()
    if is_whole:
        assert [each.state for each in tuner._results(plan, folder, interrupted).values()] == states
    else:
        with pytest.raises(KeyboardInterrupt):
            tuner._results(plan, folder, interrupted)


def test_models_that_a_space_names_are_needed_by_name_or_folder(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    plan = SweepPlan("s", TREE, "space.py")
    for varied in (tune.grid_search([str(each) for each in folders]), tune.choice([str(each) for each in folders])):
        needed = tuner.models_of(plan, {"model.path": varied})
        assert [(each.path, each.setting) for each in needed] == [(str(each), "model.path") for each in folders]


def test_a_teacher_that_rlx_makes_is_needed_by_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner.preflight, "model_folder", lambda path, storage: f"{storage}/models/{path}")
    plan = SweepPlan("s", {"storage": "/s", "model": {"path": "a/b", "reference_path": "tiny"}}, "space.py")
    needed = [(each.path, each.setting) for each in tuner.models_of(plan, {})]
    assert needed == [("/s/models/a/b", "model.path"), ("/s/models/tiny", "model.reference_path")]


def test_prompts_that_trials_read_are_looked_for_on_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(tuner.nodes, "check_path", lambda path, setting: asked.append((setting, path)))
    monkeypatch.setattr(tuner, "start_mailbox", lambda: None)
    monkeypatch.setattr(tuner.relay, "reachable", lambda services: [])
    monkeypatch.setattr(tuner.nodes, "is_own_cluster", lambda: True)
    sets = [{"name": "mine", "source": "judged.jsonl"}]
    sources = [{"source": "one.jsonl"}, {"source": "two.jsonl", "held_out": "held.jsonl"}]
    plan = SweepPlan("s", {"data": {"sources": sources}, "eval": {"sets": sets}}, "space.py")
    shared = tuner.shared_inputs(plan, {"model.lora_rank": tune.choice([8, 16])}, [])
    assert shared.model_path is shared.tables is None
    named = [path for _, path in asked if not path.startswith("reasoning_gym:")]  # which is no path
    assert named == ["one.jsonl", "two.jsonl", "held.jsonl", "judged.jsonl"]
    asked.clear()
    space = {"model.lora_rank": 8, "data.source": tune.grid_search(["a.jsonl", "b.jsonl"])}
    tuner.shared_inputs(SweepPlan("s", {}, "space.py"), space, [])
    assert asked == [("data.source", "a.jsonl"), ("data.source", "b.jsonl")]


def test_a_storage_without_sweeps_says_so(tmp_path: Path) -> None:
    for name, said in ((None, "no sweeps in "), ("a", "no sweep a in ")):
        with pytest.raises(ConfigError, match=f"^{said}{tmp_path}/sweeps$"):
            find_sweep(Storage.local(tmp_path), name)
