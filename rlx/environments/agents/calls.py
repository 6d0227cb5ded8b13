"""Calls in a turn of the policy, as OpenAI's API has them.

Left out: how a call is recognized (rlx.environments.tools), and messages with calls and results in a request (wire).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rlx.environments.tools import Call, beside_calls, calls_in, value_in
from rlx.types import sendable

_NAMES = {str: "string", type(None): "null"}


def read_calls(text: str, tools: Sequence[Mapping[str, Any]], first: int) -> tuple[str, tuple[dict[str, Any], ...]]:
    """What a turn says beside its calls, and these as `tool_calls`. One that cannot be read makes all of it text.

    Args:
        tools: those of the request.
        first: the number of the first call in the episode. Ids follow from it, so that an episode can be repeated.
    """
    calls = calls_in(text)
    if any(call.problem or not call.name for call in calls):
        return text, ()
    schemas = {each["function"]["name"]: each["function"].get("parameters") or {} for each in tools}
    try:
        told = [_told(call, schemas.get(call.name, {}), number) for number, call in enumerate(calls, first)]
    except (TypeError, ValueError, RecursionError):  # JSON does not have such a value, or the schema is none
        return text, ()
    return (beside_calls(text), tuple(told)) if told else (text, ())


def _told(call: Call, schema: Mapping[str, Any], number: int) -> dict[str, Any]:
    arguments = call.arguments
    if call.is_untyped:
        properties, named = schema.get("properties", {}), schema.get("$defs") or schema.get("definitions") or {}
        arguments = {key: _typed(text, key, _types(properties.get(key), named)) for key, text in arguments.items()}
    written = sendable(json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    # Nine characters, as some templates want them.
    return {"id": f"call{number:05}", "type": "function", "function": {"name": call.name, "arguments": written}}


def _typed(text: str, key: str, types: set[str]) -> Any:
    """An argument that is written as text: one that may be text stays so, another one is its value if it has one."""
    is_null = "null" in types and text in ("null", "None")
    if is_null or (types and "string" not in types):
        with suppress(ValueError):
            return value_in(text, key)
    return text


def _types(schema: Any, named: Mapping[str, Any]) -> set[str]:
    """The types that a JSON schema allows, of which null and string are told from others; none: it does not say.

    Args:
        named: schemas that it may refer to.
    """
    if not isinstance(schema, dict):
        return set()
    if isinstance(schema.get("$ref"), str):
        name = schema["$ref"].rpartition("/")[2]
        return _types(named.get(name), {key: each for key, each in named.items() if key != name}) or {"object"}
    given = schema.get("type", [])
    own = {given} if isinstance(given, str) else set(given)
    values = [*(schema.get("enum") or ()), *([schema["const"]] if "const" in schema else ())]
    own |= {_NAMES.get(type(each), "number") for each in values}
    parts = [part for key in ("anyOf", "oneOf", "allOf") for part in schema.get(key) or ()]
    return own.union(*(_types(part, named) for part in parts))
