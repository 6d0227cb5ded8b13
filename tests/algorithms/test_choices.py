"""Every choice by name has a test by hand, and a wrong name is refused with the list of names."""

from collections.abc import Callable
from typing import Any

import pytest
from by_hand import f64
from test_advantages import ADVANTAGES_BY_HAND, TOKEN_ADVANTAGES_BY_HAND, response_advantages
from test_importance_sampling import IMPORTANCE_BY_HAND
from test_kl import KL_BY_HAND
from test_losses import AGGREGATIONS_BY_HAND
from test_policy_loss import POLICY_BY_HAND
from torch import Tensor

from rlx.algorithms import kl, losses
from rlx.algorithms.advantages import ADVANTAGES
from rlx.algorithms.importance_sampling import IMPORTANCE_LEVELS, IMPORTANCE_WEIGHTS, importance_weights
from rlx.algorithms.losses import (
    PolicyLossSettings,
)


@pytest.mark.parametrize(
    ("choices", "by_hand"),
    [
        (kl.KL_ESTIMATORS, KL_BY_HAND),
        (ADVANTAGES, TOKEN_ADVANTAGES_BY_HAND),
        (ADVANTAGES, {"gae": None} | ADVANTAGES_BY_HAND),
        (losses.AGGREGATIONS, AGGREGATIONS_BY_HAND),
        (losses.POLICY_LOSSES, POLICY_BY_HAND),
        (IMPORTANCE_WEIGHTS, IMPORTANCE_BY_HAND),
        *((IMPORTANCE_LEVELS, levels) for levels in IMPORTANCE_BY_HAND.values()),
    ],
)
def test_every_choice_has_a_case_by_hand(choices: dict[str, Any], by_hand: dict[str, Any]) -> None:
    assert set(choices) == set(by_hand)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: kl.estimate_kl(x, "k4"), "KL estimator 'k4': .* k1, k2, k3, abs"),
        (lambda x: losses.kl_loss(x, x, x, x, 1, "k4+", x), "KL estimator 'k4.*': .* k1, k2, k3, abs"),
        (lambda x: kl.estimate_kl(x, "k1++"), "KL estimator"),
        (
            lambda x: response_advantages(x[0], x[0], "gea"),
            r"'gea': .* gae, grpo, dapo, dr_grpo, rloo, opo, reinforce\+\+, reinforce\+\+_baseline, remax",
        ),
        (lambda x: losses.token_weights(x, "mean", 1), "aggregation 'mean': .* token_mean, sequence_mean, constant"),
        (
            lambda x: losses.policy_loss(x, x, x, x, 1, PolicyLossSettings("a2c", 0.2, 0.2), x),
            "loss 'a2c': .* ppo, gspo, cispo, sapo, clip_cov",
        ),
        (
            lambda x: importance_weights(x, x, x, "clip", 0.5, 2.0),
            "weight 'clip': .* none, tis, mask",
        ),
        (
            lambda x: importance_weights(x, x, x, "tis", 0.5, 2.0, "word"),
            "level 'word': .* token, sequence",
        ),
    ],
)
def test_unknown_kinds_are_refused_by_naming_the_choices(call: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(f64([[1]]))
