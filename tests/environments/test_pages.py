"""The classes on the page about environments: they are environments, and do what the page says."""

import asyncio
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest
from episode_cases import pool_of

from rlx.cli.options import parse, settings_parser
from rlx.cli.train import new_config
from rlx.data.sources import check_enough
from rlx.environments.base import load_environment
from rlx.environments.tools import schemas
from rlx.models.tiny import build_tokenizer
from rlx.rollout.episodes.dialogue import Dialogue
from rlx.types import Observation, TaskRow

PAGE = Path(__file__).resolve().parents[2] / "docs" / "environments.md"


@pytest.fixture(autouse=True)
def shop(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("shop")
    for block in blocks("python"):
        exec(block, vars(module))
    monkeypatch.setitem(sys.modules, "shop", module)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def said(name: str, *actions: str) -> list[Observation]:
    async def played() -> list[Observation]:
        pool = pool_of(name)
        found = [await pool.start("1", TaskRow("How much is a pear?", "4"), 7)]
        for number, action in enumerate(actions):
            found.append(await pool.step("1", action, number))
        assert await pool.close("1", check=True)
        return found

    return asyncio.run(played())


def test_the_shop() -> None:
    call = '<tool_call>{"name": "price", "arguments": {"name": "%s"}}</tool_call>'
    start, unknown, known, end = said("shop:Shop", call % "melon", call % "pear", "4")
    assert start.text == "How much is a pear?"
    assert unknown.text == "error: KeyError: 'melon'" and (unknown.calls, unknown.call_errors) == (1, 1)
    assert known.messages == ({"role": "tool", "name": "price", "content": "4"},) and not known.done
    assert (end.reward, end.done, end.messages) == (1.0, True, ())


def test_the_command_of_the_shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (questions,), (command,) = (
        blocks("json"),
        re.findall(r"^rlx train (.* shop:Shop .*)$", PAGE.read_text(), re.MULTILINE),
    )
    (tmp_path / "prompts.jsonl").write_text(questions)
    config = new_config(None, parse(settings_parser("", ""), shlex.split(command))[1])
    check_enough(config.data, config.eval, config.train.prompts_per_step)
    assert config.model.path == "tiny-calculator"
    Dialogue(build_tokenizer(has_tool=True), schemas(load_environment(str(config.environment.name))))


def test_the_echo() -> None:
    start, first, last = said("shop:Echo", "yes", "no")
    assert (start.text, first.text) == ("Say 4.", "Again.")
    assert [(each.reward, each.done) for each in (first, last)] == [(1.0, False), (0.0, True)]


def test_the_solver() -> None:
    start, shorter, end = said("shop:Solver", "a word " * 20, "It is 4.")
    assert [each.messages[0]["content"] for each in (start, shorter)] == ["How much is a pear?", "Shorter, please."]
    assert (end.reward, end.done) == (1.0, True)


def test_the_buyer() -> None:
    call = '<tool_call>{"name": "price", "arguments": {"name": "pear"}}</tool_call>'
    start, known, end = said("shop:Buyer", call, "4")
    assert start.text == "How much is a pear?" and start.tools[0]["function"]["name"] == "price"
    assert known.messages == ({"role": "tool", "name": "price", "content": "4"},) and known.calls == 1
    assert (end.reward, end.done) == (1.0, True)
