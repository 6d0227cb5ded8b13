"""Two drivers start at the same moment on one fresh storage: nothing is there twice, nothing is lost.

RLX_ATTACKS sets how often (20). Claims alone are in tests/storage/test_claims.py.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import s3
from conftest import Script, mlflow_history

from rlx.runs.run_folder import mlflow_run
from rlx.storage.addresses import open_storage
from rlx.storage.filesystem import Storage
from rlx.sweeps.records import TrialRecords
from rlx.tracking import mlflow

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
ATTACKS = int(os.environ.get("RLX_ATTACKS", "20"))
Start = Callable[..., Script]


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], str]:
    """A fresh storage for each attack."""
    if request.param == "folder":
        return lambda attack: str(tmp_path / str(attack))
    request.getfixturevalue("bucket")
    return lambda attack: f"s3://{s3.BUCKET}/two/{tmp_path.name}/{attack}"


def words(storage: str, records: Path, model: Path, *more: str) -> list[str]:
    """Two steps of the tiny model, on one rank and one engine."""
    small = {
        "storage": storage, "tracking.uri": mlflow.default_uri(records), "model.path": model, "train.steps": 2,
        "train.prompts-per-step": 4, "rollout.max-tokens": 8, "rollout.kv-cache-mib": 16, "eval.every": 0,
        "scaling.num-workers": 1, "rollout.num-engines": 1,
    }  # fmt: skip
    return [*[text for key, value in small.items() for text in (f"--{key}", str(value))], *more]


def both(script: Start, name: str, arguments: list[str]) -> list[tuple[int, str]]:
    """Starts a script twice at once; gives their exit codes and what they printed, by code."""
    pair = [script(name, *arguments) for _ in range(2)]
    return sorted((each.process.wait(), each.output.read_text()) for each in pair)


def assert_steps(records: Path, run: Storage) -> None:
    """A run has both of its steps, each once."""
    history = mlflow_history(records, mlflow_run(run))
    assert {step: len(values) for step, values in history["reward/mean"].items()} == {1: 1, 2: 1}
    assert run.names().count("step_000002") == 1


@pytest.mark.parametrize(("name", "kind"), [("ppo.py", "run"), ("ppo_sweep.py", "sweep")])
def test_one_of_two_has_the_name(
    name: str, kind: str, script: Start, place: Callable[[int], str], tiny_model: Path, tmp_path: Path
) -> None:
    more = ["--name", "same", *(["--trials", "1"] if kind == "sweep" else [])]
    for attack in range(ATTACKS):
        records = tmp_path / f"records-{attack}"
        (first, _), (second, refusal) = both(script, name, words(place(attack), records, tiny_model, *more))
        assert (first, second) == (0, 1), refusal
        assert refusal.startswith(f"error: {kind} 'same' is ") and refusal.count("\n") == 1
        folder = open_storage(place(attack)) / f"{kind}s" / "same"
        if kind == "sweep":
            (trial,) = TrialRecords(folder).all()
            folder = folder / "runs" / trial
        assert_steps(records, folder)
        assert not [each for each in folder.names() if each.startswith("owner")]


def test_two_without_a_name_are_two_runs(
    script: Start, place: Callable[[int], str], tiny_model: Path, tmp_path: Path
) -> None:
    for attack in range(ATTACKS):
        records = tmp_path / f"records-{attack}"
        answers = both(script, "ppo.py", words(place(attack), records, tiny_model))
        assert [code for code, _ in answers] == [0, 0], answers
        runs = open_storage(place(attack)) / "runs"
        assert runs.names() == ["ppo-1", "ppo-2"]
        for run in runs.names():
            assert_steps(records, runs / run)
