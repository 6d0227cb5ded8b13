"""Metric names, and the one door to MLflow: sweep = parent run, trial = child run, restart = the same child run.

Importing this does not import mlflow, which takes seconds: a worker does that while its engine starts.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlx.config import ConfigError, one_line

METRICS = {
    "reward/mean": "mean score of the step's completions, penalties taken off",
    "reward/std": "standard deviation of those scores",
    "reward/NAME": "mean of the reward function NAME alone",
    "reward/running_mean": "mean of all scores trained on so far (algorithm.normalize_scores)",
    "reward/running_std": "their standard deviation",
    "task/accuracy": "fraction of the step's completions whose answer is right",
    "groups/varied_fraction": "fraction of the step's prompts whose completions do not all score the same",
    "groups/drawn": "prompts drawn for the step (algorithm.filter_groups)",
    "eval/accuracy": "fraction of held-out prompts answered right, greedy",
    "eval/reward": "mean score on held-out prompts, greedy",
    "eval/length": "mean response length on held-out prompts, in tokens",
    "eval/ema/accuracy": "eval/accuracy of the averaged weights (train.ema_decay)",
    "eval/ema/reward": "eval/reward of the averaged weights",
    "eval/ema/length": "eval/length of the averaged weights",
    "kl/ref": "mean KL estimate per token to the reference model, before the update",
    "kl/coef": "weight of that KL",
    "kl/loss": "mean of that KL as a loss, over the step's optimizer steps (algorithm.kl_in loss)",
    "ptx/loss": "supervised loss per answer token (algorithm.ptx_coef)",
    "policy/loss": "surrogate loss, mean over the step's optimizer steps",
    "policy/entropy": "mean entropy of the policy per token, in nats",
    "policy/clip_fraction": "fraction of tokens whose ratio was clipped",
    "policy/approx_kl": "mean KL(old || current) per token during the update",
    "policy/ratio": "mean ratio current / old per token during the update",
    "policy/grad_norm": "mean gradient norm of the policy before clipping",
    "policy/lr": "learning rate of the policy after the step",
    "policy/updates": "optimizer steps of the policy in the step",
    "value/loss": "clipped value loss, mean over the step's optimizer steps",
    "value/clip_fraction": "fraction of tokens whose value was clipped",
    "value/grad_norm": "mean gradient norm of the critic before clipping",
    "value/explained_variance": "1 - var(returns - values) / var(returns), before the update",
    "mismatch/kl": "mean KL estimate (k3) between engine and trainer on the same weights",
    "mismatch/max_abs": "largest difference of a token's log-probability between engine and trainer",
    "mismatch/clipped_fraction": "fraction of tokens whose importance weight was cut or masked",
    "mismatch/weight_max": "largest importance weight before it is cut",
    "mismatch/effective_fraction": "effective share of the tokens under these weights, (sum w)^2 / (n sum w^2)",
    "response/length_mean": "mean response length in tokens",
    "response/truncated_fraction": "fraction of responses that ran into rollout.max_tokens",
    "time/rollout": "seconds generating",
    "time/reward": "seconds scoring",
    "time/annotate": "seconds computing log-probabilities and values before the update",
    "time/update": "seconds in forward, backward and optimizer steps",
    "time/sync": "seconds sending weights to the engines",
    "time/eval": "seconds evaluating",
    "time/checkpoint": "seconds that training stood still for a checkpoint",
    "time/checkpoint_write": "seconds that the checkpoint before took to be written, beside training",
    "time/step": "seconds for the whole step",
    "tokens/rollout_per_s": "response tokens generated per second of time/rollout",
    "tokens/update_per_s": "prompt and response tokens trained on per second of time/update",
    "tokens/total": "response tokens generated since the run began",
    "staleness/mean": "mean age of the completions' weights, in steps",
    "memory/peak_gib": "largest peak memory of a worker, GPU memory if it has one",
}


def meaning(metric: str) -> str | None:
    """What a metric says; None if there is none of that name. Those of reward functions have the function's name."""
    general = "reward/NAME" if metric.startswith("reward/") else metric
    return METRICS.get(metric, METRICS.get(general))


def default_uri(folder: Path) -> str:
    """The SQLite tracking store in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder}/mlflow.db"


@dataclass
class Tracker:
    """One MLflow run, continued if it exists; does nothing at all on ranks other than 0 (`run_id` None)."""

    uri: str
    run_id: str | None
    _logged_to: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        if self.run_id is not None:
            history = client(self.uri).get_metric_history(self.run_id, "reward/mean")
            first = client(self.uri).get_metric_history(self.run_id, "eval/accuracy")
            self._logged_to = max((metric.step for metric in [*history, *first]), default=-1)

    def has(self, step: int) -> bool:
        """Whether a step is in the run already: one that a resumed run repeats is not logged twice."""
        return self.run_id is None or step <= self._logged_to

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs a step's metrics, all at once."""
        if self.has(step):
            return
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        entries = [Metric(key, float(value), now, step) for key, value in metrics.items()]
        client(self.uri).log_batch(self.run_id, metrics=entries)
        self._logged_to = step

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Logs completions as a table that the MLflow page shows; call it before the step's `log`."""
        if self.has(step) or not rows:
            return
        name, door = f"samples/step_{step:06d}.json", client(self.uri)
        if any(artifact.path == name for artifact in door.list_artifacts(self.run_id, "samples")):
            return  # it would be written behind those that a killed attempt has left
        door.log_table(self.run_id, {key: [row[key] for row in rows] for key in rows[0]}, name)


def start_run(
    uri: str, experiment: str, name: str, *, parent: str | None, params: Mapping[str, Any], tags: Mapping[str, str]
) -> str:
    """Opens an MLflow run, nested in `parent` if given, and gives its id; a resumed run keeps the id it has."""
    door, experiment_id = client(uri), _experiment(uri, experiment)
    nested = {"mlflow.parentRunId": parent} if parent else {}
    run = door.create_run(experiment_id, run_name=name, tags=dict(tags) | nested)
    run_id = str(run.info.run_id)
    from mlflow.entities import Param

    door.log_batch(run_id, params=[Param(key, str(value)[:6000]) for key, value in params.items()])
    return run_id


def _experiment(uri: str, name: str) -> str:
    try:
        found = client(uri).get_experiment_by_name(name)
        return str(found.experiment_id if found else client(uri).create_experiment(name, _artifacts(uri)))
    except Exception as error:  # each kind of store has its own
        raise ConfigError(f"tracking.uri {uri}: {one_line(error, 300)}") from None


def resume_run(uri: str, run_id: str) -> None:
    """Marks a run as running again and counts the attempt."""
    door = client(uri)
    attempt = int(door.get_run(run_id).data.tags.get("rlx.attempt", "1"))
    door.set_tag(run_id, "rlx.attempt", str(attempt + 1))
    door.update_run(run_id, status="RUNNING")


def end_run(uri: str, run_id: str, status: str) -> None:
    """Closes a run: FINISHED, FAILED or KILLED."""
    client(uri).set_terminated(run_id, status)


def settle_run(uri: str, run_id: str, status: str) -> None:
    """Closes a run whose own process could not, or closed it otherwise; one that ended so keeps its end time."""
    if client(uri).get_run(run_id).info.status != status:
        end_run(uri, run_id, status)


def log_file(uri: str, run_id: str, name: str, text: str) -> None:
    """Stores a text artifact, e.g. the resolved config."""
    client(uri).log_text(run_id, text, name)


def log_files(uri: str, run_id: str, paths: Sequence[Path], folder: str | None = None) -> None:
    """Stores files as artifacts."""
    for path in paths:
        client(uri).log_artifact(run_id, str(path), folder)


def client(uri: str) -> Any:
    """MLflow's client for a tracking store, without its chatter."""
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    from mlflow import MlflowClient

    for name in ("mlflow", "mlflow.store.db.utils", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return MlflowClient(tracking_uri=uri)


def _artifacts(uri: str) -> str | None:
    """Where a SQLite store keeps its artifacts: beside the database. A server decides for itself."""
    path = uri.removeprefix("sqlite:///")
    return None if path == uri else (Path(path).resolve().parent / "mlartifacts").as_uri()
