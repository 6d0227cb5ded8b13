"""Sweeps whose runs have kept what came of each question, made up, in a real MLflow store with real files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sweep_cases import Run, log_sweep

from rlx.samples.evaluations import HELD_OUT, EvaluationFile, Outcomes, write_outcomes
from rlx.storage.addresses import open_storage


def outcomes(right: np.ndarray) -> Outcomes:
    """The outcomes of questions, [questions, samples], each answer ten tokens long."""
    count = len(right)
    return Outcomes(
        ("generated",) * count,
        np.arange(count),
        np.arange(count, dtype=np.uint32),
        right,
        right.astype(float),
        np.full(right.shape, 10, np.int32),
        right.mean(axis=1),
    )


def keep(folder: Path, by_step: Mapping[int, np.ndarray]) -> None:
    """Writes what came of the held-out questions of a run at each step."""
    for step, right in by_step.items():
        write_outcomes(open_storage(str(folder)), EvaluationFile(step, HELD_OUT), outcomes(right))


def log_judged_sweep(
    uri: str,
    storage: Path,
    name: str,
    settings: Sequence[dict[str, Any]],
    right: Sequence[Sequence[Mapping[int, np.ndarray]]],
    varied: Sequence[str],
    tags: Mapping[str, str] = {},
    **more: Any,
) -> str:
    """Writes a sweep; `right` has, for each setting and seed, the answers [questions, samples] by step."""
    runs, last = [], max(max(by_step) for runs in right for by_step in runs)
    for number, (setting, of_seeds) in enumerate(zip(settings, right, strict=True)):
        for seed, by_step in enumerate(of_seeds):
            folder = storage / name / f"run_{number}_{seed}"
            keep(folder, by_step)
            curve = {step: float(each.mean()) for step, each in by_step.items()}
            stop = {} if max(by_step) == last else {"rlx.stopped": str(max(by_step))}
            own = {"rlx.folder": str(folder)} | stop
            runs.append(Run({**setting, "seed": seed, "storage": str(storage)}, curve, tags=own, **more))
    return log_sweep(uri, name, runs, [*varied, "seed"], {"rlx.seeds": json.dumps(len(right[0])), **tags})
