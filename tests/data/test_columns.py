"""Which cells of a stored row are read, and the row that they make."""

import json
import math
from contextlib import nullcontext
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree
from rlx.config.sections.data import DataConfig
from rlx.config.sections.reward import RewardConfig
from rlx.data import sources
from rlx.data.reasoning_gym import generated_questions
from rlx.data.stored import parsers
from rlx.data.stored.columns import ChatMessage, ColumnError, Columns, conversation
from rlx.rewards import scoring


def user(content: str) -> ChatMessage:
    return {"role": "user", "content": content}


def system(content: str) -> ChatMessage:
    return {"role": "system", "content": content}


def test_a_conversation_has_the_text_of_its_one_question_or_of_all_turns() -> None:
    columns = Columns("messages", "answer")
    one = columns.row({"messages": [system("Add."), user("1 + 1?")], "answer": 2})
    assert one == {"question": "1 + 1?", "answer": "2", "messages": [system("Add."), user("1 + 1?")]}
    turns: list[ChatMessage] = [user("hi"), {"role": "assistant", "content": "yes?"}, user("1 + 1?")]
    assert columns.row({"messages": turns, "answer": 2})["question"] == "user: hi\n\nassistant: yes?\n\nuser: 1 + 1?"
    assert columns.row({"messages": "1 + 1?", "answer": 2})["messages"] is None


def test_parts_of_text_are_one_content() -> None:
    parts = [{"type": "text", "text": "1 + "}, {"type": "text", "text": "1?"}]
    assert conversation([{"role": "user", "content": parts, "name": None}]) == [user("1 + 1?")]


def test_a_message_may_name_calls_that_it_does_not_make() -> None:
    """Tables of one schema give each message each entry."""
    assert conversation([{**user("1"), "tool_calls": None}, {**user("2"), "tool_calls": []}]) == [user("1"), user("2")]


def test_a_conversation_may_be_json_in_a_text(tmp_path: Path) -> None:
    turns: list[ChatMessage] = [system("Add."), user("hi"), {"role": "assistant", "content": "yes?"}, user("1 + 1?")]
    file = tmp_path / "p.csv"
    pd.DataFrame({"question": [json.dumps(turns), f" {json.dumps(turns[3:])}"], "answer": [2, 2]}).to_csv(file)
    rows = sources.first_rows(DataConfig(source=str(file)), 2)
    assert [row["messages"] for row in rows] == [turns, turns[3:]] and rows[1]["question"] == "1 + 1?"
    called = {"role": "assistant", "tool_calls": [{"name": "add"}]}
    pd.DataFrame({"question": ["1?", json.dumps([*turns, called, turns[3]])], "answer": [2, 2]}).to_csv(file)
    with pytest.raises(ConfigError, match=r"p\.csv: row 3: a message has tool_calls beside its content"):
        sources.first_rows(DataConfig(source=str(file)), 2)


def test_a_conversation_as_python_prints_it_is_refused_with_its_row(tmp_path: Path) -> None:
    file, turns = tmp_path / "p.csv", [system("Add."), user("1 + 1?")]
    for printed in (turns, np.array(turns), [{"content": "it's {x}", "role": "user"}]):
        pd.DataFrame({"question": [printed], "answer": [2]}).to_csv(file)
        with pytest.raises(
            ConfigError, match=r"p\.csv: row 2: messages written by Python, not JSON: .* json\.dumps, or"
        ):
            sources.first_rows(DataConfig(source=str(file)), 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (json.dumps([system("Add."), user("1 + 1?")])[:-5], "malformed JSON: "),
        (json.dumps([user("1?"), {"role": "assistant"}]), "a message of it has no role or no content$"),
        (' [ {"role" : "user"}]', "a message of it has no role or no content$"),
        ('[{"role": "user", "content": "hi",}]\n', "malformed JSON: "),
    ],
)
def test_a_conversation_in_json_that_cannot_be_read_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=rf"^a conversation cannot be read, '.*: {said}"):
        Columns().row({"question": text, "answer": 1})


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "[1, 2]",
        "[{'a': 1}]",
        '[{"role": "admin"}]',
        '[{"a": 1}, 2]',
        "[x] or not?",
        '[{"role": "user", "content": "hi"}] has how many messages?',
        '[{"role": "user", "content": "hi"}] is a[0] of [a]',
        '[{"role": "user", "content": "hi"}, ...] what is this?',
        '[{"role": "user", "content": "hi",}] fix this JSON',
        r'[{"role": "user", "content": "C:\users"}] fix this JSON',
        "[" * 99_999,
    ],
)
def test_other_text_in_brackets_is_a_question(text: str) -> None:
    row = Columns().row({"question": text, "answer": 1})
    assert row["question"] == text and row["messages"] is None


def test_a_conversation_in_json_is_refused_wherever_it_is_cut_off() -> None:
    text = json.dumps([{**user('a "\\" é\n😀?'), "name": None, "weight": -1.5, "seen": True}, user("1?")])
    for end in range(len('[{"role": "user",'), len(text)):
        with pytest.raises(ValueError, match=r"^a conversation cannot be read, .*: malformed JSON: "):
            Columns().row({"question": text[:end], "answer": 1})


def test_the_expected_answer_is_the_last_match_in_its_cell() -> None:
    columns = Columns(expected="#### (.+)")
    long = "48 / 2 = <<48/2=24>>24\n#### 24\n48 + 24 = 72\n#### 72 "
    assert columns.row({"question": "How many?", "answer": long})["answer"] == "72"
    assert Columns(expected=r"\d+").row({"question": "How many?", "answer": 72})["answer"] == "72"
    with pytest.raises(ValueError, match=r"--data.expected-pattern '#### \(\.\+\)' is not in the answer 'about 72'"):
        columns.row({"question": "How many?", "answer": "about 72"})
    with pytest.raises(ValueError, match=r"'#### \(\.\*\)' finds nothing in the answer '#### '"):
        Columns(expected="#### (.*)").row({"question": "How many?", "answer": "#### "})


@pytest.mark.parametrize(
    ("functions", "pattern", "is_refused"),
    [
        ({"task": 1.0}, None, True),
        ({"exact_match": 1.0}, None, True),
        ({"task": 1.0}, r"-?\d+", False),
        ({"numeric": 1.0, "exact_match": 0.0}, None, False),
    ],
)
def test_a_blank_answer_is_refused_where_saying_nothing_would_be_paid_for(
    functions: dict[str, float], pattern: str | None, is_refused: bool, tmp_path: Path
) -> None:
    (file := tmp_path / "p.jsonl").write_text('{"question": "1?", "answer": "1"}\n{"question": "2?", "answer": " "}\n')
    check = scoring.answer_check(RewardConfig(functions=functions, answer_pattern=pattern))
    with (
        pytest.raises(ConfigError, match=r"p\.jsonl:2: the expected answer is blank: task")
        if is_refused
        else nullcontext()
    ):
        assert sources.first_rows(DataConfig(source=str(file)), 2, check=check)[1]["answer"] == ""


def test_whole_answers_are_learnt_where_part_of_them_is_expected(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "1 + 1?", "answer": "two, so #### 2"}\n')
    data = DataConfig(source=str(file), expected_pattern="#### (.+)")
    read = sources.find_source(str(file)).read_first
    assert [read(str(file), data, name, 1)[0]["answer"] for name in ("data.source", "data.ptx_source")] == [
        "2",
        "two, so #### 2",
    ]
    with pytest.raises(ConfigError, match=r"data\.expected_pattern: reasoning_gym:DATASET has answers that need none"):
        from_tree({"data": {"expected_pattern": "#### (.+)"}})


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "a conversation has no message of a user"),
        ([system("Add.")], "a conversation has no message of a user"),
        (["1 + 1?"], r"a message is '1 \+ 1\?', expected \{role, content\}"),
        ([{"from": "human", "value": "1"}], r"a message is \{'from': 'human', .*expected \{role, content\}"),
        (
            [{"role": "usr", "content": "1"}],
            "the role of a message is 'usr', expected one of system, .*, ipython; nearest: user$",
        ),
        ([user("1"), {"role": "Assistant", "content": "2"}], "is 'Assistant', expected .*; nearest: assistant$"),
        ([{"role": "observation", "content": "1"}], "is 'observation', expected one of .*, ipython$"),
        (
            [user("1"), {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}, user("2")],
            "a message has tool_calls beside its content, which is not read: write them into its content$",
        ),
        (
            [{"role": "assistant", "content": None, "function_call": {"name": "f"}}, user("2")],
            "has function_call beside",
        ),
        ([{"role": "user", "content": 5}], "the content of a message is 5, expected text"),
        (
            [{"role": "user", "content": [{"type": "image", "url": "x"}]}],
            "the content of a message is .*, expected text",
        ),
        (
            [user("1"), {"role": "assistant", "content": "2"}],
            "a conversation ends with an answer, '2', not with a quest",
        ),
    ],
)
def test_what_is_no_conversation_is_refused(messages: list[Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Columns("messages", "answer").row({"messages": messages, "answer": 2})


def test_messages_of_tools_and_developers_are_taken() -> None:
    given = [
        ChatMessage(role=role, content="1") for role in ("developer", "system", "user", "assistant", "tool", "user")
    ]
    assert conversation(given) == given


def test_a_role_that_is_not_known_is_refused_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    rows = [{"question": [{"role": role, "content": "1"}], "answer": "1"} for role in ("user", "usr")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=r"prompts\.jsonl:2: the role of a message is 'usr', .*; nearest: user$"):
        sources.first_rows(DataConfig(source=str(file)), 2)


def test_a_system_message_of_a_row_comes_first_unless_the_conversation_has_one() -> None:
    columns = Columns("prompt", "answer", system="how")
    assert columns.row({"prompt": "1?", "answer": 1, "how": "Add."})["messages"] == [system("Add."), user("1?")]
    assert columns.row({"prompt": "1?", "answer": 1, "how": " "})["messages"] is None
    assert columns.row({"prompt": "1?", "answer": 1, "how": None})["messages"] is None
    own = [system("Own."), user("1?")]
    assert columns.row({"prompt": own, "answer": 1, "how": "Add."})["messages"] == own
    with pytest.raises(ValueError, match=r"the system message of '1\?' is 5, expected text"):
        columns.row({"prompt": "1?", "answer": 1, "how": 5})


def test_entries_of_cells_are_named_by_dots_unless_a_column_has_that_name() -> None:
    columns = Columns("extra.question", "a.b")
    assert columns.row({"extra": {"question": "1?"}, "a": {"b": 7}})["answer"] == "7"
    assert columns.row({"extra": {"question": "1?"}, "a": {"b": 7}, "a.b": 8})["answer"] == "8"
    assert columns.roots(["extra", "a", "a.b", "more"]) == ["extra", "a.b"]
    with pytest.raises(ValueError, match=r"the answer to '1\?' is None"):
        columns.row({"extra": {"question": "1?"}, "a": None})
    with pytest.raises(ValueError, match=r"--data.answer-column a\.b: 'text' has no entries"):
        columns.row({"extra": {"question": "1?"}, "a": "text"})
    with pytest.raises(ValueError, match=r"--data.prompt-column extra\.question: no entry 'question', it has questoin"):
        columns.row({"extra": {"questoin": "1?"}, "a": {"b": 7}})


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
@pytest.mark.parametrize(("cell", "said"), [({}, "no entry 'b', it has none"), ("x", "'x' has no entries")])
def test_an_entry_that_is_missing_is_refused_with_its_row(cell: Any, said: str, suffix: str, tmp_path: Path) -> None:
    rows = [{"question": "1?", "a": each} for each in ({"b": 1}, {"b": 2}, cell)]
    text = json.dumps(rows) if suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows)
    (file := tmp_path / f"p{suffix}").write_text(text)
    place = {".jsonl": ":3", ".json": ": row 3"}[suffix]
    with pytest.raises(ConfigError, match=rf"p{suffix}{place}: --data\.answer-column a\.b: {said}"):
        sources.first_rows(DataConfig(source=str(file), answer_column="a.b"), 3)


def test_a_message_that_is_no_unicode_is_refused_with_its_row(tmp_path: Path) -> None:
    chat = [system("\ud800"), user("1?")]
    rows = [{"question": "1?", "answer": "1", "how": None}, {"question": "1?", "answer": "1", "how": "\udfff"}]
    (file := tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=r"p\.jsonl:2: not valid Unicode: a message of the question '1\?'$"):
        sources.first_rows(DataConfig(source=str(file), system_column="how"), 2)
    with pytest.raises(ValueError, match=r"^not valid Unicode: a message of the question '1\?'$"):
        Columns().row({"question": chat, "answer": "1"})


def test_a_template_makes_the_question_of_several_cells() -> None:
    columns = Columns(answer="answer", template="{facts.text}\n\nIn \\boxed{{}}: {question} ({facts.points})")
    record = {"facts": {"text": "A cow.", "points": 3}, "question": "Legs?", "answer": "4"}
    assert columns.row(record)["question"] == "A cow.\n\nIn \\boxed{}: Legs? (3)"
    assert columns.roots(["answer", "facts", "question"]) == ["facts", "question", "answer"]
    with pytest.raises(ColumnError, match=r"no column 'question', it has answer, facts; --data.prompt-template names"):
        columns.roots(["answer", "facts"])
    with pytest.raises(ValueError, match=r"question is None, expected text or a number for data\.prompt_template"):
        columns.row(record | {"question": None})


@pytest.mark.parametrize(
    ("given", "template"),
    [(" \n", None), ([system("Add."), user(" ")], None), (json.dumps([user("")]), None), ("", "{question} ")],
)
def test_a_blank_question_is_refused_with_its_row(given: Any, template: str | None, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    rows = [{"question": each, "answer": "2"} for each in ("1 + 1?", given)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=r"p\.jsonl:2: a question is '.*', expected text \(its answer is '2'\)$"):
        sources.first_rows(DataConfig(source=str(file), prompt_template=template), 2)


def test_a_cell_of_a_template_reads_as_an_answer_does() -> None:
    """pandas and Parquet keep a column of integers with a missing one as floats."""
    columns = Columns(answer="answer", template="{a} + {b} =")
    assert columns.row({"a": 1.0, "b": 2, "answer": 3.0})["question"] == "1 + 2 ="
    table = pa.table({"a": [1.0, 1.5, math.nan], "b": [2, 3, 4], "answer": ["3", "4.5", "x"]})
    rows = parsers.table_rows(table, columns, 0)
    assert [next(rows)["question"], next(rows)["question"]] == ["1 + 2 =", "1.5 + 3 ="]
    with pytest.raises(ValueError, match=r"^row 3: a is nan, expected text or a number for data\.prompt_template$"):
        next(rows)


@pytest.mark.parametrize("template", [None, "{question}"])
def test_bytes_are_the_text_that_they_hold(template: str | None) -> None:
    columns = Columns(template=template, system="how")
    kinds = {"question": pa.binary(), "answer": pa.large_binary(), "how": pa.binary(3)}
    records = [{"question": "½ of 84?".encode(), "answer": b"42", "how": b"Add"}]
    records += [{"question": b"1?", "answer": b"\xff", "how": None}]
    rows = parsers.table_rows(pa.Table.from_pylist(records, pa.schema(kinds)), columns, 0)
    messages = [system("Add"), user("½ of 84?")]
    assert next(rows) == {"question": "½ of 84?", "answer": "42", "messages": messages}
    with pytest.raises(ValueError, match=r"^row 2: answer is b'\\xff', expected text: these bytes are not UTF-8$"):
        next(rows)


def test_decimals_are_numbers() -> None:
    cells = [Decimal("3.00"), Decimal("-2.50"), Decimal("0.0000001"), Decimal(10) ** 20]
    table = pa.table({"a": pa.array(cells, pa.decimal128(38, 7)), "answer": pa.array(cells, pa.decimal128(38, 7))})
    rows = list(parsers.table_rows(table, Columns(template="{a} ="), 0))
    answers = ["3", "-2.5000000", "0.0000001", "1" + "0" * 20]
    assert [(row["question"], row["answer"]) for row in rows] == [(f"{each} =", each) for each in answers]


def test_numbers_of_single_precision_have_their_shortest_text() -> None:
    numbers = pa.array([0.1, 7.0, None], pa.float32())
    entries = pa.StructArray.from_arrays([numbers, pa.array(["x"] * 3)], ["b", "c"])
    table = pa.table({"question": pa.array([0.1, 2.5, 1e-7], pa.float32()), "a": entries, "answer": [0.1, 2.0, 3.0]})
    rows = parsers.table_rows(table, Columns(answer="a.b", template="{question} {a.c} {answer}"), 0)
    assert [next(rows)["answer"], next(rows)["question"]] == ["0.1", "2.5 x 2"]
    with pytest.raises(ValueError, match=r"^row 3: the answer to '1e-07 x 3' is None"):
        next(rows)


def test_a_cell_of_a_csv_file_may_be_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "p.csv").write_text(f'question,answer\n1?,1\n"{"x" * 3_000_000}",2\n3?,3\n')
    data = DataConfig(source=str(file), params={})
    assert [len(row["question"]) for row in sources.first_rows(data, 3)] == [2, 3_000_000, 2]
    monkeypatch.setattr(parsers, "_LONGEST_ROW", 1 << 20)
    with pytest.raises(ConfigError) as refused:
        sources.first_rows(data, 3)
    said = "a row is longer than 1 MiB: a cell is that large, or its quote is never closed"
    assert str(refused.value) == f"data.source {file}: {said}"


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        (".json", '[{"question": "1?", "answer": 1}]'),
        (".json", '{"question": "1?", "answer": 1}\n'),
        (".jsonl", '{"question": "1?", "answer": 1}\n'),
        (".csv", "question,answer\n1?,1\n"),
    ],
)
def test_a_byte_order_mark_is_no_part_of_a_file(suffix: str, content: str, tmp_path: Path) -> None:
    (file := tmp_path / f"p{suffix}").write_text(content, "utf-8-sig")
    rows = sources.first_rows(DataConfig(source=str(file), params={}), 2)
    assert [(row["question"], row["answer"]) for row in rows] == [("1?", "1")]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("\\boxed{} {question}", r"\{\} is no column; .* braces that are text are doubled: \{\{ and \}\}"),
        ("{question", "expected '}' before end of string; "),
        ("question}", "single '}' encountered in format string; "),
        ("{question:5}", r"\{question:5\} is no column"),
        ("{a[0]}", r"\{a\[0\]\} is no column"),
        ("question", "it names no column"),
    ],
)
def test_a_template_with_other_braces_is_refused_before_anything_starts(template: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"data.prompt_template = .*{said}"):
        from_tree({"data": {"prompt_template": template}})


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"prompt_template": "{context}"}, "has no column but question"),
        ({"system_column": "system"}, "has no column but question"),
        (
            {"source": "a.csv", "prompt_template": "{a}", "prompt_column": "b"},
            "prompt_column does nothing with data.prom",
        ),
        ({"chat_template_args": {"tokenize": True}}, "tokenize is set by rlx itself"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(data: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        from_tree({"data": data})


def test_a_column_of_a_template_is_missed_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "p.csv"
    file.write_text("context,question,answer\n7,1?,1\n")
    data = DataConfig(source=str(file), params={}, prompt_template="{contxt}: {question}")
    with pytest.raises(ConfigError, match=r"p\.csv: no column 'contxt', it has context, .*; nearest: context"):
        sources.check_source(data.source, data, "data.source")
    (row,) = sources.first_rows(data.model_copy(update={"prompt_template": "{context}: {question}"}), 1)
    assert row["question"] == "7: 1?"


def test_generated_questions_are_put_into_a_template_too() -> None:
    plain = list(generated_questions(DataConfig(), seed=3, size=4))
    asked = list(generated_questions(DataConfig(prompt_template="Think. {question}"), seed=3, size=4))
    assert asked == [row | {"question": f"Think. {row['question']}"} for row in plain]
