"""Numbers that change during a run: a schedule in the place of a setting's number.

`{0: 1e-6, 200: 1e-7}` is a schedule by steps done, `{0: 1e-6, 2e6 tokens: 1e-7}` one by response tokens generated. Each
value holds from its place on; with `interpolate: linear` values lie on straight lines from place to place. Steps and
tokens are in checkpoints, so a resumed run has the same numbers. Left out: who asks for them (rlx.training).
"""

from __future__ import annotations

import bisect
import math
import re
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import pydantic
from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

from rlx.config.sections.base import Section

_PLACE = re.compile(r"(\d+(?:\.\d*)?(?:e\+?\d+)?)\s*(tok|tokens)?", re.IGNORECASE)
_INTERPOLATE = "interpolate"
_MOST_SHOWN = 3  # values after the first


@dataclass(frozen=True, slots=True)
class NumberSchedule:
    """The values of one setting by place, which is a number of steps done or of response tokens generated."""

    places: tuple[int, ...]  # rising; the first is 0
    values: tuple[float, ...]  # one for each place
    by_tokens: bool = False
    is_linear: bool = False

    @classmethod
    def of(cls, points: Mapping[Any, Any]) -> NumberSchedule:
        """Reads a schedule as people write it, and as `points` gives it.

        Raises:
            ValueError: it is none; the text says why.
        """
        kind = points.get(_INTERPOLATE, "linear")
        if kind != "linear":
            raise ValueError(f"{_INTERPOLATE} is {kind}: the only other way than steps from value to value is linear")
        rows = sorted((*_place(key), _number(value)) for key, value in points.items() if key != _INTERPOLATE)
        places, units = [place for place, _, _ in rows], {unit for place, unit, _ in rows if place}
        if not places or places[0] != 0:
            raise ValueError("a schedule begins with the value of step 0, e.g. {0: 1e-6, 200: 1e-7}")
        if len(set(places)) < len(places) or len(units) > 1:
            raise ValueError("a schedule has one value for each place, and places are all steps or all tokens")
        values = tuple(value for _, _, value in rows)
        return cls(tuple(places), values, "tokens" in units, _INTERPOLATE in points)

    @property
    def points(self) -> dict[str, float | str]:
        """The schedule as plain values, which YAML and JSON can hold."""
        unit = " tokens" if self.by_tokens else ""
        points = {
            f"{place}{unit if place else ''}": value for place, value in zip(self.places, self.values, strict=True)
        }
        return {**points, _INTERPOLATE: "linear"} if self.is_linear else {**points}

    @property
    def in_short(self) -> str:
        """The schedule for people, e.g. 1e-06 -> 1e-07 (after step 200); of many values the first ones and the last."""
        form, place_is = ("linear to" if self.is_linear else "after"), "{:,} tokens" if self.by_tokens else "step {}"
        shown = [
            f"{value:g} ({form} {place_is.format(place)})"
            for place, value in zip(self.places[1:], self.values[1:], strict=True)
        ]
        middle = shown if len(shown) <= _MOST_SHOWN else [*shown[: _MOST_SHOWN - 1], "...", shown[-1]]
        return " -> ".join([f"{self.values[0]:g}", *middle])

    def at(self, step: int, tokens: int) -> float:
        """The value in the step that follows so many steps and response tokens."""
        place = tokens if self.by_tokens else step
        last = bisect.bisect_right(self.places, place) - 1
        start = self.values[last]
        if not self.is_linear or last + 1 == len(self.places):
            return start
        share = (place - self.places[last]) / (self.places[last + 1] - self.places[last])
        return start + share * (self.values[last + 1] - start)


def _place(key: Any) -> tuple[int, str]:
    """A key of a schedule as a number and its unit."""
    found = _PLACE.fullmatch(str(key).strip())
    if not found or not float(found[1]).is_integer():
        hint = "; a space after the colon is missing" if ":" in str(key) else ""
        raise ValueError(
            f"a schedule cannot have the place {key!r:.80}: write steps such as 200, or tokens such as 2e6 tokens{hint}"
        )
    return int(float(found[1])), "tokens" if found[2] else "steps"


def _number(value: Any) -> float:
    """A value of a schedule. YAML takes 1e-6 for text."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"a schedule cannot have the value {value!r:.80}: it has numbers")
    return number


class ScheduledSection(Section):
    """A section some of whose numbers may have a schedule. Its fields have the values of the first step.

    `model_dump` and `flatten` give schedules in the place of numbers, as they were given.
    """

    CHANGING: ClassVar[tuple[str, ...]] = ()
    """the settings that are safe to change between two steps"""
    _schedules: dict[str, NumberSchedule] = pydantic.PrivateAttr(default_factory=dict)

    @property
    def schedules(self) -> Mapping[str, NumberSchedule]:
        """The schedules by setting."""
        return self._schedules

    def at(self, step: int, tokens: int) -> Self:
        """A copy with the numbers of the step that follows so many steps and response tokens; it has the schedules."""
        return self.model_copy(update={key: each.at(step, tokens) for key, each in self._schedules.items()})

    def values(self, key: str) -> Iterable[float]:
        """All values between which a setting moves; its only one without a schedule."""
        return self._schedules[key].values if key in self._schedules else (getattr(self, key),)

    def in_short(self, key: str) -> str:
        """The number of a setting for people, or its schedule."""
        return self._schedules[key].in_short if key in self._schedules else f"{getattr(self, key):g}"

    def as_given(self, key: str) -> Any:
        """The value of a setting, or its schedule as plain values."""
        return self._schedules[key].points if key in self._schedules else getattr(self, key)

    @pydantic.model_validator(mode="wrap")
    @classmethod
    def _take_schedules(cls, given: Any, handler: pydantic.ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(given, Mapping):
            return handler(given)
        plain = [name for name, field in cls.model_fields.items() if typing.get_origin(field.annotation) is not dict]
        found = {key: cls._schedule(key, given[key]) for key in plain if isinstance(given.get(key), Mapping)}
        first = {**given, **{key: each.values[0] for key, each in found.items()}}
        for key, each in found.items():
            for value in each.values[1:]:  # each is refused as the number alone would be
                handler({**first, key: value})
        section = handler(first)
        section._schedules = found
        return section

    @classmethod
    def _schedule(cls, key: str, points: Mapping[Any, Any]) -> NumberSchedule:
        try:
            if key not in cls.CHANGING:
                raise ValueError(f"it cannot change during a run; of this section can {', '.join(cls.CHANGING)}")
            return NumberSchedule.of(points)
        except ValueError as error:
            said = PydanticCustomError("schedule", "{said}", {"said": str(error)})
            raise ValidationError.from_exception_data(
                cls.__name__, [InitErrorDetails(type=said, loc=(key,), input=points)]
            ) from None

    @pydantic.model_serializer(mode="wrap")
    def _with_schedules(self, handler: pydantic.SerializerFunctionWrapHandler) -> dict[str, Any]:
        plain: dict[str, Any] = handler(self)
        return plain | {key: each.points for key, each in self._schedules.items() if key in plain}


def conflict(
    schedules: Mapping[str, NumberSchedule], *, adapts_kl: bool, exact_entropy: bool, filters: bool, is_ahead: bool
) -> str | None:
    """Why schedules do not work with other settings; None if they do.

    Args:
        schedules: by dotted key.
        adapts_kl, exact_entropy, filters: algorithm.adaptive_kl_target, exact_entropy and filter_groups are on.
        is_ahead: generation runs ahead of training, so what a completion is drawn with has to be known steps before.
    """
    sampling = [key for key in schedules if key.startswith("rollout.")]
    if "algorithm.kl_coef" in schedules and adapts_kl:
        return "algorithm.kl_coef has a schedule and algorithm.adaptive_kl_target, which changes it too: leave one out"
    if "algorithm.entropy_coef" in schedules and not exact_entropy:
        return (
            "algorithm.entropy_coef: with a schedule that reaches 0, policy/entropy would change from exact to "
            "estimated: set algorithm.exact_entropy"
        )
    if is_ahead and (late := [key for key in sampling if filters or schedules[key].by_tokens]):
        reason = "algorithm.filter_groups" if filters else "a schedule by tokens"
        return (
            f"{late[0]}: with rollout.max_staleness and {reason} it is not known at which step a completion will be "
            f"trained on, and that step's value has to score it: give a number, or set rollout.max_staleness to 0"
        )
    return None
