"""Which cells of a stored row are its prompt and its answer, and the row that they make.

A prompt is text, a conversation (a list of {role, content}, as chat templates take it, or as JSON), or text that a
template makes of several cells. Left out: reading cells (parsers.py, hub.py) and chat templates (rlx.data.prompts).
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypedDict

import pyarrow as pa

from rlx.config.errors import nearest
from rlx.config.sections.data import DataConfig, template_parts
from rlx.rewards.patterns import last_matches
from rlx.types import SYSTEM_ROLES, AnswerCheck, Prompt

_ROLES = (*SYSTEM_ROLES, "user", "assistant", "tool", "function", "ipython")
"""chat templates may pass over a message with another role, or write it as if a user had said it; the last two are of
older templates and of Llama's"""
_PRINTED = re.compile(rf"\s*\[\s*{{\s*(?=').*'role': '(?:{'|'.join(_ROLES)})'", re.DOTALL)
"""messages as pandas writes a column of lists into a CSV file"""
_CALLS = ("tool_calls", "function_call")
"""what a message has beside its content if it calls tools"""
_SAID = {"content", *_CALLS}
_BEGUN = re.compile(rf'\s*\[\s*{{\s*"role"\s*:\s*"(?:{"|".join(_ROLES)})"\s*[,}}]')
"""how a conversation begins as JSON"""
_LAST_OF_CUT = re.compile(r"(\w{0,5}|[-.])\s*")
"""what JSON that is cut off outside of a plain string ends with, from where it cannot be read"""


class ChatMessage(TypedDict):
    """One message of a conversation."""

    role: str
    content: str


class Row(TypedDict):
    """One prompt as it is stored."""

    question: str  # of a conversation its text, for people and reward functions
    answer: str
    messages: list[ChatMessage] | None  # the conversation that is the prompt; None: the question is


_MESSAGE = pa.struct({"role": pa.string(), "content": pa.string()})
SCHEMA = pa.schema({"question": pa.string(), "answer": pa.string(), "messages": pa.list_(_MESSAGE)})


class ColumnError(ValueError):
    """A file has not the columns that are to be read; no row of it is to blame."""


@dataclass(frozen=True)
class Columns:
    """Which cells of a row are read. `a.b` is the entry `b` of column `a`, unless a column has that name itself."""

    question: str = "question"
    answer: str = "answer"
    system: str | None = None
    template: str | None = None  # makes the question of several cells
    expected: str | None = None  # pattern of the expected answer in the answer's cell; None: all of it
    check: AnswerCheck | None = None  # of each expected answer

    @classmethod
    def of(cls, data: DataConfig, setting: str, check: AnswerCheck | None = None) -> Columns:
        """The columns that the settings name, for the rows of the address in a setting."""
        expected = None if setting == "data.ptx_source" else data.expected_pattern  # whole answers are learnt
        return cls(data.prompt_column, data.answer_column, data.system_column, data.prompt_template, expected, check)

    @functools.cached_property
    def parts(self) -> list[tuple[str, str]]:
        """The template as pairs (text, the cell after it)."""
        return template_parts(self.template) if self.template else []

    @functools.cached_property
    def settings(self) -> dict[str, str]:
        """The setting that names each cell that is read, by the name of the cell."""
        asked = [column for _, column in self.parts if column] or [self.question]
        named = dict.fromkeys(asked, "--data.prompt-template" if self.template else "--data.prompt-column")
        named |= {self.system: "--data.system-column"} if self.system else {}
        return named if self.answer in named else named | {self.answer: "--data.answer-column"}

    def roots(self, names: Sequence[str]) -> list[str]:
        """Returns the columns of a table with these columns that have the cells.

        Raises:
            ColumnError: a column is not there, or there twice.
        """
        counts, found = Counter(names), dict[str, None]()
        for cell, setting in self.settings.items():
            root = cell if cell in counts else cell.partition(".")[0]
            if root not in counts:
                raise ColumnError(no_column(cell, names, setting))
            if counts[root] > 1:
                raise ColumnError(f"{counts[root]} columns are called {root!r}")
            found[root] = None
        return list(found)

    def row(self, record: Mapping[str, Any]) -> Row:
        """Returns the row of a record; raises ValueError if it has no question, or no answer that can be used."""
        answer = self._cell(record, self.answer)
        question, messages = self._prompt(record, answer)
        if not question.strip():
            raise _no_question(question, answer)
        system = self._cell(record, self.system) if self.system else None
        if system is not None and not isinstance(system, str):
            raise ValueError(f"the system message of {question!r:.80} is {system!r:.80}, expected text")
        if system and system.strip() and not (messages and messages[0]["role"] in SYSTEM_ROLES):
            messages = [
                ChatMessage(role="system", content=system),
                *(messages or [ChatMessage(role="user", content=question)]),
            ]
        expected = self._expected(clean_answer(question, answer))
        if not _is_unicode("".join(message["content"] for message in messages or ())):
            raise ValueError(f"not valid Unicode: a message of the question {question!r:.80}")
        if self.check:
            self.check(expected)
        return {"question": question, "answer": expected, "messages": messages}

    def _expected(self, answer: str) -> str:
        """The part of an answer that is compared with completions."""
        (found,) = last_matches(self.expected, [answer]) if self.expected else (answer,)
        if found is None:
            raise ValueError(f"--data.expected-pattern {self.expected!r} is not in the answer {answer!r:.200}")
        if self.expected and not found.strip():
            raise ValueError(f"--data.expected-pattern {self.expected!r} finds nothing in the answer {answer!r:.200}")
        return found.strip()

    def _prompt(self, record: Mapping[str, Any], answer: Any) -> tuple[str, list[ChatMessage] | None]:
        """The question of a record, and its messages if it is a conversation."""
        if self.template:
            return "".join(text + self._filled(record, column) for text, column in self.parts), None
        given = self._cell(record, self.question)
        if isinstance(given, str):
            given = _from_json(given)
        if isinstance(given, list):
            messages = conversation(given)
            return text_of(messages), messages
        if not isinstance(given, str):
            raise _no_question(given, answer)
        return given, None

    def _filled(self, record: Mapping[str, Any], column: str) -> str:
        cell = self._cell(record, column) if column else ""
        if not isinstance(cell, str | int | float | Decimal) or _is_missing(cell):
            raise ValueError(f"{column} is {cell!r:.80}, expected text or a number for data.prompt_template")
        return _as_text(cell)

    def _cell(self, record: Mapping[str, Any], path: str) -> Any:
        """The cell of a record, as text if it holds the bytes of one; raises ValueError if it holds other bytes."""
        cell = self._entry(record, path)
        try:
            return cell.decode() if isinstance(cell, bytes) else cell
        except UnicodeDecodeError:
            raise ValueError(f"{path} is {cell!r:.80}, expected text: these bytes are not UTF-8") from None

    def _entry(self, record: Mapping[str, Any], path: str) -> Any:
        """The cell of a record as it is stored; None if it, or what it would be an entry of, is missing."""
        if path in record or "." not in path:
            return record.get(path)
        value: Any = record
        for name in path.split("."):
            if value is None:
                return None
            if not isinstance(value, Mapping):
                raise ValueError(f"{self.settings[path]} {path}: {value!r:.80} has no entries")
            if name not in value and value is not record:
                raise ValueError(f"{self.settings[path]} {path}: {_no_entry(name, list(value))}")
            value = value.get(name)
        return value


def _no_question(given: Any, answer: Any) -> ValueError:
    return ValueError(f"a question is {given!r:.80}, expected text (its answer is {answer!r:.80})")


def _no_entry(name: str, names: Sequence[str]) -> str:
    return f"no entry {name!r}, it has {', '.join(names) or 'none'}{nearest(name, names)}"


def no_column(column: str, names: Sequence[str], setting: str) -> str:
    """The line about a column that is not among the names of a table: what there is, and which setting names it."""
    shown = [name if name == name.strip() else repr(name) for name in names]  # blanks at an end are not seen otherwise
    found = f"no column {column!r}, it has {', '.join(shown) or 'none'}"
    for mark, word in ((";", ";"), ("\t", "tabs")):
        if len(names) == 1 and mark in names[0]:
            return f"{found}: its columns are separated by {word}, where , is expected"
    return f"{found}{nearest(column, shown)}; {setting} names another"


def _from_json(cell: str) -> str | list[Any]:
    """The messages in a cell that is a conversation as JSON, as formats without lists have it; else the cell itself.

    Raises:
        ValueError: it is a conversation as Python prints it, or begins as one in JSON, ends as one or within one, and
            is none.
    """
    if not cell.lstrip().startswith("["):
        return cell
    if _PRINTED.match(cell):
        way = "write this column with json.dumps, or the file as Parquet"
        raise ValueError(f"messages written by Python, not JSON: {cell!r:.80}; {way}")
    try:
        found, reason = json.loads(cell), "a message of it has no role or no content"
    except (ValueError, RecursionError) as error:
        if _is_about_messages(cell, error):
            return cell
        found, reason = [], f"malformed JSON: {error}"
    if found and all(isinstance(each, dict) and "role" in each and each.keys() & _SAID for each in found):
        return found
    if _BEGUN.match(cell):
        raise ValueError(f"a conversation cannot be read, {cell!r:.80}: {reason}")
    return cell


def _is_about_messages(cell: str, error: Exception) -> bool:
    """Whether a text that is no JSON goes on after what is like it: it does not end as messages do, or within them."""
    is_cut = False
    if isinstance(error, json.JSONDecodeError):
        if error.msg == "Extra data":
            return True
        is_cut = error.msg.startswith("Unterminated string") or bool(_LAST_OF_CUT.fullmatch(cell, error.pos))
    return not (is_cut or cell.rstrip().endswith(("]", "}")))


def conversation(given: Sequence[Any]) -> list[ChatMessage]:
    """Returns a cell's list as messages, the last of which asks for an answer.

    Raises:
        ValueError: it is no conversation, or ends with an answer.
    """
    messages = [_message(each) for each in given]
    if all(message["role"] in SYSTEM_ROLES for message in messages):
        raise ValueError("a conversation has no message of a user")
    if messages[-1]["role"] == "assistant":
        raise ValueError(f"a conversation ends with an answer, {messages[-1]['content']!r:.80}, not with a question")
    return messages


def _message(given: Any) -> ChatMessage:
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        raise ValueError(f"a message is {given!r:.80}, expected {{role, content}}")
    if (role := given["role"]) not in _ROLES:
        hint = nearest(role.lower(), _ROLES)
        raise ValueError(f"the role of a message is {role!r:.80}, expected one of {', '.join(_ROLES)}{hint}")
    if calls := [name for name in _CALLS if given.get(name)]:
        raise ValueError(f"a message has {calls[0]} beside its content, which is not read: write them into its content")
    content = given.get("content")
    if isinstance(content, list):  # parts, of which some may be images
        texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    if not isinstance(content, str):
        raise ValueError(f"the content of a message is {given.get('content')!r:.80}, expected text")
    return ChatMessage(role=role, content=content)


def text_of(messages: Sequence[ChatMessage]) -> str:
    """The text of a conversation without its system message: the one question, or all messages after their roles."""
    said = [message for message in messages if message["role"] not in SYSTEM_ROLES]
    if len(said) == 1:
        return said[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in said)


def with_system(given: str | Sequence[ChatMessage], system_prompt: str | None) -> list[ChatMessage]:
    """The messages of a question or a conversation, a system message first if one is given."""
    messages = [ChatMessage(role="user", content=given)] if isinstance(given, str) else list(given)
    if not system_prompt or messages[0]["role"] in SYSTEM_ROLES:
        return messages
    return [ChatMessage(role="system", content=system_prompt), *messages]


def prompt_of(number: int, row: Row, system_prompt: str | None) -> Prompt:
    """The prompt of a row, without its tokens; `system_prompt`: of rows that have no system message."""
    chat = with_system(row.get("messages") or row["question"], system_prompt)
    messages = tuple({"role": each["role"], "content": each["content"]} for each in chat)
    return Prompt(number, (), row["question"], row["answer"], messages=messages)


def clean_answer(question: str, answer: Any) -> str:
    """Returns an answer as text; raises ValueError if there is none, or it or the question is no Unicode."""
    if _is_missing(answer) or isinstance(answer, list | dict):
        raise ValueError(f"the answer to {question!r:.80} is {answer!r:.80}, expected text or a number")
    if not _is_unicode(f"{question}{answer}"):
        raise ValueError(f"not valid Unicode: {question!r:.80} or its answer {answer!r:.80}")
    return _as_text(answer)


def _is_unicode(text: str) -> bool:
    """Whether a text has no half of a surrogate pair alone, which JSON can write and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_missing(cell: Any) -> bool:
    return cell is None or cell != cell or (isinstance(cell, float) and math.isinf(cell))


def _as_text(cell: Any) -> str:
    if isinstance(cell, bool):  # as JSON and most CSV files write it, not as Python does
        return json.dumps(cell)
    if isinstance(cell, Decimal):  # of Parquet, with as many digits after the point in each row; never with an exponent
        return str(int(cell)) if cell == int(cell) else f"{cell:f}"
    # pandas writes integers as floats when their column has a missing value.
    is_integer = isinstance(cell, float) and cell.is_integer() and abs(cell) < 2**53
    return str(int(cell) if is_integer else cell)
