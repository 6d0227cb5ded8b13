"""The record of a run's prompt tables, by which a run that goes on knows its prompts again, whatever they are for.

The cursor of a checkpoint (stream.py) knows the prompts of training alone. The record has the checksums of all tables,
also of those that are evaluated on and of data.ptx_source.
Left out: the files that prompts were read from (rlx.tracking.provenance).
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, TypeAdapter

from rlx.config.errors import ConfigError
from rlx.config.sections.data import DataConfig, EvalConfig, PromptSettings
from rlx.data.sources import set_table, table_names, table_places
from rlx.data.stream import Digest, PromptRows
from rlx.storage.filesystem import Storage

RECORD = "prompts.json"
"""file in the folder of a run; earlier versions of rlx wrote none"""
PUT_BACK = "put back what was there, or start a new run from its weights (--from)"
"""what to do about prompts that have changed"""


class KnownTable(BaseModel):
    """What the record has of a prompt table."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    rows: int
    digest: Digest
    chosen_by: str  # those settings, as JSON, that choose the rows and may change at a resume

    def difference(self, now: KnownTable) -> str | None:
        """What is not the same now; None if all is, or if other settings choose the rows."""
        if self.chosen_by != now.chosen_by or self == now:
            return None
        if self.rows != now.rows:
            return f"there are {now.rows} of them, and were {self.rows}"
        return f"their {self.digest.difference(now.digest)} differ"


_Record = TypeAdapter(dict[str, KnownTable])


def prompt_record(data: DataConfig, evaluation: EvalConfig, rows: Mapping[str, PromptRows]) -> str:
    """Returns the content of the record for a run with these settings and rows of prompt tables."""
    return _Record.dump_json(_known(data, evaluation, rows), indent=1).decode()


def check_record(run: Storage, data: DataConfig, evaluation: EvalConfig, rows: Mapping[str, PromptRows]) -> None:
    """Checks the prompt tables with which a run would go on; a run without a record may have any.

    Raises:
        ConfigError: one has other prompts than the record in the run's folder, or that is damaged.
    """
    if not (file := run / RECORD).exists():
        return
    try:
        before = _Record.validate_json(file.read_text())
    except ValueError:  # also of bytes that are no UTF-8
        raise ConfigError(f"{file} is damaged: it is not what rlx wrote") from None
    places = table_places(data, evaluation)
    for name, now in _known(data, evaluation, rows).items():
        if name in before and (difference := before[name].difference(now)):
            which = "held-out prompts" if name.startswith("held_out") else "prompts"
            raise ConfigError(
                f"{places[name]}: its {which} are not those of run {run.name}, which cannot change now: {difference}: "
                f"{PUT_BACK}"
            )


def _known(data: DataConfig, evaluation: EvalConfig, rows: Mapping[str, PromptRows]) -> dict[str, KnownTable]:
    chosen_by = _choices(data, evaluation)
    return {
        name: KnownTable(rows=len(each), digest=each.digest, chosen_by=chosen_by[name]) for name, each in rows.items()
    }


def _choices(data: DataConfig, evaluation: EvalConfig) -> dict[str, str]:
    """The settings, as JSON, that choose the rows of each table and may change at a resume: those of `eval`."""
    shared, own = evaluation.model_dump_json(include={"source", "num_prompts", "seed"}), PromptSettings.model_fields
    return dict.fromkeys([*table_names(data, "train"), *table_names(data, "held_out"), "ptx"], shared) | {
        set_table(each.name): shared + each.model_dump_json(include={"source", *own}, exclude_none=True)
        for each in evaluation.sets
    }
