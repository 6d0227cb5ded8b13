"""The settings of a run as tracking services get them: as parameters. Left out: tags, and config.yaml beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlx.config.sections.base import Section


def params_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that are not None; both are by dotted key."""
    return {key: _readable(value) for key, value in settings.items() if value is not None}


def _readable(value: Any) -> Any:
    """A setting as trackers show it: of a list of sections, such as data.sources, what is given in each."""
    if not (isinstance(value, tuple) and any(isinstance(each, Section) for each in value)):
        return value
    return [each.model_dump(mode="json", exclude_none=True) for each in value]
