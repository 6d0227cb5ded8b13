"""What MLflow's page of a run shows beside its curves: a description, its prompts as data sets, its best evaluation.

Left out: records and how they reach MLflow (mlflow.py, delivery.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

BEST = "best/"
"""the prefix of a metric that a table of runs can be sorted by: the best value of another one"""
_DESCRIPTION = "mlflow.note.content"
_DATA_SETS = {"training": "data.", "evaluation": "eval."}
"""by MLflow's word for what a data set is used for: the settings that make it"""


def set_description(client: Any, run_id: str, text: str) -> None:
    """Gives a run the description that its page shows."""
    client.set_tag(run_id, _DESCRIPTION, text)


def summarize(client: Any, run_id: str, description: str, metrics: Mapping[str, float]) -> None:
    """Gives a sweep a description, and the best values of metrics under names of their own."""
    set_description(client, run_id, description)
    for name, value in metrics.items():
        client.log_metric(run_id, f"{BEST}{name}", value, step=0)


def dress(client: Any, run_id: str, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
    """Gives a new run a description and its data sets; a sweep gets them when it is over.

    Args:
        params: its settings by dotted name.
    """
    if tags.get("rlx.kind") != "run" or "data.source" not in params:  # a record of an earlier version
        return
    size = f"{params['train.steps']} steps of {params['train.prompts_per_step']} prompts"
    what = f"PPO ({params['algorithm.advantage']}) of {params['model.path']} on {params['data.source']}: {size}"
    text = f"{what} x {params['train.samples_per_prompt']} completions. Kept in {tags['rlx.folder']}."
    set_description(client, run_id, text)
    client.log_inputs(run_id, [_data_set(params, use, prefix) for use, prefix in _DATA_SETS.items()])


def _data_set(params: Mapping[str, str], use: str, prefix: str) -> Any:
    """Prompts as MLflow's data set; its digest is that of the settings that make them."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    settings = {key: value for key, value in params.items() if key.startswith(("data.", prefix))}
    source = params.get(f"{prefix}source") or params["data.source"]
    text = json.dumps(settings, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    data_set = Dataset(name=source[-500:], digest=digest, source_type="rlx", source=text)
    return DatasetInput(data_set, [InputTag("mlflow.data.context", use)])


def log_best(client: Any, run_id: str, at: int) -> None:
    """Logs the best value of a run's `checkpoint.best_by` after any step of training.

    Args:
        at: time in ms since the epoch.
    """
    from mlflow.entities import Metric

    params = client.get_run(run_id).data.params
    name, sign = params.get("checkpoint.best_by"), -1 if params.get("checkpoint.best_mode") == "min" else 1
    points = [point for point in client.get_metric_history(run_id, name) if point.step > 0] if name else []
    if points:
        best = max(points, key=lambda point: (sign * point.value, -point.step))
        client.log_batch(run_id, metrics=[Metric(f"{BEST}{name}", best.value, at, best.step)])
