"""Scored completions as tensors, in three stages, and how they become mini-batches and micro-batches.

Mini-batch m of a step holds the same completions on any number of ranks, because each replica holds every n-th prompt
of the step, in order. This module reads no settings. It leaves out what the models compute (trainer) and the formulas
(rlx.algorithms).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from rlx.mesh import Mesh
from rlx.models.packing import pack_row
from rlx.models.policy import ResponseTokens
from rlx.types import Completion, ScoredCompletion

B = TypeVar("B", bound="RolloutBatch")


@dataclass(frozen=True)
class RolloutBatch:
    """One rank's scored completions as tensors: B completions, prompt and response left-aligned in `ids`.

    `[B, T]` tensors are over response tokens: column t is the t-th token after the prompt. They are zero where `mask`
    is zero.
    """

    ids: Tensor  # [B, L] int64, prompt then response then padding
    prompt_lengths: Tensor  # [B] int64
    mask: Tensor  # [B, T] float, 1 on response tokens
    rollout_logprobs: Tensor  # [B, T] as the engine reports them; nan where it was not asked to
    row: Tensor  # [B] int64, the completion's index on this rank
    groups: Tensor  # [B] int64, equal for completions of the same prompt
    scores: Tensor  # [B] reward of the whole completion
    greedy_scores: Tensor  # [B] reward of the prompt's greedy completion, 0 where the estimator needs none
    inputs: ResponseTokens | None = field(default=None, kw_only=True)  # for the models; micro-batches have them

    @property
    def columns(self) -> dict[str, Any]:  # Any: mypy takes a dict of tensors for possible `inputs`
        """All tensors by name, `[B]`, `[B, L]` or `[B, T]`."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "inputs"}

    @property
    def positions(self) -> int:
        """How many tokens the models compute for these completions, padding included."""
        row = self.inputs.packing if self.inputs else None
        return (self.ids if row is None else row.ids).numel()

    def response_tokens(self, packed: bool = False) -> ResponseTokens:
        """What the models take to score the responses. Waits for the GPU."""
        tokens = ResponseTokens.of(self.ids, self.prompt_lengths, self.mask)
        if not packed:
            return tokens
        row = pack_row(self.ids, self.prompt_lengths, self.response_lengths, self.groups, tokens.token_index)
        return tokens._replace(packing=row)

    @property
    def response_lengths(self) -> Tensor:
        """`[B]` length of each response, up to the last 1 of its mask; zeros may lie between."""
        return self.mask.cumsum(1).argmax(1) + 1

    def rows(self, chosen: slice | Tensor) -> Self:
        """Some of the completions, `chosen` of the B, cut to the longest among them."""
        selected = {name: column[chosen] for name, column in self.columns.items()}
        response_lengths = self.response_lengths[chosen]
        width = int(response_lengths.max())
        length = int((selected["prompt_lengths"] + response_lengths).max())
        grids = {name: column[:, :width] for name, column in selected.items() if column.ndim == 2}
        return replace(self, **(selected | grids | {"ids": selected["ids"][:, :length]}), inputs=None)

    def to(self, device: torch.device) -> Self:
        """The same on another device."""
        return replace(self, **{name: column.to(device) for name, column in self.columns.items()})

    def with_logprobs(self, columns: Mapping[str, Any]) -> LogprobBatch:
        """The same completions with `logprobs`, `ref_logprobs`, `values` and `entropy`, `[B, T]` each.

        Columns that were computed before are left out.
        """
        completions = {each.name: getattr(self, each.name) for each in fields(RolloutBatch)}
        return LogprobBatch(**completions, **columns)


@dataclass(frozen=True)
class LogprobBatch(RolloutBatch):
    """Completions with the outputs of the models before the update.

    With a deferred first mini-batch (see `Trainer.defers_logprobs`) the rows of that mini-batch are zero until `update`
    gives back a batch that has them.
    """

    logprobs: Tensor  # [B, T] of the old policy, as algorithm.old_logprobs defines it
    ref_logprobs: Tensor  # [B, T] of the reference; the policy's own without a reference
    values: Tensor  # [B, T] of the critic; 0 without a critic
    entropy: Tensor  # [B, T] of the old policy, in nats; or -logprobs, a one-sample estimate of it

    def with_advantages(self, advantages: Tensor, returns: Tensor) -> Experience:
        """The same with advantages and returns, `[B, T]` each."""
        return Experience(**self.columns, advantages=advantages, returns=returns)


@dataclass(frozen=True)
class Experience(LogprobBatch):
    """Completions with everything that the losses need."""

    advantages: Tensor  # [B, T]
    returns: Tensor  # [B, T] what the values are fitted to


# --- building and joining


def build_batch(scored: Sequence[ScoredCompletion], pad_id: int) -> RolloutBatch:
    """One rank's completions as `[B, L]` token ids and `[B, T]` response tensors, on the CPU."""
    completions = [each.completion for each in scored]
    ids = [torch.tensor(c.prompt.token_ids + c.token_ids) for c in completions]
    return RolloutBatch(
        ids=_padded(ids, pad_id),
        prompt_lengths=torch.tensor([len(c.prompt.token_ids) for c in completions]),
        mask=_padded([torch.ones(len(c.token_ids)) for c in completions], 0.0),
        rollout_logprobs=_padded([_reported_logprobs(c) for c in completions], 0.0),
        row=torch.arange(len(completions)),
        groups=torch.tensor([c.prompt.id for c in completions]),
        scores=torch.tensor([each.score for each in scored], dtype=torch.float32),
        greedy_scores=torch.tensor([each.greedy_score for each in scored], dtype=torch.float32),
    )


def _reported_logprobs(completion: Completion) -> Tensor:
    return torch.tensor(completion.logprobs or (math.nan,) * len(completion.token_ids))


def concat(parts: Sequence[B]) -> B:
    """The completions of several batches, one after the other, padded to the longest."""
    if len(parts) == 1:
        return parts[0]
    length = max(part.ids.shape[1] for part in parts)
    width = max(part.mask.shape[1] for part in parts)
    padded = [pad_to(part, length, width).columns for part in parts]
    columns: dict[str, Any] = {name: torch.cat([part[name] for part in padded]) for name in padded[0]}
    columns["row"] = torch.arange(len(columns["scores"]), device=columns["scores"].device)
    return replace(parts[0], **columns)


def pad_to(batch: B, length: int, width: int) -> B:
    """The same with `ids` padded to `[B, length]` and the other grids to `[B, width]`."""

    def padded(name: str, grid: Tensor) -> Tensor:
        return pad(grid, (0, (length if name == "ids" else width) - grid.shape[1])) if grid.ndim == 2 else grid

    columns: dict[str, Any] = {name: padded(name, column) for name, column in batch.columns.items()}
    return replace(batch, **columns)


def _padded(rows: Sequence[Tensor], value: float) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)


# --- mini-batches and micro-batches


def minibatches(batch: B, count: int) -> list[B]:
    """A rank's completions in `count` equal parts, in order; one optimizer step each.

    Raises:
        ValueError: the completions do not divide evenly.
    """
    rows = len(batch.scores)
    if rows % count:
        raise ValueError(f"{rows} completions do not make {count} equal mini-batches")
    return [batch.rows(slice(i, i + rows // count)) for i in range(0, rows, rows // count)]


def micro_batch_count(batch: RolloutBatch, token_budget: int, packed: bool = False) -> int:
    """The least number of micro-batches of at most `token_budget` tokens, padding included; see `micro_batches`.

    A completion that is longer than the budget is a micro-batch of its own.
    """
    return len(_Rows.of(batch, packed).cut(token_budget))


def micro_batches(batch: B, count: int, packed: bool = False) -> list[B]:
    """`count` micro-batches; with `packed` of completions in their order, so that those of a group share their prompt.

    Without, of completions of similar length, the longest first, each cut to its longest completion. Every rank makes
    `count` of them. The largest is as small as possible, so micro-batches are nearly equal, on one rank and over ranks.

    Raises:
        ValueError: there are fewer completions than micro-batches.
    """
    rows = _Rows.of(batch, packed)
    if len(rows.lengths) < count:
        raise ValueError(f"{len(rows.lengths)} completions do not fill {count} micro-batches")
    budgets = range(len(rows.lengths) * max(rows.lengths))
    least = bisect.bisect_left(budgets, True, key=lambda budget: len(rows.cut(budget)) <= count)
    index = torch.tensor(rows.order, device=batch.ids.device)
    parts = [batch.rows(index[part]) for part in rows.cut(least, count)]
    # Computed now, while nothing is queued on the GPU.
    return [replace(part, inputs=part.response_tokens(packed)) for part in parts]


@dataclass(frozen=True)
class _Rows:
    """The completions of a batch in the order in which they are cut into micro-batches."""

    order: list[int]
    lengths: list[int]  # tokens of each, its prompt included
    saved: list[int] | None  # tokens that each shares with the one before it; None: padded to the longest

    @classmethod
    def of(cls, batch: RolloutBatch, packed: bool) -> _Rows:
        lengths = (batch.prompt_lengths + batch.response_lengths).tolist()
        if not packed:
            order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
            return cls(order, [lengths[i] for i in order], None)
        groups, prompts = batch.groups.tolist(), batch.prompt_lengths.tolist()
        saved = [prompts[i] * (i > 0 and groups[i] == groups[i - 1]) for i in range(len(lengths))]
        return cls(list(range(len(lengths))), lengths, saved)

    def cut(self, budget: int, count: int = 1) -> list[slice]:
        """As few slices as the budget allows, but at least `count`."""
        slices: list[slice] = []
        start = 0
        while start < len(self.lengths):
            left = len(self.lengths) - start - max(0, count - len(slices) - 1)  # each later slice gets at least one
            stop = start + max(1, min(self._fitting(start, budget), left))
            slices.append(slice(start, stop))
            start = stop
        return slices

    def _fitting(self, start: int, budget: int) -> int:
        """How many completions from `start` on fit into the budget."""
        if self.saved is None:
            return budget // self.lengths[start]
        stop, tokens = start, 0
        while stop < len(self.lengths):
            tokens += self.lengths[stop] - (self.saved[stop] if stop > start else 0)
            if tokens > budget:
                break
            stop += 1
        return stop - start


# --- over replicas


def balance_lengths(lengths: Tensor, count: int) -> Tensor:
    """The replica that trains on each completion: `[R, B]` from the lengths `[R, B]` that each replica holds.

    Completions stay in their mini-batch (there are `count`). In each mini-batch they are assigned in order of length,
    longest first, back and forth: to replicas 0, 1, 1, 0, 0, 1, ... of two. So all replicas get the same number of
    completions, of similar lengths.
    """
    replicas, rows = lengths.shape
    by_minibatch = lengths.view(replicas, count, -1).transpose(0, 1).reshape(count, -1)
    order = by_minibatch.argsort(dim=1, descending=True, stable=True)
    turn = torch.arange(order.shape[1]) % (2 * replicas)
    owners = torch.empty_like(order).scatter_(1, order, turn.minimum(2 * replicas - 1 - turn).expand_as(order))
    return owners.view(count, replicas, -1).transpose(0, 1).reshape(replicas, rows)


def balance_over_replicas(batch: B, count: int, mesh: Mesh) -> B:
    """Exchanges completions so that no replica waits for another that has longer ones; a collective call.

    Ranks wait for one another in FSDP's collectives: each micro-batch takes as long as the largest one on any replica.
    The `count` mini-batches hold the same completions as before, over all replicas, and equally many on each.
    """
    if mesh.dp_size == 1:
        return batch
    lengths, length, width = _gather_lengths(batch, mesh)
    owners = balance_lengths(lengths, count)
    outgoing, incoming = owners[mesh.dp_rank], owners == mesh.dp_rank
    sent, received = outgoing.bincount(minlength=mesh.dp_size).tolist(), incoming.sum(1).tolist()
    by_owner = outgoing.argsort(stable=True).to(batch.ids.device)

    def exchanged(column: Tensor) -> Tensor:
        result = torch.empty_like(column)
        dist.all_to_all_single(result, column[by_owner], received, sent, group=mesh.replicas)
        return result

    columns: dict[str, Any] = {name: exchanged(column) for name, column in pad_to(batch, length, width).columns.items()}
    by_minibatch = (incoming.nonzero()[:, 1] // (len(outgoing) // count)).argsort(stable=True).to(batch.ids.device)
    balanced = replace(batch, **columns).rows(by_minibatch)
    return replace(balanced, row=torch.arange(len(outgoing), device=batch.ids.device))


def _gather_lengths(batch: RolloutBatch, mesh: Mesh) -> tuple[Tensor, int, int]:
    """Every replica's completion lengths `[R, B]`, and the largest L and T of all."""
    shape = torch.tensor([batch.ids.shape[1], batch.mask.shape[1]], device=batch.ids.device)
    own = torch.cat([batch.prompt_lengths + batch.response_lengths, shape])
    gathered = torch.empty(mesh.dp_size, len(own), dtype=own.dtype, device=own.device)
    dist.all_gather_into_tensor(gathered.view(-1), own, group=mesh.replicas)
    length, width = gathered[:, -2:].amax(0).tolist()
    return gathered[:, :-2].cpu(), length, width
