"""Policy losses by hand, and against the formulas of their papers."""

import math

import pytest
import torch
from by_hand import INF, NAN, close, f64, few, gradient, random_batch
from hypothesis import given
from hypothesis import strategies as st

from rlx.algorithms import losses
from rlx.algorithms.losses import (
    PolicyLossSettings,
    policy_loss,
)
from rlx.algorithms.masking import moments


@pytest.mark.parametrize("kind", ["ppo", "gspo"])
@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "loss", "slope", "clipped"),
    [  # clip range [0.8, 1.3]; d(-A r) / d logp = -A r; a clipped token has none
        (1.0, 2, None, -2.0, -2.0, 0),
        (1.2, 2, None, -2.4, -2.4, 0),  # inside the range
        (1.5, 2, None, -2.6, 0.0, 1),  # -2 * 1.3
        (0.5, 2, None, -1.0, -1.0, 0),  # the clipped term, -2 * 0.8, is the smaller one
        (1.5, -2, None, 3.0, 3.0, 0),  # the clipped term, 2 * 1.3, is the smaller one
        (0.5, -2, None, 1.6, 0.0, 1),  # 2 * 0.8
        (1.5, 0, None, 0.0, 0.0, 0),
        (5.0, -2, 3, 6.0, 0.0, 0),  # not above 2 * 3; the dual clip does not count as clipped
        (2.0, -2, 3, 4.0, 4.0, 0),  # below it
        (0.5, -2, 3, 1.6, 0.0, 1),  # the ordinary clip, 2 * 0.8
        (5.0, 2, 3, -2.6, 0.0, 1),  # positive advantages are left alone: -2 * 1.3
    ],
)
def test_clipped_policy_loss_of_one_token(
    ratio: float, advantage: float, dual_clip: float | None, loss: float, slope: float, clipped: int, kind: str
) -> None:
    logp, one = f64([[math.log(ratio)]]).requires_grad_(), torch.ones(1, 1)
    settings = PolicyLossSettings(kind, 0.2, 0.3, dual_clip)
    actual, stats = losses.policy_loss(logp, f64([[0]]), f64([[advantage]]), one, 1, settings, one)
    close(actual.detach(), loss)
    close(gradient(actual, logp), [[slope]])
    close(stats["clip_fraction"], float(clipped))
    close(stats["clip_high_fraction"], float(clipped and ratio > 1))
    close(stats["clip_low_fraction"], float(clipped and ratio < 1))
    assert ("dual_clip_fraction" in stats) == (dual_clip is not None)
    close(stats.get("dual_clip_fraction", f64(0)), float(dual_clip is not None and advantage < 0 and ratio > dual_clip))
    close(stats["ratio"], ratio)
    close(stats["approx_kl"], ratio - 1 - math.log(ratio))


# r, A and logp = log r - 1 of each token; the responses' own ratios are sqrt(2 * 4.5) = 3, sqrt(0.5 * 1.62) = 0.9,
# 0.5 and 1.1. The clip range is [0.8, 1.2].
POLICY_RATIOS = f64([[2, NAN, 4.5], [0.5, 1.62, NAN], [INF, NAN, 0.5], [NAN, 1.1, -INF], [NAN, NAN, NAN]])
POLICY_ADVANTAGES = f64([[1, NAN, 1], [2, 2, INF], [NAN, -INF, -2], [NAN, -3, NAN], [NAN, INF, NAN]])
POLICY_MASK = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 1], [0, 1, 0], [0, 0, 0]])


def gate(ratio: float, temperature: float) -> float:
    return 4 / temperature / (1 + math.exp(-temperature * (ratio - 1)))


def fade(ratio: float, temperature: float) -> float:
    """d gate / d log ratio."""
    share = temperature * gate(ratio, temperature) / 4
    return 4 * share * (1 - share) * ratio


POLICY_BY_HAND = {  # loss of each token in reading order, slope of each token, tokens clipped
    "ppo": (
        [-1.2, -1.2, -2 * 0.5, -2 * 1.2, 2 * 0.8, 3 * 1.1],
        [[0, 0, 0], [-2 * 0.5, 0, 0], [0, 0, 0], [0, 3 * 1.1, 0], [0, 0, 0]],
        2 + 1 + 1,
    ),
    "gspo": (
        [-1.2, -1.2, -2 * 0.9, -2 * 0.9, 2 * 0.8, 3 * 1.1],
        [[0, 0, 0], [-2 * 0.9, -2 * 0.9, 0], [0, 0, 0], [0, 3 * 1.1, 0], [0, 0, 0]],
        2 + 1,
    ),
    "cispo": (
        [
            -1.2 * (math.log(2) - 1), -1.2 * (math.log(4.5) - 1), -2 * 0.8 * (math.log(0.5) - 1),
            -2 * 1.2 * (math.log(1.62) - 1), 2 * 0.8 * (math.log(0.5) - 1), 3 * 1.1 * (math.log(1.1) - 1),
        ],
        [[-1.2, 0, -1.2], [-2 * 0.8, -2 * 1.2, 0], [0, 0, 2 * 0.8], [0, 3 * 1.1, 0], [0, 0, 0]],
        2 + 2 + 1,
    ),
    "sapo": (
        [-gate(2, 1), -gate(4.5, 1), -2 * gate(0.5, 1), -2 * gate(1.62, 1), 2 * gate(0.5, 1.05), 3 * gate(1.1, 1.05)],
        [
            [-fade(2, 1), 0, -fade(4.5, 1)], [-2 * fade(0.5, 1), -2 * fade(1.62, 1), 0],
            [0, 0, 2 * fade(0.5, 1.05)], [0, 3 * fade(1.1, 1.05), 0], [0, 0, 0],
        ],
        0,
    ),
}  # fmt: skip
POLICY_BY_HAND["clip_cov"] = POLICY_BY_HAND["ppo"]  # apart from tokens whose weight is 0


@pytest.mark.parametrize("kind", POLICY_BY_HAND)
def test_policy_loss_of_a_batch_by_hand(kind: str) -> None:
    losses, slopes, clipped = POLICY_BY_HAND[kind]
    logp = (POLICY_RATIOS.log() - 1).requires_grad_()
    arguments = (logp, f64([[-1, NAN, -1], [-1, -1, INF], [INF, NAN, -1], [NAN, -1, NAN], [NAN, NAN, NAN]]))
    arguments += (POLICY_ADVANTAGES, POLICY_MASK, 10, PolicyLossSettings(kind, 0.2, 0.2))
    loss, stats = policy_loss(*arguments, weights=torch.ones(5, 3))
    close(loss.detach(), sum(losses) / 10)
    close(gradient(loss, logp), f64(slopes) / 10)
    close(stats["clip_fraction"], float(clipped))
    close(stats["ratio"], 2 + 4.5 + 0.5 + 1.62 + 0.5 + 1.1)
    # the sum of (r - 1) - log r
    close(stats["approx_kl"], 2 + 4.5 + 0.5 + 1.62 + 0.5 + 1.1 - 6 - math.log(2 * 4.5 * 0.5 * 1.62 * 0.5 * 1.1))

    weights = f64([[1, NAN, 2], [3, 4, INF], [NAN, INF, 5], [NAN, 6, NAN], [NAN, NAN, NAN]])
    weighted, weighted_stats = policy_loss(*arguments, weights=weights)
    close(weighted.detach(), sum((i + 1) * loss for i, loss in enumerate(losses)) / 10)
    close(gradient(weighted, logp), weights.nan_to_num(0, 0, 0) * f64(slopes) / 10)
    assert weighted_stats == stats
    assert not any(stat.requires_grad for stat in stats.values())


@pytest.mark.parametrize("kind", ["ppo", "cispo"])
@few
@given(st.integers(0, 2**31))
def test_policy_loss_gradient_against_the_formula(kind: str, seed: int) -> None:
    # ppo: -A r w / denominator, but 0 on masked tokens and where the clipped term is the larger one;
    # cispo: -A clip(r) w / denominator, on tokens outside of the clip range, too
    batch = random_batch(seed)
    logp = batch.pop("logp").requires_grad_()
    loss, stats = losses.policy_loss(logp, **batch, denominator=17, settings=PolicyLossSettings(kind, 0.1, 0.2))
    ratio, advantages = (logp.detach() - batch["old_logp"]).exp(), batch["advantages"]
    if kind == "ppo":
        clipped = ((advantages > 0) & (ratio > 1.2)) | ((advantages < 0) & (ratio < 0.9))
        slope = -advantages * ratio * ~clipped
    else:
        clipped = (ratio > 1.2) | (ratio < 0.9)
        slope = -advantages * ratio.clamp(0.9, 1.2)
    close(gradient(loss, logp), slope * batch["weights"] * batch["mask"] / 17)
    close(stats["clip_fraction"], (clipped & batch["mask"].bool()).sum().double())


@few
@given(st.integers(0, 2**31))
def test_gspo_is_the_objective_of_its_paper_where_a_response_has_one_advantage(seed: int) -> None:
    batch = random_batch(seed)
    old_logp, mask = batch["old_logp"], batch["mask"]
    advantages = batch["advantages"][:, :1].expand(-1, 5)
    logp = batch["logp"].requires_grad_()
    weights, size = losses.token_weights(mask, "sequence_mean", 5)
    settings = PolicyLossSettings("gspo", 0.1, 0.2)
    loss, _ = losses.policy_loss(logp, old_logp, advantages, mask, float(size), settings, weights)

    objectives = []
    for i in range(len(mask)):
        if mask[i].any():
            ratio = (logp[i] - old_logp[i])[mask[i].bool()].mean().exp()
            objectives.append(torch.minimum(ratio * advantages[i, 0], ratio.clamp(0.9, 1.2) * advantages[i, 0]))
    literal = -torch.stack(objectives).mean()
    close(loss.detach(), literal.detach(), 1e-6)
    close(gradient(loss, logp), gradient(literal, logp), 1e-6)


def test_gspo_scales_each_token_by_its_own_advantage() -> None:
    # ratio sqrt(1.21 * 1) = 1.1 on both tokens
    logp = f64([[math.log(1.21), 0]]).requires_grad_()
    settings = PolicyLossSettings("gspo", 0.2, 0.2)
    loss, _ = losses.policy_loss(logp, f64([[0, 0]]), f64([[1, -3]]), torch.ones(1, 2), 1, settings, torch.ones(1, 2))
    close(gradient(loss, logp), [[-1.1, 3 * 1.1]])


def test_gspo_gives_every_token_of_a_response_the_same_ratio() -> None:
    # To the last bit: or the clip would take some tokens of a response on its bound and leave others.
    make, one = torch.Generator().manual_seed(0), torch.ones(1, 50)
    logp = (3 * torch.randn(1, 50, generator=make)).requires_grad_()
    loss, _ = losses.policy_loss(logp, 0 * one, one, one, 1, PolicyLossSettings("gspo", 0.9, 9.0), one)
    slopes = gradient(loss, logp)
    close(slopes, slopes[:, :1].expand(1, 50), 0.0)


@pytest.mark.parametrize("kind", ["ppo", "gspo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_policy_loss_of_huge_log_ratios_is_finite(dtype: torch.dtype, dual_clip: float | None, kind: str) -> None:
    logp = torch.tensor([[1000], [-1000], [1000], [-1000]], dtype=dtype, requires_grad=True)
    advantages = torch.tensor([[1], [1], [-1], [-1]], dtype=dtype)
    settings = PolicyLossSettings(kind, 0.2, 0.2, dual_clip)
    one = torch.ones(4, 1)
    loss, stats = losses.policy_loss(logp, torch.zeros(4, 1, dtype=dtype), advantages, one, 4, settings, one)
    # -1.2, -exp(-20), exp(20) or the dual clip, 0.8
    bound = math.exp(20) if dual_clip is None else dual_clip
    close(loss.detach(), torch.tensor((-1.2 - math.exp(-20) + bound + 0.8) / 4, dtype=dtype), 1e-6)
    close(gradient(loss, logp), torch.zeros(4, 1, dtype=dtype))
    # (r - 1) - log r: twice exp(20) - 1 - 20, twice exp(-20) - 1 + 20
    close(stats["approx_kl"], torch.tensor(2 * math.exp(20) + 2 * math.exp(-20) - 4, dtype=dtype), 1e-6)


def test_cispo_of_huge_log_ratios_keeps_its_gradient() -> None:
    logp = f64([[1000, -1000, 1000, -1000]]).requires_grad_()
    settings = PolicyLossSettings("cispo", 0.2, 0.3)
    loss, _ = losses.policy_loss(logp, 0 * logp, f64([[1, 1, -2, -2]]), torch.ones(1, 4), 1, settings, torch.ones(1, 4))
    close(loss.detach(), -1.3 * 1000 + 0.8 * 1000 + 2 * 1.3 * 1000 - 2 * 0.8 * 1000)
    close(gradient(loss, logp), [[-1.3, -0.8, 2 * 1.3, 2 * 0.8]])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [  # temperatures 2 and 0.5; the sigmoid is 1/2 at ratio 1, and 3/4 and 1/4 at t (r - 1) = log 3 and -log 3
        (1.0, 3, -3 * 2 / 2, -3.0),  # on policy the gradient is that of the policy gradient
        (1.0, -3, 3 * 2 / 0.5, 3.0),
        (1 + math.log(3) / 2, 3, -3 * 4 / 2 * 0.75, -3 * 0.75 * (1 + math.log(3) / 2)),  # 4 * 3/4 * 1/4 = 3/4
        (1 - math.log(3) / 2, 3, -3 * 4 / 2 * 0.25, -3 * 0.75 * (1 - math.log(3) / 2)),
        (1 + 2 * math.log(3), -3, 3 * 4 / 0.5 * 0.75, 3 * 0.75 * (1 + 2 * math.log(3))),
        (2.0, 0, 0.0, 0.0),
        (INF, 3, -3 * 4 / 2, 0.0),  # far away nothing is left of the gradient
    ],
)
def test_sapo_of_one_token_by_hand(ratio: float, advantage: float, loss: float, slope: float) -> None:
    log_ratio = 1000 if math.isinf(ratio) else math.log(ratio)
    logp = f64([[log_ratio]]).requires_grad_()
    settings = PolicyLossSettings("sapo", 0.2, 0.2, temperatures=(2.0, 0.5))
    actual, stats = policy_loss(logp, f64([[0]]), f64([[advantage]]), torch.ones(1, 1), 1, settings, torch.ones(1, 1))
    close(actual.detach(), loss)
    close(gradient(actual, logp), [[slope]])
    assert float(stats["clip_fraction"]) == 0


def test_covariances_by_hand() -> None:
    # the means over the two parts are -2 and 0.5
    logp = [f64([[-1, NAN], [-3, -4]]), f64([[0]])]
    advantages = [f64([[2, INF], [-1, 2]]), f64([[-1]])]
    masks = [torch.tensor([[1, 0], [1, 1]]), torch.tensor([[1]])]
    parts = list(zip(logp, advantages, masks, strict=True))
    total = sum(torch.stack([moments(p, mask), moments(a, mask)]) for p, a, mask in parts)
    found = [losses.covariances(p, a, mask, total) for p, a, mask in parts]
    close(found[0], [[1 * 1.5, 0], [-1 * -1.5, -2 * 1.5]])
    close(found[1], [[2 * -1.5]])
