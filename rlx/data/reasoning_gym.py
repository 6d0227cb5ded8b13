"""Where questions come from, and who checks their answers: reasoning-gym datasets, or the rows of a prompt file.

Reading files is data.py's work; this module knows only which kind a source is.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from rlx.config.errors import ConfigError, nearest
from rlx.config.sections import GENERATED, DataConfig
from rlx.types import Checker


def is_generated(source: str) -> bool:
    """Whether a source names a reasoning-gym dataset rather than a file."""
    return source.startswith(GENERATED)


def generated_questions(config: DataConfig, seed: int, size: int) -> Iterator[dict[str, Any]]:
    """Rows {question, answer, entry} of the configured dataset, each question once.

    Entry i depends on seed + i alone, so two sets are disjoint in their seeds when these lie further apart than `size`.
    """
    seen: set[str] = set()
    for index, item in enumerate(_dataset(config, seed, size)):
        if item["question"] not in seen:
            seen.add(item["question"])
            yield {"question": item["question"], "answer": str(item["answer"]), "entry": index}


def answer_checker(config: DataConfig, seed: int, size: int) -> Checker:
    """The source's own scorer: reasoning-gym's for a generated set (of this seed), exact match for a file."""
    if not is_generated(config.source):
        return lambda given, expected, entry: float(given.strip() == expected.strip())
    dataset = _dataset(config, seed, size)

    def check(given: str, expected: str, entry: int | None) -> float:
        item = dataset[entry]
        try:
            return float(dataset.score_answer(given, item))
        except Exception:  # scorers parse what the model wrote, and that may be anything: unreadable is wrong
            return 0.0

    return check


def _dataset(config: DataConfig, seed: int, size: int) -> Any:
    name = config.source.removeprefix(GENERATED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package compiles sources with invalid escapes on first import
        import reasoning_gym  # type: ignore[import-untyped]  # imports a hundred datasets and takes seconds: only where it is used
        from reasoning_gym.factory import DATASETS  # type: ignore[import-untyped]
    if name not in DATASETS:
        raise ConfigError(f"data.source: reasoning-gym has no dataset {name!r}{nearest(name, list(DATASETS))}")
    known = [field.name for field in fields(DATASETS[name][1]) if field.name not in ("seed", "size")]
    for key in config.params:
        if key not in known:
            raise ConfigError(f"data.params.{key}: {name} has no such parameter{nearest(key, known)}")
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **config.params)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"data.params {config.params}: {name} refuses them: {error}") from None
