"""The prompt tables of a run's sources: what is trained on, what is held out, and what data.ptx_source has.

Left out: reading rows (sources.py), their tokens (prompts.py), and the tables of eval.sets.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from rlx.config.errors import ConfigError
from rlx.config.sections.data import DataConfig, EvalConfig
from rlx.data import ray_data, sources
from rlx.data.prompts import TokenizerSource, tokenize_rows
from rlx.types import AnswerCheck

if TYPE_CHECKING:
    from ray.data import MaterializedDataset

_LOG = logging.getLogger("rlx")


def source_tables(
    data: DataConfig,
    evaluation: EvalConfig,
    checks: Sequence[AnswerCheck | None],
    tokenizer: TokenizerSource,
    keeps_messages: bool = False,
) -> dict[str, MaterializedDataset]:
    """Returns the prompts of each source, to train on and held out, by `sources.table_names`.

    A prompt that any source holds out is left out of training, with a warning.

    Args:
        checks: of the answers of each source.
        keeps_messages: see `tokenize_rows`.

    Raises:
        ConfigError: a source has no prompts to train on or none to hold out, or a row cannot be used.
    """
    training, held_out = sources.table_names(data, "train"), sources.table_names(data, "held_out")
    tables, places = {}, sources.table_places(data, evaluation)
    for number, (part, check) in enumerate(zip(data.parts, checks, strict=True)):
        setting, own = data.setting_of(number), evaluation.part(data, number)
        rows, asked = sources.training_and_held_out_rows(part, own, check, setting)
        for name, some, use in ((training[number], rows, "training"), (held_out[number], asked, "held-out")):
            tables[name] = tokenize_rows(some, part, tokenizer, f"{use} prompts of {places[name]}", keeps_messages)
    if data.sources or not sources.find_source(data.source).is_generated:  # one that generates has left them out itself
        asked_of = "one of data.sources" if data.sources else evaluation.source and "eval.source"
        hint = f", of {asked_of}" if asked_of else "; set eval.source"
        prompts = _prompts_of(tables[name] for name in held_out)
        tables |= {name: _others(tables[name], prompts, places[name], hint) for name in training}
    return tables


def supervised_table(
    data: DataConfig, held_out: Iterable[MaterializedDataset], tokenizer: TokenizerSource
) -> MaterializedDataset:
    """Returns the prompts of data.ptx_source, with their answers.

    One that is in any of the tables `held_out` is left out, with a warning: its answer would be learnt.

    Raises:
        ConfigError: there are no other ones, or a row cannot be used.
    """
    place = f"data.ptx_source {data.ptx_source}"
    rows = sources.read_rows(str(data.ptx_source), data, "data.ptx_source")
    table = tokenize_rows(rows, data, tokenizer, f"prompts of {place}")
    return _others(table, _prompts_of(held_out), place, "")


def _prompts_of(tables: Iterable[MaterializedDataset]) -> set[bytes]:
    """The prompts in some tables, as `_token_bytes`."""
    import ray  # slow to import, and `rlx train` imports this module before its quick checks

    return {prompt for table in tables for block in table.to_arrow_refs() for prompt in _token_bytes(ray.get(block))}


def _others(table: MaterializedDataset, held_out: set[bytes], place: str, hint: str) -> MaterializedDataset:
    """The rows of a table whose prompts are not held out; says how many are left out.

    What the policy reads is compared, whatever it was made of: text or a conversation, whose system message.

    Args:
        held_out: prompts as `_token_bytes`.
        place: where the rows come from, for the warning and the error.
        hint: how the error goes on.

    Raises:
        ConfigError: there is no other one.
    """
    # Counted first: most sources repeat nothing, and what is filtered is a copy of all rows.
    found = ray_data.map_tables(table, _count_repeated, held_out=held_out)
    if not (repeated := sum(row["repeated"] for row in found.take_all())):
        return table
    total = table.count()
    if repeated == total:
        raise ConfigError(f"{place}: every training prompt is also a held-out one{hint}")
    _LOG.warning("%s: %d of %d training prompts are also held out: they are left out", place, repeated, total)
    return ray_data.map_tables(table, _without, held_out=held_out)


def _count_repeated(rows: pa.Table, held_out: set[bytes]) -> pa.Table:
    return pa.table({"repeated": [sum(prompt in held_out for prompt in _token_bytes(rows))]})


def _without(rows: pa.Table, held_out: set[bytes]) -> pa.Table:
    return rows.filter(pa.array([prompt not in held_out for prompt in _token_bytes(rows)], pa.bool_()))


def _token_bytes(rows: pa.Table) -> Iterator[bytes]:
    """The token ids of each row as bytes: they are the same where the ids are."""
    for chunk in rows["token_ids"].chunks:
        content = chunk.flatten().to_numpy().astype(np.int32).tobytes()
        ends = 4 * np.cumsum(chunk.value_lengths().to_numpy())
        yield from (content[start:end] for start, end in itertools.pairwise([0, *ends.tolist()]))
