"""Whole runs for tests: a config that takes seconds, and what a run reported."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared import KEPT, History, mlflow_history

from rlx.cluster import connection
from rlx.config.experiment import over_experiment
from rlx.config.loading import from_tree, with_overrides
from rlx.config.run import RunConfig
from rlx.runs import launch, preflight
from rlx.runs.launch import RunResult
from rlx.storage.addresses import open_storage
from rlx.tracking.metrics import MEASURED
from rlx.tracking.services import mlflow
from rlx.types import Notify, OnReport

STEPS = 4


@dataclass(frozen=True)
class Done:
    """A finished run, and what it reported."""

    config: RunConfig
    result: RunResult
    reports: list[tuple[dict[str, Any], str | None]]
    history: History
    storage: Path


def train(
    config: RunConfig,
    *,
    resume: bool = False,
    records: Path | None = None,
    on_report: OnReport | None = None,
    notify: Notify | None = None,
    keep: bool = True,
) -> Done:
    """Runs a config.

    Args:
        records: folder of the MLflow database, if it is not the storage.
        keep: whether engines and workers stay for the next run of the same shape: starting them takes most of a small
            run's time.
    """
    storage = records or Path(config.storage)
    prepared = preflight.prepare(config)
    connection.connect(config, prepared.resources)
    reports: list[tuple[dict[str, Any], str | None]] = []
    folder = open_storage(config.storage) / "runs" / str(config.name)

    def record(metrics: dict[str, Any], checkpoint: str | None) -> None:
        reports.append((metrics, checkpoint))
        if on_report:
            on_report(metrics, checkpoint)

    result = launch.run(
        prepared, folder, resume=resume, on_report=record, notify=notify, processes=KEPT if keep else None
    )
    return Done(config, result, reports, mlflow_history(storage, result.mlflow_run), storage)


def small(model: Path, storage: Path | str, name: str, **overrides: Any) -> RunConfig:
    """Returns the config of a run that takes seconds, on two ranks and two engines.

    What it keeps for the next run leaves room for a trial on the tests' cluster.
    """
    tree = {
        "name": name,
        "storage": str(storage),
        "model": {"path": str(model)},
        "data": {"num_prompts": 200, "max_prompt_tokens": 32},
        "train": {"steps": STEPS, "prompts_per_step": 8, "samples_per_prompt": 2},
        "rollout": {"num_engines": 2, "max_tokens": 8, "kv_cache_mib": 16, "resources_per_engine": {"CPU": 0.25}}
        | {"logprobs_every": 1},
        "scaling": {"num_workers": 2, "resources_per_worker": {"CPU": 0.5}},
        "eval": {"every": 2, "num_prompts": 12},
        "checkpoint": {"every": 2},
    }
    return from_tree(
        with_overrides(over_experiment(tree), {key.replace("__", "."): value for key, value in overrides.items()})
    )


def comparable(history: History, steps: range) -> dict[str, dict[int, list[float]]]:
    """Returns the metrics that are equal in two runs of the same config."""
    kept = {name: by_step for name, by_step in history.items() if not name.startswith(MEASURED)}
    return {name: {step: by_step[step] for step in steps if step in by_step} for name, by_step in kept.items()}


def sample_rows(done: Done, step: int) -> list[dict[str, Any]]:
    """The sample table of a step."""
    path = artifact(done, f"samples/step_{step:06d}.json")
    table = json.loads(path.read_text())
    return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]


def artifact(done: Done, name: str) -> Path:
    run = mlflow.client(mlflow.default_uri(done.storage)).get_run(done.result.mlflow_run)
    return Path(run.info.artifact_uri.removeprefix("file://")) / name
