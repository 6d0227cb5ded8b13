"""The reward function `code`: the program in a completion, run on the tests in the answer column of its prompt.

The tests are a JSON list of {"stdin": ..., "stdout": ...}, or Python with asserts that call what the program defines.
What a program prints is compared here, outside of the sandbox. Left out: how programs are shut in.
"""

from __future__ import annotations

import ast
import functools
import json
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Lock
from typing import NamedTuple

import regex  # type: ignore[import-untyped]  # Python 3.11.0 to 3.11.2 match possessive groups wrongly

from rlx.config.errors import ConfigError
from rlx.config.sections.reward import RewardConfig
from rlx.rewards.sandbox.packages import imported_packages, missing_packages
from rlx.rewards.sandbox.pool import Limits, Program, Ran, Sandbox, SandboxError
from rlx.types import MarkedScores, Prompt, Response

_LOG = logging.getLogger("rlx")
_FENCE = regex.compile(r"\s*(`{3,}+(?!.*`)|~{3,})\s*([\w+-]*)")
_TEXT = r"(?:[^`]*+`[^`]++`(?!`))*+[^`]*+"  # which may have pieces of code
_FENCE_AFTER_TEXT = regex.compile(_TEXT + r"(`{3,}+)([\w+-]+)\s*$")  # without a language it may as well end something
_PYTHON = ("python", "py", "python3")
_PAIR = {"stdin", "stdout"}
_WHITE_SPACE = 1 << 16  # bytes of it that a right output may have more than the expected one


class Tests(NamedTuple):
    """What a program has to do: one of both is empty."""

    pairs: tuple[tuple[str, str], ...]  # standard input, and what has to be printed
    asserts: str  # Python

    @classmethod
    def of(cls, answer: str) -> Tests:
        """The tests in an answer column; ValueError says what is wrong with it."""
        try:
            rows = json.loads(answer)
        except (ValueError, RecursionError):
            return cls((), answer)
        if not isinstance(rows, list) or not rows or not all(map(_is_pair, rows)):
            raise ValueError('expected a JSON list of {"stdin": TEXT, "stdout": TEXT}, or Python with asserts')
        return cls(tuple((row["stdin"], row["stdout"]) for row in rows), "")


def _is_pair(row: object) -> bool:
    return isinstance(row, dict) and row.keys() == _PAIR and all(isinstance(text, str) for text in row.values())


def check_answers(prompts: Sequence[Prompt], config: RewardConfig) -> None:
    """Raises ConfigError for the first prompt whose answer holds no tests, or some that no program passes.

    It warns of packages that the sandbox lacks, if tests import them that may pass all the same.
    """
    for prompt in prompts:
        if problem := _problem(prompt.answer, config):
            raise ConfigError(f"reward code: the answer of prompt {prompt.id} {problem}")
    if packages := {package for prompt in prompts for package in imported_packages(_tree(Tests.of(prompt.answer)))}:
        names = ", ".join(sorted(packages))
        _LOG.warning("reward code: tests import %s, which the sandbox lacks: those that use it fail", names)


def check_tests(answer: str, config: RewardConfig | None) -> None:
    """Raises ValueError if an answer holds no tests, or some that no program passes. It is only parsed, in 30 us.

    `config`: None for the environment `code`, whose programs have to pass all tests.
    """
    if problem := _problem(answer, config):
        raise ValueError(f"{'reward' if config else 'environment'} code: the answer {problem}")


def _problem(answer: str, config: RewardConfig | None) -> str | None:
    """What is wrong with the tests in an answer; None if nothing is. See `check_tests`."""
    try:
        tests = Tests.of(answer)
        tree = _tree(tests)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        return f"holds no tests: {' '.join(str(error).split()) or type(error).__name__}"
    missing = missing_packages(tree)
    if not tests.pairs and not missing:
        return "holds no tests: Python without a test"
    packages = [package for package in missing if package]
    has_others = config is not None and len(packages) < len(missing)
    if not packages or (has_others and config and config.code_score == "share"):
        return None
    others = " (--reward.code-score share pays for the others)" if has_others else ""
    return (
        f"uses {packages[0]} in {len(packages)} of its {len(missing)} tests, which no program passes, since only "
        f"Python's own modules are there{others}"
    )


def _tree(tests: Tests) -> ast.Module:
    with warnings.catch_warnings():  # Python tells of each unknown escape in a text
        warnings.simplefilter("ignore")
        return ast.parse(tests.asserts, "tests")


def program_in(text: str) -> str:
    """The last fenced block of Python in a text, or of no language, or the whole text if nothing is fenced.

    A block that is not closed ends with the text.
    """
    blocks = list(_blocks(text))
    python = [block for language, block in blocks if language in _PYTHON]
    found = python or [block for language, block in blocks if not language]
    return found[-1] if found else "" if blocks else text


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """(language, content) of each fenced block."""
    fence, language, column, lines = "", "", 0, list[str]()
    for line in text.split("\n"):
        if fence and line.strip().startswith(fence) and not line.strip().strip(fence[0]):
            yield language, _dedented(lines, column) + "\n"
            fence = ""
        elif fence:
            lines.append(line)
        elif match := _FENCE.match(line) or _FENCE_AFTER_TEXT.match(line):
            fence, language, column, lines = match[1], match[2].lower(), match.start(1), []
    if fence:
        yield language, _dedented(lines, column)


def _dedented(lines: Sequence[str], column: int) -> str:
    """The content of a block whose fence begins in a column: if it is indented as a whole, its lines move left."""
    first = next((line for line in lines if line.strip()), "")
    width = min(column, _indentation(first))
    return "\n".join(line[min(width, _indentation(line)) :] for line in lines)


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip(" \t"))


class _Judgement(NamedTuple):
    score: float
    limit: str | None  # that ended the program
    has_tests: bool = True


class _Judge:
    """Judges the programs of one batch, which share an amount of time."""

    def __init__(self, config: RewardConfig, programs: int) -> None:
        self._is_shared, self._lock = config.code_score == "share", Lock()
        self._sandbox = Sandbox.open(strict=config.sandbox == "strict")
        self._left = config.code_mean_cpu_s * programs
        self._limits = Limits.of(config)
        short = config.code_mean_cpu_s / 2
        self._short = replace(
            self._limits, cpu_s=min(self._limits.cpu_s, short), idle_s=min(self._limits.idle_s, short)
        )

    def judge(self, program: str, tests: Tests) -> _Judgement:
        """Runs a program on its tests."""
        limits = self._limits if self._has_time(0.0) else self._short
        passed, limit = (self._of_pairs if tests.pairs else self._of_asserts)(program, tests, limits)
        share = sum(passed) / len(passed) if passed else 0.0
        return _Judgement(share if self._is_shared else float(share == 1), limit, bool(passed))

    def _has_time(self, seconds: float) -> bool:
        """Takes seconds from the batch; whether it had them."""
        with self._lock:
            self._left -= seconds
            return self._left > 0

    def _of_pairs(self, program: str, tests: Tests, limits: Limits) -> tuple[list[bool], str | None]:
        """Which tests a program passes, and the limit that ended it. It is not run when a test more changes nothing."""
        wanted = [output_lines(stdout) for _, stdout in tests.pairs]

        def passes(number: int, ran: Ran) -> bool:
            return ran.is_good and output_lines(ran.output.decode(errors="replace")) == wanted[number]

        def goes_on(ran: Sequence[Ran]) -> bool:
            has_time = self._has_time(ran[-1].seconds) or ran[-1].seconds <= self._short.cpu_s
            return has_time and (self._is_shared or passes(len(ran) - 1, ran[-1]))

        longest = max(len(stdout.encode(errors="replace")) for _, stdout in tests.pairs)
        enough = replace(limits, output=min(limits.output, 2 * longest + _WHITE_SPACE))  # what is kept of each test
        ran = self._sandbox.run(Program(program, tuple(stdin for stdin, _ in tests.pairs)), enough, goes_on)
        passed = [passes(number, each) for number, each in enumerate(ran)]
        limit = next((each.ended for each in ran if each.ended != "exit"), None)
        missing = len(wanted) - len(passed)
        if missing and (self._is_shared or all(passed)):
            limit = limit or "cpu"
        return passed + [False] * missing, limit

    def _of_asserts(self, program: str, tests: Tests, limits: Limits) -> tuple[list[bool], str | None]:
        tested = self._sandbox.run_tests(program, tests.asserts, limits)
        self._has_time(tested.seconds)
        return tested.passed, tested.limit


def output_lines(text: str) -> list[str]:
    """The lines of an output without white space at their ends, and without empty ones at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def code(responses: Sequence[Response], config: RewardConfig) -> MarkedScores:
    """The score of each response's program, and whether a limit ended it.

    Equal programs for equal tests are run once. A prompt without tests scores 0, with a warning.

    Raises:
        SandboxError: this machine puts up no walls any more.
    """
    tasks = [_task(response, config) for response in responses]
    unique = list(dict.fromkeys(task for task in tasks if task is not None))
    judge = _Judge(config, len(unique))
    try:
        with ThreadPoolExecutor(config.code_parallel or _parallel()) as pool:
            judged = dict(zip(unique, pool.map(lambda task: judge.judge(*task), unique), strict=True))
    except SandboxError as error:
        raise SandboxError(f"reward code: {error}") from None
    found = [_Judgement(0.0, None) if task is None else judged[task] for task in tasks]
    for response, each in zip(responses, found, strict=True):
        if not each.has_tests:
            _warn_of_tests(response.prompt.answer)
    return MarkedScores([each.score for each in found], {"code_limited": [float(bool(each.limit)) for each in found]})


def _task(response: Response, config: RewardConfig) -> tuple[str, Tests] | None:
    """The program of a response and its tests; None if there is no program, or there are no tests."""
    program = response.answer if config.answer_pattern else program_in(response.text)
    try:
        tests = Tests.of(response.prompt.answer)
    except ValueError:
        _warn_of_tests(response.prompt.answer)
        return None
    return (program, tests) if program and program.strip() else None


@functools.lru_cache(maxsize=1024)
def _warn_of_tests(answer: str) -> None:
    _LOG.warning("reward code: an answer holds no tests, so its completions score 0: %.100r", answer)


def _parallel() -> int:
    import joblib  # type: ignore[import-untyped]  # takes a third of a second

    workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # of this machine; torch's launchers set it
    return max(2, 2 * joblib.cpu_count() // workers)  # a container may have less than the machine
