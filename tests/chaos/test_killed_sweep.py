"""A sweep whose driver is killed at random moments and resumed each time: the trials of the undisturbed one.

RLX_KILLS sets how often (10).
"""

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import KILLED_S, Script, assert_all_end, mlflow_history
from run_cases import comparable

from rlx.runs.run_folder import mlflow_run
from rlx.storage.addresses import open_storage
from rlx.sweeps.records import TrialRecords

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
KILLS = int(os.environ.get("RLX_KILLS", "10"))
STEPS = 10


def words(storage: Path, model: Path, name: str) -> list[str]:
    """A sweep of four trials, each with two seeds."""
    small = {
        "model.path": model, "train.steps": STEPS, "train.prompts-per-step": 8, "rollout.max-tokens": 8,
        "rollout.kv-cache-mib": 16, "eval.every": 2, "eval.num_prompts": 12, "checkpoint.every": 2,
    }  # fmt: skip
    settings = [text for key, value in small.items() for text in (f"--{key}", str(value))]
    return ["--storage", str(storage), "--name", name, "--trials", "2", "--seeds", "2", *settings]


def outcome(storage: Path, name: str) -> dict[str, Any]:
    """What a sweep came to: its trials' records, and all that they logged, to the last bit."""
    folder = open_storage(str(storage)) / "sweeps" / name
    histories = {
        trial: mlflow_history(storage, mlflow_run(folder / "runs" / trial)) for trial in (folder / "runs").names()
    }
    logged = {trial: comparable(history, range(STEPS + 1)) for trial, history in histories.items()}
    return {"records": TrialRecords(folder).all(), "logged": logged}


def killed_within(run: Script, seconds: float) -> bool:
    """Kills the driver after so many seconds; False if it had ended before."""
    deadline = time.monotonic() + seconds
    while run.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if run.process.poll() is not None:
        return False
    run.kill()
    assert_all_end(run, KILLED_S)
    return True


def test_a_sweep_that_is_killed_at_random_moments_is_the_undisturbed_one(
    tiny_model: Path, tmp_path: Path, script: Any
) -> None:
    whole: Script = script("ppo_sweep.py", *words(tmp_path, tiny_model, "whole"))
    assert whole.process.wait(900) == 0, whole.output.read_text()
    expected, moments = outcome(tmp_path, "whole"), random.Random(1)
    assert {record.state for record in expected["records"].values()} == {"finished"}
    kills, lives = 0, 0
    while kills < KILLS:
        name, lives = f"killed-{lives}", lives + 1
        run: Script = script("ppo_sweep.py", *words(tmp_path, tiny_model, name))
        while kills < KILLS and killed_within(run, moments.uniform(0, 75)):
            kills += 1
            begun = (open_storage(str(tmp_path)) / "sweeps" / name / "sweep.json").exists()
            again = ["--storage", str(tmp_path), "--resume", name] if begun else words(tmp_path, tiny_model, name)
            print(f"kill {kills}/{KILLS} of {name}: {'resumed' if begun else 'begun again'}", flush=True)
            run = script("ppo_sweep.py", *again)
        assert run.process.wait(900) == 0, run.output.read_text()
        assert outcome(tmp_path, name) == expected
