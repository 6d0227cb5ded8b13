"""What a sweep of many trials costs its driver: python bench/load.py [--trials 500] [--at-once 100] [--steps 20]

The trials train nothing: each sends reports of real size, once a second, through the mailbox to Tune, and its records
through the actor that writes to the driver's MLflow database, as a trial on another node does. Tune, the mailbox, the
records, the callback and MLflow are those of a real sweep. Shown for each part of the sweep: reports per second, CPU of
the driver, the mailbox and the MLflow actor per report, and their memory. Left out: training, engines, Ray Train.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import tune

from rlx.cluster import connection
from rlx.config.sweep import DEFAULT_METRIC
from rlx.runs import mailbox, relay
from rlx.runs.mailbox import Box, StepReport
from rlx.storage.addresses import open_storage
from rlx.storage.filesystem import Storage
from rlx.sweeps.callback import DriverState, SweepCallback, TrialLog
from rlx.sweeps.records import SweepPlan, TrialRecords
from rlx.sweeps.schedulers.schedule import Schedule
from rlx.sweeps.searchers import ListSearch
from rlx.sweeps.space import MODE
from rlx.sweeps.trial_source import TrialOptions, TrialSource
from rlx.tracking.base import TrackingService

METRICS = 60
"""metrics of a step with the defaults"""
PARTS = 5
"""parts of the sweep that are compared: with equal costs, nothing grows with the number of trials before"""


class LoadTrial(tune.Trainable):
    """A trial that reports and logs as a real one does, and does nothing else."""

    def setup(self, config: dict[str, Any], actor: Any, tracking: TrackingService, sweep: Storage, steps: int) -> None:
        self.actor, self.tracking, self.sweep, self.steps = actor, tracking, sweep, steps
        self._begin()

    def step(self) -> dict[str, Any]:
        time.sleep(1.0)
        metrics = {f"group/metric_{i}": random.random() for i in range(METRICS)}
        metrics |= {DEFAULT_METRIC: 0.5, "time/eval": 0.1, "step": self.done + 1}
        self.box.send(StepReport(metrics, self.done + 1 == self.steps, None))  # as Ray Train's controller does
        (report,) = self.box.receive(self.done, 60.0)
        self.done += 1
        self.run.log({key: value for key, value in metrics.items() if key != "step"}, self.done, now_ms())
        return report.metrics | {"done": report.is_last}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "pointer.json").write_text(json.dumps({"path": "/somewhere/step_000010"}))

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.box.close()
        self._begin()
        return True

    def _begin(self) -> None:
        self.done, self.box = 0, Box.new(self.actor)
        key = uuid.uuid4().hex
        params = {f"section.setting_{i}": str(i) for i in range(120)}
        run_id = self.tracking.make_run(
            key, "load", self.trial_name, parent=None, params=params, tags={"rlx.kind": "run"}, at=now_ms()
        )
        folder = self.sweep / "runs" / self.trial_name
        (folder / "run.json").write_text(json.dumps({"mlflow_run": run_id, "key": key}))
        self.run = self.tracking.writer(run_id)


def now_ms() -> int:
    return int(time.time() * 1000)


class Watch:
    """Prints what each part of the sweep has cost, when so many trials have ended."""

    def __init__(self, trials: int, processes: dict[str, psutil.Process]) -> None:
        self.trials, self.processes, self.ended, self.reports = trials, processes, 0, 0
        self.rows: list[dict[str, float]] = []
        self.before = self._state()

    def __call__(self, trial: str, settings: Any, metrics: Any, state: str) -> None:
        self.reports += state == "running" and "step" in metrics
        if state != "finished":
            return
        self.ended += 1
        if self.ended % (self.trials // PARTS) == 0:
            now = self._state()
            change = {key: value - self.before[key] for key, value in now.items()}
            self.before = now
            count = change["reports"]
            row = {"trials": self.ended, "reports/s": count / change["time"]}
            row |= {f"{name} ms/report": 1000 * change[name] / count for name in self.processes}
            row |= {f"{name} MiB": process.memory_info().rss / 2**20 for name, process in self.processes.items()}
            self.rows.append(row)
            print("  ".join(f"{key} {value:.1f}" for key, value in row.items()), flush=True)

    def _state(self) -> dict[str, float]:
        cpu = {name: sum(process.cpu_times()[:2]) for name, process in self.processes.items()}
        return {"time": time.monotonic(), "reports": float(self.reports)} | cpu


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=100)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    args = parser.parse_args(argv)
    connection.quiet_environment()
    connection.start_cluster(num_cpus=1, object_store_memory=2**28)
    with tempfile.TemporaryDirectory(prefix="rlx-load-") as folder:
        rows = measure(args.trials, args.at_once, args.steps, open_storage(folder))
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))
    ray.shutdown()
    return 0


def measure(trials: int, at_once: int, steps: int, storage: Storage) -> list[dict[str, float]]:
    """Runs the sweep; returns the figures of each part."""
    plan = SweepPlan("load", {"storage": storage.path, "train": {"steps": steps}}, "space.py", candidates=trials)
    sweep, records = storage / "sweeps" / "load", TrialRecords(storage / "sweeps" / "load")
    actor = mailbox.start_mailbox()
    relayed = relay.start_relay(plan.tracking[0])
    settings = [{"train.actor_lr": 1e-6 * (i + 1)} for i in range(trials)]
    source = TrialSource(ListSearch(settings), {}, records, TrialOptions(trials, limit=lambda open_trials: at_once))
    pids = ray.get([actor.__ray_call__.remote(_pid), relayed.actor.__ray_call__.remote(_pid)])
    processes = map(psutil.Process, (os.getpid(), *pids))
    SweepCallback.watch = watch = Watch(trials, dict(zip(("driver", "mailbox", "mlflow"), processes, strict=True)))
    callback = SweepCallback(plan, TrialLog(plan.tracking, sweep, records, Schedule(steps, 1, {})), DriverState())
    made = tune.with_parameters(LoadTrial, actor=actor, tracking=relayed, sweep=sweep, steps=steps)
    os.environ |= {"TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1", "TUNE_MAX_PENDING_TRIALS_PG": "200"}
    tune.Tuner(
        tune.with_resources(made, {"CPU": 0, "memory": 1.0}),
        tune_config=tune.TuneConfig(
            metric=DEFAULT_METRIC,
            mode=MODE,
            num_samples=-1,
            search_alg=source,
            reuse_actors=True,
            trial_name_creator=source.name_of,
            trial_dirname_creator=source.name_of,
        ),
        run_config=tune.RunConfig(name="tune", storage_path=sweep.path, callbacks=[callback], verbose=0),
    ).fit()
    assert len(records.all()) == trials
    return watch.rows


def _pid(actor: Any) -> int:
    return os.getpid()


if __name__ == "__main__":
    raise SystemExit(main())
