"""A calculator as a tool: the policy writes an expression, and is told its value.

The reward is 1 for an answer that is the expected number. Left out: functions and names; only numbers are computed.
"""

from __future__ import annotations

import ast
import json
import operator
import random
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

from rlx.types import TaskRow, Utterance

_LONGEST = 200
_LARGEST_POWER, _LARGEST_BITS = 64, 4096
_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?")
_OPERATORS: Mapping[type[ast.AST], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Calculator:
    """Answers a question of arithmetic with the help of a calculator."""

    def __init__(self, answer: str = "last", examples: int = 0) -> None:
        """Chooses what counts as an answer, and what is shown first.

        Args:
            answer: "last": the last number in what the policy says counts; "whole": all of it has to be the number.
            examples: sums that are asked, computed with the tool and answered before the question, for a model that
                would not call it by itself.
        """
        if answer not in ("last", "whole"):
            raise ValueError(f"answer is {answer!r}: expected last or whole")
        if examples < 0:
            raise ValueError(f"examples is {examples}: expected 0 or more")
        self._whole, self._examples, self._expected = answer == "whole", examples, ""

    def reset(self, row: TaskRow, seed: int) -> list[Utterance]:
        """Begins with the examples, of numbers that the seed draws, and the question.

        Raises:
            ValueError: the expected answer is no number.
        """
        if number_in(row.answer, whole=True) is None:
            raise ValueError(
                f"the expected answer {row.answer!r:.80} is no number; data.expected_pattern takes one out of a text"
            )
        self._expected, drawn = row.answer, random.Random(seed)
        shown = [message for _ in range(self._examples) for message in example(drawn)]
        return [*shown, *row.asked]

    def calculate(self, expression: str) -> str:
        """Computes the value of an arithmetic expression.

        Args:
            expression: numbers with + - * / ** and parentheses, for example (12 + 3) * 4
        """
        return number_text(value_of(expression))

    def score(self, answer: str) -> float:
        """1 if the policy's answer is the expected number, else 0."""
        expected, given = number_in(self._expected, whole=True), number_in(answer, whole=self._whole)
        return float(given is not None and given == expected)


def example(drawn: random.Random) -> list[Utterance]:
    """A sum of three numbers with three digits that is asked, computed with the tool and answered."""
    numbers = [drawn.randint(100, 999) for _ in range(3)]
    expression, total = " + ".join(map(str, numbers)), str(sum(numbers))
    call = json.dumps({"name": "calculate", "arguments": {"expression": expression}})
    return [
        {"role": "user", "content": f"What is {expression}?"},
        {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
        {"role": "tool", "name": "calculate", "content": total},
        {"role": "assistant", "content": total},
    ]


def value_of(expression: str) -> Fraction:
    """The exact value of an expression.

    Raises:
        ValueError: it is too long or is no arithmetic; ZeroDivisionError, OverflowError: it has no value.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"an expression has at most {_LONGEST} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except SyntaxError:
        raise ValueError(f"{expression!r} is no arithmetic expression") from None
    return _value(tree)


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return Fraction(str(node.value))
        case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
            return -_value(node.operand) if isinstance(node.op, ast.USub) else _value(node.operand)
        case ast.BinOp(op=ast.Pow()):
            return _power(_value(node.left), _value(node.right))
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(f"{ast.unparse(node)!r} is no arithmetic expression")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > _LARGEST_POWER:
        raise ValueError(f"an exponent is a whole number of at most {_LARGEST_POWER}")
    if abs(exponent) * max(base.numerator.bit_length(), base.denominator.bit_length()) > _LARGEST_BITS:
        raise OverflowError("the number is too large")
    return Fraction(base ** int(exponent))


def number_text(value: Fraction) -> str:
    """A number as people write it: whole, with at most ten decimals, or as a fraction beyond that."""
    if value.denominator == 1:
        return str(value.numerator)
    scaled = value * 10**10
    if scaled.denominator == 1:
        sign, digits = "-" * (value < 0), str(abs(scaled.numerator)).zfill(11)
        return f"{sign}{digits[:-10]}.{digits[-10:].rstrip('0')}"
    return f"{float(value):.10g}"


def number_in(text: str, *, whole: bool) -> Fraction | None:
    """The last number in a text, or the number that all of it is; None: there is none.

    Exponents are not read: 1e999999999 would fill the memory.
    """
    found = [text.strip()] * ("e" not in text.lower()) if whole else _NUMBER.findall(text)
    try:
        return Fraction(found[-1].replace(",", "")) if found else None
    except (ValueError, ZeroDivisionError):
        return None
