"""The formulas beside those of TRL's GRPOTrainer, whose own `_compute_loss` computes values and gradients.

Slow, because TRL's imports take seconds. Left out: what TRL does otherwise, see docs/algorithms.md.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlx.algorithms.importance_sampling import importance_weights
from rlx.algorithms.losses import PolicyLossSettings, kl_loss, policy_loss, token_weights

pytestmark = pytest.mark.slow

B, T, LIMIT = 6, 9, 12
LENGTHS = torch.tensor([9, 1, 4, 7, 9, 2])


def _batch() -> dict[str, Tensor]:
    """Log-probabilities that differ by up to some nats, on responses of several lengths."""
    draw = torch.Generator().manual_seed(3)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(B, T, generator=draw)

    logp = -noise(1.0).abs()
    return {
        "logp": logp,
        "old": logp + noise(0.4),
        "ref": logp + noise(0.5),
        "rollout": logp + noise(0.3),
        "entropy": noise(1.0).abs(),
        "advantages": torch.randn(B, 1, generator=draw).expand(B, T),
        "mask": (torch.arange(T) < LENGTHS[:, None]).float(),
    }


def _trl_loss(batch: dict[str, Tensor], logp: Tensor, **settings: Any) -> Tensor:
    """TRL's loss of a step without accumulation, by the code of its trainer."""
    module = pytest.importorskip("trl.trainer.grpo_trainer")
    defaults = {"delta": None, "use_bias_correction_kl": False, "sapo_temperature_pos": 1.0}
    args = SimpleNamespace(**{**defaults, "sapo_temperature_neg": 1.05, "steps_per_generation": 1, **settings})
    everything = SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x)
    everything.pad_across_processes = lambda x, dim, pad_index: x
    trainer = SimpleNamespace(
        args=args,
        accelerator=everything,
        model=SimpleNamespace(training=True),
        loss_type=settings["loss_type"],
        importance_sampling_level=settings.get("level", "token"),
        epsilon_low=settings.get("low", 0.2),
        epsilon_high=settings.get("high", 0.2),
        beta=settings.get("beta", 0.0),
        top_entropy_quantile=settings.get("quantile", 1.0),
        use_vllm="ratio" in settings,
        vllm_importance_sampling_correction=True,
        off_policy_mask_threshold=None,
        max_completion_length=LIMIT,
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logp, batch["entropy"], None)
    trainer.get_high_entropy_mask = lambda *given: module.GRPOTrainer.get_high_entropy_mask(trainer, *given)
    ids = torch.zeros(B, T, dtype=torch.long)
    inputs = {
        **{"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": batch["mask"]},
        **{"advantages": batch["advantages"], "old_per_token_logps": batch["old"], "ref_per_token_logps": batch["ref"]},
        **{"num_items_in_batch": batch["mask"].sum(), "importance_sampling_ratio": settings.get("ratio")},
    }
    loss: Tensor = module.GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss


def _assert_equal_with_gradients(batch: dict[str, Tensor], ours: Any, **settings: Any) -> None:
    values, gradients = [], []
    for compute in (ours, lambda logp: _trl_loss(batch, logp, **settings)):
        logp = batch["logp"].clone().requires_grad_()
        loss = compute(logp)
        loss.backward()
        assert logp.grad is not None
        values.append(loss.item())
        gradients.append(logp.grad)
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    assert torch.allclose(*gradients, rtol=1e-5, atol=1e-7)


def _ours(batch: dict[str, Tensor], kind: str, low: float, high: float, aggregation: str, **more: Any) -> Any:
    """The policy loss, and the KL with `kl`: (its estimator, its coefficient), with `kept` further weights `[B, T]`."""

    def compute(logp: Tensor) -> Tensor:
        mask = batch["mask"]
        weights, size = token_weights(mask, aggregation, LIMIT)
        settings = PolicyLossSettings(kind, low, high, more.get("dual_clip"))
        kept = weights * more.get("kept", 1.0)
        loss, _ = policy_loss(logp, batch["old"], batch["advantages"], mask, size.item(), settings, kept)
        if estimator := more.get("kl"):
            kl = kl_loss(logp, batch["old"], batch["ref"], mask, size.item(), estimator, weights)
            loss = loss + more["coefficient"] * kl
        return loss

    return compute


@pytest.mark.parametrize(
    ("trl", "kind", "low", "high", "aggregation"),
    [
        ({"loss_type": "grpo"}, "ppo", 0.2, 0.2, "sequence_mean"),
        ({"loss_type": "dapo", "high": 0.28}, "ppo", 0.2, 0.28, "token_mean"),
        ({"loss_type": "dr_grpo"}, "ppo", 0.2, 0.2, "constant"),
        ({"loss_type": "cispo", "high": 5.0}, "cispo", 1.0, 4.0, "token_mean"),  # TRL's is the limit itself, 1 + 4
        ({"loss_type": "sapo"}, "sapo", 0.2, 0.2, "sequence_mean"),
        ({"loss_type": "grpo", "level": "sequence", "low": 3e-4, "high": 4e-4}, "gspo", 3e-4, 4e-4, "sequence_mean"),
    ],
    ids=lambda given: given["loss_type"] + given.get("level", "") if isinstance(given, dict) else "",
)
def test_policy_losses(trl: dict[str, Any], kind: str, low: float, high: float, aggregation: str) -> None:
    batch = _batch()
    if kind == "gspo":  # ratios on both sides of so narrow a clip, and within
        batch["old"] = batch["logp"] + 1e-3 * (batch["old"] - batch["logp"])
    _assert_equal_with_gradients(batch, _ours(batch, kind, low, high, aggregation), **trl)


def test_grpos_kl_in_the_loss() -> None:
    batch = _batch()
    assert (batch["logp"] - batch["ref"]).abs().max() < 2.6  # where ours ends and TRL's does not
    ours = _ours(batch, "ppo", 0.2, 0.2, "sequence_mean", kl="k3", coefficient=0.04)
    _assert_equal_with_gradients(batch, ours, loss_type="grpo", beta=0.04)


def test_the_tokens_of_high_entropy() -> None:
    batch = _batch()
    mask = batch["mask"].bool()
    limit = torch.quantile(batch["entropy"][mask], 0.8)
    kept = (batch["entropy"] >= limit).float()
    assert 0 < (kept * batch["mask"]).sum() < batch["mask"].sum() / 2
    ours = _ours(batch, "ppo", 0.2, 0.2, "token_mean", kept=kept)
    _assert_equal_with_gradients(batch, ours, loss_type="dapo", quantile=0.2)


def test_truncated_importance_sampling() -> None:
    batch = _batch()
    ours = importance_weights(batch["old"], batch["rollout"], batch["mask"], "tis", 0.5, 1.1)
    ratio = (batch["old"] - batch["rollout"]).exp().clamp(max=1.1)
    _assert_equal_with_gradients(
        batch, _ours(batch, "ppo", 0.2, 0.2, "token_mean", kept=ours), loss_type="dapo", ratio=ratio
    )
