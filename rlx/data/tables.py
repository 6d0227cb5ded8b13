"""The prompt tables of a run's sources: what is trained on, what is held out, and what data.ptx_source has.

Left out: reading rows (sources.py), their tokens (prompts.py), and the tables of eval.sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rlx.config.sections.data import DataConfig, EvalConfig, held_out_setting
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
    tables = {}
    for number, (part, check) in enumerate(zip(data.parts, checks, strict=True)):
        setting, own = data.setting_of(number), evaluation.part(data, number)
        rows, asked = sources.training_and_held_out_rows(part, own, check, setting)
        what = f"training prompts of {setting} {part.source}"
        tables[training[number]] = tokenize_rows(rows, part, tokenizer, what, keeps_messages)
        place = f"{held_out_setting(setting)} {own.source}" if own.source else f"{setting} {part.source}"
        tables[held_out[number]] = tokenize_rows(asked, part, tokenizer, f"held-out prompts of {place}", keeps_messages)
    if data.sources or evaluation.source:  # what a source holds out of its own rows it has left out itself
        prompts = [row for name in held_out for row in tables[name].take_all()]
        tables |= _not_held_out({name: tables[name] for name in training}, data, prompts)
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


def _not_held_out(
    training: dict[str, MaterializedDataset], data: DataConfig, held_out: Sequence[dict[str, Any]]
) -> dict[str, MaterializedDataset]:
    """The training tables without the prompts of any source that are held out; ConfigError if none is left of one."""
    hint = f", of {'one of data.sources' if data.sources else 'eval.source'}"
    places = [f"{data.setting_of(number)} {part.source}" for number, part in enumerate(data.parts)]
    return {
        name: without_repetitions(table, held_out, place, hint)
        for (name, table), place in zip(training.items(), places, strict=True)
    }
