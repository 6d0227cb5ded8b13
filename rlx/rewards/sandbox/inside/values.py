"""Messages between tests and a program, and values as JSON. Left out: what is asked."""

from __future__ import annotations

import builtins
import importlib
import json
import os
import struct
import sys
from collections.abc import Callable
from typing import Any

_SOURCE, _SOCKET = 3, 4  # files that are open when either side starts: its text, and the way to the other side
_MAX_BYTES = 16 << 20  # of one message
_SEQUENCES: dict[str, type[Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_TEXTS: dict[str, Callable[[Any], Any]] = {
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
}
_NUMBERS = {"Decimal": "decimal", "Fraction": "fractions"}  # and their modules, which take long to import
MUTABLE = (list, dict, set, bytearray)
"""types of arguments that a function may change"""


def own_text() -> str:
    """The text that this side executes. `exit` and `quit`, which Python leaves out here, are defined."""
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    with open(_SOURCE, encoding="utf-8") as file:
        return file.read()


class Wire:
    """Messages of JSON, each after its length."""

    def __init__(self) -> None:
        self._file = os.fdopen(_SOCKET, "r+b", buffering=0)

    def send(self, message: object) -> None:
        """Sends a message; ValueError if it is too long."""
        data = json.dumps(message).encode()
        if len(data) > _MAX_BYTES:
            raise ValueError("too much data for one call")
        data = struct.pack("<I", len(data)) + data
        while data:
            data = data[self._file.write(data) or 0 :]

    def receive(self) -> Any:
        """The next message; EOFError if the other side has gone or sends something else."""
        (length,) = struct.unpack("<I", self._read(4))
        if length > _MAX_BYTES:
            raise EOFError
        return json.loads(self._read(length))

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            if not (chunk := self._file.read(count - len(data))):
                raise EOFError
            data += chunk
        return bytes(data)


def encode(value: Any, refer: Callable[[Any], dict[str, Any]]) -> Any:
    """Plain data as JSON, anything else as what `refer` makes of it; a subclass of a plain type becomes that type."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [encode(each, refer) for each in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key, refer), encode(each, refer)] for key, each in value.items()]}
    if isinstance(value, (tuple, set, frozenset)):
        kind = next(name for name, plain in _SEQUENCES.items() if isinstance(value, plain))
        return {kind: [encode(each, refer) for each in value]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes" if isinstance(value, bytes) else "bytearray": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if _NUMBERS.get(type(value).__name__) == type(value).__module__:
        return {type(value).__name__: str(value)}
    return refer(value)


def decode(data: Any, resolve: Callable[[str, Any], Any]) -> Any:
    """The value of `encode`; `resolve` is called with what a reference says."""
    if isinstance(data, list):
        return [decode(each, resolve) for each in data]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "dict":
        return {decode(key, resolve): decode(value, resolve) for key, value in content}
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(each, resolve) for each in content)
    if kind in _TEXTS:
        return _TEXTS[kind](content)
    if kind in _NUMBERS:
        return getattr(importlib.import_module(_NUMBERS[kind]), kind)(content)
    if kind == "complex":
        return complex(*content)
    return resolve(kind, content)
