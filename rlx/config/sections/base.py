"""The base class of all sections, the types that their settings share, and the settings under dotted keys.

The text under a setting is its --help text.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Self

import pydantic
import regex  # type: ignore[import-untyped]  # what searches with a time limit, see rlx.rewards.patterns
from pydantic import Field, NonNegativeFloat

from rlx.config.addresses import any_secret, refuse_empty


class Section(pydantic.BaseModel):
    """Base class of all sections: frozen, and strict about unknown settings."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    def with_default(self, key: str, default: Any) -> Self:
        """A copy in which a setting that was not given has another default; it still counts as not given."""
        copy = self.model_copy()
        if key not in self.model_fields_set:
            copy.__dict__[key] = default
        return copy

    def as_given(self, key: str) -> Any:
        """The value of a setting as a file or an option has it."""
        return getattr(self, key)

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _check_truth(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """Pydantic takes true for 1, and YAML `yes` for true."""
        kind = cls.model_fields[str(info.field_name)].annotation
        entries = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        if _may_be(kind, int, float) and not _may_be(kind, bool) and any(isinstance(each, bool) for each in entries):
            raise ValueError("expected a number, not true or false (which yes and no are in YAML)")
        return value

    @pydantic.field_validator("*", mode="wrap")
    @classmethod
    def _read_empty(cls, value: Any, read: pydantic.ValidatorFunctionWrapHandler, info: pydantic.ValidationInfo) -> Any:
        """An empty text in a file or a tree leaves a text unset that may be so, unless it is one of its values."""
        try:
            return read(value)
        except pydantic.ValidationError:
            annotation = cls.model_fields[str(info.field_name)].annotation
            if isinstance(value, str) and not value and all(_may_be(annotation, kind) for kind in (str, type(None))):
                return None
            raise


def _may_be(annotation: Any, *kinds: type) -> bool:
    """Whether an annotation has one of some types in it."""
    return annotation in kinds or any(_may_be(each, *kinds) for each in typing.get_args(annotation))


_RAYS_OWN = ("CPU", "GPU")


def _check_resources(resources: dict[str, float]) -> dict[str, float]:
    for name in resources:
        if name not in _RAYS_OWN and name.upper() in _RAYS_OWN:  # which no node of Ray has
            raise ValueError(f"no resource of Ray is called {name}; nearest: {name.upper()}")
    if not any(resources.values()):
        raise ValueError("at least one resource must be more than 0")  # Ray refuses an empty bundle
    return resources


_FUZZY = re.compile(r"(?<!\\)(?:\\\\)*\{\s*[eids]")  # as regex reads it; Python's re takes that for text


def _check_pattern(pattern: str) -> str:
    try:
        regex.compile(pattern)
    except (regex.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from None
    if _FUZZY.search(pattern):
        raise ValueError("write \\{ for a brace that is text: {e}, {i}, {d}, {s} allow errors in a match")
    return pattern


def _check_names(arguments: dict[str, Any]) -> dict[str, Any]:
    for name in arguments:
        if not name.isidentifier():
            raise ValueError(f"no argument is called {name!r}")
    if any_secret(arguments):
        raise ValueError("an address in it holds a password, token or key, which would be saved with the run")
    return arguments


_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


def _with_exponents(value: Any) -> Any:
    """A value with numbers in the place of texts such as 1e-3, at any depth: YAML 1.1 reads and writes them as text."""
    if isinstance(value, dict):
        return {key: _with_exponents(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_with_exponents, value))
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _check_params(params: dict[str, Any]) -> Any:
    try:
        return _with_exponents(params)
    except RecursionError:
        raise ValueError("nested too deeply") from None


Params = Annotated[dict[str, Any], pydantic.AfterValidator(_check_params)]
"""settings of something that is not rlx's, by name"""
Arguments = Annotated[Params, pydantic.AfterValidator(_check_names)]
"""arguments of a function of another library, by name"""
NonEmptyText = Annotated[str, pydantic.AfterValidator(refuse_empty)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
"""of a wait; clocks of threads, sockets and processes take little more"""
Fraction = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Pattern = Annotated[str, pydantic.AfterValidator(_check_pattern)]
Resources = Annotated[dict[str, NonNegativeFloat], pydantic.AfterValidator(_check_resources)]


def flatten(config: Section, prefix: str = "") -> dict[str, Any]:
    """Every setting under its dotted key; a setting whose value is a dict stays one entry."""
    flat: dict[str, Any] = {}
    for key in type(config).model_fields:
        value = config.as_given(key)
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Section) else {f"{prefix}{key}": value}
    return flat


def differences(now: Section, before: Section) -> Iterator[tuple[str, Any, Any]]:
    """Yields each setting that differs between two configs: its name, its value now and before.

    Of a list of entries, such as data.sources, it yields what differs in an entry (`data.sources sums.weight`), or the
    names of the entries where these differ.
    """
    values, earlier = flatten(now), flatten(before)
    for key in values:
        if values[key] == earlier[key]:
            continue
        own, theirs = _entries(values[key]), _entries(earlier[key])
        if not own and not theirs:
            yield key, values[key], earlier[key]
        elif list(own) != list(theirs):
            yield key, ", ".join(own), ", ".join(theirs) or "unset"
        else:
            for name, entry in own.items():
                yield from ((f"{key} {name}.{part}", *pair) for part, *pair in differences(entry, theirs[name]))


def _entries(value: Any) -> dict[str, Section]:
    """The entries of a setting that is a list of sections, by what they are called; none of any other setting."""
    given = value if isinstance(value, tuple) else ()
    return {f"{getattr(each, 'label', number)}": each for number, each in enumerate(given) if isinstance(each, Section)}
