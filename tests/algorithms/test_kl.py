"""KL estimators by hand; their expected values and gradients."""

import math

import pytest
import torch
from by_hand import close, f64, few, gradient
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlx.algorithms import kl
from rlx.algorithms.kl import estimate_kl

LOG2 = math.log(2)
KL_BY_HAND = {  # kind: values and slopes where policy / reference is 2, 1/2, 1
    "k1": ([LOG2, -LOG2, 0], [1, 1, 1]),
    "k2": ([LOG2**2 / 2, LOG2**2 / 2, 0], [LOG2, -LOG2, 0]),
    "k3": ([1 / 2 - 1 + LOG2, 2 - 1 - LOG2, 0], [1 - 1 / 2, 1 - 2, 1 - 1]),
    "abs": ([LOG2, LOG2, 0], [1, -1, 0]),
}


@pytest.mark.parametrize("plus", ["", "+"])
@pytest.mark.parametrize("kind", KL_BY_HAND)
def test_kl_estimators_by_hand_and_their_straight_through_gradient(kind: str, plus: str) -> None:
    half, quarter = math.log(1 / 2), math.log(1 / 4)
    logp = f64([[half, quarter, half]]).requires_grad_()
    kl = estimate_kl(logp - f64([[quarter, half, half]]), kind + plus)
    close(kl.detach(), [KL_BY_HAND[kind][0]])
    close(gradient(kl.sum(), logp), [KL_BY_HAND["k2" if plus else kind][1]])


@few
@given(st.sampled_from(list(KL_BY_HAND)), st.lists(st.floats(-1000, 1000, width=32), max_size=8))
def test_straight_through_kl_has_the_plain_value_to_the_last_bit(kind: str, log_ratios: list[float]) -> None:
    logp = torch.tensor([log_ratios])
    plain, through = (estimate_kl(logp, name) for name in (kind, kind + "+"))
    close(through, plain, 0.0)


@few
@given(st.integers(0, 2**31))
def test_expected_value_and_gradient_of_each_kl_estimator(seed: int) -> None:
    # Exactly, over all outcomes of a small policy; the gradients are with respect to its logits.
    make = torch.Generator().manual_seed(seed)
    logits, ref_logits = (0.6 * torch.randn(2, 5, generator=make, dtype=torch.float64).tanh()).unbind()  # k3 below 10
    logits.requires_grad_()
    logp, ref_logp = logits.log_softmax(0), ref_logits.log_softmax(0)
    kl = (logp.exp() * (logp - ref_logp)).sum()
    forward_kl = (ref_logp.exp() * (ref_logp - logp)).sum()

    def slope(x: Tensor) -> Tensor:
        return torch.autograd.grad(x, logits, retain_graph=True)[0]

    def expectation(kind: str) -> Tensor:
        return (logp.detach().exp() * estimate_kl(logp - ref_logp, kind)).sum()

    for kind in ("k1", "k3", "k1+", "k3+"):
        close(expectation(kind), kl)
    for kind in ("k2", "k1+", "k2+", "k3+", "abs+"):
        close(slope(expectation(kind)), slope(kl))
    close(slope(expectation("k1")), torch.zeros(5).double())
    close(slope(expectation("k3")), slope(forward_kl))


def test_k3_keeps_its_digits_near_zero() -> None:
    # exp(-d) - 1 + d = d^2 / 2 - d^3 / 6 + d^4 / 24 - ...; the terms left out are below 1e-22
    d = 1e-4
    kl = estimate_kl(f64([[d]]), "k3")
    assert kl.item() == pytest.approx(d**2 / 2 - d**3 / 6 + d**4 / 24, rel=1e-10, abs=0)


def test_k3_of_huge_log_ratios_is_finite() -> None:
    logp = torch.tensor([[1000.0, -1000.0]])
    # d = 1000: exp(-1000) - 1 + 1000; d = -1000: cut at exp(20) - 1 - 20
    close(kl.k3_unbounded(logp), torch.tensor([[999.0, math.exp(20) - 21]]), 1e-6)
    close(estimate_kl(logp, "k3"), torch.tensor([[10.0, 10.0]]), 0.0)


@few
@given(st.lists(st.floats(-30, 30), min_size=1, max_size=8), st.floats(-1, 1))
def test_k3_is_never_negative(logps: list[float], ref: float) -> None:
    logp = f64([logps])
    kl = estimate_kl(logp - ref, "k3")
    assert (kl >= -1e-15).all()  # rounding
    assert (kl[(logp - ref).abs() > 1e-3] > 0).all()
