"""Parameter groups: which trained weights share a learning rate and a decay, and which are hidden matrices.

Left out: which of them an optimizer takes (choice), and learning rates by step (rlx.training.update).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from rlx.config.sections.train import TrainConfig
from rlx.models.fsdp import decoder_layers
from rlx.storage.checkpoint_files import ModelAndOptimizer

RATE = "rate"
"""entry of a parameter group: the setting of train that has its learning rate"""
Groups = list[dict[str, Any]]


def parameter_groups(
    train: TrainConfig, model: nn.Module, rate: str, takes: Callable[[nn.Parameter], bool] = lambda weight: True
) -> Groups:
    """The trained weights in groups, as torch's optimizers take them, the body before a value head.

    Only matrices decay, neither norms nor biases. A value head has the critic's learning rate.

    Args:
        rate: the setting that has the learning rate of all other weights.
        takes: which weights to take.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}  # by (part of the head, decays)
    for name, p in sorted(model.named_parameters(), key=lambda pair: pair[0].startswith("value_head.")):
        if p.requires_grad and takes(p):
            groups.setdefault((name.startswith("value_head."), p.ndim > 1), []).append(p)
    return [
        {
            "params": parameters,
            "lr": getattr(train, "critic_lr" if is_head else rate),
            "weight_decay": train.weight_decay if decays else 0.0,
            RATE: "critic_lr" if is_head else rate,
        }
        for (is_head, decays), parameters in groups.items()
    ]


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """The matrices of the layers that a model repeats: neither embeddings nor output layers, norms and biases."""
    return {p for layer in decoder_layers(model) for p in layer.parameters() if p.ndim == 2}


def base_lrs(train: TrainConfig, models: Mapping[str, ModelAndOptimizer]) -> dict[str, list[float]]:
    """Learning rates of each model's parameter groups before warm-up and decay."""
    return {name: [getattr(train, g[RATE]) for g in each.optimizer.param_groups] for name, each in models.items()}
