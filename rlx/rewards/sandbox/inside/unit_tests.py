"""The tests of a program: executes them, and reports which passed. Left out: which program, and its score."""

from __future__ import annotations

import ast
import builtins
import importlib
import os
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from rlx.rewards.sandbox.inside.values import MUTABLE, Wire, decode, encode, own_text

_NAMES_OF_PROGRAM = ("solution", "program")
"""the modules that are the program where tests import them"""


class ProgramError(Exception):
    """The program raised an exception of its own, or ended."""


class _Asked:
    """What Python itself asks an object of the program.

    Operators are not among it: the program would see what is expected of it, and decide comparisons.
    """

    __slots__ = ("_number", "_tests")
    _number: int
    _tests: TestSide

    def __init__(self, tests: TestSide, number: int) -> None:
        object.__setattr__(self, "_tests", tests)
        object.__setattr__(self, "_number", number)

    def __iter__(self) -> Any:
        return self._tests.ask("iterate", self)

    def __next__(self) -> Any:
        return self._tests.ask("next", self)

    def __len__(self) -> int:
        return int(self._tests.ask("length", self))

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        return str(self._tests.ask("text", self))

    def __repr__(self) -> str:
        return str(self._tests.ask("repr", self))

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and self._tests.ask("has_instance", self, value) is True

    def __subclasscheck__(self, kind: Any) -> bool:
        return isinstance(kind, Remote) and self._tests.ask("has_subclass", self, kind) is True

    def __enter__(self) -> Any:
        return self._tests.ask("enter", self)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """The program hears whether something was raised; it does not decide what becomes of it."""
        replaced = (Exception,) if kind else ()
        with suppress(*replaced):
            self._tests.ask("leave", self, kind is not None)


class Remote(_Asked):
    """An object of the program. It is equal to nothing but itself: the program does not decide comparisons."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._tests.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._tests.ask("set", self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tests.ask("call", self, *args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self._tests.ask("item", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._tests.ask("set_item", self, key, value)


class TestSide:
    """Executes unit tests and reports which passed."""

    def __init__(self) -> None:
        self.wire, self.functions = Wire(), list[Callable[..., Any]]()
        self.module = types.ModuleType("__main__")
        sys.modules["__main__"] = self.module
        for name in _NAMES_OF_PROGRAM:
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__dict__["__getattr__"] = self._attribute

    def run(self, source: str, report: Callable[[str], object]) -> None:
        """Reports the number of tests and a line break, then 1 or 0 for each test in turn.

        A test is a statement at the top that neither defines nor imports something, or a function test_... without
        parameters. A bare comparison anywhere (`f(1) == 2`) is meant as an assert.
        """
        tree = ast.parse(source)
        functions = [each.name for each in tree.body if isinstance(each, ast.FunctionDef) and _is_test_function(each)]
        report(f"{len(find_tests(tree))}\n")
        _assert_comparisons(tree)
        self._take_names(_names_in(tree))
        for statement in tree.body:
            code = compile(ast.Module([statement], []), "tests.py", "exec")
            passed = _passes(lambda code=code: exec(code, self.module.__dict__))  # type: ignore[misc]
            if _is_test(statement):
                report(str(int(passed)))
        for name in functions:
            report(str(int(_passes(lambda name=name: self.module.__dict__[name]()))))  # type: ignore[misc]

    def _take_names(self, names: Sequence[str]) -> None:
        """Defines what the program defines; modules are this process' own.

        What is built in stays what it is, or a program could decide a test with its own `all`. Tests that use no other
        name are about that one.
        """
        wanted = [name for name in names if len(names) == 1 or not hasattr(builtins, name)]
        self.module.__dict__.update(self._of_program(wanted))

    def _attribute(self, name: str) -> Any:
        """What tests import from the program by its name, so here it may be called as what is built in."""
        found = self._of_program([name])
        if name not in found:
            raise AttributeError(f"the program has no {name}")
        return found[name]

    def _of_program(self, names: Sequence[str]) -> dict[str, Any]:
        """The values of those names that the program defines; none once it has ended."""
        wanted = [name for name in names if name[:2] != "__"]
        try:
            self.wire.send({"globals": wanted})
            found = self._reply()["globals"]
            return {name: self._global(name, found[name]) for name in wanted if name in found}
        except (EOFError, OSError, ProgramError, StopIteration):  # the last would end a loop of the tests
            return {}

    def _global(self, name: str, data: Any) -> Any:
        if isinstance(data, dict) and "module" in data:
            is_known = data["module"] == name and name in sys.stdlib_module_names
            return importlib.import_module(name) if is_known else None
        return decode(data, self._resolve)

    def ask(self, operation: str, remote: _Asked, *args: Any, **kwargs: Any) -> Any:
        """What an operation of the program gives, or an exception of the type that it raises."""
        request = {
            "do": operation,
            "object": remote._number,
            "args": [encode(each, self._refer) for each in args],
            "kwargs": {name: encode(each, self._refer) for name, each in kwargs.items()},
        }
        try:
            self.wire.send(request)
            reply = self._reply()
        except (EOFError, OSError):
            raise ProgramError("the program has ended") from None
        except StopIteration as error:
            if operation != "next":  # it would end a loop of the tests, as if all of it were right
                raise ProgramError(f"StopIteration: {error}") from None
            raise
        for i, data in reply["after"].items():
            _replace(args[int(i)], decode(data, self._resolve))
        return decode(reply["value"], self._resolve)

    def _reply(self) -> Any:
        """The program's answer; meanwhile it may call functions of the tests that it got."""
        while True:
            message = self.wire.receive()
            if "error" in message:
                raise _exception(*message["error"])
            if "function" not in message:
                return message
            args = [decode(each, self._resolve) for each in message["args"]]
            result = self.functions[message["function"]](*args)
            self.wire.send({"result": encode(result, self._refer)})

    def _refer(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Remote):
            return {"object": value._number}
        if not callable(value):
            raise TypeError(f"a program takes plain data, not {type(value).__name__}")
        self.functions.append(value)
        return {"function": len(self.functions) - 1}

    def _resolve(self, kind: str, content: Any) -> Any:
        if kind != "object" or type(content) is not int:
            raise ProgramError("no valid answer")
        return Remote(self, content)


def _names_in(tree: ast.Module) -> list[str]:
    """All names that a module of unit tests uses or imports."""
    nodes = list(ast.walk(tree))
    used = {each.id for each in nodes if isinstance(each, ast.Name)}
    return sorted(used | {each.name for each in nodes if isinstance(each, ast.alias)})


def find_tests(tree: ast.Module) -> list[ast.stmt]:
    """The statements and functions of a module of unit tests that are its tests."""
    return [each for each in tree.body if _is_test(each) or _is_test_function(each)]


def _is_test(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return not isinstance(statement.value, ast.Constant)
    return isinstance(statement, (ast.Assert, ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Raise))


def _is_test_function(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.FunctionDef) and statement.name[:5] == "test_" and not statement.args.args


def _assert_comparisons(tree: ast.Module) -> None:
    """Puts an assert in the place of each bare comparison, at any depth: its value would be lost otherwise."""
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):  # a lambda and `a if b else c` have an expression there
                statements[:] = map(_asserting, statements)


def _asserting(statement: ast.stmt) -> ast.stmt:
    """The assert that a statement is meant as, if it is a bare comparison or several of them; else the statement."""
    parts = _parts(statement.value) if isinstance(statement, ast.Expr) else []
    if not parts or not all(map(_is_comparison, parts)):
        return statement
    condition = ast.BoolOp(ast.And(), parts) if len(parts) > 1 else parts[0]
    return ast.fix_missing_locations(ast.copy_location(ast.Assert(condition, None), statement))


def _parts(value: ast.expr) -> list[ast.expr]:
    """The values in a tuple or list, also in those within it; any other expression is a part alone."""
    if isinstance(value, (ast.Tuple, ast.List)):
        return [part for each in value.elts for part in _parts(each)]
    return [value]


def _is_comparison(value: ast.expr) -> bool:
    """Whether an expression compares, and does nothing else with what it finds."""
    match value:
        case ast.BoolOp():
            return all(map(_is_comparison, value.values))
        case ast.BinOp(op=ast.BitAnd() | ast.BitOr()):
            return _is_comparison(value.left) and _is_comparison(value.right)
        case ast.UnaryOp(op=ast.Not()):
            return _is_comparison(value.operand)
    return isinstance(value, ast.Compare)


def _passes(test: Callable[[], Any]) -> bool:
    try:
        test()
    except SystemExit as error:  # of unittest.main in the tests; the program cannot raise it here
        return not error.code
    except BaseException:
        return False
    return True


def _exception(name: str, text: str) -> Exception:
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(text)
        except TypeError:  # UnicodeDecodeError needs more
            pass
    return ProgramError(f"{name}: {text}")


def _replace(original: Any, now: Any) -> None:
    """Gives an argument the content that the program left in it."""
    if type(original) is not type(now) or type(original) not in MUTABLE or original == now:
        return
    if isinstance(original, (list, bytearray)):
        original[:] = now
    else:
        original.clear()
        original.update(now)


def main() -> None:
    """Runs the tests; the first thing that is printed is their number, then a digit for each."""
    verdicts = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what tests print is no verdict
    sys.argv = ["tests.py"]
    TestSide().run(own_text(), lambda text: os.write(verdicts, text.encode()))
