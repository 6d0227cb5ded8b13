"""The formulas of PPO on language models: KL, advantages, losses, importance weights, adaptive coefficients.

Every function takes tensors and plain numbers and returns tensors, on any device. Left out: models, settings,
communication between ranks. Whatever must agree over all ranks (moments, denominators, statistics) is a sum here, and
the caller all-reduces it.

Imports of rlx: none.

Conventions, which the docstrings do not repeat. B is the number of responses, T the number of response positions.
Tensors are `[B, T]` unless another shape is stated. `mask` (bool, or 0 and 1) is 1 on response tokens. Where the mask
is 0, the other tensors may hold anything, nan and inf included: it never reaches a result or a gradient.
Log-probabilities (`logp`) are natural logarithms in float32 or wider. Every choice by name is a literal dict beside its
functions; a name that is not in it raises ValueError, which lists the names that are.

Example:
    import torch
    from rlx.algorithms.advantages import gae

    rewards, values, mask = torch.tensor([[0.0, 1.0]]), torch.zeros(1, 2), torch.ones(1, 2)
    advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=0.95)
    assert torch.allclose(advantages, torch.tensor([[0.95, 1.0]]))
"""
