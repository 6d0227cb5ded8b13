"""Scored completions are chosen, become padded tensors, and those become mini-batches and micro-batches.

Mini-batch m of a step holds the same completions on any number of ranks, because each rank holds every ranks-th prompt
of the step, in order. No config and no communication here.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlx.types import Experience, Judged


class Selection:
    """The completions that a step trains on: group by group, those of each prompt together.

    Left out, if asked for, are groups whose scores are all equal: their advantages would all be 0. Source: dynamic
    sampling of Yu et al. 2025, DAPO (arXiv 2503.14476) eq. 11.
    """

    def __init__(self, wanted: int, samples: int, filtered: bool, greedy: bool, at_once: bool = False) -> None:
        """`wanted` groups of `samples` completions, on this rank; `greedy`: each comes with a further one at its end,
        the prompt's greedy completion, whose score is kept with the others; `at_once`: groups are not waited for."""
        self.wanted, self.samples, self.filtered, self.greedy, self.at_once = wanted, samples, filtered, greedy, at_once
        self.drawn: list[Judged] = []  # all there were to choose from
        self.tokens = 0  # that were generated for them
        self.varied = 0  # groups whose scores differ
        self.rounds = 0
        self._kept: list[list[Judged]] = []
        self._left_out: list[list[Judged]] = []
        self._taken = 0  # groups

    def add(self, judged: Sequence[Judged]) -> None:
        """Takes in whole groups, of a round or of a part of one."""
        size = self.samples + self.greedy
        for start in range(0, len(judged), size):
            group = list(judged[start : start + self.samples])
            if self.greedy:
                group = [replace(one, greedy=judged[start + self.samples].score) for one in group]
            varied = len({one.score for one in group}) > 1
            (self._left_out if self.filtered and not varied else self._kept).append(group)
            self.drawn += group
            self.varied += varied
        self.tokens += sum(len(one.completion.token_ids) for one in judged)

    @property
    def missing(self) -> int:
        """How many more groups are wanted."""
        return max(0, self.wanted - len(self._kept))

    def take(self, last: bool = False) -> list[Judged]:
        """Completions to train on that were not taken before.

        Unless they are wanted at once there are none before the `last` call: only then it is known which groups are
        left out. If there are too few, it fills up with some that were left out.
        """
        if not (self.at_once or last):
            return []
        groups = (self._kept + self._left_out)[self._taken : self.wanted]
        self._taken += len(groups)
        return [one for group in groups for one in group]


def build(judged: Sequence[Judged], pad_id: int) -> Experience:
    """One rank's completions as `[B, L]` token ids and `[B, T]` response tensors, on the CPU."""
    completions = [one.completion for one in judged]
    ids = [torch.tensor(c.prompt.token_ids + c.token_ids) for c in completions]
    ones = [torch.ones(len(c.token_ids)) for c in completions]
    mask = _padded(ones, 0.0)
    later = ("logprobs", "ref_logprobs", "values", "entropy", "advantages", "returns")
    return Experience(
        ids=_padded(ids, pad_id),
        prompt_lengths=torch.tensor([len(c.prompt.token_ids) for c in completions]),
        mask=mask,
        rollout_logprobs=_padded([torch.tensor(c.logprobs) for c in completions], 0.0),
        place=torch.arange(len(completions)),
        groups=torch.tensor([c.prompt.id for c in completions]),
        scores=torch.tensor([one.score for one in judged], dtype=torch.float32),
        greedy=torch.tensor([one.greedy for one in judged], dtype=torch.float32),
        **{name: torch.zeros_like(mask) for name in later},
    )


def joined(parts: Sequence[Experience]) -> Experience:
    """The completions of several experiences, one after the other, padded to the longest."""
    if len(parts) == 1:
        return parts[0]
    length, width = max(part.ids.shape[1] for part in parts), max(part.mask.shape[1] for part in parts)
    alike = [widened(part, length, width).columns for part in parts]
    whole = Experience(**{name: torch.cat([columns[name] for columns in alike]) for name in alike[0]})
    return replace(whole, place=torch.arange(len(whole.scores), device=whole.scores.device))


def widened(part: Experience, length: int, width: int) -> Experience:
    """The same with `ids` padded to `[B, length]` and the rest to `[B, width]`."""

    def column(name: str, grid: Tensor) -> Tensor:
        return pad(grid, (0, (length if name == "ids" else width) - grid.shape[1])) if grid.ndim == 2 else grid

    return Experience(**{name: column(name, grid) for name, grid in part.columns.items()})


def minibatches(experience: Experience, count: int) -> list[Experience]:
    """`count` equal runs of a rank's completions; one optimizer step each.

    Raises:
        ValueError: they cannot be equal.
    """
    rows = len(experience.scores)
    if rows % count:
        raise ValueError(f"{rows} completions do not make {count} equal mini-batches")
    return [experience.rows(slice(i, i + rows // count)) for i in range(0, rows, rows // count)]


def dealt(lengths: Tensor, count: int) -> Tensor:
    """Which replica is to train on each completion, `[R, B]` from the lengths `[R, B]` of those that each has.

    Those of each of `count` mini-batches are dealt by themselves, the longest first, to and fro: to replicas 0, 1, 1,
    0, 0, 1, ... of two. So all get as many, of like lengths, and their micro-batches can be alike.
    """
    replicas, rows = lengths.shape
    together = lengths.view(replicas, count, -1).transpose(0, 1).reshape(count, -1)
    order = together.argsort(dim=1, descending=True, stable=True)
    turn = torch.arange(order.shape[1]) % (2 * replicas)
    owners = torch.empty_like(order).scatter_(1, order, turn.minimum(2 * replicas - 1 - turn).expand_as(order))
    return owners.view(count, replicas, -1).transpose(0, 1).reshape(replicas, rows)


def micro_batch_count(experience: Experience, token_budget: int) -> int:
    """The least number of micro-batches of at most `token_budget` tokens, padding included.

    A completion that is longer than the budget is a micro-batch of its own.
    """
    return len(_packed(sorted(_lengths(experience), reverse=True), token_budget))


def micro_batches(experience: Experience, count: int) -> list[Experience]:
    """`count` micro-batches of completions of like length, the longest first, each cut to its longest; every rank makes
    as many. The largest is as small as can be: they are nearly equal, and so are those of different ranks.

    Raises:
        ValueError: there are fewer completions.
    """
    lengths = _lengths(experience)
    if len(lengths) < count:
        raise ValueError(f"{len(lengths)} completions do not fill {count} micro-batches")
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    longest_first = [lengths[i] for i in order]
    budgets = range(len(lengths) * longest_first[0])
    least = bisect.bisect_left(budgets, True, key=lambda budget: len(_packed(longest_first, budget)) <= count)
    index = torch.tensor(order, device=experience.ids.device)
    return [experience.rows(index[part]) for part in _packed(longest_first, least, count)]


def _lengths(experience: Experience) -> list[int]:
    return list((experience.prompt_lengths + experience.widths).tolist())


def _packed(lengths: Sequence[int], budget: int, count: int = 1) -> list[slice]:
    """Runs of descending lengths, as few as can be within the budget, padding included, but at least `count`."""
    runs: list[slice] = []
    start = 0
    while start < len(lengths):
        left = len(lengths) - start - max(0, count - len(runs) - 1)  # each run to come gets one at least
        stop = start + max(1, min(budget // lengths[start], left))
        runs.append(slice(start, stop))
        start = stop
    return runs


def _padded(rows: Sequence[Tensor], value: float) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)
