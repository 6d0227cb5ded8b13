"""A run that goes on has the prompts that it had, whatever it uses them for."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree
from rlx.data.record import RECORD, check_record, prompt_record
from rlx.data.stream import TableRows
from rlx.storage.addresses import open_storage
from rlx.storage.filesystem import Storage

DATA = {"source": "p.jsonl", "ptx_source": "learn.jsonl"}
SET = {"name": "own", "source": "own.jsonl"}
NAMES = ("train", "held_out", "eval.own", "ptx")


@pytest.fixture
def folder(tmp_path: Path) -> Storage:
    """A run's folder with a record."""
    run = open_storage(str(tmp_path / "try1"))
    (run / RECORD).write_text(prompt_record(*prompts()))
    return run


def prompts(changed: str = "", column: str = "token_ids", **evaluation: Any) -> Any:
    """Settings, and rows of tables that are alike but for the last row of one of them in a column."""
    config = from_tree({"data": DATA, "eval": {"sets": [SET]} | evaluation, "algorithm": {"ptx_coef": 0.1}})
    alike: dict[str, list[Any]] = {"token_ids": [[1], [2]], "answer": ["1", "2"]}
    other = alike | {column: [alike[column][0], [3] if column == "token_ids" else "3"]}
    return config.data, config.eval, {name: TableRows(pa.table(other if name == changed else alike)) for name in NAMES}


@pytest.mark.parametrize(
    ("table", "place"),
    [
        ("train", "data.source p.jsonl: its prompts"),
        ("held_out", "data.source p.jsonl: its held-out prompts"),
        ("eval.own", "eval.sets own own.jsonl: its prompts"),
        ("ptx", "data.ptx_source learn.jsonl: its prompts"),
    ],
)
@pytest.mark.parametrize(("column", "what"), [("token_ids", "texts or tokens"), ("answer", "expected answers")])
def test_prompts_that_changed_are_refused_by_their_setting(
    table: str, place: str, column: str, what: str, folder: Storage
) -> None:
    check_record(folder, *prompts())
    with pytest.raises(ConfigError) as refused:
        check_record(folder, *prompts(table, column))
    said = f"{place} are not those of run try1, which cannot change now: their {what} differ: put back what was there"
    assert str(refused.value) == f"{said}, or start a new run from its weights (--from)"


def test_what_is_evaluated_on_may_be_chosen_anew(folder: Storage) -> None:
    check_record(folder, *prompts("held_out", num_prompts=7))
    check_record(folder, *prompts("eval.own", sets=[SET | {"num_prompts": 7}]))
    with pytest.raises(ConfigError, match=r"^eval\.sets own"):
        check_record(folder, *prompts("eval.own", sets=[SET | {"samples": 7}], every=3))


def test_a_run_of_an_earlier_version_goes_on_without_a_record(folder: Storage) -> None:
    (folder / RECORD).delete()
    check_record(folder, *prompts("ptx"))


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff\xfe{}"])
def test_a_damaged_record_is_refused_in_one_line_with_its_file(content: bytes, folder: Storage) -> None:
    (Path(folder.path) / RECORD).write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        check_record(folder, *prompts())
    assert str(refused.value) == f"{folder}/{RECORD} is damaged: it is not what rlx wrote"
