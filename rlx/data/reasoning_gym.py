"""Prompts that reasoning-gym generates from seeds, and its scorers of answers.

Some scorers evaluate what the policy has written, as Python or as formulas: they run in processes that can only
compute, with limits.
Left out: prompts that are stored in files (files.py).
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.config.errors import ConfigError, nearest
from rlx.config.sections.data import GENERATED, DataConfig, EvalConfig
from rlx.data.stored.columns import Columns, Row
from rlx.rewards.child import ChildError, ChildProcess, map_limited
from rlx.types import AnswerCheck, Checker, GivenAnswer

if TYPE_CHECKING:
    import ray.data

_LOG = logging.getLogger("rlx")
_MOST_LEFT_OUT = 0.1  # share of the training questions
_OWN = ("seed", "size")  # parameters that follow from other settings
_GENERATING = ("data.source", "eval.sets")
"""the beginnings of the settings whose addresses may generate prompts"""
_SECONDS, _BATCH_SECONDS = 5.0, 5.0  # of computing: for one answer; for the slow ones of a batch


class ReasoningGymSource:
    """The source reasoning_gym:DATASET; see `rlx.data.sources.PromptSource`. It checks no answers: all are alike."""

    is_generated = True

    def check(self, address: str, data: DataConfig, setting: str) -> None:
        """Raises ConfigError for any setting but data.source, data.sources and eval.sets, and for names of datasets and
        parameters that reasoning-gym does not know."""
        if not setting.startswith(_GENERATING) or setting.endswith(".held_out"):
            raise ConfigError(f"{setting} {address}: expected a prompt file; only data.source may generate prompts")
        _check_names(address.removeprefix(GENERATED), data.params, setting)

    def requiring(self, check: AnswerCheck | None) -> ReasoningGymSource:
        return self

    def first_rows(self, data: DataConfig, count: int, setting: str = "data.source") -> list[Row]:
        """Returns the rows of the first seeds; raises ConfigError if the dataset or its parameters cannot be used."""
        rows = generated_questions(data, data.seed, count, setting)
        return [Row(question=row["question"], answer=row["answer"], messages=None) for row in rows]

    def resolve(self, address: str) -> str:
        return address

    def rows(self, address: str, data: DataConfig, setting: str) -> ray.data.Dataset:
        """Raises ConfigError: no rows are stored."""
        raise ConfigError(f"{setting} {address}: expected a prompt file; only data.source may generate prompts")

    def split(
        self, data: DataConfig, held_out: EvalConfig, setting: str = "data.source"
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Returns rows of two ranges of seeds; a training question that is also held out is left out of the first.

        Raises:
            ConfigError: the dataset or its parameters cannot be used, or no training question is left.
        """
        held_out_rows = list(generated_questions(data, held_out.seed, held_out.num_prompts, setting))
        held_out_questions = {row["question"] for row in held_out_rows}
        questions = list(generated_questions(data, data.seed, data.num_prompts, setting))
        training_rows = [row for row in questions if row["question"] not in held_out_questions]
        if not training_rows:
            raise ConfigError(f"{setting} {data.source}: every training question is also a held-out one")
        if (left_out := 1 - len(training_rows) / len(questions)) > _MOST_LEFT_OUT:
            _LOG.warning(
                "%s: %.0f%% of its training questions are also held out and left out, so the mix of the others may be "
                "another one: give %s with more different questions, or a smaller eval.num_prompts",
                data.source,
                100 * left_out,
                _params_of(setting),
            )
        return training_rows, held_out_rows

    def answer_checker(self, data: DataConfig, seed: int, size: int) -> Checker:
        """Returns the dataset's own scorer, for the rows that `generated_questions` gives for the same arguments.

        An answer that it cannot parse is wrong, and so is one that takes more than 5 s of computing; many of those in a
        batch have less time. It raises RuntimeError if an entry is not there.
        """
        process = _scorer_process(data.model_dump_json())

        def check(answers: Sequence[GivenAnswer]) -> list[float]:
            try:
                scores = process.call((seed, size, [(answer.given, answer.entry) for answer in answers]))
            except ChildError as error:
                raise RuntimeError(f"{data.source}: its scorer {error}") from None
            if given_up := scores.count(None):
                _LOG.warning("%s gave up on %d of %d answers: they score 0", data.source, given_up, len(scores))
            return [score if score and 0 < score <= 1 else 0.0 for score in scores]  # others are forged

        return check


@functools.cache
def _scorer_process(data: str) -> ChildProcess:
    """The child process for all answers to questions of one dataset: to import reasoning-gym takes seconds."""
    return ChildProcess(functools.partial(_scorer, data))


def _scorer(data: str) -> Callable[[tuple[int, int, list[tuple[str, int]]]], list[float | None]]:
    """Runs in the child process; `data`: a DataConfig as JSON."""
    dataset_of = functools.cache(functools.partial(_create_dataset, DataConfig.model_validate_json(data)))

    def scores(batch: tuple[int, int, list[tuple[str, int]]]) -> list[float | None]:
        seed, size, answers = batch
        dataset = dataset_of(seed, size)
        items = [(given, dataset[entry]) for given, entry in answers]
        return map_limited(lambda item: float(dataset.score_answer(*item)), items, _SECONDS, _BATCH_SECONDS)

    return scores


def generated_questions(
    data: DataConfig, seed: int, size: int, setting: str = "data.source"
) -> Iterator[dict[str, Any]]:
    """Yields rows {question, answer, entry} of the configured dataset, each question once.

    Entry i depends on seed + i alone. So two sets share no seed if their seeds are at least `size` apart.

    Args:
        setting: the setting that has the address, for errors.

    Raises:
        ConfigError: the dataset or its parameters cannot be used.
    """
    seen: set[str] = set()
    columns = Columns(template=data.prompt_template)
    for index, item in enumerate(_create_dataset(data, seed, size, setting)):
        if item["question"] not in seen:
            seen.add(item["question"])
            row = columns.row({"question": item["question"], "answer": str(item["answer"])})
            yield {"question": row["question"], "answer": row["answer"], "entry": index}


def _check_names(name: str, params: Iterable[str], setting: str) -> None:
    """Raises ConfigError if the sources of reasoning-gym have no such dataset or parameter; importing it takes seconds.

    A name that they have anywhere in quotes passes: `_create_dataset` checks it again.
    """
    found = importlib.util.find_spec("reasoning_gym")
    folders = (found.submodule_search_locations if found else None) or ()
    files = (file for folder in folders for file in Path(folder).rglob("*.py"))
    texts = [file.read_text(errors="replace") for file in files]
    if texts and not any(f'"{name}"' in text or f"'{name}'" in text for text in texts):
        known = re.findall(r'^DATASET_NAME = "(\w+)"', "\n".join(texts), re.MULTILINE)
        raise ConfigError(_unknown_name(name, known, setting))
    for text in texts:
        if f'DATASET_NAME = "{name}"' in text and (known := known_params(text)):
            _check_params(name, params, known, setting)


def known_params(text: str) -> list[str]:
    """The parameters of the dataset that a source file of reasoning-gym registers; none where that cannot be seen."""
    registered = re.search(r"^register_dataset\(\s*DATASET_NAME,\s*\w+,\s*(\w+)", text, re.MULTILINE)
    classes = (node for node in ast.parse(text).body if registered and isinstance(node, ast.ClassDef))
    fields = (each for node in classes if registered and node.name == registered[1] for each in node.body)
    targets = (each.target for each in fields if isinstance(each, ast.AnnAssign))
    return [target.id for target in targets if isinstance(target, ast.Name) and target.id not in _OWN]


def _check_params(name: str, params: Iterable[str], known: Sequence[str], setting: str) -> None:
    for key in params:
        if key not in known:
            raise ConfigError(f"{_params_of(setting)}.{key}: {name} has no such parameter{nearest(key, known)}")


def _params_of(setting: str) -> str:
    """The setting with the parameters of the dataset that a setting names."""
    return f"{setting.removesuffix('source')}params" if setting.endswith(".source") else f"{setting}: params"


def _unknown_name(name: str, known: Sequence[str], setting: str) -> str:
    return f"{setting}: reasoning-gym has no dataset {name!r}{nearest(name, known)}"


def _create_dataset(data: DataConfig, seed: int, size: int, setting: str = "data.source") -> Any:
    name = data.source.removeprefix(GENERATED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package compiles sources with invalid escapes on first import
        import reasoning_gym  # type: ignore[import-untyped]  # imports a hundred datasets and takes seconds
        from reasoning_gym.factory import DATASETS  # type: ignore[import-untyped]
    if name not in DATASETS:
        raise ConfigError(_unknown_name(name, list(DATASETS), setting))
    known = [field.name for field in fields(DATASETS[name][1]) if field.name not in _OWN]
    _check_params(name, data.params, known, setting)
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **data.params)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"{_params_of(setting)} {data.params}: {name} refuses them: {error}") from None
