"""What a sweep costs beside the same runs by hand, and how soon a trial is at its first step.

    python bench/sweep.py [--trials N] [--steps N] [--SETTING VALUE ...]

One run by hand and, for each choice of --reuse, one sweep of N such runs, one after the other, on the same machine with
nothing else to do; times are those that MLflow has of them, and the clock of the processes. Only the ratios mean
something elsewhere. Prints a table for each choice and writes bench/results/sweep.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlx.runs import preflight
from rlx.storage.addresses import open_storage
from rlx.storage.filesystem import Storage
from rlx.tracking.outbox import run_id
from rlx.tracking.services import mlflow

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Times:
    """Moments of a run, in seconds since the epoch."""

    begun: float
    ready: float  # step 0 is reported: the model is evaluated, and the first step begins
    ended: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--reuse", nargs="+", default=["engines", "workers", "none"])
    args, more = parser.parse_known_args(argv)
    model = preflight.model_folder("tiny", str(ROOT / "storage"))
    with tempfile.TemporaryDirectory(prefix="rlx-bench-") as folder:
        words = ["--storage", folder, "--model.path", model, "--train.steps", str(args.steps), *more]
        by_hand = seconds_of("ppo.py", "--name", "alone", *words)
        storage, results = open_storage(folder), dict[str, dict[str, float]]()
        alone = times(storage, storage / "runs" / "alone")
        for reuse in args.reuse:
            in_sweep = seconds_of(
                "ppo_sweep.py", "--name", f"reuse-{reuse}", "--trials", str(args.trials), "--max-concurrent", "1",
                "--reuse", reuse, "--space", str(same_settings(Path(folder))), *words,
            )  # fmt: skip
            runs = storage / "sweeps" / f"reuse-{reuse}" / "runs"
            trials = [times(storage, runs / f"trial_{i:05d}") for i in range(args.trials)]
            results[reuse] = measured(by_hand, in_sweep, alone, trials)
            print(f"--reuse {reuse}")
            print("".join(f"{name:<62} {value:8.3f}\n" for name, value in results[reuse].items()), flush=True)
    out = ROOT / "bench" / "results" / "sweep.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"trials": args.trials, "steps": args.steps, **results}, indent=1) + "\n")
    return 0


def measured(by_hand: float, in_sweep: float, alone: Times, trials: Sequence[Times]) -> dict[str, float]:
    """The table: seconds, and ratios to the run by hand."""
    gaps = [after.ready - before.ended for before, after in itertools.pairwise(trials)]
    training = statistics.mean(trial.ended - trial.ready for trial in trials)
    return {
        "run by hand, s": by_hand,
        "of which training, s": alone.ended - alone.ready,
        "sweep, s": in_sweep,
        "sweep / (trials x run by hand)": in_sweep / (len(trials) * by_hand),
        "training of a trial / training of the run by hand": training / (alone.ended - alone.ready),
        "end of a trial to first step of the next, mean s": statistics.mean(gaps),
        "the longest of them, s": max(gaps),
        "that / start of the run by hand": statistics.mean(gaps) / (by_hand - (alone.ended - alone.ready)),
    }


def seconds_of(script: str, *words: str, variables: Mapping[str, str] | None = None) -> float:
    """How long one of experiments/ takes; `variables` are further ones of its environment."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(ROOT / "experiments" / script), *words],
        env=os.environ | dict(variables or {}), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{script} failed: {done.stderr[-2000:]}")
    return time.monotonic() - started


def same_settings(folder: Path) -> Path:
    """A search space in which all trials are the run by hand."""
    path = folder / "space.py"
    path.write_text("def space():\n    return {'seed': 0}\n")
    return path


def times(storage: Storage, folder: Storage) -> Times:
    """What MLflow has of a run."""
    uri = mlflow.default_uri(Path(storage.path))
    own = run_id(folder)
    assert own
    run = mlflow.get_run(uri, own)
    first_ms = min(point.at_ms for point in mlflow.history(uri, run.id, "eval/accuracy"))
    assert run.end_ms
    return Times(run.start_ms / 1000, first_ms / 1000, run.end_ms / 1000)


if __name__ == "__main__":
    sys.exit(main())
