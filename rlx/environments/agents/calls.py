"""Calls in a turn of the policy, as OpenAI's API has them.

Left out: how a call is recognized (rlx.environments.tools), and messages with calls and results in a request (wire).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rlx.environments.tools import Call, beside_calls, calls_in, value_in


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
        properties = schema.get("properties", {})
        arguments = {key: _typed(text, key, _types(properties.get(key))) for key, text in arguments.items()}
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    # Nine characters, as some templates want them.
    return {"id": f"call{number:05}", "type": "function", "function": {"name": call.name, "arguments": written}}


def _typed(text: str, key: str, types: set[str]) -> Any:
    """An argument that is written as text: one that may be text stays so, another one is its value if it has one."""
    is_null = "null" in types and text in ("null", "None")
    if is_null or (types and "string" not in types):
        with suppress(ValueError):
            return value_in(text, key)
    return text


def _types(schema: Any) -> set[str]:
    """The types that a JSON schema allows; none: it does not say."""
    if not isinstance(schema, dict):
        return set()
    given = schema.get("type", [])
    own = {given} if isinstance(given, str) else set(given)
    own |= {"string" for each in schema.get("enum", ()) if isinstance(each, str)}
    own |= {"object"} if "$ref" in schema else set()
    return own.union(*map(_types, schema.get("anyOf", ())))
