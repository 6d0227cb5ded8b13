"""How the analysis refuses what it cannot read; tests/analysis has what it prints of sweeps."""

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
from rlx.storage.signatures import SIGNATURE, Signer
from rlx.tracking.services import mlflow


def test_an_analysis_makes_no_storage_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert analyze.main(["--storage", str(tmp_path / "storage")]) == 1
    assert capsys.readouterr().err == f"error: no storage folder {tmp_path}/storage\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mode", "best"], "error: --mode: invalid choice: 'best'"),
        (["--mode", "MAX"], "(choose from 'max', 'min'); nearest: max"),
        (["--swep", "s"], "unrecognized arguments: --swep s"),
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
    words = ["--sweep", "nb", "--storage", "/my runs", "--experiment", "my sums", "--tracking-uri", "http://host:5000"]
    assert analyze.sweep_words("nb", "/my runs", tracking) == words


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
