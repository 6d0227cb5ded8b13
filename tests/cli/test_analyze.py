"""How the analysis refuses what it cannot read; tests/analysis has what it prints of sweeps."""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlx.cli import analyze
from rlx.config.loading import from_tree
from rlx.config.sections.records import TrackingConfig
from rlx.storage.addresses import open_storage
from rlx.storage.filesystem import Storage
from rlx.storage.signatures import SIGNATURE, Signer
from rlx.sweeps.records import SweepPlan, plan_content, planned_tracking, signed_content
from rlx.tracking.services import mlflow


def test_an_analysis_makes_no_storage_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert analyze.main(["--storage", str(tmp_path / "storage")]) == 1
    assert capsys.readouterr().err.startswith(f"error: no storage folder {tmp_path}/storage; --tracking.uri names ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mode", "best"], "error: --mode: invalid choice: 'best'"),
        (["--mode", "MAX"], "(choose from 'max', 'min'); nearest: max"),
        (["--swep", "s"], "unrecognized arguments: --swep s; nearest: --sweep ("),
        (["--uri=x"], "unrecognized arguments: --uri=x; here it is --tracking.uri ("),
        (["--output_dir", "x"], "unrecognized arguments: --output_dir x ("),  # which is the storage of `rlx train`
        (["--exp", "rlx"], "unrecognized arguments: --exp rlx"),  # options are written out
    ],
)
def test_mistakes_in_the_options_of_an_analysis(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        analyze.main(words)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (KeyboardInterrupt(), "interrupted\n", 130),
        (PermissionError(13, "Permission denied", "page"), "error: page: Permission denied\n", 1),
    ],
)
def test_an_analysis_that_cannot_end_says_why_in_a_line(
    error: BaseException, said: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: Any) -> int:
        raise error

    monkeypatch.setattr(analyze, "print_analysis", fail)
    assert analyze.main([]) == code
    assert capsys.readouterr() == ("", said)


def test_a_database_that_breaks_while_it_is_read_is_told_of_in_a_line(
    tmp_path: Path, empty_database: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    uri = mlflow.default_uri(tmp_path)
    mlflow.client(uri).create_experiment("rlx")
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        database.execute("DROP TABLE runs")
    assert analyze.main(["--storage", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: MLflow does not answer any more: ") and "runs" in line


def test_the_storage_that_is_there_has_the_database(tmp_path: Path) -> None:
    assert analyze.existing_uri(tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    assert not list(tmp_path.iterdir())


def test_a_printed_command_finds_its_sweep_wherever_that_is() -> None:
    assert analyze.sweep_words("nb", "storage", TrackingConfig()) == ["--sweep", "nb"]
    tracking = TrackingConfig(uri="http://host:5000", experiment="my sums")
    words = ["--sweep", "nb", "--storage", "/my runs", "--experiment", "my sums", "--tracking.uri", "http://host:5000"]
    assert analyze.sweep_words("nb", "/my runs", tracking) == words


def test_a_sweep_is_read_where_its_own_plan_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is at these addresses: the error names the one that was asked."""
    folder = Storage.local(tmp_path) / "sweeps" / "s"
    at = {name: f"sqlite:///{tmp_path}/{name}/mlflow.db" for name in ("planned", "given")}
    plan = SweepPlan("s", {"tracking": {"uri": at["planned"], "experiment": "sums"}}, "space.py")
    (folder / "sweep.json").write_text(json.dumps(plan_content(plan)))
    (folder / "space.py").write_text("")

    def asked(*words: str) -> str:
        assert analyze.main([*words, "--storage", str(tmp_path)]) == 1
        return capsys.readouterr().err

    theirs = f"error: this user did not write sweep 's', which is recorded at {at['planned']}: --tracking.uri gives"
    assert asked().startswith(theirs) and asked("--sweep", "s").startswith(theirs)
    planned, given = (f"error: no MLflow database {tmp_path}/{name}/mlflow.db\n" for name in at)
    assert asked("--trust") == planned and not (folder / SIGNATURE).exists()
    (folder / SIGNATURE).write_text(Signer.new().sign(signed_content(folder)))
    assert asked() == asked("--sweep", "s") == planned
    assert asked("--tracking.uri", at["given"]) == asked("--tracking-uri", at["given"]) == given
    assert asked("--sweep", "other") == f"error: no MLflow database {tmp_path}/mlflow.db\n"  # by its name in MLflow
    assert analyze.main(["--sweep", f"{tmp_path}/sweeps/s"]) == 1 and capsys.readouterr().err == planned
    assert planned_tracking(Storage.local(tmp_path), None).experiment == "sums"
    (folder / "sweep.json").write_text("[1]")
    assert asked("--sweep", "s") == f"error: no MLflow database {tmp_path}/mlflow.db\n"


def named(name: str) -> Any:
    """As much of a trial as is looked at."""
    return SimpleNamespace(name=name)


def test_what_somebody_else_wrote_is_not_handed_on(tmp_path: Path) -> None:
    """A stranger's store may name a module of this folder as the reward of the best setting."""
    tree = from_tree({"reward": {"functions": {"my_rewards:boom": 1.0}}}).model_dump(mode="json")
    runs, trial = open_storage(str(tmp_path)), named("trial_00000")
    for folder in (tmp_path / trial.name, tmp_path / "elsewhere"):
        folder.mkdir()
    assert analyze._not_own(runs, trial, tree) == {"reward.functions": {"my_rewards:boom": 1.0}}
    (runs / trial.name / SIGNATURE).write_text(Signer.new().sign(tree))
    assert analyze._not_own(runs, trial, tree) == {}
    assert analyze._not_own(runs, trial, {**tree, "seed": 7}) != {}  # of another config
    (runs / "elsewhere" / SIGNATURE).write_text(Signer.new().sign(tree))
    assert analyze._not_own(runs / "below", named("../elsewhere"), tree) != {}


@pytest.mark.parametrize("words", [[], ["--sweep", "sw1"]])
def test_a_sweep_is_not_compared_with_itself(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rlx.tracking.services.mlflow.find_experiment", lambda *_: "1")
    monkeypatch.setattr("rlx.analysis.loading.sweep_names", lambda *_: ["sw1", "sw0"])
    assert analyze.main([*words, "--against", "sw1", "--storage", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: --against sw1 is the analyzed sweep itself: ")
