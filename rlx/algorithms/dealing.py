"""Which completions an optimizer step has, and which replica trains on each, from their groups and lengths; and what
seeds draw for their tokens.

Left out: the exchange between ranks (rlx.training.experience).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def choose_minibatches(groups: Tensor, count: int, seeds: Sequence[int] | None) -> Tensor:
    """The mini-batch of each completion, `[R, B]`, from the groups `[R, B]` that each replica holds.

    Args:
        seeds: of a random choice, which depends on nothing but them and the numbers of the groups, so it is the same on
            any number of replicas. The completions of a group stay together. None: each replica's are cut in order.
    """
    if seeds is None:
        rows = groups.shape[1]
        return (torch.arange(rows) // (rows // count)).expand_as(groups)
    names, index = groups.unique(return_inverse=True)
    place = torch.from_numpy(np.random.default_rng(seeds).permutation(len(names)))
    order = place[index].flatten().argsort(stable=True)
    chosen = torch.empty_like(order)
    chosen[order] = torch.arange(len(order)) // (len(order) // count)
    return chosen.view_as(groups)


def deal(prompts: Tensor, responses: Tensor, groups: Tensor, chosen: Tensor, shares_prompts: bool) -> Tensor:
    """The replica that trains on each completion, `[R, B]`; all tensors are `[R, B]` of what each replica holds.

    Args:
        prompts, responses: lengths.
        groups: equal for completions of the same prompt.
        chosen: mini-batches, which are equally large; completions stay in theirs.
        shares_prompts: a replica computes the prompt of a group once. Then groups stay together where the busiest
            replica has less to do so than with single completions of similar lengths.
    """
    single = balance_lengths(prompts + responses, chosen)
    if not shares_prompts:
        return single
    _, index = groups.unique(return_inverse=True)
    whole = balance_groups(responses, index, chosen)
    if whole is None:
        return single
    loads = [_busiest(prompts, responses, index, chosen, owners) for owners in (whole, single)]
    return whole if loads[0] <= loads[1] else single


def balance_lengths(lengths: Tensor, chosen: Tensor) -> Tensor:
    """The replica of each completion, `[R, B]`, from the lengths `[R, B]`: as many for each, of similar lengths.

    Completions stay in their mini-batch, `chosen` `[R, B]`.
    """
    return _to_and_fro(lengths.flatten(), chosen.flatten(), len(lengths)).view_as(lengths)


def balance_groups(responses: Tensor, groups: Tensor, chosen: Tensor) -> Tensor | None:
    """The replica of each completion, `[R, B]`, where groups, numbered from 0 in `groups` `[R, B]`, stay whole.

    They are dealt by the sum of their `responses` `[R, B]`. None: they cannot be dealt so that each replica has as many
    completions of each mini-batch.
    """
    names, index = (chosen * (groups.max() + 1) + groups).unique(return_inverse=True)
    minibatch = names // (groups.max() + 1)
    of_minibatch, sizes = minibatch.bincount(), index.flatten().bincount()
    if (of_minibatch % len(groups)).any() or (sizes != sizes[0]).any():
        return None
    totals = torch.zeros_like(names).index_add_(0, index.flatten(), responses.flatten())
    return _to_and_fro(totals, minibatch, len(groups))[index]


def _to_and_fro(sizes: Tensor, chosen: Tensor, replicas: int) -> Tensor:
    """The replica of each of N things, `[N]`, from their sizes and mini-batches, `[N]`; mini-batches have as many each.

    In each mini-batch they are assigned in order of size, largest first, back and forth: to replicas 0, 1, 1, 0, 0, 1,
    ... of two. So all replicas get the same number of things, of similar sizes.
    """
    order = sizes.argsort(descending=True, stable=True)
    order = order[chosen[order].argsort(stable=True)]
    turn = torch.arange(len(order)) % (len(order) // (int(chosen.max()) + 1)) % (2 * replicas)
    owners = torch.empty_like(order)
    owners[order] = turn.minimum(2 * replicas - 1 - turn)
    return owners


def _busiest(prompts: Tensor, responses: Tensor, groups: Tensor, chosen: Tensor, owners: Tensor) -> int:
    """The tokens of the busiest replica of each mini-batch, summed, if each computes the prompt of a group once."""
    replicas, part = len(groups), (chosen * len(groups) + owners).flatten()
    tokens = torch.zeros(replicas * (int(chosen.max()) + 1), dtype=responses.dtype)
    tokens.index_add_(0, part, responses.flatten())
    shared, index = (part * (groups.max() + 1) + groups.flatten()).unique(return_inverse=True)
    once = torch.zeros_like(shared).scatter_(0, index, prompts.flatten())  # of one completion, they are all alike
    tokens.index_add_(0, shared // (groups.max() + 1), once)
    return int(tokens.view(-1, replicas).amax(1).sum())


def token_draws(groups: Tensor, samples: Tensor, width: int, seeds: Sequence[int]) -> Tensor:
    """A random number in [0, 1) for each token, `[B, width]`; it depends on seeds, group, sample and position alone.

    Args:
        groups: `[B]` of each completion.
        samples: `[B]` the completion's number in its group.
    """
    completions = zip(groups.tolist(), samples.tolist(), strict=True)
    rows = [np.random.default_rng((*seeds, *each)).random(width, dtype=np.float32) for each in completions]
    return torch.from_numpy(np.stack(rows)).to(groups.device)
