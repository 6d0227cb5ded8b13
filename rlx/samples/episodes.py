"""The episodes that a run has kept, for steps that are done again: what their environments said need not be asked.

Left out: what is made of them (rlx.rollout.episodes.kept).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow.parquet as pq

from rlx.config.errors import ConfigError, one_line
from rlx.samples.columns import COMPLETIONS, CompletionFile, made_with
from rlx.storage import checkpoint_catalog
from rlx.storage.filesystem import Storage, StorageError, retry
from rlx.types import Episode, KeptEpisode, episode_name

_READ = ("group", "sample", "question", "expected", "token_ids", "episode")


@dataclass(frozen=True)
class KeptSteps:
    """Steps of a run, with their evaluations."""

    run: Storage
    after: int  # this step; -1: all from the evaluation before the first on
    until: int | None = None  # and with this one; None: all

    @classmethod
    def since_checkpoint(cls, run: Storage) -> KeptSteps:
        """The steps that a run has done since its newest checkpoint, which it does again when it is resumed.

        Raises:
            StorageError: the storage does not answer.
        """
        found = retry(partial(checkpoint_catalog.complete_checkpoints, run), f"reading {run.path}")
        return cls(run, found[-1].step if found else -1)

    def episodes(self, environment: str, seed: int) -> dict[str, KeptEpisode]:
        """The episodes of these steps whose environment has not failed, by `episode_name`.

        Args:
            environment, seed: see `columns.made_with`; those that were made with others are left out.

        Raises:
            ConfigError: a file is not what rlx wrote.
            StorageError: the storage does not answer.
        """
        folder = self.run / COMPLETIONS
        files = [file for name in retry(folder.names, f"reading {folder.path}") if (file := CompletionFile.of(name))]
        found: dict[str, KeptEpisode] = {}
        for file in files:
            if self.after < file.step and (self.until is None or file.step <= self.until):
                found |= _episodes(folder / str(file), made_with(environment, seed))
        return found


def _episodes(file: Storage, metadata: dict[bytes, bytes]) -> dict[str, KeptEpisode]:
    try:
        rows = retry(partial(_rows, file, metadata), f"reading {file.path}")
        episodes = [Episode.of_json(row["episode"]) for row in rows]
        return {
            episode_name(episode.turns[0].version, row["group"], row["sample"]): KeptEpisode(
                row["question"], row["expected"], tuple(row["token_ids"]), episode
            )
            for row, episode in zip(rows, episodes, strict=True)
            if not episode.failure
        }
    except StorageError:
        raise
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"{file.path} is damaged: {one_line(error, 200)}") from None


def _rows(file: Storage, metadata: dict[bytes, bytes]) -> list[dict[str, Any]]:
    """The rows with an episode, of a file with this metadata."""
    with file.filesystem.open_input_file(file.path) as source:
        parquet = pq.ParquetFile(source)
        if not metadata.items() <= (parquet.schema_arrow.metadata or {}).items():
            return []
        return [row for row in parquet.read(columns=list(_READ)).to_pylist() if row["episode"]]
