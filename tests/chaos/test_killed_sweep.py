"""A sweep of which one process or another is killed at random moments: its trials are those of the undisturbed one.

The driver is resumed each time; trials, workers, controllers and engines are replaced. RLX_KILLS sets how often (20).
"""

import os
import random
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from run_cases import comparable
from shared import KILLED_S, LIKE_TINY, Script, assert_all_end, mlflow_history

from rlx.storage.addresses import open_storage
from rlx.sweeps.records import TrialRecords
from rlx.tracking.outbox import run_id

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
ROOT = Path(__file__).resolve().parents[2]
KILLS = int(os.environ.get("RLX_KILLS", "20"))
STEPS = 10
PROCESSES = {
    "driver": "ppo_sweep.py",
    "trial": "ray::ResourceTrainable",
    "worker": "ray::RayTrainWorker",
    "controller": "ray::TrainController",
    "engine": "ray::VLLMEngine",
}
"""what may be killed, and how its process is called"""


def words(storage: Path, model: Path, name: str) -> list[str]:
    """A sweep of two settings, each with two seeds."""
    small = {
        "model.path": model, "train.steps": STEPS, "train.prompts-per-step": 8, "rollout.max-tokens": 8,
        "rollout.kv-cache-mib": 16, "eval.every": 2, "eval.num_prompts": 12, "checkpoint.every": 2,
        "scaling.max-failures": -1,
    }  # fmt: skip
    settings = [text for key, value in small.items() for text in (f"--{key}", str(value))]
    space = ["--space", str(ROOT / "search_spaces" / "ppo_tiny.py"), *LIKE_TINY]
    return ["--storage", str(storage), "--name", name, *space, "--trials", "2", "--seeds", "2", *settings]


def outcome(storage: Path, name: str) -> dict[str, Any]:
    """What a sweep came to: its trials' records, and all that they logged, to the last bit."""
    folder = open_storage(str(storage)) / "sweeps" / name
    histories = {trial: mlflow_history(storage, run_id(folder / "runs" / trial)) for trial in (folder / "runs").names()}
    logged = {trial: comparable(history, range(STEPS + 1)) for trial, history in histories.items()}
    return {"records": TrialRecords(folder).all(), "logged": logged}


def process_of(run: Script, kind: str) -> psutil.Process | None:
    """One of the sweep's processes of a kind; None if there is none now."""
    if kind == "driver":
        return psutil.Process(run.process.pid)
    found = [process for process in run.processes() if " ".join(process.cmdline()).startswith(PROCESSES[kind])]
    return found[0] if found else None


def ended_within(run: Script, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while run.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return run.process.poll() is not None


def test_a_sweep_that_is_hit_at_random_moments_is_the_undisturbed_one(
    tiny_model: Path, tmp_path: Path, script: Any
) -> None:
    whole: Script = script("ppo_sweep.py", *words(tmp_path, tiny_model, "whole"))
    assert whole.process.wait(900) == 0, whole.output.read_text()
    expected, moments = outcome(tmp_path, "whole"), random.Random(1)
    assert {record.state for record in expected["records"].values()} == {"finished"}
    kinds, lives = [kind for _ in range(KILLS) for kind in PROCESSES][:KILLS], 0
    moments.shuffle(kinds)
    while kinds:
        name, lives = f"killed-{lives}", lives + 1
        run: Script = script("ppo_sweep.py", *words(tmp_path, tiny_model, name))
        while kinds and not ended_within(run, moments.uniform(0, 75)):
            if (victim := process_of(run, kinds[-1])) is None:
                continue
            kind = kinds.pop()
            victim.kill()
            print(f"{KILLS - len(kinds)}/{KILLS} of {name}: {kind}", flush=True)
            if kind == "driver":
                run.process.wait()
                assert_all_end(run, KILLED_S)
                begun = (open_storage(str(tmp_path)) / "sweeps" / name / "sweep.json").exists()
                again = ["--storage", str(tmp_path), "--resume", name] if begun else words(tmp_path, tiny_model, name)
                run = script("ppo_sweep.py", *again)
        assert run.process.wait(900) == 0, run.output.read_text()
        assert_all_end(run, 30)
        assert outcome(tmp_path, name) == expected
