"""The episodes that a run has kept, for steps that are done again: what their environments said need not be asked.

Left out: what is made of them (rlx.rollout.episodes.kept).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq

from rlx.config.errors import one_line
from rlx.samples.columns import COMPLETIONS, REDONE, CompletionFile
from rlx.storage.filesystem import Storage, StorageError, retry
from rlx.types import Episode, KeptEpisode, Notify


@dataclass(frozen=True)
class KnownEpisodes:
    """Where the episodes of steps are that are done again."""

    folder: Storage
    after: int = -1  # this step; -1: also the evaluation before the first one
    until: int | None = None  # and with this one; None: all

    @classmethod
    def of_steps(cls, run: Storage, after: int, until: int) -> KnownEpisodes:
        """Those of a run's steps, with their evaluations, after one step and until another one."""
        return cls(run / COMPLETIONS, after, until)

    @classmethod
    def before_resume(cls, run: Storage) -> KnownEpisodes:
        """Those of the steps that a resumed run does again, once `writer.discard_after` has been called."""
        return cls(run / REDONE)

    def read(self, metadata: Mapping[bytes, bytes], notify: Notify) -> dict[str, KeptEpisode]:
        """The episodes whose environment has not failed, by `Episode.begun_with`.

        Args:
            metadata: `columns.made_with`; episodes that were made with other settings are left out.
            notify: is told of files that cannot be read, whose environments are asked again.
        """
        found: dict[str, KeptEpisode] = {}
        try:
            names = retry(self.folder.names, f"reading {self.folder}")
        except StorageError as error:
            notify(f"environments are asked again for what they have said before: {error}")
            return found
        for file in filter(None, map(CompletionFile.of, names)):
            if self.after < file.step and (self.until is None or file.step <= self.until):
                try:
                    place = self.folder / str(file)
                    found |= retry(partial(_read_file, place, metadata), f"reading {place}")
                except (StorageError, ValueError, KeyError, TypeError, AttributeError, NotImplementedError) as error:
                    notify(f"{file} is damaged, environments are asked again for it: {one_line(error, 200)}")
        return found


def _read_file(file: Storage, metadata: Mapping[bytes, bytes]) -> dict[str, KeptEpisode]:
    with file.filesystem.open_input_file(file.path) as source:
        parquet = pq.ParquetFile(source)
        if not metadata.items() <= (parquet.schema_arrow.metadata or {}).items():
            return {}
        table = parquet.read(columns=["token_ids", "episode"])
    found = {}
    for row, text in enumerate(table["episode"].to_pylist()):
        episode = Episode.of_json(text) if text else None  # read whole, so that damage is found here
        if episode and episode.begun_with and not episode.failure:
            found[episode.begun_with] = KeptEpisode(_tokens(table["token_ids"][row]), text)
    return found


def _tokens(ids: pa.ListScalar) -> Sequence[int]:
    """The token ids of a completion, as an array of four bytes each."""
    numbers: Sequence[int] = ids.values.to_numpy().copy()
    return numbers
