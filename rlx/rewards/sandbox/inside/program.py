"""The program under test: executes it, then calls what the tests ask for. Left out: whether answers are right."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from typing import Any

from rlx.rewards.sandbox.inside.values import MUTABLE, Wire, decode, encode, own_text


class ProgramSide:
    """Does what the tests ask for. The program may change all of it, since it runs in this process."""

    def __init__(self) -> None:
        self.wire, self.objects = Wire(), list[Any]()
        self.names: dict[str, Any] = {}
        self.operations: dict[str, Callable[..., Any]] = {
            "get": getattr,
            "set": setattr,
            "call": lambda function, *args, **kwargs: function(*args, **kwargs),
            "item": lambda container, key: container[key],
            "set_item": lambda container, key, value: container.__setitem__(key, value),
            "iterate": iter,
            "next": next,
            "length": len,
            "text": str,
            "repr": repr,
            "has_instance": lambda kind, value: isinstance(value, kind),
            "has_subclass": lambda kind, value: issubclass(value, kind),
            "enter": lambda manager: type(manager).__enter__(manager),
            "leave": _leave,
        }

    def load(self, source: str) -> None:
        """Executes the program, as a module that is imported."""
        module = types.ModuleType("solution")
        sys.modules["solution"] = module
        self.names = module.__dict__
        exec(compile(source, "program.py", "exec"), self.names)

    def serve(self) -> None:
        """Answers until the tests are done."""
        try:
            while True:
                self._answer(self.wire.receive())
        except EOFError:
            os._exit(0)

    def _answer(self, request: dict[str, Any]) -> None:
        try:
            reply = self._reply(request)
            self.wire.send(reply)
        except EOFError:
            raise
        except BaseException as error:
            kind = next((each for each in type(error).__mro__ if each.__module__ == "builtins"), Exception)
            self.wire.send({"error": [kind.__name__, str(error)[:1000]]})

    def _reply(self, request: dict[str, Any]) -> dict[str, Any]:
        if "globals" in request:
            return {"globals": {name: self._global(name) for name in request["globals"] if name in self.names}}
        args = [decode(each, self._resolve) for each in request["args"]]
        kwargs = {name: decode(each, self._resolve) for name, each in request["kwargs"].items()}
        value = self.operations[request["do"]](self.objects[request["object"]], *args, **kwargs)
        after = {i: encode(each, self._refer) for i, each in enumerate(args) if isinstance(each, MUTABLE)}
        return {"value": encode(value, self._refer), "after": after}

    def _global(self, name: str) -> Any:
        value = self.names[name]
        return {"module": value.__name__} if isinstance(value, types.ModuleType) else encode(value, self._refer)

    def _refer(self, value: Any) -> dict[str, Any]:
        self.objects.append(value)
        return {"object": len(self.objects) - 1}

    def _resolve(self, kind: str, content: Any) -> Any:
        if kind == "object":
            return self.objects[content]

        def function(*args: Any) -> Any:  # of the tests
            self.wire.send({"function": content, "args": [encode(each, self._refer) for each in args]})
            while "result" not in (message := self.wire.receive()):
                self._answer(message)
            return decode(message["result"], self._resolve)

        return function


def _leave(manager: Any, has_failed: bool) -> None:
    """Ends a `with` of the tests. What they raised stays with them: its text may say what is expected."""
    error = Exception("raised by the tests") if has_failed else None
    type(manager).__exit__(manager, error and Exception, error, None)


def main() -> None:
    """Serves the program until its tests are done."""
    program = ProgramSide()
    program.load(own_text())
    program.serve()
