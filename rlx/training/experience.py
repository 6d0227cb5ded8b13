"""Completions as tensors, in three stages, and how they become mini-batches and micro-batches.

Mini-batch m of a step's first pass holds the same completions on any number of ranks, because each replica holds every
n-th prompt of the step, in order; those of later passes follow from seeds and prompts. This module reads no settings.
It leaves out what the models compute (trainer) and the formulas (rlx.algorithms).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from rlx.algorithms.dealing import choose_minibatches, deal
from rlx.mesh import Mesh
from rlx.models.packing import pack_row, same_prompts
from rlx.models.policy import ResponseTokens, Sequences, sequence_lengths
from rlx.types import Completion, ScoredCompletion

AnyBatch = TypeVar("AnyBatch", bound="RolloutBatch")


@dataclass(frozen=True)
class RolloutBatch:
    """One rank's completions as tensors: B completions, prompt and response left-aligned in `ids`.

    `[B, T]` tensors are over response tokens: column t is the t-th token after the prompt. They are zero where `mask`
    is zero.
    """

    ids: Tensor  # [B, L] int64, prompt then response then padding
    prompt_lengths: Tensor  # [B] int64
    mask: Tensor  # [B, T] float, 1 on response tokens
    rollout_logprobs: Tensor  # [B, T] as the engine reports them; nan where it was not asked to
    row: Tensor  # [B] int64, the completion's index on this rank
    groups: Tensor  # [B] int64, equal for completions of the same prompt
    samples: Tensor  # [B] int64, the completion's number among those of its prompt
    scores: Tensor  # [B] reward of the whole completion; 0 before `with_scores`
    greedy_scores: Tensor  # [B] reward of the prompt's greedy completion, 0 where the estimator needs none
    trained: Tensor  # [B] float, 1 if the losses have the completion
    counted: Tensor  # [B] float, 1 if others are compared with it, also where the losses leave it out
    turn_rewards: Tensor | None = field(default=None, kw_only=True)  # [B, T] of turns that end there; episodes have it
    contexts: Tensor | None = field(default=None, kw_only=True)  # [B, T] number of a token's context; episodes have it
    inputs: ResponseTokens | None = field(default=None, kw_only=True)  # for the models; micro-batches have them

    @property
    def columns(self) -> dict[str, Any]:  # Any: mypy takes a dict of tensors for possible `inputs`
        """All tensors by name, `[B]`, `[B, L]` or `[B, T]`."""
        columns = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "inputs"}
        return {name: column for name, column in columns.items() if column is not None}

    @property
    def loss_mask(self) -> Tensor:
        """`[B, T]` float, 1 on the response tokens that the losses have."""
        return self.mask * self.trained[:, None]

    @property
    def positions(self) -> int:
        """How many tokens the models compute for these completions, padding included."""
        if self.inputs is None:
            return self.ids.numel()
        return (self.inputs.ids if self.inputs.packing is None else self.inputs.packing.ids).numel()

    def response_tokens(self, packed: bool = False) -> ResponseTokens:
        """What the models take to score the responses. Waits for a GPU."""
        if self.contexts is not None and self.contexts.any():
            sequences = Sequences.of(self.ids, self.prompt_lengths, self.mask, self.contexts, self.prompt_numbers)
            return sequences.response_tokens(self.mask, packed)
        tokens = ResponseTokens.of(self.ids, self.prompt_lengths, self.mask)
        if not packed:
            return tokens
        row = pack_row(self.ids, self.prompt_lengths, self.response_lengths, self.prompt_numbers, tokens.token_index)
        return tokens._replace(packing=row)

    @property
    def prompt_numbers(self) -> Tensor:
        """`[B]` int64, equal for adjacent rows with the same prompt; in a group, environments may begin differently."""
        if self.contexts is None:
            return self.groups
        return same_prompts(self.ids, self.prompt_lengths, self.groups)

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
        """The batch on another device."""
        inputs = None if self.inputs is None else self.inputs.to(device)
        return replace(self, **{name: column.to(device) for name, column in self.columns.items()}, inputs=inputs)

    def with_scores(self, scored: Sequence[ScoredCompletion]) -> Self:
        """The same completions with their scores, which are in the same order."""
        rows = [(each.score, each.greedy_score) for each in scored]
        scores, greedy_scores = torch.tensor(rows, dtype=torch.float32).T.contiguous().to(self.ids.device)
        return replace(self, scores=scores, greedy_scores=greedy_scores)

    def with_logprobs(self, columns: Mapping[str, Any]) -> LogprobBatch:
        """The completions with `logprobs`, `ref_logprobs`, `values` and `entropy`, `[B, T]` each.

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
        """The completions with advantages and returns, `[B, T]` each."""
        unknown = torch.full_like(advantages, math.nan)
        own = {"advantages": advantages, "returns": returns, "newest_logprobs": unknown, "home": self.row}
        return Experience(**(self.columns | own), chosen=self.mask)


@dataclass(frozen=True)
class Experience(LogprobBatch):
    """Completions with everything that the losses need."""

    advantages: Tensor  # [B, T]
    returns: Tensor  # [B, T] what the values are fitted to
    chosen: Tensor  # [B, T] float, 1 on the tokens that may be in the policy loss: all, or those that were chosen
    newest_logprobs: Tensor  # [B, T] of the policy in the update's newest pass over each completion; nan before one
    home: Tensor  # [B] int64, the completion's index among those of all replicas, before they were dealt


# --- building and joining


def build_batch(completions: Sequence[Completion], pad_id: int, mask_truncated: bool = False) -> RolloutBatch:
    """One rank's completions as `[B, L]` token ids and `[B, T]` response tensors, on the CPU, without scores.

    Args:
        mask_truncated: the losses leave out completions that were cut.
    """
    turns: dict[str, Any] = _turn_columns(completions) if completions[0].episode else {}
    return RolloutBatch(
        ids=_padded([c.prompt.token_ids + c.token_ids for c in completions], pad_id),
        prompt_lengths=torch.tensor([len(c.prompt.token_ids) for c in completions]),
        mask=_padded([_drawn_mask(c) for c in completions], 0.0),
        rollout_logprobs=_padded([_reported_logprobs(c) for c in completions], 0.0),
        row=torch.arange(len(completions)),
        groups=torch.tensor([c.prompt.id for c in completions]),
        samples=torch.tensor([c.sample for c in completions]),
        scores=torch.zeros(len(completions)),
        greedy_scores=torch.zeros(len(completions)),
        trained=torch.tensor([float(not c.has_failed and (c.finished or not mask_truncated)) for c in completions]),
        counted=torch.tensor([float(not c.has_failed) for c in completions]),
        **turns,
    )


def _drawn_mask(completion: Completion) -> np.ndarray:
    if completion.episode is None:
        return np.ones(len(completion.token_ids), np.float32)
    return np.array(completion.drawn, np.float32)


def _reported_logprobs(completion: Completion) -> Sequence[float]:
    return completion.logprobs or [math.nan if drawn else 0.0 for drawn in completion.drawn]


def _turn_columns(completions: Sequence[Completion]) -> dict[str, Tensor]:
    """What batches of episodes have beside: rewards where turns end, and the contexts of tokens, `[B, T]` each."""
    rewards, contexts = zip(*(each.by_turn for each in completions), strict=True)
    return {"turn_rewards": _padded(rewards, 0.0), "contexts": _padded(contexts, 0)}


def concat(parts: Sequence[AnyBatch]) -> AnyBatch:
    """The completions of several batches, one after the other, padded to the longest."""
    if len(parts) == 1:
        return parts[0]
    length = max(part.ids.shape[1] for part in parts)
    width = max(part.mask.shape[1] for part in parts)
    padded = [pad_to(part, length, width).columns for part in parts]
    columns: dict[str, Any] = {name: torch.cat([part[name] for part in padded]) for name in padded[0]}
    columns["row"] = torch.arange(len(columns["scores"]), device=columns["scores"].device)
    return replace(parts[0], **columns)


def pad_to(batch: AnyBatch, length: int, width: int) -> AnyBatch:
    """The batch with `ids` padded to `[B, length]` and the other grids to `[B, width]`."""

    def padded(name: str, grid: Tensor) -> Tensor:
        return pad(grid, (0, (length if name == "ids" else width) - grid.shape[1])) if grid.ndim == 2 else grid

    columns: dict[str, Any] = {name: padded(name, column) for name, column in batch.columns.items()}
    return replace(batch, **columns)


def _padded(rows: Sequence[Sequence[float] | np.ndarray], value: float) -> Tensor:
    """`[B, longest]` int64 or float32, as `value` is. Numpy reads Python's numbers in a fifth of the time of torch."""
    dtype = np.float32 if isinstance(value, float) else np.int64
    grid = np.full((len(rows), max(map(len, rows))), value, dtype)
    for line, row in zip(grid, rows, strict=True):
        line[: len(row)] = row
    return torch.from_numpy(grid)


# --- mini-batches and micro-batches


def minibatches(batch: AnyBatch, count: int) -> list[AnyBatch]:
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


def micro_batches(batch: AnyBatch, count: int, packed: bool = False) -> list[AnyBatch]:
    """`count` micro-batches; with `packed` of completions in their order, so that those of a group share their prompt.

    Without `packed`, completions are sorted by length, the longest first, and each part is cut to its longest one.
    Every rank makes `count`. The largest is as small as possible, so all are nearly equal, on one rank and over ranks.

    Raises:
        ValueError: there are fewer completions than micro-batches.
    """
    rows = _Rows.of(batch, packed)
    if len(rows.lengths) < count:
        raise ValueError(f"{len(rows.lengths)} completions do not fill {count} micro-batches")
    budgets = range(sum(rows.contexts) * max(rows.lengths))
    least = bisect.bisect_left(budgets, True, key=lambda budget: len(rows.cut(budget)) <= count)
    index = torch.tensor(rows.order, device=batch.ids.device)
    parts = [batch.rows(index[part]) for part in rows.cut(least, count)]
    return [replace(part, inputs=part.response_tokens(packed)) for part in parts]


@dataclass(frozen=True)
class _Rows:
    """The completions of a batch in the order in which they are cut into micro-batches."""

    order: list[int]
    lengths: list[int]  # tokens of each, its prompt included; of its longest context where they are padded
    saved: list[int] | None  # tokens that each shares with the one before it; None: padded to the longest
    contexts: list[int]  # sequences that each has

    @classmethod
    def of(cls, batch: RolloutBatch, packed: bool) -> _Rows:
        lengths, contexts = (batch.prompt_lengths + batch.response_lengths).tolist(), [1] * len(batch.scores)
        if not packed:
            if batch.contexts is not None:
                each = sequence_lengths(batch.prompt_lengths, batch.mask, batch.contexts)
                lengths, contexts = each.amax(1).tolist(), (each > 0).sum(1).tolist()
            order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
            return cls(order, [lengths[i] for i in order], None, [contexts[i] for i in order])
        groups, prompts = batch.prompt_numbers.tolist(), batch.prompt_lengths.tolist()
        saved = [prompts[i] * (i > 0 and groups[i] == groups[i - 1]) for i in range(len(lengths))]
        return cls(list(range(len(lengths))), lengths, saved, contexts)

    def cut(self, budget: int, count: int = 1) -> list[slice]:
        """The slices that the budget allows, as few as possible, but at least `count`."""
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
            sequences = itertools.accumulate(self.contexts[start:])
            return sum(1 for _ in itertools.takewhile((budget // self.lengths[start]).__ge__, sequences))
        stop, tokens = start, 0
        while stop < len(self.lengths):
            tokens += self.lengths[stop] - (self.saved[stop] if stop > start else 0)
            if tokens > budget:
                break
            stop += 1
        return stop - start


# --- over replicas


def deal_minibatches(
    batch: AnyBatch, count: int, mesh: Mesh, seeds: Sequence[int] | None = None, packed: bool = False
) -> AnyBatch:
    """Exchanges completions so that `minibatches` gives those of a pass, dealt over replicas; a collective call.

    Ranks wait for one another in FSDP's collectives: each micro-batch takes as long as the largest one on any replica.
    So each replica gets equally many completions of each mini-batch, with as much to compute.

    Args:
        count: of mini-batches.
        seeds: see `choose_minibatches`.
        packed: completions of a group on the same replica share their prompt.
    """
    if mesh.dp_size == 1 and seeds is None:
        return batch
    if mesh.dp_size == 1:
        return _in_order(batch, choose_minibatches(batch.groups.cpu()[None], count, seeds)[0].argsort(stable=True))
    prompts, responses, groups, length, width = _gather(batch, mesh)
    chosen = choose_minibatches(groups, count, seeds)
    # In episodes prompts may differ within a group, and contexts are read again: nothing is known to be shared.
    owners = deal(prompts, responses, groups, chosen, packed and batch.contexts is None)
    outgoing, incoming = owners[mesh.dp_rank], owners == mesh.dp_rank
    dealt = _exchanged(pad_to(batch, length, width), outgoing, incoming.sum(1), mesh)
    order = torch.arange(len(dealt.row))
    if packed:  # those of a group are adjacent again, wherever they come from: only adjacent rows share a prompt
        order = groups[incoming].argsort(stable=True)
    return _in_order(dealt, order[chosen[incoming][order].argsort(stable=True)])


def return_to_owners(batch: Experience, mesh: Mesh) -> Experience:
    """Each replica's own completions in the order in which it made them, wherever they are; a collective call."""
    if mesh.dp_size > 1:
        _, _, groups, length, width = _gather(batch, mesh)
        homes = batch.home.new_empty(groups.numel())
        dist.all_gather_into_tensor(homes, batch.home, group=mesh.replicas)
        owners = homes.cpu().view_as(groups) // groups.shape[1]
        arriving = (owners == mesh.dp_rank).sum(1)
        batch = _exchanged(pad_to(batch, length, width), owners[mesh.dp_rank], arriving, mesh)
    return _in_order(batch, batch.home.argsort())


def _exchanged(batch: AnyBatch, owners: Tensor, arriving: Tensor, mesh: Mesh) -> AnyBatch:
    """The completions that arrive, those of the first replica first; a collective call.

    Args:
        batch: of the same widths on every replica.
        owners: `[B]` the replica that gets each of them.
        arriving: `[R]` how many each replica has for this one.
    """
    sent, received = owners.bincount(minlength=mesh.dp_size).tolist(), arriving.tolist()
    by_owner = owners.argsort(stable=True).to(batch.ids.device)

    def exchanged(column: Tensor) -> Tensor:
        result = torch.empty_like(column)
        dist.all_to_all_single(result, column[by_owner], received, sent, group=mesh.replicas)
        return result

    columns: dict[str, Any] = {name: exchanged(column) for name, column in batch.columns.items()}
    return replace(batch, **columns)


def _in_order(batch: AnyBatch, order: Tensor) -> AnyBatch:
    """All completions in another order, `[B]`; from now on it is theirs."""
    index = order.to(batch.ids.device)
    return replace(batch.rows(index), row=torch.arange(len(index), device=index.device))


def _gather(batch: RolloutBatch, mesh: Mesh) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """Every replica's lengths of prompts and responses, and groups, `[R, B]` on the CPU; and the largest L and T."""
    shape = torch.tensor([batch.ids.shape[1], batch.mask.shape[1]], device=batch.ids.device)
    own = torch.cat([batch.prompt_lengths, batch.response_lengths, batch.groups, shape])
    gathered = torch.empty(mesh.dp_size, len(own), dtype=own.dtype, device=own.device)
    dist.all_gather_into_tensor(gathered.view(-1), own, group=mesh.replicas)
    length, width = gathered[:, -2:].amax(0).tolist()
    prompts, responses, groups = gathered[:, :-2].cpu().chunk(3, dim=1)
    return prompts, responses, groups, length, width
