"""A step's completions dealt anew over the replicas, so that none waits for another that has longer ones.

FSDP's collectives hold all ranks together: each micro-batch takes as long as its largest on any replica. Which
completions those are is experience's choice; here they travel.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from rlx.mesh import Mesh
from rlx.types import ScoredCompletion


def balance_over_replicas(batch: Experience, count: int, grid: Mesh) -> Experience:
    """The replica's share of `count` mini-batches that hold the same completions as before, over all replicas, and as
    many on each; a collective call."""
    if grid.dp_size == 1:
        return batch
    shape = torch.tensor([batch.ids.shape[1], batch.mask.shape[1]], device=batch.ids.device)
    own = torch.cat([batch.prompt_lengths + batch.widths, shape])
    everyone = torch.empty(grid.dp_size, len(own), dtype=own.dtype, device=own.device)
    dist.all_gather_into_tensor(everyone.view(-1), own, group=grid.replicas)
    lengths, (length, width) = everyone[:, :-2].cpu(), everyone[:, -2:].amax(0).tolist()
    owners = balance_lengths(lengths, count)
    mine, here = owners[grid.dp_rank], owners == grid.dp_rank
    leaving, coming = mine.bincount(minlength=grid.dp_size).tolist(), here.sum(1).tolist()
    by_owner = mine.argsort(stable=True).to(own.device)

    def exchanged(column: Tensor) -> Tensor:
        received = torch.empty_like(column)
        dist.all_to_all_single(received, column[by_owner], coming, leaving, group=grid.replicas)
        return received

    whole = pad_to(batch, length, width)
    found = Experience(**{name: exchanged(column) for name, column in whole.columns.items()})
    by_minibatch = (here.nonzero()[:, 1] // (len(mine) // count)).argsort(stable=True)
    return replace(found.rows(by_minibatch.to(own.device)), place=torch.arange(len(mine), device=own.device))


def build(judged: Sequence[ScoredCompletion], pad_id: int) -> Experience:
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
        greedy=torch.tensor([one.greedy_score for one in judged], dtype=torch.float32),
        **{name: torch.zeros_like(mask) for name in later},
    )


def concat(parts: Sequence[Experience]) -> Experience:
    """The completions of several experiences, one after the other, padded to the longest."""
    if len(parts) == 1:
        return parts[0]
    length, width = max(part.ids.shape[1] for part in parts), max(part.mask.shape[1] for part in parts)
    alike = [pad_to(part, length, width).columns for part in parts]
    whole = Experience(**{name: torch.cat([columns[name] for columns in alike]) for name in alike[0]})
    return replace(whole, place=torch.arange(len(whole.scores), device=whole.scores.device))


def pad_to(part: Experience, length: int, width: int) -> Experience:
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


def balance_lengths(lengths: Tensor, count: int) -> Tensor:
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


@dataclass(frozen=True)
class Experience:
    """One rank's rollouts as tensors; B completions, prompt and response left-aligned in `ids`.

    `[B, T]` tensors are over response tokens: column t is the t-th token after the prompt. They are zero where
    `mask` is zero. The last six are all zero until the steps of the loop fill them in.
    """

    ids: Tensor  # [B, L] int64, prompt then response then padding
    prompt_lengths: Tensor  # [B] int64
    mask: Tensor  # [B, T] float, 1 on response tokens
    rollout_logprobs: Tensor  # [B, T] as the engine reports them
    place: Tensor  # [B] int64, which of the rank's completions it is
    groups: Tensor  # [B] int64, the same for completions of the same prompt
    scores: Tensor  # [B] reward of the whole completion
    greedy: Tensor  # [B] reward of the prompt's greedy completion, 0 where the estimator asks for none
    logprobs: Tensor  # [B, T] the policy's before the update ("old"), as algorithm.old_logprobs has them
    ref_logprobs: Tensor  # [B, T]
    values: Tensor  # [B, T] the critic's before the update ("old")
    entropy: Tensor  # [B, T] the policy's before the update, in nats, or minus the logprobs, of which it is the mean
    advantages: Tensor  # [B, T]
    returns: Tensor  # [B, T]

    @property
    def columns(self) -> dict[str, Tensor]:
        """All of the above by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
        """What the models score: `ids`, `prompt_lengths`, `mask`, `places`."""
        return self.ids, self.prompt_lengths, self.mask, self.places

    @functools.cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """[N] each, rows and columns of the response tokens; a GPU is waited for, when this is first asked for."""
        rows, columns = self.mask.nonzero(as_tuple=True)
        return rows, columns

    @property
    def widths(self) -> Tensor:
        """[B] the length of each response: to the last 1 of its mask, as zeros may lie between."""
        return self.mask.cumsum(1).argmax(1) + 1

    def rows(self, chosen: slice | Tensor) -> Experience:
        """Some of the completions, cut to the longest among them."""
        cut = {name: column[chosen] for name, column in self.columns.items()}
        widths = self.widths[chosen]
        width, length = int(widths.max()), int((cut["prompt_lengths"] + widths).max())
        grids = {name: part[:, :width] for name, part in cut.items() if part.ndim == 2}
        return replace(self, **(cut | grids | {"ids": cut["ids"][:, :length]}))

    def to(self, device: torch.device) -> Experience:
        return replace(self, **{name: column.to(device) for name, column in self.columns.items()})
