"""Token weights, and all losses but that of the policy, by hand; what all losses have in common."""

import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from by_hand import INF, NAN, close, f64, few, gradient, random_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kl import KL_BY_HAND, LOG2
from torch import Tensor

from rlx.algorithms import losses
from rlx.algorithms.losses import (
    PolicyLossSettings,
    entropy_loss,
    kl_loss,
    policy_loss,
    supervised_loss,
    token_weights,
    value_loss,
)

AGGREGATIONS_BY_HAND: dict[str, tuple[list[list[float]], int]] = {  # weights and size, length 8
    "token_mean": ([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]], 3 + 1),
    "sequence_mean": ([[1 / 3, 0, 1 / 3, 1 / 3], [0, 0, 0, 0], [0, 1, 0, 0]], 2),
    "constant": ([[1 / 8, 0, 1 / 8, 1 / 8], [0, 0, 0, 0], [0, 1 / 8, 0, 0]], 2),
}


@pytest.mark.parametrize("kind", AGGREGATIONS_BY_HAND)
def test_token_weights_by_hand(kind: str) -> None:
    mask = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]])
    for same in (mask, mask.bool(), mask.double()):
        weights, size = losses.token_weights(same, kind, 8)
        close(weights.double(), AGGREGATIONS_BY_HAND[kind][0], 1e-7)
        close(size.double(), float(AGGREGATIONS_BY_HAND[kind][1]))
    weights, size = losses.token_weights(mask[:0], kind, 8)
    assert weights.shape == (0, 4) and size == 0


Loss = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


def policy_loss_alone(kind: str) -> Loss:
    settings = PolicyLossSettings(kind, 0.2, 0.2)
    return lambda x, other, weights, mask, size: losses.policy_loss(x, other, other, mask, size, settings, weights)[0]


LOSSES: dict[str, Loss] = {
    **{kind: policy_loss_alone(kind) for kind in ("ppo", "gspo", "cispo")},
    "kl_loss": lambda x, other, weights, mask, size: losses.kl_loss(x, other, other, mask, size, "k3+", weights),
    "entropy_loss": lambda x, other, weights, mask, size: losses.entropy_loss(x, mask, size, weights),
    "supervised_loss": lambda x, other, weights, mask, size: losses.supervised_loss(x, mask, size),
    "value_loss": lambda x, other, weights, mask, size: losses.value_loss(x, other, other, mask, size, 0.2)[0],
}


@pytest.mark.parametrize("denominator", [0, -3])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_refuse_a_step_without_tokens(name: str, denominator: float) -> None:
    one = f64([[1]])
    with pytest.raises(ValueError, match="denominator"):
        LOSSES[name](one, one, one, one, denominator)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("values", [torch.tensor([[NAN, 1]]).double(), torch.empty(0, 3).double()])
def test_losses_without_response_tokens_are_zero_and_have_a_gradient(name: str, values: Tensor) -> None:
    # A rank whose micro-batch is empty must still take part in the backward pass.
    leaf = values.clone().requires_grad_()
    hidden = torch.full_like(values, INF)
    loss = LOSSES[name](leaf, hidden, hidden, torch.zeros_like(values), 8)
    close(loss.detach(), 0.0)
    close(gradient(loss, leaf), torch.zeros_like(values))


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_losses_reach_their_first_argument_only(name: str) -> None:
    tensors = [f64([[x]]).requires_grad_() for x in (0.5, 0.4, 2.0)]
    loss = LOSSES[name](*tensors, torch.ones(1, 1), 1)
    gradients = torch.autograd.grad(loss, tensors, allow_unused=True)
    assert [grad is not None for grad in gradients] == [True, False, False]


def plain_aggregate(rows: list[list[float]], kind: str, length: int) -> float:
    """The formulas of the papers, over the token losses of each response that has any."""
    if kind == "token_mean":  # DAPO eq. 8: 1 / sum_i |o_i| * sum_i sum_t
        return sum(sum(row) for row in rows) / sum(len(row) for row in rows)
    if kind == "sequence_mean":  # GRPO eq. 3: 1 / G * sum_i 1 / |o_i| * sum_t
        return statistics.mean(sum(row) / len(row) for row in rows)
    return statistics.mean(sum(row) / length for row in rows)  # Dr. GRPO: 1 / G * sum_i 1 / length * sum_t


@pytest.mark.parametrize("kind", AGGREGATIONS_BY_HAND)
@few
@given(st.integers(0, 2**31))
def test_aggregated_losses_are_those_of_the_papers(kind: str, seed: int) -> None:
    batch = random_batch(seed)
    logp, old, advantages, mask = (batch[name] for name in ("logp", "old_logp", "advantages", "mask"))
    clipped, kl, entropy = [], [], []
    for i in range(len(mask)):
        tokens = [t for t in range(mask.shape[1]) if mask[i, t]]
        steps = [(math.exp(logp[i, t] - old[i, t]), advantages[i, t].item()) for t in tokens]
        clipped.append([-min(r * a, min(max(r, 0.8), 1.3) * a) for r, a in steps])
        kl.append([(logp[i, t] - old[i, t]).item() ** 2 / 2 for t in tokens])
        entropy.append([-logp[i, t].item() for t in tokens])
    weights, size = losses.token_weights(mask, kind, 7)
    n = size.item()
    actual = [
        losses.policy_loss(logp, old, advantages, mask, n, PolicyLossSettings("ppo", 0.2, 0.3), weights)[0],
        losses.kl_loss(logp, old, old, mask, n, "k2", weights),
        losses.entropy_loss(logp, mask, n, weights),
    ]
    expected = [plain_aggregate([row for row in rows if row], kind, 7) for rows in (clipped, kl, entropy)]
    close(torch.stack(actual), expected, 1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS_BY_HAND)
@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.lists(st.integers(0, 6), max_size=4), st.randoms(use_true_random=False))
def test_losses_do_not_depend_on_micro_batches_or_padding(
    kind: str, aggregation: str, seed: int, cuts: list[int], order: Any
) -> None:
    batch, rows, edges = random_batch(seed), list(range(6)), [0, *sorted(cuts), 6]
    order.shuffle(rows)
    n, tokens = token_weights(batch["mask"], aggregation, 7)[1].item(), float(batch["mask"].sum())

    def losses(part: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        logp, old, mask = part["logp"], part["old_logp"], part["mask"]
        weights, size = token_weights(mask, aggregation, 7)
        corrected = {**part, "weights": part["weights"] * weights}
        dual_clip = None if kind == "cispo" else 1.5
        policy, stats = policy_loss(**corrected, denominator=n, settings=PolicyLossSettings(kind, 0.1, 0.2, dual_clip))
        value, value_stats = value_loss(logp, old, part["advantages"], mask, tokens, clip=0.2)
        others = kl_loss(logp, old, 1.1 * old, mask, n, "k3+", weights) + entropy_loss(logp.sin(), mask, n, weights)
        total = policy + value + others + supervised_loss(logp, mask, tokens)
        return total, {**stats, "value_clip_fraction": value_stats["clip_fraction"], "size": size.double()}

    def padded(tensor: Tensor, chosen: list[int], left: int, right: int) -> Tensor:
        filler = NAN if tensor.is_floating_point() else 0
        return torch.nn.functional.pad(tensor[chosen], (left, right), value=filler)

    whole = batch["logp"].clone().requires_grad_()
    whole_loss, whole_stats = losses({**batch, "logp": whole})

    parts = batch["logp"].clone().requires_grad_()
    total, total_gradient, total_stats = f64(0), torch.zeros_like(parts), dict.fromkeys(whole_stats, f64(0))
    for i, (start, end) in enumerate(itertools.pairwise(edges)):
        cut = {name: padded(x, rows[start:end], i % 2, i) for name, x in {**batch, "logp": parts}.items()}
        loss, stats = losses(cut)
        total += loss.detach()
        total_gradient += gradient(loss, parts)
        total_stats = {name: total_stats[name] + stats[name] for name in total_stats}

    close(total, whole_loss.detach())
    close(total_gradient, gradient(whole_loss, whole))
    close(total_stats["size"], n)
    for name, stat in whole_stats.items():
        close(total_stats[name], stat)


# --- KL, entropy and supervised losses

MASK = torch.tensor([[1, 0, 1], [0, 1, 0], [0, 0, 0]])
ONES = torch.ones(3, 3)
WEIGHTS = f64([[3, NAN, 5], [INF, 7, NAN], [NAN, NAN, NAN]])


@pytest.mark.parametrize("plus", ["", "+"])
@pytest.mark.parametrize("kind", KL_BY_HAND)
def test_kl_loss_by_hand(kind: str, plus: str) -> None:
    # policy / reference is 2, 1/2, 1, as in KL_BY_HAND
    logp = f64([[LOG2, NAN, -LOG2], [INF, 0, -INF], [NAN, NAN, NAN]]).requires_grad_()
    ref_logp = f64([[0, INF, 0], [NAN, 0, -INF], [NAN, NAN, NAN]])
    (a, b, c), (x, y, z) = KL_BY_HAND[kind][0], KL_BY_HAND["k2" if plus else kind][1]
    loss = losses.kl_loss(logp, logp, ref_logp, MASK, 10, kind + plus, ONES)  # of the old policy's tokens, on policy
    close(loss.detach(), (a + b + c) / 10)
    close(gradient(loss, logp), [[x / 10, 0, y / 10], [0, z / 10, 0], [0, 0, 0]])
    weighted = losses.kl_loss(logp, logp, ref_logp, MASK, 10, kind + plus, WEIGHTS)
    close(weighted.detach(), (3 * a + 5 * b + 7 * c) / 10)
    close(gradient(weighted, logp), [[3 * x / 10, 0, 5 * y / 10], [0, 7 * z / 10, 0], [0, 0, 0]])
    # Off policy, current / old is 3, 1/2, 5 where policy / reference is 2, 1/2, 1.
    old_logp = logp.detach() - f64([[math.log(3), NAN, math.log(1 / 2)], [INF, math.log(5), 0], [0, 0, 0]])
    q, r, s = (3, 0.5, 5) if plus else (1, 1, 1)
    loss = losses.kl_loss(logp, old_logp, ref_logp, MASK, 10, kind + plus, ONES)
    close(loss.detach(), (q * a + r * b + s * c) / 10)
    close(gradient(loss, logp), [[q * x / 10, 0, r * y / 10], [0, s * z / 10, 0], [0, 0, 0]])


@few
@given(st.integers(0, 2**31))
def test_the_corrected_kl_loss_has_the_gradient_of_the_kl_whatever_policy_the_tokens_are_of(seed: int) -> None:
    # Exactly, over all outcomes of a small policy; each outcome is a response of one token, weighted by the old policy.
    make = torch.Generator().manual_seed(seed)
    logits, old_logits, ref_logits = torch.randn(3, 5, generator=make, dtype=torch.float64).unbind()
    logits.requires_grad_()
    logp, old_logp, ref_logp = (each.log_softmax(0) for each in (logits, old_logits, ref_logits))
    exact = gradient((logp.exp() * (logp - ref_logp)).sum(), logits)

    def slope(kind: str) -> Tensor:
        columns = (each[:, None] for each in (logits.log_softmax(0), old_logp, ref_logp))
        loss = losses.kl_loss(*columns, torch.ones(5, 1), 1, kind, old_logp.exp()[:, None])
        return gradient(loss, logits)

    for kind in ("k1+", "k2+", "k3+", "abs+"):
        close(slope(kind), exact)
    assert (slope("k2") - exact).abs().max() > 1e-3  # without the weight the gradient is another one


def test_k3_in_the_loss_ends_at_10() -> None:
    # policy - reference is 1000, -1000, 10, 12, -2.6, -2.7; k3 reaches 10 at 10.99998 and at -2.6112
    logp = torch.tensor([[1000.0, -1000.0, 10.0, 12.0, -2.6, -2.7]], requires_grad=True)
    zero = torch.zeros(1, 6)
    loss = losses.kl_loss(logp, zero, zero, torch.ones(1, 6), 1, "k3", torch.ones(1, 6))
    inside = math.exp(-10) + 9 + math.exp(2.6) - 1 - 2.6
    close(loss.detach(), torch.tensor(4 * 10 + inside), 1e-6)
    close(gradient(loss, logp), torch.tensor([[0, 0, 1 - math.exp(-10), 0, 1 - math.exp(2.6), 0]]), 1e-6)


def test_entropy_loss_by_hand() -> None:
    entropy = f64([[1, NAN, 2], [INF, 4, -INF], [NAN, NAN, NAN]]).requires_grad_()
    loss = losses.entropy_loss(entropy, MASK, 10, ONES)
    close(loss.detach(), -(1 + 2 + 4) / 10)
    close(gradient(loss, entropy), -MASK.double() / 10)
    weighted = losses.entropy_loss(entropy, MASK, 10, WEIGHTS)
    close(weighted.detach(), -(3 * 1 + 5 * 2 + 7 * 4) / 10)
    close(gradient(weighted, entropy), [[-3 / 10, 0, -5 / 10], [0, -7 / 10, 0], [0, 0, 0]])


def test_supervised_loss_by_hand() -> None:
    logp = f64([[-1, NAN, -2], [INF, -4, -INF], [NAN, NAN, NAN]]).requires_grad_()
    loss = losses.supervised_loss(logp, MASK, 10)
    close(loss.detach(), (1 + 2 + 4) / 10)
    close(gradient(loss, logp), -MASK.double() / 10)


# --- value loss


def test_value_loss_without_clip_by_hand() -> None:
    values = f64([[1, NAN, 4], [INF, 2, 0]]).requires_grad_()
    returns, old = f64([[3, 1, 3], [NAN, 2, NAN]]), f64([[NAN] * 3] * 2)
    loss, stats = losses.value_loss(values, old, returns, torch.tensor([[1, 0, 1], [0, 1, 0]]), 5, None)
    close(loss.detach(), 0.5 * (4 + 1 + 0) / 5)
    close(gradient(loss, values), [[-2 / 5, 0, 1 / 5], [0, 0, 0]])
    close(stats["clip_fraction"], 0.0)


@pytest.mark.parametrize(
    ("value", "loss", "slope", "clipped"),
    [  # old value 10, return 12, clip 1: V' = clip(V, 9, 11)
        (10.5, 0.5 * 1.5**2, -1.5, 0),  # inside: V' = V
        (11.5, 0.5 * 1.0**2, 0.0, 1),  # (11 - 12)^2 > (11.5 - 12)^2
        (7.0, 0.5 * 5.0**2, -5.0, 0),  # (7 - 12)^2 > (9 - 12)^2
        (14.0, 0.5 * 2.0**2, 2.0, 0),  # (14 - 12)^2 > (11 - 12)^2
    ],
)
def test_clipped_value_loss_of_one_token(value: float, loss: float, slope: float, clipped: int) -> None:
    values = f64([[value, NAN]]).requires_grad_()
    actual, stats = losses.value_loss(values, f64([[10, NAN]]), f64([[12, NAN]]), torch.tensor([[1, 0]]), 4, 1.0)
    close(actual.detach(), loss / 4)
    close(gradient(actual, values), [[slope / 4, 0]])
    close(stats["clip_fraction"], float(clipped))


def test_value_loss_does_not_count_rounding_as_clipping() -> None:
    # Every change is below the clip, but so much larger than the old value that old + (new - old) rounds.
    old, step = torch.rand(2, 100, 10, generator=torch.Generator().manual_seed(0)).unbind()
    old, new = 0.01 * old, 0.1 * step
    assert (old + (new - old) != new).any()
    _, stats = losses.value_loss(new, old, old + 0.05, torch.ones(100, 10), 1, 0.2)
    close(stats["clip_fraction"], torch.tensor(0.0))
