"""A task of programming over several turns: the policy submits a program, and is told which of its tests fails.

The answer column has the tests, as `reward.functions code` reads them, and programs run in the same sandbox. Left out:
tests that the policy must not see: it is shown the first that fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlx.config.sections.reward import RewardConfig
from rlx.environments.python_tool import how_it_failed
from rlx.rewards.sandbox.pool import Limits, Program, Sandbox
from rlx.rewards.sandbox.reward import Tests, check_tests, output_lines, program_in
from rlx.types import TaskRow, Utterance

_SHOWN = 500
"""characters that are shown of each text"""
_IMPORT = """
import sys, types
sys.modules["solution"] = module = types.ModuleType("solution")
exec(compile({source!r}, "solution.py", "exec"), module.__dict__)
"""


class CodeTask:
    """The reward is 1 for a program that passes all tests, less what each further attempt costs."""

    def __init__(self, sandbox: str = "strict", cpu_s: float = 4.0, cost: float = 0.0) -> None:
        """
        Args:
            sandbox: as reward.sandbox.
            cpu_s: seconds that one test of a program may compute.
            cost: what is taken off the reward for each attempt after the first, down to 0.
        """
        given = RewardConfig.model_validate({"sandbox": sandbox, "code_cpu_s": cpu_s})
        self._sandbox, self._limits = Sandbox.open(strict=given.sandbox == "strict"), Limits.of(given)
        self._cost, self._attempts = cost, 0
        self._tests: Tests | None = None

    def reset(self, row: TaskRow, seed: int) -> Sequence[Utterance]:
        """Begins with the question; raises ValueError if the row's answer has no tests, or some that nothing passes."""
        check_tests(row.answer, None)
        self._tests, self._attempts = Tests.of(row.answer), 0
        return row.asked

    def step(self, action: str) -> tuple[str, float, bool]:
        """Runs the program in a turn on the tests."""
        assert self._tests is not None
        self._attempts += 1
        program = program_in(action)
        failure = self._failed_pair(program) if self._tests.pairs else self._failed_assert(program)
        if failure:
            return f"{failure}\nCorrect the program and send it again.", 0.0, False
        return "All tests pass.", max(0.0, 1.0 - self._cost * (self._attempts - 1)), True

    def _failed_pair(self, program: str) -> str:
        """What the first pair of input and output shows that a program fails; empty if there is none."""
        assert self._tests is not None
        pairs = self._tests.pairs
        ran = self._sandbox.run(
            Program(program, tuple(given for given, _ in pairs), keeps_errors=True),
            self._limits,
            lambda done: done[-1].is_good,
        )
        for (given, wanted), each in zip(pairs, ran, strict=False):
            printed = each.output.decode(errors="replace")
            if not each.is_good:
                return f"For the input {_short(given)} the program failed: {how_it_failed(each)}."
            if output_lines(printed) != output_lines(wanted):
                return f"For the input {_short(given)} it prints {_short(printed)}, not {_short(wanted)}."
        return "" if len(ran) == len(pairs) else "The program was not run on all tests."

    def _failed_assert(self, program: str) -> str:
        """How many unit tests a program fails, as a sentence; empty if none."""
        assert self._tests is not None
        verdicts = self._sandbox.run_tests(program, self._tests.asserts, self._limits)
        failed = verdicts.passed.count(False)
        if verdicts.limit:
            return f"A limit ended the program: {verdicts.limit}."
        if verdicts.passed and not failed:
            return ""
        told = f"{failed} of {len(verdicts.passed)} tests fail."
        return told if True in verdicts.passed else told + self._failed_alone(program)

    def _failed_alone(self, program: str) -> str:
        """How a program fails as a module that nobody calls, as a sentence; empty if it does not.

        What it says when the tests call it would show what they call it with.
        """
        alone = Program(_IMPORT.format(source=program), ("",), keeps_errors=True)
        ran = self._sandbox.run(alone, self._limits)[0]
        errors = ran.errors.replace('"program.py"', '"-"').replace('"solution.py"', '"program.py"')  # its own lines
        ran = replace(ran, errors=errors)
        return "" if ran.is_good else f" Without any test it fails as well: {how_it_failed(ran)}."


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
