"""Runs and their checkpoints as a person sees them: figures, what is wrong with them, and commands that work."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlx import __version__
from rlx.cli import listing
from rlx.cli import main as rlx
from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree
from rlx.config.run import RunConfig
from rlx.runs import run_folder
from rlx.storage import checkpoint_catalog
from rlx.storage.addresses import open_storage
from rlx.storage.checkpoint_manifest import Manifest
from rlx.storage.filesystem import Storage, StorageError

ROOT = Path(__file__).resolve().parents[2]


def make_run(storage: str, name: str, *names: str, **settings: Any) -> RunConfig:
    """A run's folder as a run leaves it, without checkpoints."""
    folder = open_storage(storage)
    for part in names or ("runs", name):
        folder = folder / part
    config = from_tree({"name": name, "train": {"steps": 40}} | settings)
    (folder / "run.json").write_text('{"mlflow_run": "0"}')
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return config


def put(storage: str, name: str, step: int, ranks: int = 2, **metrics: float) -> Path:
    """A checkpoint of 1000 bytes per rank."""
    place = open_storage(storage) / "runs" / name / checkpoint_catalog.checkpoint_name(step)
    for rank in range(ranks):
        (place / f"rank_{rank:05d}.safetensors").write_text(f"{rank}" * 1000)
    files = {file: checkpoint_catalog.file_record(place / file) for file in place.names()}
    known = {key.replace("__", "/"): value for key, value in metrics.items()}
    manifest = Manifest(
        rlx=__version__, step=step, ranks=ranks, metrics=known, tokens=0, kl={}, scores={}, cursor={}, evaluation={},
        mlflow_run_id=None, config=RunConfig().model_dump(mode="json"), files=files,
    )  # fmt: skip
    checkpoint_catalog.commit(place, manifest)
    return Path(place.path)


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """One with a run of four checkpoints: two complete, an unfinished and a damaged one."""
    monkeypatch.chdir(tmp_path)
    make_run("kept", "try1")
    put("kept", "try1", 10, ranks=1, reward__mean=0.25, eval__accuracy=0.75, kl__ref=0.00123456)
    put("kept", "try1", 20, reward__mean=0.5, eval__accuracy=0.5)
    (put("kept", "try1", 30) / "rank_00001.safetensors").write_text("cut")
    (put("kept", "try1", 35) / "manifest.json").unlink()
    return "kept"


Shown = Callable[..., str]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Shown:
    """What the script prints."""

    def run(*words: str, code: int = 0) -> str:
        assert runpy.run_path(str(ROOT / "experiments" / "checkpoints.py"))["main"](words) == code
        out, err = capsys.readouterr()
        assert not (err if code == 0 else out)
        return err if code else out

    return run


def cells(text: str) -> list[dict[str, str]]:
    """The rows of a Markdown table in a text."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    head, rule, *rows = [[cell.strip() for cell in line] for line in lines]
    assert all(re.fullmatch(":?-+:?", cell) for cell in rule)
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_a_runs_checkpoints(storage: str, shown: Shown) -> None:
    when = time.mktime((2026, 3, 4, 5, 6, 7, 0, 0, -1))
    os.utime(Path(storage, "runs/try1/step_000010/manifest.json"), (when, when))
    text = shown("try1", "--storage", storage)
    assert text.startswith("run try1: 20 of 40 steps done\n\n")
    first, second, third, fourth = cells(text)
    assert first == {
        "step": "10",
        "written": "2026-03-04 05:06",
        "size": first["size"],
        "ranks": "1",
        "reward/mean": "0.25",
        "eval/accuracy": "0.75",
        "kl/ref": "0.001235",
        "state": "complete",
        "which": "best",
    }
    assert (second["step"], second["ranks"], second["kl/ref"], second["which"]) == ("20", "2", "-", "newest")
    assert third["state"] == "rank_00001.safetensors has 3 bytes, not 1000"
    assert fourth["state"] == "no manifest.json: it was never finished"
    assert (fourth["written"], fourth["size"], fourth["ranks"]) == ("-", "2.0 KiB", "-")
    assert [row["which"] for row in (third, fourth)] == ["", ""]
    folder = Path(storage, "runs/try1/step_000020")
    assert second["size"] == listing.readable_size(sum(file.stat().st_size for file in folder.iterdir()))


def commands(text: str) -> list[list[str]]:
    return [shlex.split(line) for line in text.splitlines() if line.startswith("rlx ")]


def test_commands_go_on_from_a_run(storage: str, shown: Shown) -> None:
    text = shown("try1", "--storage", storage)
    assert f"\nin {Path.cwd()}/kept/runs/try1\n" in text
    assert commands(text) == [
        ["rlx", "train", "--resume", "try1", "--storage", "kept"],
        ["rlx", "train", "--from", "try1@best", "--storage", "kept"],
        ["rlx", "export", "try1", "--checkpoint", "best", "--storage", "kept"],
    ]
    assert run_folder.checkpoint_of("try1@best", "kept")[1].step == 10


def test_a_run_whose_folder_was_renamed_is_not_resumed_by_that_name(storage: str, shown: Shown) -> None:
    Path(storage, "runs/try1").rename(Path(storage, "runs/try1 copy"))
    assert commands(shown("try1 copy", "--storage", storage)) == [
        ["rlx", "train", "--from", "try1 copy@best", "--storage", "kept"],
        ["rlx", "export", "try1 copy", "--checkpoint", "best", "--storage", "kept"],
    ]


def test_the_usual_storage_need_not_be_named(storage: str, shown: Shown) -> None:
    Path(storage).rename("storage")
    assert commands(shown("try1"))[1:] == [
        ["rlx", "train", "--from", "try1@best"],
        ["rlx", "export", "try1", "--checkpoint", "best"],
    ]


def test_a_finished_run_goes_on_with_more_steps(storage: str, shown: Shown) -> None:
    Path(storage, "runs/try1/result.json").write_text(json.dumps({"step": 40}))
    text = shown("try1", "--storage", storage)
    assert text.startswith("run try1: 40 of 40 steps done\n")
    assert commands(text)[0][2:6] == ["--resume", "try1", "--train.steps", "80"]


def test_a_run_by_its_folder(storage: str, shown: Shown) -> None:
    """A trial of a sweep, too: it cannot be resumed by itself."""
    make_run(storage, "s.trial_00000", "sweeps", "s", "runs", "trial_00000")
    Path(storage, "runs/try1/step_000010").rename(Path(storage, "sweeps/s/runs/trial_00000/step_000010"))
    text = shown(f"{storage}/sweeps/s/runs/trial_00000")
    assert commands(text) == [
        ["rlx", "train", "--from", "kept/sweeps/s/runs/trial_00000@best"],
        ["rlx", "export", "kept/sweeps/s/runs/trial_00000", "--checkpoint", "best"],
    ]
    assert run_folder.checkpoint_of("kept/sweeps/s/runs/trial_00000@best", "storage")[1].step == 10


def test_without_a_best_there_is_a_newest(storage: str, shown: Shown) -> None:
    make_run(storage, "plain")
    put(storage, "plain", 5, reward__mean=0.5)
    text = shown("plain", "--storage", storage)
    assert [(row["which"], "eval/accuracy" in row) for row in cells(text)] == [("newest", False)]
    assert commands(text)[1][3] == "plain@newest"


@pytest.mark.parametrize("damage", ["rank_00000.safetensors", "manifest.json"])
def test_a_best_that_would_be_refused_is_not_named(damage: str, storage: str, shown: Shown) -> None:
    """Neither the damaged one, nor the next one in its place."""
    Path(storage, "runs/try1/step_000010", damage).write_text("{}")
    text = shown("try1", "--storage", storage)
    assert [row["which"] for row in cells(text)] == ["", "newest", "", ""]
    assert [command[2:5] for command in commands(text)[1:]] == [
        ["--from", "try1@newest", "--storage"],
        ["try1", "--checkpoint", "newest"],
    ]
    with pytest.raises(StorageError, match="best by eval/accuracy, cannot be used"):
        run_folder.checkpoint_of("try1@best", storage)


def test_the_best_is_by_what_the_run_says(storage: str, shown: Shown) -> None:
    make_run(storage, "other", checkpoint={"best_by": "eval/length", "best_mode": "min"})
    for step, length in ((1, 3.0), (2, 2.0), (3, 4.0)):
        put(storage, "other", step, eval__length=length, eval__accuracy=0.1 * length)
    rows = cells(shown("other", "--storage", storage))
    assert [(row["eval/length"], row["which"]) for row in rows] == [("3", ""), ("2", "best"), ("4", "newest")]


def test_all_runs(storage: str, shown: Shown) -> None:
    make_run(storage, "fresh")
    make_run(storage, "s.trial_00000", "sweeps", "s", "runs", "trial_00000")
    make_run(storage, "broken")
    Path(storage, "runs/broken/config.yaml").write_text("]")
    Path(storage, "runs/no-run").mkdir()
    broken, fresh, try1, trial = cells(shown("--storage", storage))
    assert [try1[key] for key in ("run", "steps", "newest", "best")] == ["try1", "20/40", "step_000020", "step_000010"]
    assert try1["problem"] == "2 of 4 checkpoints not complete"
    files = Path(storage, "runs/try1").rglob("step_*/*")
    assert try1["size"] == listing.readable_size(sum(file.stat().st_size for file in files))
    assert list(fresh.values()) == ["fresh", "0/40", "-", "-", "0 B", ""]
    assert trial["run"] == "kept/sweeps/s/runs/trial_00000"  # what the script takes for RUN
    assert broken["steps"] == "0/?" and re.fullmatch(r".*/config\.yaml is damaged.*", broken["problem"])


def test_what_cannot_be_read_hides_nothing_else(storage: str, shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(storage, "older")
    manifest = put(storage, "older", 5) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 1}))
    put(storage, "older", 6)
    make_run(storage, "locked")
    for place in ("s.trial", "locked.trial"):
        make_run(storage, place, "sweeps", place.partition(".")[0], "runs", "trial_00000")
    for file in ("runs/.DS_Store", "sweeps/.DS_Store", "sweeps/notes.txt"):
        Path(storage, file).touch()
    exists, names = Storage.exists, Storage.names

    def is_open(place: Storage) -> Storage:
        if "/locked" in place.path:
            raise PermissionError(13, "Permission denied", place.path)
        return place

    monkeypatch.setattr(Storage, "exists", lambda place: exists(is_open(place)))
    monkeypatch.setattr(Storage, "names", lambda place: names(is_open(place)))
    locked, older, _, sweep, trial = cells(shown("--storage", storage))
    assert (locked["run"], sweep["run"]) == ("locked", "kept/sweeps/locked")
    assert "Permission denied" in locked["problem"] and "Permission denied" in sweep["problem"]
    assert (older["newest"], trial["problem"]) == ("step_000006", "")
    assert "format 1" in older["problem"]
    assert ["format 1" in row["state"] for row in cells(shown("older", "--storage", storage))] == [True, False]


def test_no_runs_are_no_error(tmp_path: Path, shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown() == f"no runs in {tmp_path}/storage yet: rlx train makes one\n"
    assert list(tmp_path.iterdir()) == []  # nor is a folder made
    (tmp_path / "mine").mkdir()
    assert shown("--storage", "mine") == f"no runs in {tmp_path}/mine yet: rlx train makes one\n"


def test_a_storage_that_was_named_must_be_there(tmp_path: Path, shown: Shown) -> None:
    assert shown("--storage", f"{tmp_path}/none", code=1) == f"error: --storage {tmp_path}/none: no such folder\n"


@pytest.mark.parametrize(
    ("which", "run"),
    [
        ("try1@best", "try1"),
        ("a/runs/try1@7", "a/runs/try1"),
        ("a/runs/try1/step_000020/", "a/runs/try1"),
        ("s3://b/runs/a/step_000020?region=eu", "s3://b/runs/a?region=eu"),
        ("s3://b/runs/a?region=eu@best", "s3://b/runs/a?region=eu"),
        *((same, same) for same in ("try1", "me@work/runs/try1", "s3://b/runs/a?region=eu", "step_000020")),
    ],
)
def test_the_run_of_what_may_name_a_checkpoint(which: str, run: str) -> None:
    assert listing.run_of(which) == run


@pytest.mark.parametrize("command", ["checkpoints", "samples"])
def test_a_checkpoint_is_answered_with_its_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        rlx.main([command, "try1@best"])
    assert capsys.readouterr().err == "error: try1@best is a checkpoint; give the run: try1\n"


def test_a_run_without_checkpoints(storage: str, shown: Shown) -> None:
    make_run(storage, "fresh")
    text = shown("fresh", "--storage", storage)
    assert text.startswith("run fresh: 0 of 40 steps done\n\nno checkpoints yet\n")
    assert [command[2:4] for command in commands(text)] == [["--resume", "fresh"]]


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ("tyr1", "error: no run 'tyr1' in {here}/kept/runs; nearest: try1\n"),
        ("kept/runs/tyr1", "error: no run in {here}/kept/runs/tyr1: there is no such folder\n"),
        (
            "kept/runs/try1/run.json",
            "error: no run in {here}/kept/runs/try1/run.json\n",
        ),
        (
            "./kept",
            "error: no run in {here}/kept: it holds runs (try1); give one of them, e.g. {here}/kept/runs/try1\n",
        ),
        (
            "kept/runs",
            "error: no run in {here}/kept/runs: it holds runs (try1); give one of them, e.g. {here}/kept/runs/try1\n",
        ),
    ],
)
def test_an_unknown_run_is_one_line(run: str, said: str, storage: str, shown: Shown) -> None:
    assert shown(run, "--storage", storage, code=1) == said.format(here=Path.cwd())


def test_the_name_of_a_sweep_is_answered_with_its_trials(storage: str, shown: Shown) -> None:
    Path(storage, "sweeps", "lr").mkdir(parents=True)
    trials = f"lr is a sweep, its trials are {Path.cwd()}/kept/sweeps/lr/runs/trial_00000, ..."
    assert shown("lr", "--storage", storage, code=1) == f"error: no run 'lr' in {Path.cwd()}/kept/runs: {trials}\n"
    with pytest.raises(ConfigError, match="lr is a sweep, its trials are "):
        run_folder.checkpoint_of("lr@best", storage)


@pytest.mark.slow
def test_a_listing_is_the_same_on_s3(bucket: str, shown: Shown) -> None:
    make_run(bucket, "far")
    put(bucket, "far", 10, eval__accuracy=0.5)
    (row,) = cells(shown("--storage", bucket))
    assert (row["run"], row["steps"], row["best"]) == ("far", "10/40", "step_000010")
    text = shown("far", "--storage", bucket)
    (row,) = cells(text)
    assert (row["state"], row["which"]) == ("complete", "newest, best")
    assert time.time() - time.mktime(time.strptime(row["written"], "%Y-%m-%d %H:%M")) < 300
    assert commands(text)[1][2:] == ["--from", "far@best", "--storage", bucket]
    assert shown(f"{bucket}/runs", code=1).endswith(f"it holds runs (far); give one of them, e.g. {bucket}/runs/far\n")
    assert shown("fra", "--storage", bucket, code=1) == f"error: no run 'fra' in {bucket}/runs; nearest: far\n"
    (start, export) = commands(shown(f"{bucket}/runs/far"))
    assert start[2:] == ["--from", f"{bucket}/runs/far/step_000010"] and export[2:] == start[3:]


@pytest.mark.slow
def test_it_starts_without_what_is_slow_to_import(storage: str) -> None:
    code = "import runpy, sys; code = runpy.run_path(sys.argv[1])['main'](sys.argv[2:]); print(*sorted(sys.modules))"
    words = [str(ROOT / "experiments" / "checkpoints.py"), "try1", "--storage", storage]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=Path.cwd())
    *_, modules = done.stdout.splitlines()
    assert "rlx.cli.listing" in modules.split() and done.returncode == 0
    slow = {"torch", "ray", "vllm", "mlflow", "transformers", "pandas", "matplotlib"}
    assert not slow & set(modules.split())


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (14 << 20, "14.0 MiB"), (2 << 40, "2.0 TiB")]
)
def test_sizes_are_readable(count: int, text: str) -> None:
    assert listing.readable_size(count) == text
