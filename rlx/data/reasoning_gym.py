"""Prompts that reasoning-gym generates from seeds, and its scorers of answers.

Left out: prompts that are stored in files (files.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rlx.config.errors import ConfigError, nearest
from rlx.config.sections import GENERATED, DataConfig, EvalConfig
from rlx.types import Checker

if TYPE_CHECKING:
    import ray.data


class ReasoningGymSource:
    """The source reasoning_gym:DATASET; see `rlx.data.sources.PromptSource`."""

    is_generated = True

    def check(self, address: str, setting: str) -> None:
        """Raises ConfigError for any setting but data.source. The dataset's name is checked when rows are made:
        importing reasoning-gym takes seconds."""
        if setting != "data.source":
            raise ConfigError(f"{setting} {address}: expected a prompt file; only data.source may generate prompts")

    def resolve(self, address: str) -> str:
        return address

    def rows(self, address: str, data: DataConfig, setting: str) -> ray.data.Dataset:
        """Raises ConfigError: no rows are stored."""
        raise ConfigError(f"{setting} {address}: expected a prompt file; only data.source may generate prompts")

    def split(self, data: DataConfig, held_out: EvalConfig) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Returns rows of two ranges of seeds; a training question that is also held out is left out of the first.

        Raises:
            ConfigError: the dataset or its parameters cannot be used, or no training question is left.
        """
        held_out_rows = list(generated_questions(data, held_out.seed, held_out.num_prompts))
        held_out_questions = {row["question"] for row in held_out_rows}
        questions = generated_questions(data, data.seed, data.num_prompts)
        training_rows = [row for row in questions if row["question"] not in held_out_questions]
        if not training_rows:
            raise ConfigError(f"data.source {data.source}: every training question is also a held-out one")
        return training_rows, held_out_rows

    def answer_checker(self, data: DataConfig, seed: int, size: int) -> Checker:
        """Returns the dataset's own scorer, for the rows that `generated_questions` gives for the same arguments."""
        dataset = _create_dataset(data, seed, size)

        def check(given: str, expected: str, entry: int | None) -> float:
            item = dataset[entry]
            try:
                return float(dataset.score_answer(given, item))
            except Exception:  # a scorer can fail on text that a model wrote: an answer that it cannot parse is wrong
                return 0.0

        return check


def generated_questions(data: DataConfig, seed: int, size: int) -> Iterator[dict[str, Any]]:
    """Yields rows {question, answer, entry} of the configured dataset, each question once.

    Entry i depends on seed + i alone. So two sets share no seed if their seeds are at least `size` apart.

    Raises:
        ConfigError: the dataset or its parameters cannot be used.
    """
    seen: set[str] = set()
    for index, item in enumerate(_create_dataset(data, seed, size)):
        if item["question"] not in seen:
            seen.add(item["question"])
            yield {"question": item["question"], "answer": str(item["answer"]), "entry": index}


def _create_dataset(data: DataConfig, seed: int, size: int) -> Any:
    name = data.source.removeprefix(GENERATED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package compiles sources with invalid escapes on first import
        import reasoning_gym  # type: ignore[import-untyped]  # imports a hundred datasets and takes seconds
        from reasoning_gym.factory import DATASETS  # type: ignore[import-untyped]
    if name not in DATASETS:
        raise ConfigError(f"data.source: reasoning-gym has no dataset {name!r}{nearest(name, list(DATASETS))}")
    known = [field.name for field in fields(DATASETS[name][1]) if field.name not in ("seed", "size")]
    for key in data.params:
        if key not in known:
            raise ConfigError(f"data.params.{key}: {name} has no such parameter{nearest(key, known)}")
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **data.params)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"data.params {data.params}: {name} refuses them: {error}") from None
