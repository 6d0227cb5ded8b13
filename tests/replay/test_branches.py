"""A branch as a run of its own: its settings, its place, and what is left of it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from replay_cases import evaluated, run_of
from test_run_folder import settings

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree
from rlx.config.sections.data import EvalConfig, EvalSetConfig
from rlx.replay import branches, pairs
from rlx.replay.recorded import RecordedRun
from rlx.runs import launch, run_folder
from rlx.storage.addresses import open_storage


@pytest.fixture
def run(tiny_model: Path, tmp_path: Path) -> RecordedRun:
    short = {"data__max_prompt_tokens": 32, "rollout__max_tokens": 8}
    own = {"model__path": str(tiny_model), "tracking__completions": 0.25, "checkpoint__every": 10}
    return run_of(tmp_path / "storage", **short, **own)


def test_a_replay_lies_beside_the_run_and_leaves_nothing(run: RecordedRun, tmp_path: Path) -> None:
    with branches.scratch(run) as place:
        branch = place.placed(replace(branches.branch_to(run, 13), attributes_gradient=True))
        prepared = branch.prepare()
        config = prepared.config
        assert prepared.replay and (prepared.replay.until, prepared.replay.attributes_gradient) == (13, True)
        assert prepared.replayed == run.folder  # its prompts are to be these
        assert (config.name, config.train.steps, config.checkpoint.every) == ("a-13", 30, 0)
        assert config.checkpoint.init_from == f"{tmp_path}/storage/runs/a/step_000010"
        assert config.checkpoint.init_state == "all"
        assert (config.tracking.completions, config.tracking.backends) == (1.0, ("mlflow",))
        assert branches.records_of(prepared) == place.uri != f"sqlite:///{tmp_path}/storage/mlflow.db"
        folder = Path(config.storage)
        assert folder.parent == tmp_path / "storage" / branches.REPLAYS
        run_folder.check_start(config)
        (folder / "runs" / "a-13").mkdir(parents=True)
        (folder / "runs" / "a-13" / "file").write_text("x")
    assert not folder.exists() and folder.parent.exists()
    assert not Path(place.uri.removeprefix("sqlite:///")).parent.exists()


@pytest.mark.parametrize(("name", "stem"), [("a copy", "a-copy"), ("ä", "run"), ("a?", "a"), ("b" * 150, "b" * 96)])
def test_a_run_whose_folder_was_renamed_is_replayed_under_a_name_that_a_run_can_have(
    name: str, stem: str, run: RecordedRun, tmp_path: Path
) -> None:
    (tmp_path / "storage" / "runs" / "a").rename(tmp_path / "storage" / "runs" / name)
    renamed = RecordedRun.read(name, str(tmp_path / "storage"))
    with branches.scratch(renamed) as place:
        config = place.placed(branches.branch_to(renamed, 13)).prepare().config
        assert config.name == f"{stem}-13" and config.checkpoint.init_from == f"{renamed.folder.path}/step_000010"
        assert Path(place.address).name.startswith(f"{stem}-")
    names = pairs.pair_names(open_storage(str(tmp_path / "storage")) / "runs", renamed, 10)
    assert names == (f"{stem}-at-10-1.control", f"{stem}-at-10-1.changed")


def test_a_replay_can_be_kept(run: RecordedRun) -> None:
    with branches.scratch(run, keep=True) as place:
        (Path(place.address) / "runs").mkdir(parents=True)
    assert Path(place.address).exists()


def test_two_replays_at_once_have_places_of_their_own(run: RecordedRun) -> None:
    with branches.scratch(run) as first, branches.scratch(run) as second:
        assert first.address != second.address and first.uri != second.uri


def test_a_job_ends_with_its_step_and_opens_it(run: RecordedRun, tmp_path: Path) -> None:
    with branches.scratch(run) as place:
        prepared = place.placed(replace(branches.branch_to(run, 13), attributes_gradient=True)).prepare()
        job = launch._job(prepared, open_storage(str(tmp_path)), [], "signed", False)
        assert (job.replay, job.waits, job.signature) == (prepared.replay, False, "signed")
        plain = launch._job(replace(prepared, replay=None), open_storage(str(tmp_path)), [], "", True)
        assert (plain.replay, plain.waits) == (None, True)


def test_steps_with_which_a_run_once_ended_are_evaluated_again(run: RecordedRun) -> None:
    """Step 12 was the last before the run went on, step 30 is it now; the others are due, with eval.every 10."""
    for number in (0, 10, 12, 20, 30):
        evaluated(run.folder, number, [True])
    assert run.evaluated_ends(EvalConfig(every=10)) == {12}
    own = EvalSetConfig(name="own", every=4, source="reasoning_gym:chain_sum")
    evaluated(run.folder, 16, [True], name="own")
    evaluated(run.folder, 30, [True], name="own")
    assert run.evaluated_ends(EvalConfig(every=0)) == {10, 12, 16, 20, 30}
    assert run.evaluated_ends(EvalConfig(every=10, sets=(own,))) == {12, 30}
    with branches.scratch(run) as place:
        prepared = place.placed(branches.branch_to(run, 13)).prepare()
        assert prepared.replay and prepared.replay.evaluated == {12, 16}


def test_the_model_may_lie_elsewhere_under_its_name(run: RecordedRun, tiny_model: Path, tmp_path: Path) -> None:
    """That its files are the same is what `rlx verify` says."""
    (tmp_path / "here").mkdir()
    here = tmp_path / "here" / tiny_model.name
    here.symlink_to(tiny_model)
    with branches.scratch(run) as place:
        branch = place.placed(replace(branches.branch_to(run, 13), changes={"model.path": str(here)}))
        prepared = branch.prepare()
        assert Path(prepared.model_path).samefile(tiny_model)
        run_folder.check_start(prepared.config)


def test_steps_from_the_start_have_the_runs_own_start(run: RecordedRun, tiny_model: Path, tmp_path: Path) -> None:
    """A run that began with another's weights begins with them again."""
    origin = f"{tmp_path}/storage/runs/a/step_000020"
    start = {"checkpoint__init_from": origin, "model__path": str(tiny_model), "train__steps": 30}
    folder = tmp_path / "storage" / "runs" / "b"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"mlflow_run": "2"}))
    (folder / "config.yaml").write_text(yaml.safe_dump(settings(name="b", storage=str(tmp_path / "storage"), **start)))
    other = RecordedRun.read("b", str(tmp_path / "storage"))
    branch = branches.branch_to(other, 5, trust=True)
    assert branch.start is None and branch.origin == "the start" and branch.steps == range(6)
    config = from_tree(branch.tree())
    assert (config.checkpoint.init_from, config.checkpoint.init_state) == (origin, "weights")


def test_a_run_is_found_by_its_name_or_its_folder(run: RecordedRun, tmp_path: Path) -> None:
    storage = str(tmp_path / "storage")
    for which in ("a", f"{storage}/runs/a", f"{storage}/runs/a/", f"file://{storage}/runs/a"):
        found = RecordedRun.read(which, storage)
        assert (found.name, found.folder.path) == ("a", f"{storage}/runs/a")
        assert found.storage.removeprefix("file://") == storage
    with pytest.raises(ConfigError, match=r"no run 'b' in .*; nearest: a|no run 'b'"):
        RecordedRun.read("b", storage)
    with pytest.raises(ConfigError, match=r"no run in /nowhere/runs/a"):
        RecordedRun.read("/nowhere/runs/a", storage)
