"""Reward models from preferences: Bradley and Terry's model of which of two completions is preferred (1952), fitted to
pairs as in Ouyang et al. 2022 (arXiv 2203.02155), equation 1.

One process, on a GPU if there is one. Left out: conversations of several turns, margins, several GPUs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pydantic
import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlx.config.errors import ConfigError
from rlx.config.sections import DataConfig
from rlx.data import reasoning_gym
from rlx.models import tiny
from rlx.rewards.reward_model import Classifier, load_classifier, token_batches

PAIR_SEED, PAIR_SEEDS = 30_000_000, 1_000_000  # far from the prompts' seeds; how far the pairs of two seeds are apart
NEAR = tuple(off for off in range(-9, 10) if off)  # what a wrong answer is off by
EVAL_TOKENS = 16_384  # in one forward pass without gradient


class Pair(pydantic.BaseModel, frozen=True):
    """Two completions of a prompt, one of them preferred."""

    prompt: str = Field(min_length=1)
    chosen: str
    rejected: str


@dataclass(frozen=True)
class Recipe:
    """How a reward model is trained. The learning rate rises from zero, then falls to zero."""

    epochs: int
    batch: int  # pairs per optimizer step
    learning_rate: float
    seed: int = 0  # of the new layer's weights and the order of pairs
    warmup: float = 0.1  # share of the steps in which the learning rate rises
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def steps(self, pairs: int) -> int:
        """Optimizer steps on so many pairs; the last of an epoch may be smaller."""
        return self.epochs * -(-pairs // self.batch)


Progress = Callable[[int, dict[str, float]], None]
"""called with the steps done and {loss, accuracy, pairs_per_s}; held_out_accuracy before the first and with the last"""


def bradley_terry_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Mean of -log sigmoid(chosen - rejected) over scores `[B]`: how unlikely the preferences are."""
    return -logsigmoid(chosen - rejected).mean()


def read_pairs(path: str) -> list[Pair]:
    """The pairs of a .jsonl file, a {prompt, chosen, rejected} per line; ConfigError names the line."""
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    pairs = [_pair(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not pairs:
        raise ConfigError(f"{path}: there are no pairs in it")
    return pairs


def _pair(line: bytes, where: str) -> Pair:
    try:
        return Pair.model_validate_json(line)
    except pydantic.ValidationError as error:
        wrong = error.errors()[0]
        key = "".join(f"{name}: " for name in wrong["loc"])
        raise ConfigError(f"{where}: {key}{wrong['msg']}; expected prompt, chosen and rejected") from None


def generated_pairs(seed: int, size: int) -> list[Pair]:
    """Pairs from `size` drawn questions of the default task, each question once: its answer, and a number near it."""
    off = random.Random(seed)
    rows = reasoning_gym.generated_questions(DataConfig(), PAIR_SEED + seed * PAIR_SEEDS, size)
    return [
        Pair(prompt=row["question"], chosen=row["answer"], rejected=str(int(row["answer"]) + off.choice(NEAR)))
        for row in rows
    ]


def hold_out_pairs(pairs: Sequence[Pair], count: int) -> tuple[list[Pair], list[Pair]]:
    """(training pairs, the last `count`): whose prompts are held out is not trained on."""
    held_out = list(pairs[-count:])
    prompts = {pair.prompt for pair in held_out}
    training = [pair for pair in pairs if pair.prompt not in prompts]
    if not training:
        raise ConfigError(f"{len(pairs)} pairs are too few to hold {count} out: no other prompt is left")
    return training, held_out


def train(
    base: str,
    folder: Path,
    pairs: Sequence[Pair],
    held_out: Sequence[Pair],
    recipe: Recipe,
    *,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Trains a reward model and puts its Hugging Face folder at `folder`, whole or not at all.

    On CPU the same input always gives the same weights. Returns the accuracy on held-out pairs `before` and `after`,
    and the `seconds` taken.

    Args:
        base: folder or name of the model to start from.

    Raises:
        ConfigError: the folder exists, or the model cannot be used.
        RuntimeError: a gradient is not finite.
    """
    check_new(folder)
    started, report = time.monotonic(), progress or (lambda done, metrics: None)
    with tiny.private_torch_state(recipe.seed), tiny.no_progress_bars():
        classifier = load_classifier(base, new_head=True, trust_remote_code=trust_remote_code, setting="base model")
        classifier.model.to("cuda" if torch.cuda.is_available() else "cpu")
        before = after = accuracy(classifier, held_out)
        report(0, {"held_out_accuracy": before})
        for done, metrics in enumerate(_steps(classifier, pairs, recipe), start=1):
            if done == recipe.steps(len(pairs)):
                metrics["held_out_accuracy"] = after = accuracy(classifier, held_out)
            report(done, metrics)
        with tiny.whole_folder(folder) as unfinished:
            classifier.model.save_pretrained(unfinished)
            classifier.tokenizer.save_pretrained(unfinished)
    return {"before": before, "after": after, "seconds": time.monotonic() - started}


def check_new(folder: Path) -> None:
    """ConfigError if there is something at the place of a reward model to be."""
    if folder.exists():
        raise ConfigError(f"{folder} exists, and a reward model overwrites nothing")


@torch.no_grad()
def accuracy(classifier: Classifier, pairs: Sequence[Pair]) -> float:
    """The share of pairs whose chosen completion scores higher; of a tie, half."""
    rows = _rows(classifier, pairs)
    margins = torch.empty(len(pairs))
    for batch in token_batches([2 * max(map(len, pair)) for pair in rows], EVAL_TOKENS):
        chosen, rejected = _scores(classifier, [rows[i] for i in batch])
        margins[batch] = (chosen - rejected).cpu()
    return _won(margins)


def _steps(classifier: Classifier, pairs: Sequence[Pair], recipe: Recipe) -> Iterator[dict[str, float]]:
    """Takes the optimizer steps, and tells how each went."""
    model, steps = classifier.model, recipe.steps(len(pairs))
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    rising = max(1.0, recipe.warmup * steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / rising, 1 - step / steps))
    for number, batch in enumerate(_batches(_rows(classifier, pairs), recipe), start=1):
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
        yield {"loss": loss.item(), "accuracy": _won(chosen - rejected), "pairs_per_s": speed}


Rows = tuple[list[int], list[int]]  # the token ids of a pair: chosen, rejected


def _rows(classifier: Classifier, pairs: Sequence[Pair]) -> list[Rows]:
    chosen = classifier.rows([(pair.prompt, pair.chosen) for pair in pairs])
    rejected = classifier.rows([(pair.prompt, pair.rejected) for pair in pairs])
    return list(zip(chosen, rejected, strict=True))


def _batches(rows: Sequence[Rows], recipe: Recipe) -> Iterator[list[Rows]]:
    """Epoch after epoch, each in its own order."""
    order = random.Random(recipe.seed)
    for _ in range(recipe.epochs):
        shuffled = order.sample(rows, len(rows))
        yield from (shuffled[start : start + recipe.batch] for start in range(0, len(rows), recipe.batch))


def _scores(classifier: Classifier, rows: Sequence[Rows]) -> tuple[Tensor, ...]:
    """Scores of the chosen and of the rejected, `[B]` each, in one forward pass."""
    return classifier.scores([row for pair in zip(*rows, strict=True) for row in pair]).chunk(2)


def _won(margins: Tensor) -> float:
    return float(((margins > 0).float() + (margins == 0).float() / 2).mean())
