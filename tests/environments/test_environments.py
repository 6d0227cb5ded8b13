"""The environments that ship: what they say, what they reward, and that their best strategies reach the optimum."""

import asyncio
import functools
import json
import re
import statistics
import sys
import threading
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from rlx.config.errors import ConfigError
from rlx.config.run import settings
from rlx.config.sections.reward import RewardConfig
from rlx.environments.base import ENVIRONMENTS, LONGEST_ANSWER, load_environment, messages_of, tool_methods
from rlx.environments.calculator import Calculator, number_in, number_text, value_of
from rlx.environments.code_task import CodeTask
from rlx.environments.games.guess_number import GuessNumber
from rlx.environments.games.treasure import Treasure
from rlx.environments.host import Action, Beginning, EnvironmentHost, HostSettings
from rlx.environments.python_tool import ProgramFailed, PythonTool
from rlx.environments.tools import calls_in, schemas
from rlx.rewards import scoring
from rlx.types import TaskRow

WEAK = "limits"  # the walls of this machine do not matter here


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_environment_of_the_table_is_one_and_describes_its_tools(name: str) -> None:
    found = load_environment(name)
    assert found.__doc__
    for tool in schemas(found):
        assert tool["function"]["description"] and tool["function"]["parameters"]["properties"]


class Stock(dict[str, int]):
    """Is a builtin class, too."""

    def price(self, name: str) -> int:
        """The price of a fruit.

        Args:
            name: the fruit
        """
        return self[name]


def test_methods_of_a_builtin_class_are_no_tools() -> None:
    assert [tool["function"]["name"] for tool in schemas(Stock)] == list(tool_methods(Stock)) == ["price"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("__main__:Here", "put Here in a module, which other processes can import"),
        ("./envs.py:Shop", "expected module:Class, not a path: envs:Shop, from its folder"),
    ],
)
def test_a_name_that_no_other_process_finds_is_refused(name: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_environment(name)
    assert str(refused.value) == f"environment.name {name}: {reason}"


class NoTools:
    def score(self, answer: str) -> float:
        return 0.0


class Silent(NoTools):
    def look(self) -> str:
        return ""


class NoScore:
    def look(self) -> str:
        """Looks."""
        return ""


class Threaded(Silent):
    @property
    def threads_per_episode(self) -> int:
        return 2


class Owing(Silent):
    threads_per_episode = -1


class Wrapped(NoTools):
    limit = max  # of Python's, and so no method of this class

    @classmethod
    def kind(cls) -> str:
        """Says what it is."""
        return cls.__name__

    @functools.cache  # noqa: B019 - as a user may write it
    def once(self) -> str:
        """Looks once."""
        return "seen"

    @property
    def size(self) -> int:
        return 1


class NoReset:
    def step(self, action: str) -> tuple[str, float, bool]:
        return "", 0.0, True


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_setting_names_every_environment_of_the_table(name: str) -> None:
    assert re.search(rf"\b{name}\b", str(settings()["environment.name"].description))


def test_class_methods_and_wrapped_methods_are_tools() -> None:
    assert list(tool_methods(Wrapped)) == ["kind", "once"]
    assert [tool["function"]["name"] for tool in schemas(Wrapped)] == ["kind", "once"]


def test_a_class_of_the_working_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop_here.py").write_text("class Shop:\n    reset = step = lambda self, *given: None\n")
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])  # as for an installed command
    monkeypatch.chdir(tmp_path)
    assert load_environment("shop_here:Shop").__name__ == "Shop"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("calculater", "nearest: calculator"),
        ("nothing", "calculator, python, guess_number"),
        ("no.such.module:Class", "no.such.module cannot be imported"),
        ("test_environments:Silend", "has no class Silend; nearest: Silent"),
        ("test_environments:NoTools", "neither step.action. nor a public method"),
        ("test_environments:Silent", "the tool look has no docstring"),
        ("test_environments:NoScore", "has tools but no score"),
        ("test_environments:NoReset", "has step but no reset"),
        ("test_environments:Threaded", "threads_per_episode is a number of the class, 0 or more, not property"),
        ("test_environments:Owing", "threads_per_episode is a number of the class, 0 or more, not -1"),
    ],
)
def test_a_name_that_is_none_is_refused_in_one_line(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as raised:
        load_environment(name)
    assert "\n" not in str(raised.value) and name in str(raised.value)


@pytest.mark.parametrize("wrap", [str, lambda text: [{"role": "user", "content": text}]])
def test_an_observation_has_a_largest_length(wrap: Callable[[str], Any]) -> None:
    longest = "a" * LONGEST_ANSWER
    assert messages_of(wrap(longest))[0]["content"] == longest
    with pytest.raises(ValueError, match="1000001 characters, more than 1000000"):
        messages_of(wrap(longest + "a"))


def test_an_observation_is_text_or_messages() -> None:
    assert messages_of("a") == ({"role": "user", "content": "a"},)
    assert messages_of([{"role": "tool", "name": "f", "content": "a"}])[0]["name"] == "f"
    for wrong in (5, [5], [{"role": "user"}], {"content": "a"}):
        with pytest.raises(TypeError, match="message"):
            messages_of(wrong)


class Node(str):
    """A text as parsers of HTML return it: with what cannot be pickled, and with a meaning for templates."""

    def __init__(self, text: str) -> None:
        self.lock = threading.Lock()

    def __html__(self) -> str:
        raise AssertionError("a template that escapes asks for it")


@pytest.mark.parametrize(
    "said", [Node("a\ud83d"), {Node("role"): Node("user"), "content": Node("a\ud83d")}], ids=["text", "message"]
)
def test_texts_are_plain_and_whole_in_either_form(said: Any) -> None:
    (message,) = messages_of(said)
    assert message == {"role": "user", "content": "a?"}
    assert {type(text) for each in message.items() for text in each} == {str}


def test_fields_of_a_message_are_as_json_gives_them_back() -> None:
    further = {"tags": ("x", Node("y\udcff")), "of": {1: True}}
    (message,) = messages_of({"role": "user", "content": "a", **further})
    assert message == {"role": "user", "content": "a", "tags": ["x", "y?"], "of": {"1": True}}
    assert json.loads(json.dumps(message)) == message
    with pytest.raises(TypeError, match="names of a message's fields are text, not int 1"):
        messages_of({"role": "user", "content": "a", 1: 2})


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("515 - 248 - 468", "-201"),
        ("(1 + 2) * 3", "9"),
        ("1 / 8", "0.125"),
        ("-1/3", "-0.3333333333"),
        ("2 ** 10", "1024"),
    ],
)
def test_the_calculator_is_exact(expression: str, value: str) -> None:
    assert Calculator().calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "a + 1",
        "__import__('os')",
        "9 ** 9 ** 9 ** 9",
        "(9**64)**64",
        "1 if 1 else 2",
        "1" * 300,
        "True + 1",
        "1 / 0",
    ],
)
def test_the_calculator_computes_nothing_else(expression: str) -> None:
    with pytest.raises((ValueError, ArithmeticError)):
        value_of(expression)


@pytest.mark.parametrize(
    ("answer", "whole", "last"),
    [("1200", 1, 1), ("It is 1,200.", 0, 1), ("1200 or 3", 0, 0), ("", 0, 0), ("1200.0", 1, 1), ("9/0", 0, 0)],
)
def test_the_calculator_scores_the_last_number_or_all_that_is_said(answer: str, whole: float, last: float) -> None:
    for kind, expected in (("whole", whole), ("last", last)):
        calculator = Calculator(kind)
        assert calculator.reset(TaskRow("How many?", "1200"), 0) == [{"role": "user", "content": "How many?"}]
        assert calculator.score(answer) == expected


@pytest.mark.parametrize("answer", [r"\frac{3}{4}", "(2, 3)", "1e3", "72 apples"])
def test_the_calculator_refuses_an_expected_answer_that_is_no_number(answer: str) -> None:
    with pytest.raises(ValueError, match=r"is no number; data\.expected_pattern takes one out of a text"):
        Calculator().reset(TaskRow("How many?", answer), 0)


def test_tools_begin_with_the_conversation_of_a_row() -> None:
    chat = tuple({"role": role, "content": role} for role in ("system", "user", "assistant", "user"))
    row = TaskRow("all of it", "3", messages=chat)
    assert Calculator().reset(row, 7) == list(chat[1:])
    assert (row.system, TaskRow("a", "b").asked) == (chat[:1], ({"role": "user", "content": "a"},))


def test_the_calculator_shows_examples_of_its_use_that_the_seed_draws() -> None:
    row, shown = TaskRow("How many?", "3"), Calculator(examples=2)
    said = shown.reset(row, 7)
    assert [each["role"] for each in said] == ["user", "assistant", "tool", "assistant"] * 2 + ["user"]
    for asked, called, returned, answered in (said[:4], said[4:8]):
        (call,) = calls_in(called["content"])
        assert shown.calculate(**call.arguments) == returned["content"] == answered["content"]
        assert call.arguments["expression"] in asked["content"]
    assert shown.reset(row, 7) == said != shown.reset(row, 8)


def halving(largest: int, seed: int) -> tuple[float, int]:
    """The reward and the guesses of the best strategy."""
    game, low, high, guesses = GuessNumber(largest), 1, largest, 0
    game.reset(TaskRow("", ""), seed)
    while True:
        guess, guesses = (low + high) // 2, guesses + 1
        said, reward, done = game.step(f"I guess {guess}")
        if done:
            return reward, guesses
        low, high = (low, guess - 1) if said == "smaller" else (guess + 1, high)


def test_halving_the_range_wins_in_as_few_guesses_as_are_needed() -> None:
    games = [halving(15, seed) for seed in range(60)]
    assert max(guesses for _, guesses in games) == GuessNumber(15).most_guesses == 4
    assert all(reward == pytest.approx(1 - 0.1 * (guesses - 1)) for reward, guesses in games)
    assert 3.0 < statistics.mean(guesses for _, guesses in games) < 3.6  # 49 / 15 on average
    game = GuessNumber(15)
    game.reset(TaskRow("", ""), 0)
    assert game.step("who knows") == ("no number", 0.0, False) and game.step("9" * 5000)[1:] == (0.0, False)


def test_the_shortest_way_to_the_treasure_has_the_whole_reward() -> None:
    for seed in range(20):
        world, rewards = Treasure(4), list[float]()
        text, done = world.reset(TaskRow("", ""), seed), False
        while not done:
            where = text.rpartition(" is ")[2]
            word = "take" if "Here is the key" in text else "open" if "The chest is here" in text else where.split()[0]
            text, reward, done = world.step(word.strip("."))
            rewards.append(reward)
        assert (len(rewards), sum(rewards)) == (world.steps_needed, 1.0)


def test_turns_that_lead_nowhere_cost_a_part_of_the_reward() -> None:
    world = Treasure(2, cost=0.25)
    text = world.reset(TaskRow("", ""), 3)
    assert world.step("dance")[0].startswith("Nothing happens.") and world.step("open")[1:] == (0.0, False)
    done, reward = False, 0.0
    text = world.step("dance")[0]
    while not done:
        where = text.rpartition(" is ")[2]
        word = "take" if "Here is the key" in text else "open" if "The chest is here" in text else where.split()[0]
        text, reward, done = world.step(word.strip("."))
    assert reward == pytest.approx(1 - 3 * 0.25)


@pytest.mark.slow
def test_programs_of_the_policy_run_in_the_sandbox() -> None:
    tool = PythonTool(WEAK, cpu_s=0.5)
    tool.reset(TaskRow("Sum?", "5050"), 0)
    assert tool.python("print(sum(range(101)))") == "5050\n"
    with pytest.raises(ProgramFailed, match=r"^ended by its limit of cpu$"):
        tool.python("while True: pass")
    assert len(tool.python("print('a' * 5000)")) < 2100
    assert [tool.score(each) for each in ("It is 5050.", "so\n5050", "5051")] == [1, 1, 0]
    tool.reset(TaskRow("What?", r"\frac{3}{4}"), 0)  # no number, though there are some in it
    assert [tool.score(each) for each in ("4", "3/4", "so\n\\frac{3}{4}")] == [0, 0, 1]


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("print(5)\nprint(1/0)", "exit status 1, ZeroDivisionError: division by zero (line 2)\n5"),
        ("print(1", "exit status 1, SyntaxError: '(' was never closed (line 1)"),
        ("import numpy", "exit status 1, ModuleNotFoundError: No module named 'numpy' (line 1)"),
        ("raise ValueError(object())", "exit status 1, ValueError: <object object at 0x...> (line 1)"),
        ("import json\njson.loads('x')", "JSONDecodeError: Expecting value: line 1 column 1 (char 0) (line 2)"),
        ("import sys\nsys.exit('No.')", "exit status 1, No."),
        ("import os\nos._exit(3)", "exit status 3"),
    ],
)
def test_the_policy_is_told_the_error_of_its_program_and_it_counts(program: str, error: str) -> None:
    called = f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': program}})}</tool_call>"
    row, settings = TaskRow("Sum?", "5"), HostSettings("python", {"sandbox": WEAK}, timeout_s=60.0, concurrency=1)
    twice = [asyncio.run(EnvironmentHost(settings).repeat("a", Beginning(row, 0), [Action(called, 0)])) for _ in "12"]
    answer = twice[0][1].observation
    assert answer and answer == twice[1][1].observation
    assert answer.messages[0]["content"].startswith("error: ProgramFailed: ") and answer.text.endswith(error)
    assert (answer.calls, answer.call_errors) == (1, 1)


def test_a_program_is_corrected_until_its_tests_pass() -> None:
    tests = json.dumps([{"stdin": "2\n", "stdout": "4\n"}, {"stdin": "3\n", "stdout": "6\n"}])
    task = CodeTask(WEAK, cpu_s=0.5, cost=0.25)
    task.reset(TaskRow("Double a number.", tests), 0)
    said, reward, done = task.step("```python\nprint(4)\n```")
    assert "For the input '3\\n' it prints '4\\n', not '6\\n'." in said and (reward, done) == (0.0, False)
    assert "failed: exit status 1, ValueError (line 1)." in task.step("```python\nraise ValueError\n```")[0]
    assert task.step("```python\nprint(2 * int(input()))\n```") == ("All tests pass.", 0.5, True)
    task.reset(TaskRow("Double a number.", "assert double(2) == 4\nassert double(3) == 6\n"), 0)
    assert task.step("```python\ndef double(x):\n    return 4\n```")[0].startswith("1 of 2 tests fail.")
    assert task.step("```python\ndef double(x):\n    return 2 * x\n```")[1:] == (0.75, True)
    said = task.step("def double(x) return 2 * x")[0]
    assert "2 of 2 tests fail. Without any test it fails as well: exit status 1, SyntaxError: " in said
    said = task.step("x = 1\0")[0]
    assert "ValueError" in said or "SyntaxError" in said
    assert "(line" not in said  # which would be of what runs it
    said = task.step("def double(x):\n    raise ValueError(x)")[0]  # which would be the tests' arguments
    assert said == "2 of 2 tests fail.\nCorrect the program and send it again."


@pytest.mark.parametrize(
    "answer", ["x = 1", "[]", "def (", "import numpy\nassert f(numpy.ones(2)) == 2\nassert f(1) == 2"]
)
def test_an_answer_without_tests_that_a_program_passes_is_refused(answer: str) -> None:
    with pytest.raises(
        ValueError, match=r"^environment code: the answer (holds no tests|uses numpy in 1 of its 2 tests)"
    ):
        CodeTask(WEAK).reset(TaskRow("Double a number.", answer), 0)
    check = scoring.answer_check(RewardConfig(functions={"environment": 1.0}), "code")
    assert check and scoring.answer_check(RewardConfig(functions={"environment": 1.0}), "python") is None
    with pytest.raises(ValueError, match=r"^environment code: the answer"):
        check(answer)


def test_a_program_that_passes_late_has_no_reward_below_0() -> None:
    task = CodeTask(WEAK, cost=0.6)
    task.reset(TaskRow("Print 4.", json.dumps([{"stdin": "", "stdout": "4\n"}])), 0)
    turns = [task.step(f"```python\nprint({number})\n```") for number in (2, 3, 4)]
    assert turns[-1] == ("All tests pass.", 0.0, True)


@pytest.mark.parametrize(
    ("text", "whole", "expected"),
    [
        ("-3", True, -3.0),
        (" 1/4 ", True, 0.25),
        (".5", True, 0.5),
        ("1,000,000", True, 1e6),
        ("3 apples", True, None),
        ("1e9", True, None),  # an exponent could make a number of any length
        ("1e999999999", True, None),
        ("9" * 5000, True, None),
        ("first 2, then 1/3 of 6.5", False, 6.5),
        ("between 1 and -2.50.", False, -2.5),
        ("12,34", False, 34.0),  # no thousands
        ("none", False, None),
    ],
)
def test_numbers_are_found_in_what_is_said(text: str, whole: bool, expected: float | None) -> None:
    found = number_in(text, whole=whole)
    assert (found if found is None else float(found)) == expected


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Fraction(-7), "-7"),
        (Fraction(-1, 4), "-0.25"),
        (Fraction(1, 10**10), "0.0000000001"),
        (Fraction(1, 10**11), "1e-11"),
        (Fraction(2, 3), "0.6666666667"),
        (Fraction(123456789012345, 1000), "123456789012.345"),
    ],
)
def test_numbers_are_written_as_people_write_them(value: Fraction, text: str) -> None:
    assert number_text(value) == text


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2 ** -2", 0.25), ("+3 - -2", 5), ("0.1 + 0.2", 0.3), (" 7 ", 7), ("2 ** 64", 2**64), ("1e3 / 4", 250)],
)
def test_values_are_exact_up_to_the_limits_of_powers(expression: str, value: float) -> None:
    assert value_of(expression) == Fraction(str(value))


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("2 ** 65", ValueError),
        ("4 ** (1 / 2)", ValueError),
        ("0 ** -1", ZeroDivisionError),
        ("(2 ** 64) ** 64", OverflowError),
        ("5 // 2", ValueError),
        ("1j", ValueError),
    ],
)
def test_what_has_no_exact_value_is_an_error_of_its_kind(expression: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        value_of(expression)


def test_environments_refuse_arguments_of_which_nothing_can_be_made() -> None:
    with pytest.raises(ValueError, match="'first': expected last or whole"):
        Calculator("first")
    with pytest.raises(ValueError, match="examples is -1"):
        Calculator(examples=-1)
    with pytest.raises(ValueError, match="at least 1"):
        GuessNumber(0)
    with pytest.raises(ValueError, match="at least 2 rooms"):
        Treasure(1)
    with pytest.raises(ValueError, match="sandbox"):
        PythonTool("none")


def test_a_guess_is_compared_whatever_its_size_and_a_new_game_counts_anew() -> None:
    game = GuessNumber(1, cost=0.5)  # the number is 1
    game.reset(TaskRow("", ""), 0)
    said = [game.step(text)[0] for text in ("0", "2", "-1", "9" * 5000, "-" + "9" * 5000, "is it 0 or 2")]
    assert said == ["larger", "smaller", "larger", "smaller", "larger", "smaller"]
    assert game.step("1") == ("right", 0.0, True)  # never below 0
    game.reset(TaskRow("", ""), 0)
    assert game.step("2, no: 1") == ("right", 1.0, True)
    assert [GuessNumber(largest).most_guesses for largest in (1, 2, 3, 4, 7, 8)] == [1, 2, 2, 3, 3, 4]


def test_a_walk_through_the_world_is_told_step_by_step() -> None:
    world = Treasure(2, cost=0.25)
    assert "The key is" in world.reset(TaskRow("", ""), 1)
    world._at, world._key, world._treasure, world.steps_needed = (0, 0), (1, 1), (1, 0), 5  # two moves, take, one, open
    assert world.step("take")[0] == "Nothing happens. The key is north and east."
    assert world.step("I go WEST")[0] == "Nothing happens. The key is north and east."  # there is a wall
    assert world.step("north or rather east")[0] == "Here is a chest. The key is north."
    assert world.step("open") == ("Nothing happens. Here is a chest. The key is north.", 0.0, False)
    assert world.step("north")[0] == "Here is the key. The key is here."
    assert world.step("take")[0] == "You have the key. The chest is south."
    assert world.step("take")[0] == "Nothing happens. The chest is south."
    assert world.step("south")[0] == "Here is a chest. The chest is here."
    assert world.step("open") == ("The chest is open.", 1 - 4 * 0.25, True)
    assert world.step("open")[1] == 0.0  # never below 0
