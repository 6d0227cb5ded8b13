"""Settings as the parameters of a tracking service, and read back. Left out: tags, and config.yaml beside them."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from rlx.config.errors import printable
from rlx.config.loading import setting_at
from rlx.config.sections.base import Section


def params_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that are not None; both are by dotted key."""
    return {key: _readable(value) for key, value in settings.items() if value is not None}


def setting_of(params: Mapping[str, str], key: str) -> int | float | str | None:
    """The value of a setting, or of an entry of one that is a dict, as it was recorded: a number or a text; None for
    none."""
    text = params.get(key)
    if text is None:  # an entry: what is recorded is the dict
        whole = {name: _literal(each) for name, each in params.items() if key.startswith(f"{name}.")}
        entry = setting_at(whole, key)
        text = None if entry is None else str(entry)
    value = _literal(text)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number or text is None else printable(text)


def _readable(value: Any) -> Any:
    """A setting as trackers show it: of a list of sections, such as data.sources, what is given in each."""
    if not (isinstance(value, tuple) and any(isinstance(each, Section) for each in value)):
        return value
    return [each.model_dump(mode="json", exclude_none=True) for each in value]


def _literal(text: str | None) -> Any:
    """The value that a text stands for; None if it stands for none."""
    try:
        return None if text is None else ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
