"""The prompt tables of a run's sources: what is trained on, what is held out, and what data.ptx_source has.

Left out: reading rows (sources.py), their tokens (prompts.py), and the tables of eval.sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rlx.config.sections.data import DataConfig, EvalConfig
from rlx.data import sources
from rlx.data.prompts import TokenizerSource, tokenize_rows
from rlx.data.stored.source import without_repetitions
from rlx.types import AnswerCheck

if TYPE_CHECKING:
    from ray.data import MaterializedDataset


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
    if data.sources or evaluation.source:  # what a source holds out of its own rows it has left out itself
        prompts = [row for name in held_out for row in tables[name].take_all()]
        hint = f", of {'one of data.sources' if data.sources else 'eval.source'}"
        tables |= {name: without_repetitions(tables[name], prompts, places[name], hint) for name in training}
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
    return without_repetitions(table, [row for each in held_out for row in each.take_all()], place, "")
