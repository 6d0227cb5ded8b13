"""Which completions an optimizer step has, and which replica trains on each, from their groups and lengths.

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


def balance_lengths(lengths: Tensor, chosen: Tensor) -> Tensor:
    """The replica that trains on each completion, `[R, B]`, from the lengths `[R, B]` that each replica holds.

    Completions stay in their mini-batch, `chosen` `[R, B]`; mini-batches are equally large. In each they are assigned
    in order of length, longest first, back and forth: to replicas 0, 1, 1, 0, 0, 1, ... of two. So all replicas get
    the same number of completions, of similar lengths.
    """
    replicas = len(lengths)
    order = lengths.flatten().argsort(descending=True, stable=True)
    order = order[chosen.flatten()[order].argsort(stable=True)]
    turn = torch.arange(len(order)) % (len(order) // (int(chosen.max()) + 1)) % (2 * replicas)
    owners = torch.empty_like(order)
    owners[order] = turn.minimum(2 * replicas - 1 - turn)
    return owners.view_as(lengths)
