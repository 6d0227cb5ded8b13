"""The lineage of a trial of population based training, as schedules, by the folders of its runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_cases import train
from shared import NothingLeft
from test_run_folder import settings
from test_sweep import News, history, prepared

from rlx.cli.timemachine import lineage as command
from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, read_yaml, with_overrides
from rlx.config.run import may_change
from rlx.storage.addresses import open_storage
from rlx.storage.filesystem import Storage
from rlx.sweeps import tuner
from rlx.sweeps.records import SweepPlan, TrialRecord, TrialState
from rlx.sweeps.schedulers import lineage
from rlx.sweeps.schedulers.lineage import Stretch
from rlx.sweeps.space import load_space
from rlx.tracking.metrics import MEASURED

VARIED = ["train.actor_lr", "algorithm.kl_coef"]


def run(sweep: Path, name: str, lr: float, kl: float, origin: str | None = None) -> None:
    """The folder of a run; `origin`: the run and the step that it went on from, as a@6."""
    folder, donor = sweep / "runs" / name, (origin or "").split("@")
    start = {"checkpoint__init_from": f"{sweep}/runs/{donor[0]}/step_{int(donor[1]):06d}"} if origin else {}
    whole = {"checkpoint__init_state": "all"} if origin else {}
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"mlflow_run": name}))
    given = settings(name="x", train__actor_lr=lr, algorithm__kl_coef=kl, **start, **whole)
    (folder / "config.yaml").write_text(yaml.safe_dump(given))


@pytest.fixture
def sweep(tmp_path: Path) -> Storage:
    """Trial 1 went on from trial 0 at step 4 with another rate, and from trial 2 at step 8 with a third."""
    folder = tmp_path / "sweeps" / "s"
    run(folder, "trial_00000", 1e-4, 0.01)
    run(folder, "trial_00002", 4e-4, 0.01)
    run(folder, "trial_00001", 9e-4, 0.01)
    run(folder, "trial_00002.2", 2e-4, 0.01, "trial_00000@4")
    run(folder, "trial_00001.2", 5e-4, 0.01, "trial_00000@4")
    run(folder, "trial_00001.3", 3e-4, 0.01, "trial_00002.2@8")
    return open_storage(str(folder))


def test_stretches_lead_back_to_the_start(sweep: Storage) -> None:
    stretches = lineage.lineage_of(sweep, "trial_00001", 12, VARIED)
    assert [(each.run, each.start, each.end) for each in stretches] == [
        ("trial_00000", 0, 4),
        ("trial_00002.2", 4, 8),
        ("trial_00001.3", 8, 12),
    ]
    assert [each.settings["train.actor_lr"] for each in stretches] == [1e-4, 2e-4, 3e-4]
    assert lineage.scheduled_settings(stretches) == {
        "train.actor_lr": {"0": 1e-4, "4": 2e-4, "8": 3e-4},
        "algorithm.kl_coef": 0.01,
    }
    (alone,) = lineage.lineage_of(sweep, "trial_00000", 12, VARIED)
    assert (alone.start, alone.end) == (0, 12)


def test_the_config_has_the_schedules(sweep: Storage) -> None:
    schedule = lineage.scheduled_settings(lineage.lineage_of(sweep, "trial_00001", 12, VARIED))
    plan = SweepPlan("s", {"name": "s", "storage": "x", "train": {"steps": 12}}, "space.py")
    config = from_tree(lineage.rerun_tree(plan, schedule))
    assert (config.name, config.train.steps, config.algorithm.kl_coef) == (None, 12, 0.01)
    rates = [config.at(step, 0).train.actor_lr for step in (0, 3, 4, 7, 8, 11)]
    assert rates == [1e-4, 1e-4, 2e-4, 2e-4, 3e-4, 3e-4]


def test_a_value_that_comes_back_is_a_point_of_its_own() -> None:
    values = [1.0, 2.0, 2.0, 1.0]
    stretches = [Stretch("r", 3 * i, 3 * i + 3, {"algorithm.kl_coef": value}) for i, value in enumerate(values)]
    assert lineage.scheduled_settings(stretches) == {"algorithm.kl_coef": {"0": 1.0, "3": 2.0, "9": 1.0}}


def test_what_can_have_no_schedule_is_refused_if_it_changed() -> None:
    stretches = [Stretch("r", 0, 3, {"train.ppo_epochs": 1}), Stretch("r", 3, 6, {"train.ppo_epochs": 2})]
    assert may_change("train.actor_lr") and not may_change("train.ppo_epochs")
    assert not may_change("seed") and not may_change("data.source")
    with pytest.raises(ConfigError, match=r"train.ppo_epochs changed in the lineage, and can have no schedule"):
        lineage.scheduled_settings(stretches)
    assert lineage.scheduled_settings(stretches[:1]) == {"train.ppo_epochs": 1}


def test_runs_that_lead_in_a_circle_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    run(folder, "trial_00000", 1e-4, 0.1, "trial_00001@8")
    run(folder, "trial_00001", 1e-4, 0.1, "trial_00000@4")
    with pytest.raises(ConfigError, match=r"went on from step \d+, and was not evaluated since"):
        lineage.lineage_of(open_storage(str(folder)), "trial_00000", 12, VARIED)


def record(value: float) -> TrialRecord:
    return TrialRecord(settings={}, state=TrialState.FINISHED, reports=[(4, 0.0), (12, value)])


def test_the_best_trial_and_the_setting_beside_it(sweep: Storage) -> None:
    plan = SweepPlan("s", {}, "space.py")
    records = {f"trial_0000{number}": record(value) for number, value in enumerate((0.3, 0.9, 0.5))}
    assert lineage.best_trial(plan, records) == "trial_00001"
    assert lineage.best_trial(SweepPlan("s", {}, "space.py", mode="min"), records) == "trial_00000"
    failed = record(0.99).model_copy(update={"state": TrialState.FAILED})
    assert lineage.best_trial(plan, records | {"trial_00003": failed}) == "trial_00001"
    lineages = {name: lineage.lineage_of(sweep, name, 12, VARIED) for name in records}
    constant, which = lineage.constant_settings(plan, records, lineages, "trial_00001")
    assert constant == {"train.actor_lr": 1e-4, "algorithm.kl_coef": 0.01}
    assert which == "those of trial_00000, the best trial that never changed"
    changed = {name: each for name, each in lineages.items() if len(each) > 1}
    constant, which = lineage.constant_settings(plan, records, changed, "trial_00002")
    assert constant["train.actor_lr"] == 2e-4 and which.startswith("those that trial_00002 had from step 4 to 12")
    with pytest.raises(ConfigError, match="no trial of sweep s has been evaluated yet"):
        lineage.best_trial(plan, {"trial_00000": TrialRecord(settings={})})
    with pytest.raises(ConfigError, match="or those that were have failed"):
        lineage.best_trial(plan, {"trial_00000": failed})


@pytest.mark.slow
def test_the_command_shows_the_lineage_and_writes_both_settings(
    sweep: Storage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = "def space():\n    from ray import tune\n\n    return {'train.actor_lr': tune.loguniform(1e-5, 1e-3)}\n"
    plan = {"name": "s", "tree": {"train": {"steps": 12}}, "space": "space.py", "scheduler": "pbt", "defaults": 2}
    (sweep / "sweep.json").write_text(json.dumps(plan))
    (sweep / "space.py").write_text(space)
    for number, value in enumerate((0.3, 0.9, 0.5)):
        (sweep / "trials" / f"trial_0000{number}.json").write_text(record(value).model_dump_json())
    words = ["s", "--storage", str(tmp_path), "--out", str(tmp_path / "out"), "--trust"]
    assert command.main(words) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "trial_00001 of sweep s: eval/accuracy 0.9"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in shown[4:7]]
    assert rows == [
        ["1 to 4", "trial_00000", "0.0001"],
        ["5 to 8", "trial_00002.2", "0.0002"],
        ["9 to 12", "trial_00001.3", "0.0003"],
    ]
    assert "the constant settings beside it are those of trial_00000, the best trial that never changed" in shown
    assert [line.split()[1] for line in shown[-3:]] == ["sweep", "sweep", "analyze"]
    config = from_tree(read_yaml(tmp_path / "out" / "schedule.yaml"))
    assert config.schedules["train.actor_lr"].points == {"0": 1e-4, "4": 2e-4, "8": 3e-4}
    constant = from_tree(read_yaml(tmp_path / "out" / "constant.yaml"))
    assert (constant.train.actor_lr, constant.train.steps, constant.schedules) == (1e-4, 12, {})
    (tmp_path / "out" / "schedule.yaml").unlink()
    assert command.main([*words, "--trial", "trial_00000"]) == 0
    said = "trial_00000 never changed its settings: there is no schedule to compare with constant ones"
    assert capsys.readouterr().out.splitlines()[-1] == said
    assert not (tmp_path / "out" / "schedule.yaml").exists()
    assert command.main([*words, "--trial", "trial_00009"]) == 1
    assert "--trial trial_00009: sweep s has trial_00000, trial_00001, trial_00002" in capsys.readouterr().err


def test_the_files_can_be_used_as_they_are(tmp_path: Path) -> None:
    """The space is of one setting, the config complete; the commands are those that compare both."""
    tree: dict[str, Any] = {"train": {"steps": 12}}
    plan, schedule = SweepPlan("s", tree, "space.py", metric="eval/reward"), {"train.actor_lr": {"0": 1e-4, "4": 2e-4}}
    command.write_files(tmp_path / "out", plan, {"schedule": schedule}, ["train.actor_lr"])
    space = load_space(str(tmp_path / "out" / "schedule.py"), tree)
    assert space["train.actor_lr"].categories == [{"0": 1e-4, "4": 2e-4}]
    config = from_tree(read_yaml(tmp_path / "out" / "schedule.yaml"))
    assert config.schedules["train.actor_lr"].points == {"0": 1e-4, "4": 2e-4}
    first, second, third = command.rerun_commands(tmp_path / "out", plan, "storage")
    assert first.startswith(f"rlx sweep --config {tmp_path}/out/schedule.yaml --space {tmp_path}/out/schedule.py ")
    assert first.endswith("--trials 1 --seeds 5 --seed 100 --name s-schedule --metric eval/reward --mode max")
    assert "--name s-constant" in second
    assert third == "rlx analyze --sweep s-schedule --against s-constant --metric eval/reward --mode max"


@pytest.mark.slow  # a whole sweep, and a run
@pytest.mark.timeout(900)
def test_a_run_with_the_schedule_of_a_lineage_has_its_numbers(
    tiny_model: Path, tmp_path: Path, nothing_left: NothingLeft
) -> None:
    """To the last bit, on the seed of the sweep: all that the trials did is in the schedule."""
    space, lengths = (
        "{'train.actor_lr': tune.loguniform(1e-5, 1e-3)}",
        {"functions": {"length": 1.0}, "length_target": 3},
    )
    options: dict[str, Any] = {"scheduler": "pbt", "candidates": 2, "metric": "eval/reward"}
    plan, storage = prepared(tiny_model, tmp_path, space, {"reward": lengths}, **options)
    tuner.run_sweep(plan, storage, watch=News().watch)
    folder, varied = storage / "sweeps" / "s", ["train.actor_lr"]
    lineages = [lineage.lineage_of(folder, name, 10, varied) for name in ("trial_00000", "trial_00001")]
    changed = max(lineages, key=len)
    assert len(changed) > 1 and changed[-1].end == 10
    tree = lineage.rerun_tree(plan, lineage.scheduled_settings(changed))
    again = train(from_tree(with_overrides(tree, {"name": "again", "storage": storage.path})), keep=False)
    count = 0
    for each in changed:
        own = history(plan, storage, each.run)
        names = [name for name in own if not name.startswith(MEASURED)]
        steps = range(each.start + 1, each.end + 1)
        for name, step in ((name, step) for name in names for step in steps if step in own[name]):
            assert again.history[name][step] == own[name][step], (each, name, step)
            count += 1
    assert count > 200
    assert {step: values[0] for step, values in again.history["schedule/train.actor_lr"].items()} == {
        step: each.settings["train.actor_lr"] for each in changed for step in range(each.start + 1, each.end + 1)
    }
