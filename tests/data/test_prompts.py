"""Prompt files, the prompt table, and each rank's share of the steps; the reading runs in real Ray tasks."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
import ray.data

from rlx.config.errors import ConfigError
from rlx.config.sections import DataConfig
from rlx.data import prompts, sources, stored, stream
from rlx.data.stream import PromptStream, TableRows
from rlx.models import tiny

pytestmark = pytest.mark.usefixtures("ray_cluster")

FILES = DataConfig(source="prompts.csv", params={})
LONG = "a question of 25 letters?"


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a character-level tokenizer whose chat template marks the roles."""
    folder = tmp_path_factory.mktemp("chat")
    tiny.build_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same without a chat template."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = tiny.build_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return str(folder)


def rows(*questions: str) -> list[dict[str, Any]]:
    return [{"question": question, "answer": "1", "entry": i} for i, question in enumerate(questions)]


def decoded(table: ray.data.Dataset, model: str) -> list[str]:
    tokenizer = prompts.load_tokenizer(model)
    return [tokenizer.decode(row["token_ids"]) for row in table.take_all()]


# --- files


def jsonl(file: Path, records: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], None]] = {
    ".jsonl": jsonl,
    ".parquet": lambda file, records: pd.DataFrame(records).to_parquet(file),
    ".csv": lambda file, records: pd.DataFrame(records).to_csv(file, index=False),
}


@pytest.mark.parametrize("suffix", WRITERS)
def test_rows_keep_file_order_and_become_text(tmp_path: Path, suffix: str) -> None:
    records = [{"asked": f"q{i}", "other": None if i == 5 else i, "solution": i} for i in range(300)]
    WRITERS[suffix](tmp_path / f"p{suffix}", records)
    config = DataConfig(source="x.csv", prompt_column="asked", answer_column="solution")
    found = sources.read_rows(str(tmp_path / f"p{suffix}"), config, "data.source").take_all()
    assert found == [{"question": f"q{i}", "answer": str(i)} for i in range(300)]


@pytest.mark.parametrize("suffix", WRITERS)
def test_swapped_columns_and_lines_within_a_text(tmp_path: Path, suffix: str) -> None:
    WRITERS[suffix](tmp_path / f"p{suffix}", [{"question": "a", "answer": 'b\nc\u2028"d", e'}])
    config = DataConfig(source="x.csv", prompt_column="answer", answer_column="question")
    found = sources.read_rows(str(tmp_path / f"p{suffix}"), config, "data.source").take_all()
    assert found == [{"question": 'b\nc\u2028"d", e', "answer": "a"}]


@pytest.mark.parametrize(
    ("name", "content", "answers"),
    [
        ("a.csv", "question,answer\na,007\nb,1e3\nc,NA\nd,2024-01-01\ne,42\nf,1.50\n", ["007", "1e3", "NA"]),
        ("a.jsonl", '{"question":"a","answer":42}\n\n{"question":"b","answer":1.5}\r\n', ["42", "1.5"]),
        ("b.jsonl", '{"question":"a","answer":"2024-01-01"}\n{"question":"b","answer":7.0}', ["2024-01-01", "7"]),
        ("c.jsonl", '{"question":"a","answer":12345678901234567891}', ["12345678901234567891"]),
        ("d.jsonl", '{"question":"a","answer":"x","more":[1]}\n{"answer":"y","question":"b"}\n', ["x", "y"]),
    ],
)
def test_answers_are_the_text_of_the_file(tmp_path: Path, name: str, content: str, answers: list[str]) -> None:
    (tmp_path / name).write_text(content)
    found = [row["answer"] for row in sources.read_rows(str(tmp_path / name), FILES, "data.source").take_all()]
    assert found[: len(answers)] == answers
    if name == "a.csv":
        assert found[3:] == ["2024-01-01", "42", "1.50"]


def test_integers_that_pandas_made_floats_are_integers_again(tmp_path: Path) -> None:
    frame = pd.DataFrame({"question": ["a", "b", "c"], "answer": [42, None, 7]}).dropna()
    assert frame["answer"].dtype == float
    frame.to_parquet(tmp_path / "p.parquet")
    found = sources.read_rows(str(tmp_path / "p.parquet"), FILES, "data.source").take_all()
    assert [row["answer"] for row in found] == ["42", "7"]


GOOD = '{"question": "q", "answer": "a"}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "p.txt",
            "x",
            ": expected reasoning_gym:DATASET, hf:NAME, or a file, folder or glob of .jsonl, .json",
        ),
        ("p.csv", None, ": no such file"),
        ("p.csv", "", ": there are no rows in it"),
        ("p.csv", "question,answer\n", ": there are no rows in it"),
        ("p.jsonl", "", ": there are no rows in it"),
        ("p.jsonl", "\n \n", ": there are no rows in it"),
        ("p.parquet", "x", ": Parquet file size is 1 bytes"),
        ("p.jsonl", GOOD + "\n" + '{"question": "q"', ":3: malformed JSON: "),
        ("p.jsonl", GOOD + "[1]\n", ":2: expected a JSON object per line, found list"),
        (
            "p.jsonl",
            GOOD + '{"question": 5, "answer": "r"}\n',
            ":2: a question is 5, expected text (its answer is 'r')",
        ),
        ("p.jsonl", GOOD + '{"question": " ", "answer": "r"}\n', ":2: a question is ' ', expected text"),
        ("p.jsonl", GOOD + '{"question": "lost"}\n', ":2: the answer to 'lost' is None, expected text or a number"),
        ("p.jsonl", GOOD + '{"question": "q", "answer": NaN}\n', ":2: the answer to 'q' is nan"),
        ("p.jsonl", GOOD + '{"question": "q", "answer": [1]}\n', ":2: the answer to 'q' is [1]"),
        ("p.csv", "question,answer\nq,1\nlost,\n", ": the answer to 'lost' is None"),
        ("p.csv", "question,answer\nq,1\nr,1,2\n", ": CSV parse error: Row #3: Expected 2 columns, got 3"),
        ("p.csv", "questoin,answer\nq,1\n", ": no column 'question', it has questoin, answer; nearest: questoin"),
        ("p.jsonl", '{"question": "q", "x": 1}\n', ": no column 'answer', it has question, x"),
        ("p.csv", "question,answer,question\nq,1,2\n", ": 2 columns are called 'question'"),
    ],
)
def test_an_unusable_file_is_refused_in_one_line_that_says_where(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, content: str | None, message: str
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError) as refused:
        sources.read_rows(str(file), FILES, "eval.source")
    assert str(refused.value).startswith(f"eval.source {file}{message}")
    assert "\n" not in str(refused.value)
    assert capfd.readouterr().err == ""


def test_a_question_that_is_a_number_in_parquet_is_refused(tmp_path: Path) -> None:
    pd.DataFrame({"question": [5], "answer": ["x"]}).to_parquet(tmp_path / "p.parquet")
    with pytest.raises(ConfigError, match=r"p\.parquet: a question is 5, expected text"):
        sources.read_rows(str(tmp_path / "p.parquet"), FILES, "data.source")


@pytest.mark.parametrize(("count", "size", "held_out"), [(40, 3, 3), (40, 100, 4), (2, 5, 1), (9, 5, 1)])
def test_the_last_rows_are_held_out_at_most_a_tenth(count: int, size: int, held_out: int) -> None:
    source = ray.data.from_items([{"n": i} for i in range(count)], override_num_blocks=2)
    train, rest = stored.hold_out(source, size)
    assert [row["n"] for row in train.take_all()] == list(range(count - held_out))
    assert [row["n"] for row in rest.take_all()] == list(range(count - held_out, count))


def test_one_row_cannot_be_split() -> None:
    with pytest.raises(ConfigError, match=r"1 rows are too few to hold one out; set eval\.source"):
        stored.hold_out(ray.data.from_items([{"n": 1}]), 5)


# --- the prompt table


def test_the_chat_template_and_the_system_message_are_applied(chat_model: str) -> None:
    plain = prompts.tokenize_rows(rows("1 + 1?"), DataConfig(), chat_model)
    assert decoded(plain, chat_model) == ["<|user|>1 + 1?<|assistant|>"]
    directed = prompts.tokenize_rows(rows("1 + 1?"), DataConfig(system_prompt="Be brief."), chat_model)
    assert decoded(directed, chat_model) == ["<|system|>Be brief.<|user|>1 + 1?<|assistant|>"]
    assert plain.take_all()[0] | {"token_ids": None} == rows("1 + 1?")[0] | {"token_ids": None}


def test_a_model_without_a_chat_template_gets_the_bare_text(base_model: str) -> None:
    assert decoded(prompts.tokenize_rows(rows("1 + 1?"), DataConfig(), base_model), base_model) == ["1 + 1?"]
    directed = prompts.tokenize_rows(rows("1 + 1?"), DataConfig(system_prompt="Be brief."), base_model)
    assert decoded(directed, base_model) == ["Be brief.\n\n1 + 1?"]


def test_over_long_prompts_are_left_out_and_counted(base_model: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="rlx"):
        table = prompts.tokenize_rows(rows("ab", LONG, "cd", LONG), DataConfig(max_prompt_tokens=24), base_model)
    assert [row["question"] for row in table.take_all()] == ["ab", "cd"]
    assert [row["entry"] for row in table.take_all()] == [0, 2]
    assert caplog.messages == ["2 of 4 prompts are longer than data.max_prompt_tokens (24) and left out"]
    caplog.clear()
    assert prompts.tokenize_rows(rows("ab", LONG), DataConfig(max_prompt_tokens=25), base_model).count() == 2
    assert caplog.messages == []


def test_no_prompt_left_is_an_error(base_model: str) -> None:
    with pytest.raises(ConfigError, match=r"no prompt is left: 2 of 2 prompts are longer than .*_tokens \(24\)"):
        prompts.tokenize_rows(rows(LONG, LONG), DataConfig(max_prompt_tokens=24), base_model)


def test_an_empty_block_has_the_schema_of_the_others(base_model: str) -> None:
    source = ray.data.from_items(rows(LONG, LONG, "ab", "cd"), override_num_blocks=2)
    table = prompts.tokenize_rows(source, DataConfig(max_prompt_tokens=24), base_model)
    joined = pa.concat_tables(table.iter_batches(batch_size=None, batch_format="pyarrow"))
    assert joined["question"].to_pylist() == ["ab", "cd"]


def test_a_folder_without_a_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"model.path {tmp_path}: its tokenizer: ") as refused:
        prompts.tokenize_rows(rows("ab"), DataConfig(), str(tmp_path))
    assert "\n" not in str(refused.value)


# --- each rank's share


def table(size: int) -> pa.Table:
    return pa.table(
        {
            "question": [f"q{i}" for i in range(size)],
            "answer": [str(i) for i in range(size)],
            "token_ids": [[i, i] for i in range(size)],
        }
    )


def rows_of(size: int) -> TableRows:
    return TableRows(table(size))


def ids(stream: PromptStream, count: int) -> list[int]:
    return [prompt.id for prompt in stream.next(count)]


def test_prompts_are_the_rows_at_the_positions() -> None:
    first, second = stream.prompts(rows_of(5), [3, 1])
    assert (first.id, first.token_ids, first.question, first.answer) == (3, (3, 3), "q3", "3")
    assert first.dataset_index is None
    assert second.id == 1
    with_entries = table(2).append_column("entry", pa.array([7, 9]))
    assert [prompt.dataset_index for prompt in stream.prompts(TableRows(with_entries), range(2))] == [7, 9]
    assert stream.prompts(rows_of(5), []) == []


def test_every_prompt_comes_once_per_epoch_in_another_order() -> None:
    stream = PromptStream(rows_of(12), seed=0)
    drawn = [ids(stream, 4) + ids(stream, 8) for _ in range(3)]
    # Each draw of a prompt has an id of its own, from which its sampling seeds follow.
    assert [sorted(ids) for ids in drawn] == [list(range(start, start + 12)) for start in (0, 12, 24)]
    orders = [[i % 12 for i in ids] for ids in drawn]
    assert orders[0] != orders[1] != orders[2] != list(range(12))


def test_a_later_draw_of_a_prompt_is_the_same_prompt() -> None:
    early, late = stream.prompts(rows_of(5), [3, 8])
    assert (early.id, late.id) == (3, 8)
    assert (early.question, early.token_ids) == (late.question, late.token_ids) == ("q3", (3, 3))


def test_the_order_depends_on_the_seed_alone() -> None:
    first, again, other = (ids(PromptStream(rows_of(50), seed=seed), 50) for seed in (3, 3, 4))
    assert first == again
    assert first != other


@pytest.mark.parametrize("size", [3, 20, 64])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_steps_are_the_same_on_any_number_of_ranks(size: int, ranks: int) -> None:
    alone = PromptStream(rows_of(size), seed=1)
    shared = [PromptStream(rows_of(size), seed=1, rank=rank, ranks=ranks) for rank in range(ranks)]
    for _ in range(5):
        shares = [ids(stream, 8) for stream in shared]
        assert {len(share) for share in shares} == {8 // ranks}
        assert [prompt for row in zip(*shares, strict=True) for prompt in row] == ids(alone, 8)


def test_a_step_may_take_several_epochs() -> None:
    step = ids(PromptStream(rows_of(3), seed=0), 10)
    assert [sorted(step[i : i + 3]) for i in (0, 3, 6)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_a_stream_continues_at_its_cursor_on_other_ranks_too() -> None:
    stream = PromptStream(rows_of(10), seed=2)
    ids(stream, 24)
    cursor = json.loads(json.dumps(stream.cursor()))
    assert {name: cursor[name] for name in cursor if name != "token_digest"} == {
        "epoch": 2,
        "offset": 4,
        "seed": 2,
        "size": 10,
    }
    expected = ids(stream, 8)
    halves = [PromptStream(rows_of(10), seed=2, rank=rank, ranks=2) for rank in range(2)]
    for half in halves:
        half.seek(cursor)
        assert half.cursor() == cursor
    assert [prompt for row in zip(*(ids(half, 8) for half in halves), strict=True) for prompt in row] == expected


@pytest.mark.parametrize(("size", "seed"), [(11, 2), (10, 3)])
def test_a_cursor_of_other_prompts_is_refused(size: int, seed: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"\(seed 2, 10 of them\) are not those of this run \(seed {seed}, {size} of them\)"
    ):
        PromptStream(rows_of(size), seed).seek(PromptStream(rows_of(10), seed=2).cursor())


@pytest.mark.parametrize("tokens", [[[1], [2, 3], [5]], [[1, 2], [3], [4]], [[3], [1], [2]]])
def test_a_cursor_of_as_many_prompts_with_other_tokens_is_refused(tokens: list[list[int]]) -> None:
    def stream(ids: list[list[int]], chunks: int = 1) -> PromptStream:
        parts = [pa.table({"token_ids": pa.array(ids[i::chunks], pa.list_(pa.int64()))}) for i in range(chunks)]
        return PromptStream(TableRows(pa.concat_tables(parts)), seed=1)

    cursor = stream([[1], [2, 3], [4]]).cursor()
    stream([[1], [4], [2, 3]], chunks=2).seek(cursor)  # how the table lies in memory is nothing of the prompts
    with pytest.raises(ConfigError, match=r"prompts are not those of this run: their texts or tokens differ$"):
        stream(tokens).seek(cursor)
