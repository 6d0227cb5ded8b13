"""Trains a reward model on preferences: pairs of completions of a prompt, one of them preferred.

The model is that of Bradley and Terry (1952), fitted to pairs as in Ouyang et al. 2022 (arXiv 2203.02155) eq. 1. One
process trains, on a GPU if there is one. Left out: conversations of several turns, margins, several GPUs, where the
model is saved.
"""

from __future__ import annotations

import codecs
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pydantic
import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlx.config.errors import ConfigError
from rlx.rewards.reward_model import Classifier, Exchange, token_batches

NEAR = tuple(offset for offset in range(-9, 10) if offset)
"""distances of a generated wrong answer from the correct one"""
EVAL_TOKENS = 16_384
"""tokens of one forward pass without gradient"""


# --- pairs


class Pair(pydantic.BaseModel, frozen=True):
    """Two completions of a prompt, one of them preferred."""

    prompt: str = Field(min_length=1)
    chosen: str
    rejected: str


def read_pairs(path: str) -> list[Pair]:
    """The pairs of a .jsonl file, with one {prompt, chosen, rejected} per line.

    Raises:
        ConfigError: the file cannot be read, has no pairs, or a line is not valid; the text names the line.
    """
    try:
        lines = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    pairs = [_pair(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not pairs:
        raise ConfigError(f"{path}: there are no pairs in it")
    return pairs


def _pair(line: bytes, location: str) -> Pair:
    try:
        pair = Pair.model_validate_json(line)
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        key = "".join(f"{name}: " for name in problem["loc"])
        raise ConfigError(f"{location}: {key}{problem['msg']}; expected prompt, chosen and rejected") from None
    if pair.chosen == pair.rejected:  # no gradient, and half of a success in the accuracy
        raise ConfigError(f"{location}: chosen and rejected are the same text")
    return pair


def pairs_of_questions(questions: Sequence[tuple[str, str]], seed: int) -> list[Pair]:
    """One pair for each (question, whole number that answers it): the answer is preferred to a number near it."""
    offsets = random.Random(seed)
    return [
        Pair(prompt=question, chosen=answer, rejected=str(int(answer) + offsets.choice(NEAR)))
        for question, answer in questions
    ]


def hold_out_pairs(pairs: Sequence[Pair], count: int) -> tuple[list[Pair], list[Pair]]:
    """(training pairs, held-out pairs): each prompt is on one side with all its pairs, so that none is lost.

    Held out are the last prompts that bring the number of their pairs nearer to `count`, or the one with the fewest
    pairs if none does.

    Raises:
        ConfigError: no training pair is left.
    """
    sizes, missing, prompts = Counter(pair.prompt for pair in pairs), count, set[str]()
    latest_first = dict.fromkeys(pair.prompt for pair in reversed(pairs))
    for prompt in latest_first:
        if sizes[prompt] < 2 * missing:
            prompts.add(prompt)
            missing -= sizes[prompt]
    prompts = prompts or {min(latest_first, key=sizes.__getitem__)}
    training = [pair for pair in pairs if pair.prompt not in prompts]
    if not training:
        raise ConfigError(f"{len(pairs)} pairs are too few to hold {count} out: no other prompt is left")
    return training, [pair for pair in pairs if pair.prompt in prompts]


# --- training


@dataclass(frozen=True)
class Recipe:
    """How a reward model is trained. The learning rate rises from zero, then falls to zero."""

    epochs: int
    batch: int  # pairs per optimizer step
    learning_rate: float
    seed: int = 0  # of the order of pairs
    warmup: float = 0.1  # share of the steps in which the learning rate rises
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def steps(self, pairs: int) -> int:
        """The number of optimizer steps on this number of pairs; the last batch of an epoch may be smaller."""
        return self.epochs * -(-pairs // self.batch)


@dataclass(frozen=True)
class TrainingResult:
    """The result of training a reward model."""

    accuracy_before: float  # on the held-out pairs
    accuracy_after: float


OnStep = Callable[[int, dict[str, float]], None]
"""called with the steps done and {loss, accuracy, pairs_per_s}; held_out_accuracy before the first and with the last"""


def bradley_terry_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Mean of -log sigmoid(chosen - rejected) over scores `[B]` each: how unlikely the preferences are; a scalar."""
    return -logsigmoid(chosen - rejected).mean()


def fit_preferences(
    classifier: Classifier,
    pairs: Sequence[Pair],
    held_out: Sequence[Pair],
    recipe: Recipe,
    on_step: OnStep = lambda done, metrics: None,
) -> TrainingResult:
    """Trains a classifier in place to score the chosen completions of pairs higher than the rejected ones.

    On CPU, with the same number of threads, the same input always gives the same weights.

    Raises:
        RuntimeError: a gradient is not finite.
    """
    classifier.model.to("cuda" if torch.cuda.is_available() else "cpu")
    before = after = accuracy(classifier, held_out)
    on_step(0, {"held_out_accuracy": before})
    for done, metrics in enumerate(_steps(classifier, pairs, recipe), start=1):
        if done == recipe.steps(len(pairs)):
            metrics["held_out_accuracy"] = after = accuracy(classifier, held_out)
        on_step(done, metrics)
    return TrainingResult(before, after)


@torch.no_grad()
def accuracy(classifier: Classifier, pairs: Sequence[Pair]) -> float:
    """The share of pairs whose chosen completion scores higher than the rejected one; a tie counts as half."""
    rows = _token_rows(classifier, pairs)
    margins = torch.empty(len(pairs))
    for batch in token_batches([2 * max(map(len, pair)) for pair in rows], EVAL_TOKENS):
        chosen, rejected = _scores(classifier, [rows[i] for i in batch])
        margins[batch] = (chosen - rejected).cpu()
    return _share_won(margins)


def _steps(classifier: Classifier, pairs: Sequence[Pair], recipe: Recipe) -> Iterator[dict[str, float]]:
    """Takes the optimizer steps, and yields the metrics of each."""
    model, steps = classifier.model, recipe.steps(len(pairs))
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    rising = max(1.0, recipe.warmup * steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / rising, 1 - step / steps))
    for number, batch in enumerate(_batches(_token_rows(classifier, pairs), recipe), start=1):
        started = time.perf_counter()
        chosen, rejected = _scores(classifier, batch)
        loss = bradley_terry_loss(chosen, rejected)
        optimizer.zero_grad()
        loss.backward()
        if not torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm).isfinite():
            raise RuntimeError(f"step {number}: the gradients are not finite; nothing is saved; a lower --lr may help")
        optimizer.step()
        schedule.step()
        speed = len(batch) / (time.perf_counter() - started)
        yield {"loss": loss.item(), "accuracy": _share_won(chosen - rejected), "pairs_per_s": speed}


TokenRows = tuple[list[int], list[int]]
"""the token ids of a pair: (chosen, rejected)"""


def _token_rows(classifier: Classifier, pairs: Sequence[Pair]) -> list[TokenRows]:
    chosen = classifier.encode([Exchange(pair.prompt, pair.chosen) for pair in pairs])
    rejected = classifier.encode([Exchange(pair.prompt, pair.rejected) for pair in pairs])
    return list(zip(chosen, rejected, strict=True))


def _batches(rows: Sequence[TokenRows], recipe: Recipe) -> Iterator[list[TokenRows]]:
    """Batches of all epochs, each epoch in an order of its own."""
    order = random.Random(recipe.seed)
    for _ in range(recipe.epochs):
        shuffled = order.sample(rows, len(rows))
        yield from (shuffled[start : start + recipe.batch] for start in range(0, len(rows), recipe.batch))


def _scores(classifier: Classifier, rows: Sequence[TokenRows]) -> tuple[Tensor, ...]:
    """Scores of the chosen and of the rejected completions, `[B]` each, from one forward pass."""
    return classifier.scores([row for pair in zip(*rows, strict=True) for row in pair]).chunk(2)


def _share_won(margins: Tensor) -> float:
    """The share of margins `[B]` above 0; a margin of 0 counts as half."""
    return float(((margins > 0).float() + (margins == 0).float() / 2).mean())
