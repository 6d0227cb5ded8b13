"""Runs that are killed again and again: what comes after is the same, to the last bit, as if nothing had been.

RLX_KILLS sets how often each run is killed (20); tests/runs/test_run_single.py kills one once.
"""

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from shared import KILLED_S, LIKE_TINY, History, Script, assert_all_end, mlflow_history

from rlx.runs import run_folder
from rlx.storage import checkpoint_catalog
from rlx.storage.addresses import open_storage
from rlx.tracking import outbox
from rlx.tracking.metrics import MEASURED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
Start = Callable[..., Script]

KILLS = int(os.environ.get("RLX_KILLS", "20"))
STEPS = 20
SMALL = [
    "--train.prompts-per-step",
    "8",
    "--train.samples-per-prompt",
    "2",
    "--eval.every",
    "4",
    "--eval.num-prompts",
    "12",
]


@dataclass(frozen=True)
class Place:
    """Where runs and their records are kept."""

    address: str
    records: Path
    model: Path

    def words(self, name: str, ranks: int) -> list[str]:
        where = ["--storage", self.address, "--tracking.uri", f"sqlite:///{self.records}/mlflow.db"]
        run = ["--name", name, *LIKE_TINY, "--model.path", str(self.model), "--train.steps", str(STEPS), *SMALL]
        return [*where, *run, "--checkpoint.every", "2", "--scaling.num-workers", str(ranks)]

    def history(self, name: str) -> History:
        run_id = outbox.run_id(open_storage(self.address) / "runs" / name)
        whole = mlflow_history(self.records, run_id)
        return {key: by_step for key, by_step in whole.items() if not key.startswith(MEASURED)}

    def newest(self, name: str) -> int:
        """The step of the run's newest whole checkpoint; 0 if there is none."""
        found = checkpoint_catalog.complete_checkpoints(open_storage(self.address) / "runs" / name)
        return found[-1].step if found else 0


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, tiny_model: Path) -> Place:
    address = str(tmp_path) if request.param == "local" else request.getfixturevalue("bucket")
    return Place(address, tmp_path, tiny_model)


def finish(script: Script) -> None:
    assert script.process.wait(600) == 0, script.output.read_text()


def killed_at_random(run: Script, moments: random.Random, kept: int) -> bool:
    """Kills the driver in its start-up (one time in four) or up to three steps after the checkpoint that it goes on
    from; False if it had ended before."""
    if moments.random() < 0.25:
        deadline = time.monotonic() + moments.uniform(0, 25)
        while run.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
    else:
        reached = f"\nstep {min(STEPS, kept + moments.randrange(4))}/"
        while run.process.poll() is None and reached not in run.output.read_text():
            time.sleep(0.05)
        time.sleep(moments.uniform(0, 2.5))
    if run.process.poll() is not None:
        assert run.process.returncode == 0, run.output.read_text()
        return False
    run.kill()
    assert_all_end(run, KILLED_S)
    return True


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_is_killed_at_random_moments_is_the_undisturbed_one(ranks: int, place: Place, script: Start) -> None:
    finish(script("ppo.py", *place.words("whole", ranks)))
    expected, moments = place.history("whole"), random.Random(f"{ranks} {place.address.startswith('s3')}")
    assert sorted(expected["reward/mean"]) == list(range(1, STEPS + 1))
    kills, lives = 0, 0
    while kills < KILLS:
        name = f"killed-{lives}"
        lives += 1
        run, kept = script("ppo.py", *place.words(name, ranks)), 0
        while kills < KILLS and killed_at_random(run, moments, kept):
            kills += 1
            kept = place.newest(name)
            begun = run_folder.holds_run(open_storage(place.address) / "runs" / name)
            again = ["--storage", place.address, "--resume", name] if begun else place.words(name, ranks)
            run = script("ppo.py", *again)
            print(f"kill {kills}/{KILLS} of {name}: goes on from step {kept}", flush=True)
        finish(run)
        assert place.history(name) == expected
        assert place.newest(name) == STEPS
    assert_all_end(run, 10)
