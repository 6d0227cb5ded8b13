"""Reads the completions that a run has kept, on a folder or on S3, whichever ranks wrote them.

The files may be damaged or come from someone else: every problem becomes an error of one line. Left out: which of the
completions are shown (choosing.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlx.config.errors import ConfigError, one_line
from rlx.samples.columns import COLUMNS, COMPLETIONS, LATER, PER_TOKEN, REWARD, CompletionFile, Kind
from rlx.storage.filesystem import Storage, StorageError, retry
from rlx.types import Episode


@dataclass(frozen=True)
class KeptStep:
    """The files of one step's completions, or of one evaluation's."""

    number: int
    kind: Kind
    files: tuple[CompletionFile, ...]

    @property
    def missing(self) -> int:
        """How many ranks' files are not there."""
        return self.files[0].ranks - len(self.files)


@dataclass(frozen=True)
class KeptCompletion:
    """One completion as it was kept; `columns.COLUMNS` says what its values mean."""

    step: int
    kind: Kind
    prompt_index: int
    group: int
    sample: int
    trained: bool
    question: str
    expected: str
    prompt: str
    completion: str
    answer: str | None
    score: float
    correct: bool
    finish: str
    version: int
    staleness: int
    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    engine_logprobs: tuple[float, ...] | None
    logprobs: tuple[float, ...] | None
    ratios: tuple[float, ...] | None
    advantages: tuple[float, ...] | None
    rewards: Mapping[str, float] = field(default_factory=dict)  # unweighted, by the name of the reward function
    turns: tuple[int, ...] | None = None
    episode: str | None = None
    source: str | None = None

    @property
    def played(self) -> Episode | None:
        """The episode, if there was an environment; raises ConfigError if the file has something else."""
        return None if self.episode is None else _episode(self.episode, self.step)

    @property
    def mismatch(self) -> tuple[float, ...] | None:
        """The log-probability of each token by the engine minus that by the trainer; None: one of them is not known."""
        if self.engine_logprobs is None or self.logprobs is None:
            return None
        return tuple(a - b for a, b in zip(self.engine_logprobs, self.logprobs, strict=True))

    @property
    def mean_advantage(self) -> float | None:
        """The mean over the policy's tokens; None: it was not trained on."""
        own = self.own(self.advantages)
        return sum(own) / len(own) if own else None

    def own(self, values: Sequence[float] | None) -> list[float]:
        """Those of one value for each token that are of the policy's tokens; none if they are not known."""
        turns = self.turns or (0,) * len(values or ())
        return [value for value, turn in zip(values or (), turns, strict=values is not None) if turn >= 0]


def kept_steps(run: Storage) -> list[KeptStep]:
    """The steps and evaluations whose completions a run has kept, in their order.

    Raises:
        StorageError: the storage does not answer.
    """
    folder = run / COMPLETIONS
    names = [file for name in retry(folder.names, f"reading {folder}") if (file := CompletionFile.of(name))]
    attempts: dict[tuple[int, Kind], dict[int, list[CompletionFile]]] = {}
    for file in sorted(names):
        attempts.setdefault((file.step, file.kind), {}).setdefault(file.ranks, []).append(file)
    # On other numbers of ranks there is another set of files: the one that lacks the fewest counts.
    best = {key: min(sets.values(), key=lambda files: files[0].ranks - len(files)) for key, sets in attempts.items()}
    return [KeptStep(step, kind, tuple(files)) for (step, kind), files in sorted(best.items())]


def read(run: Storage, step: KeptStep) -> pa.Table:
    """The completions of a step, by prompt and sample: in the same order on any number of ranks.

    Returns:
        A table with the `columns.COLUMNS`, and one more for each reward function.

    Raises:
        ConfigError: a file is not what rlx wrote.
        StorageError: the storage does not answer.
    """
    tables = [_read_file(run / COMPLETIONS / str(file)) for file in step.files]
    return pa.concat_tables(tables, promote_options="default").sort_by(
        [("group", "ascending"), ("sample", "ascending")]
    )


def completions(table: pa.Table) -> list[KeptCompletion]:
    """The rows of a table of completions. A large table takes many times its memory: choose rows first."""
    names = [name for name in table.column_names if name.startswith(REWARD)]
    rows, rewards = table.select(COLUMNS.names).to_pylist(), table.select(names).to_pylist()
    return [_as_completion(*pair) for pair in zip(rows, rewards or [{}] * len(rows), strict=True)]


def count_failed(table: pa.Table) -> int:
    """How many completions are episodes whose environment failed; raises ConfigError if an episode is damaged."""
    texts = zip(table["episode"].to_pylist(), table["step"].to_pylist(), strict=True)
    return sum(bool(text and _episode(text, step).failure) for text, step in texts)


def _episode(text: str, step: int) -> Episode:
    try:
        return Episode.of_json(text)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"an episode in the completions of step {step} is damaged: {error}") from None


def _read_file(file: Storage) -> pa.Table:
    try:
        table = retry(partial(_table, file), f"reading {file}")
        rewards = [name for name in table.column_names if name.startswith(REWARD)]
        for name in set(LATER) - set(table.column_names):
            table = table.append_column(name, pa.nulls(len(table), COLUMNS.field(name).type))
        known = table.select(COLUMNS.names).cast(COLUMNS)
        _check(known)
        for name in rewards:
            known = known.append_column(name, table[name].cast(pa.float64()))
        return known
    except StorageError:
        raise
    except (ValueError, KeyError, TypeError, NotImplementedError) as error:  # pyarrow's own errors are of these kinds
        reason = one_line(error, 200)
        raise ConfigError(f"{file} is damaged, or another version of rlx wrote it: {reason}") from None


def _check(table: pa.Table) -> None:
    """Raises ValueError for values that no completion has."""
    for kind in table["kind"].unique().to_pylist():
        Kind(kind)
    lengths = pc.list_value_length(table["tokens"])
    for name in PER_TOKEN:
        if pc.any(pc.not_equal(pc.list_value_length(table[name]), lengths)).as_py():
            raise ValueError(f"{name} and tokens are not of the same length")


def _table(file: Storage) -> pa.Table:
    with file.filesystem.open_input_file(file.path) as source:
        return pq.ParquetFile(source).read()


def _as_completion(row: Mapping[str, Any], rewards: Mapping[str, float | None]) -> KeptCompletion:
    values: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in row.items()}
    given = {name.removeprefix(REWARD): value for name, value in rewards.items() if value is not None}
    return KeptCompletion(**values | {"kind": Kind(row["kind"]), "rewards": given})
