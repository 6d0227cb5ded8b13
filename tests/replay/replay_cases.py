"""Made-up runs for the tests of the time machine: folders with checkpoints, completions and evaluations."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from sample_cases import Letters, step
from test_run_folder import put, settings

from rlx.replay.recorded import RecordedRun
from rlx.samples.columns import COMPLETIONS, CompletionFile, Kind, StepCompletions, as_table
from rlx.samples.evaluations import HELD_OUT, EvaluationFile, Outcomes, write_outcomes
from rlx.samples.token_texts import TokenTexts
from rlx.samples.writer import as_bytes
from rlx.storage.filesystem import Storage, write_bytes
from rlx.storage.signatures import SIGNATURE, Signer


def run_of(storage: Path, name: str = "a", steps: tuple[int, ...] = (10, 20), **changes: Any) -> RecordedRun:
    """A run of 30 steps with checkpoints, signed by this user."""
    folder, signer = storage / "runs" / name, Signer.new()
    tree = settings(name=name, storage=str(storage), **{"train__steps": 30, **changes})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"mlflow_run": "1"}))
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    (folder / SIGNATURE).write_text(signer.sign(tree))
    for number in steps:
        put(
            folder,
            number,
            signature=signer.sign(tree),
            **{"name": name, "storage": str(storage), "train__steps": 30} | changes,
        )
    return RecordedRun.read(name, str(storage))


def keep(folder: Storage, number: int, completions: StepCompletions | None = None) -> None:
    """Writes the completions of a step as one rank does."""
    table = as_table(completions or step(number), TokenTexts(Letters()))
    write_bytes(folder / COMPLETIONS / str(CompletionFile(number, Kind.TRAINING, 0, 1)), as_bytes(table))


def with_score(number: int, place: int, score: float) -> StepCompletions:
    """The completions of a step with another score of one of them."""
    given = step(number)
    rows = [replace(row, score=score) if i == place else row for i, row in enumerate(given.rows)]
    return replace(given, rows=rows)


def evaluated(folder: Storage, number: int, right: list[bool], source: str = "s", name: str = HELD_OUT) -> None:
    """Writes the outcomes of an evaluation, one answer to each question."""
    count, grid = len(right), np.array(right)[:, None]
    rows, zeros = np.arange(count), np.zeros((count, 1))
    outcomes = Outcomes(
        (source,) * count, rows, rows.astype(np.uint32), grid, zeros, zeros.astype(np.int32), zeros[:, 0]
    )
    write_outcomes(folder, EvaluationFile(number, name), outcomes)
