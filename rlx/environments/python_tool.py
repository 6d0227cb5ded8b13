"""Python as a tool: the policy writes programs, which run in the sandbox, and is told what they print.

Each call is a program of its own: nothing stays from one to the next. Left out: files of the policy, and packages.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.config.sections.reward import RewardConfig
from rlx.environments.calculator import number_in
from rlx.rewards.sandbox.pool import Limits, Program, Ran, Sandbox
from rlx.types import TaskRow, Utterance

_SHOWN = 2000
"""characters of what a program prints; the rest is cut"""


class ProgramFailed(Exception):
    """A program of the policy has failed: how, and what it had printed until then."""


class PythonTool:
    """Answers a question with the help of Python; the reward is 1 for the expected answer, a number or a text."""

    def __init__(self, sandbox: str = "strict", cpu_s: float = 4.0, memory_mb: int = 512) -> None:
        """
        Args:
            sandbox: as reward.sandbox: strict, or limits for machines that cannot shut files and networks.
            cpu_s: seconds that a program may compute.
            memory_mb: MiB of memory that it may use.
        """
        given = RewardConfig.model_validate(
            {"sandbox": sandbox, "code_cpu_s": cpu_s, "code_idle_s": cpu_s, "code_memory_mb": memory_mb}
        )
        self._sandbox, self._limits = Sandbox.open(strict=given.sandbox == "strict"), Limits.of(given)
        self._expected = ""

    def reset(self, row: TaskRow, seed: int) -> Sequence[Utterance]:
        """Begins with the question."""
        self._expected = row.answer
        return row.asked

    def python(self, code: str) -> str:
        """Runs a Python program and returns what it prints.

        Args:
            code: the program; it has to print its results
        """
        # A program that fails raises: the call then counts as one that failed. The model is shown what stands above.
        ran = self._sandbox.run(Program(code, ("",), keeps_errors=True), self._limits)[0]
        printed = ran.output.decode(errors="replace")
        printed = printed if len(printed) <= _SHOWN else f"{printed[:_SHOWN]}... (cut)"
        if ran.is_good:
            return printed
        raise ProgramFailed(f"{how_it_failed(ran)}\n{printed}".rstrip())

    def score(self, answer: str) -> float:
        """1 if the last line of the answer is the expected text, or its last number is the expected number; else 0."""
        lines = answer.strip().splitlines()
        if lines and lines[-1].strip() == self._expected.strip():
            return 1.0
        expected, given = number_in(self._expected, whole=True), number_in(answer, whole=False)
        return float(expected is not None and given == expected)


def how_it_failed(ran: Ran) -> str:
    """What the policy reads of a program that has failed, in a line: the limit that ended it, or its status and error.

    What a program says that a limit ends depends on the machine, so it is left out.
    """
    if ran.ended != "exit":
        return f"ended by its limit of {ran.ended}"
    return f"exit status {ran.code}" + (f", {ran.error}" if ran.error else "")
