"""What came of each question in each evaluation of a run: one small parquet file for each, written and read again.

    <run>/evaluations/step_000020-held_out.parquet     the evaluation that every run has, after step 20
    <run>/evaluations/step_000020-NAME.parquet         one of eval.sets

Questions are in the order of their table, whatever the seed and the number of ranks, and have the same ids in all runs
on the same prompts: so runs can be compared question by question. Left out: the completions themselves (columns.py),
and statistics of the outcomes (rlx.algorithms.sampled_answers, rlx.analysis).

Example:
    from rlx.samples import evaluations
    from rlx.storage.addresses import open_storage

    run = open_storage("storage/runs/try1", create=False)
    for file in evaluations.kept_evaluations(run):
        outcomes = evaluations.read_outcomes(run, file)
        print(file.step, file.name, dict(zip(outcomes.questions, outcomes.right.sum(1))))
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlx.config.errors import ConfigError, one_line
from rlx.storage.filesystem import Storage, StorageError, retry, write_bytes
from rlx.types import Notify

EVALUATIONS = "evaluations"
"""folder of a run with the outcomes of its evaluations"""
HELD_OUT = "held_out"
"""name of the evaluation that every run has: one greedy answer to each held-out prompt"""
AVERAGED = "ema"
"""name of the same with the averaged weights"""
_FILE = re.compile(r"step_(\d{6,})-([A-Za-z0-9][A-Za-z0-9_.-]*)\.parquet")
_SCHEMA = pa.schema(
    {
        "source": pa.string(),
        "row": pa.int64(),
        "checksum": pa.uint32(),
        "majority": pa.float64(),
        "right": pa.list_(pa.bool_()),
        "score": pa.list_(pa.float64()),
        "length": pa.list_(pa.int32()),
    }
)


@dataclass(frozen=True, order=True)
class EvaluationFile:
    """The name of the file of one evaluation."""

    step: int  # steps done before it
    name: str  # of the set of questions

    def __str__(self) -> str:
        return f"step_{self.step:06d}-{self.name}.parquet"

    @classmethod
    def of(cls, name: str) -> EvaluationFile | None:
        """What a file of such a name holds; None for other files."""
        found = _FILE.fullmatch(name)
        return cls(int(found[1]), found[2]) if found else None


@dataclass(frozen=True, eq=False)
class Outcomes:
    """What came of N questions with n samples each; element i of each column is that of question i."""

    sources: tuple[str, ...]  # the data set, file or folder that it is from
    rows: np.ndarray  # [N], its row of the prompt table
    checksums: np.ndarray  # [N], CRC-32 of the token ids of its prompt
    right: np.ndarray  # [N, n], whether each sample is right
    scores: np.ndarray  # [N, n], the sum of the reward functions by weight
    lengths: np.ndarray  # [N, n], tokens of each sample
    majority: np.ndarray  # [N], see `rlx.algorithms.sampled_answers.majority`

    @property
    def questions(self) -> list[str]:
        """The ids of the questions: the same in all runs on the same prompts with the same tokens."""
        columns = zip(self.sources, self.rows.tolist(), self.checksums.tolist(), strict=True)
        return [f"{source}/{row}/{checksum:08x}" for source, row, checksum in columns]


@dataclass(frozen=True)
class OutcomeWriter:
    """Keeps the outcomes of a run's evaluations."""

    run: Storage
    notify: Notify

    def keep(self, file: EvaluationFile, outcomes: Outcomes) -> None:
        """Writes the outcomes of an evaluation. A storage that does not take them is said in one line, and no error."""
        try:
            write_outcomes(self.run, file, outcomes)
        except StorageError as error:
            self.notify(f"outcomes of the evaluation {file.name} of step {file.step} are not kept: {error}")


def write_outcomes(run: Storage, file: EvaluationFile, outcomes: Outcomes) -> None:
    """Writes or replaces the file of an evaluation, at once: a reader never sees half of it.

    Raises:
        StorageError: the storage does not take it.
    """
    grids = (outcomes.right, outcomes.scores, outcomes.lengths)
    columns = [outcomes.sources, outcomes.rows, outcomes.checksums, outcomes.majority, *(list(grid) for grid in grids)]
    table = pa.table([pa.array(column, kind) for column, kind in zip(columns, _SCHEMA.types, strict=True)], _SCHEMA)
    stream = pa.BufferOutputStream()
    pq.write_table(table, stream, compression="zstd", write_statistics=False)
    path = run / EVALUATIONS / str(file)
    retry(partial(write_bytes, path, stream.getvalue().to_pybytes()), f"writing {path}")


def kept_evaluations(run: Storage) -> list[EvaluationFile]:
    """The evaluations of which a run has kept the outcomes, by step and name.

    Raises:
        StorageError: the storage does not answer.
    """
    folder = run / EVALUATIONS
    names = retry(folder.names, f"reading {folder}")
    return sorted(file for name in names if (file := EvaluationFile.of(name)))


def read_outcomes(run: Storage, file: EvaluationFile) -> Outcomes:
    """The outcomes of an evaluation.

    Raises:
        ConfigError: the file is not what rlx wrote.
        StorageError: the storage does not answer.
    """
    path = run / EVALUATIONS / str(file)
    try:
        table = retry(partial(_table, path), f"reading {path}").select(_SCHEMA.names).cast(_SCHEMA)
        kinds: dict[str, Any] = {"right": np.bool_, "score": np.float64, "length": np.int32}
        right, scores, lengths = (np.array(table[name].to_pylist(), kind) for name, kind in kinds.items())
        if not right.shape == scores.shape == lengths.shape == (len(table), right.shape[-1]):
            raise ValueError("questions have different numbers of samples")
    except StorageError:
        raise
    except (ValueError, KeyError, TypeError, NotImplementedError) as error:  # pyarrow's own errors are of these kinds
        reason = one_line(error, 200)
        raise ConfigError(f"{path} is damaged, or another version of rlx wrote it: {reason}") from None
    rows, checksums, majority = (table[name].to_numpy() for name in ("row", "checksum", "majority"))
    return Outcomes(tuple(table["source"].to_pylist()), rows, checksums, right, scores, lengths, majority)


def _table(file: Storage) -> pa.Table:
    with file.filesystem.open_input_file(file.path) as source:
        return pq.ParquetFile(source).read()
