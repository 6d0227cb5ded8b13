"""What is kept of a completion: the columns of a parquet file, its name, and which prompts are kept.

Left out: writing and reading files (writer.py, reader.py).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import pyarrow as pa

from rlx.config.sections.rollout import EnvironmentConfig
from rlx.samples.token_texts import TokenTexts
from rlx.types import Completion, ScoredCompletion

COMPLETIONS = "completions"
"""folder of a run with its completions"""
REDONE = "completions_before"
"""folder of a run with the completions of steps that a resume does again, as they were before"""
REWARD = "reward/"
"""what the column of a reward function begins with; its name follows, as in the metrics of the same names"""
_FILE = re.compile(r"(step|held_out)_(\d{6,})-(\d{5,})-of-(\d{5,})\.parquet")
_TOKENS = pa.list_(pa.float32())
COLUMNS = pa.schema(
    {
        "step": pa.int32(),  # PPO step that the completion is of; of a held-out one, the steps done before
        "kind": pa.string(),  # training or held_out
        "prompt_index": pa.int64(),  # row of the prompt table: the same prompt in every epoch
        "group": pa.int64(),  # epoch x rows of the table + row: completions that are compared with one another
        "source": pa.string(),  # which of data.sources the prompt is of; null: there is one
        "sample": pa.int32(),  # number of the completion among those of its prompt
        "trained": pa.bool_(),  # whether the losses have it: filter_groups and mask_truncated leave some out
        "question": pa.string(),
        "expected": pa.string(),  # the answer in the data set
        "prompt": pa.string(),  # all that the policy read, chat template and special tokens included
        "completion": pa.string(),  # without special tokens
        "answer": pa.string(),  # the part that was taken for the answer; null: none
        "score": pa.float64(),  # weighted sum of the reward functions, minus penalties
        "correct": pa.bool_(),
        "finish": pa.string(),  # stop: ended with a stop token, or by the environment; length: at rollout.max_tokens
        "version": pa.int32(),  # step of the weights that generated it
        "staleness": pa.int32(),  # steps that these weights were older than those that trained on it
        "token_ids": pa.list_(pa.int32()),
        "tokens": pa.list_(pa.string()),  # the text of each token, special tokens included
        "engine_logprobs": _TOKENS,  # of each token by the engine; null: it was not asked (rollout.logprobs_every)
        "logprobs": _TOKENS,  # by the trainer before the update (the old policy); null: it was not trained on
        "ratios": _TOKENS,  # of the policy to the old one in the update's newest pass over it; null: it made none
        "advantages": _TOKENS,
        "turns": pa.list_(pa.int32()),  # number of the turn that the policy drew each token in, -1: an environment's
        "episode": pa.string(),  # what the environment said, as `Episode.as_json`; null, as above: there is none
    }
)
"""the columns of every file; each reward function has one more"""


PER_TOKEN = ("token_ids", "engine_logprobs", "logprobs", "ratios", "advantages", "turns")
"""columns that have a value for each token, if any"""


LATER = ("turns", "episode", "source")
"""columns that files of earlier versions do not have"""


class Kind(StrEnum):
    """What completions were generated for."""

    TRAINING = "training"
    HELD_OUT = "held_out"


_PREFIXES = {Kind.TRAINING: "step", Kind.HELD_OUT: "held_out"}
_KINDS = {prefix: kind for kind, prefix in _PREFIXES.items()}


@dataclass(frozen=True, order=True)
class CompletionFile:
    """The name of one rank's file."""

    step: int
    kind: Kind
    rank: int
    ranks: int  # whose files together have all completions of the step

    def __str__(self) -> str:
        return f"{_PREFIXES[self.kind]}_{self.step:06d}-{self.rank:05d}-of-{self.ranks:05d}.parquet"

    @classmethod
    def of(cls, name: str) -> CompletionFile | None:
        """Reads a name; None if it is not one of these."""
        found = _FILE.fullmatch(name)
        return found and cls(int(found[2]), _KINDS[found[1]], int(found[3]), int(found[4]))


@dataclass(frozen=True)
class TrainedTokens:
    """What training has computed for the tokens of its completions: arrays `[B, T]`, one row each, in their order."""

    logprobs: np.ndarray  # of the old policy
    newest_logprobs: np.ndarray  # in the update's newest pass; nan where it made none
    advantages: np.ndarray
    in_losses: np.ndarray  # [B] 1 for those that the losses have

    def rows(self, chosen: Sequence[int]) -> TrainedTokens:
        """Those of the chosen completions that were trained on."""
        own = [number for number in chosen if number < len(self.logprobs)]
        return TrainedTokens(*(column[own] for column in vars(self).values()))


@dataclass(frozen=True)
class StepCompletions:
    """One rank's completions of a step."""

    kind: Kind
    step: int
    prompts: int  # rows of the prompt table
    rows: Sequence[ScoredCompletion]
    trained: TrainedTokens | None = None  # of the first of the rows; None: of none
    sources: Sequence[str] = ()  # what data.sources are called, by their numbers; none: there is one


def is_kept(share: float, seed: int, step: int, prompt: int) -> bool:
    """Whether the completions of a prompt are kept: a function of the run's seed, the step and the prompt alone.

    Args:
        share: of the prompts, 0 to 1.
        prompt: its `group`.
    """
    digest = hashlib.blake2b(f"{seed} {step} {prompt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def made_with(environment: EnvironmentConfig, template_args: Mapping[str, Any], seed: int) -> dict[bytes, bytes]:
    """The metadata of a file: the settings that decide, beside prompts and policy, what environments say.

    Args:
        template_args: `data.chat_template_args`, which decide what the policy reads.
        seed: of the run.
    """
    return {b"environment": f"{seed} {json.dumps(template_args, sort_keys=True)} {environment.identity}".encode()}


def as_table(step: StepCompletions, texts: TokenTexts) -> pa.Table:
    """The completions with all columns, in their order."""
    rows = step.rows
    columns = _of_rows(step) | _of_tokens(step, texts)
    fields = [pa.array(columns[name], COLUMNS.field(name).type) for name in COLUMNS.names]
    names = dict.fromkeys(name for row in rows for name in row.scores_by_function)
    parts = [pa.array([row.scores_by_function.get(name) for row in rows], pa.float64()) for name in names]
    return pa.table([*fields, *parts], [*COLUMNS.names, *(f"{REWARD}{name}" for name in names)])


def _of_rows(step: StepCompletions) -> dict[str, list[Any]]:
    """The columns with one value for each completion."""
    in_losses = step.trained.in_losses.astype(bool).tolist() if step.trained else []
    completions = [row.completion for row in step.rows]
    newest = step.step - (step.kind == Kind.TRAINING)  # version of the weights that the step began with
    return {
        "step": [step.step] * len(step.rows),
        "kind": [str(step.kind)] * len(step.rows),
        "prompt_index": [each.prompt.id % step.prompts for each in completions],
        "group": [each.prompt.id for each in completions],
        "source": [step.sources[each.prompt.source] if step.sources else None for each in completions],
        "sample": [each.sample for each in completions],
        "trained": in_losses + [False] * (len(step.rows) - len(in_losses)),
        "question": [each.prompt.question for each in completions],
        "expected": [each.prompt.answer for each in completions],
        "completion": [row.text for row in step.rows],
        "answer": [row.answer for row in step.rows],
        "score": [row.score for row in step.rows],
        "correct": [row.is_correct for row in step.rows],
        "finish": ["stop" if each.finished else "length" for each in completions],
        "version": [each.version for each in completions],
        "staleness": [newest - each.version for each in completions],
        "episode": [each.episode and each.episode.as_json() for each in completions],
    }


def _of_tokens(step: StepCompletions, texts: TokenTexts) -> dict[str, list[Any]]:
    """The columns with texts and numbers of each token."""
    completions = [row.completion for row in step.rows]
    lengths = [len(each.token_ids) for each in completions]
    read = {ids: texts.whole(ids) for ids in dict.fromkeys(each.prompt.token_ids for each in completions)}
    trained = step.trained
    logprobs = _cut(trained.logprobs if trained else None, lengths)
    newest = _cut(trained.newest_logprobs if trained else None, lengths)
    return {
        "prompt": [read[each.prompt.token_ids] for each in completions],
        "token_ids": [each.token_ids for each in completions],
        "tokens": [texts.each(each.token_ids) for each in completions],
        "engine_logprobs": [each.logprobs or None for each in completions],
        "logprobs": logprobs,
        "ratios": [_ratio(*each) for each in zip(newest, logprobs, strict=True)],
        "advantages": _cut(trained.advantages if trained else None, lengths),
        "turns": [_turns(each) for each in completions],
    }


def _turns(completion: Completion) -> list[int] | None:
    """The number of each token's turn; None: there is no environment."""
    if completion.episode is None:
        return None
    numbers = [-1] * len(completion.token_ids)
    for number, turn in enumerate(completion.episode.turns):
        numbers[turn.start : turn.stop] = [number] * (turn.stop - turn.start)
    return numbers


def _ratio(newest: np.ndarray | None, old: np.ndarray | None) -> np.ndarray | None:
    """The ratio of the policy to the old one at each token, `[T]`; None if the update made no pass."""
    if newest is None or old is None or np.isnan(newest).all():
        return None
    with np.errstate(over="ignore"):  # it may be infinite
        return np.asarray(np.exp(newest - old))


def _cut(grid: np.ndarray | None, lengths: Sequence[int]) -> list[np.ndarray | None]:
    """The rows of a grid `[B, T]` without padding, and None for the completions that it has no row of."""
    rows: Iterable[np.ndarray] = () if grid is None else grid
    cut: list[np.ndarray | None] = [row[:length] for row, length in zip(rows, lengths, strict=False)]
    return cut + [None] * (len(lengths) - len(cut))
