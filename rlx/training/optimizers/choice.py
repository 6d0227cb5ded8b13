"""The table of optimizers, by the names of `train.optimizer`, and how each is made of a model's weights.

Left out: which weights share a learning rate (groups), and learning rates by step (rlx.training.update).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from rlx.config.sections.train import TrainConfig
from rlx.training.optimizers.eight_bit import eight_bit_adamw, is_quantized
from rlx.training.optimizers.groups import Groups, hidden_matrices, parameter_groups
from rlx.training.optimizers.joined import Joined
from rlx.training.optimizers.muon import ShardedMuon


@dataclass(frozen=True)
class OptimizerChoice:
    """An optimizer of some weights; AdamW takes all others."""

    takes: Callable[[nn.Module], set[nn.Parameter]]
    make: Callable[[TrainConfig, Groups], Optimizer]


def _adamw(train: TrainConfig, groups: Groups) -> Optimizer:
    return torch.optim.AdamW(groups, betas=train.adam_betas, eps=train.adam_eps, fused=True)


OPTIMIZERS: dict[str, OptimizerChoice] = {
    "adamw": OptimizerChoice(lambda model: set(), _adamw),
    "muon": OptimizerChoice(hidden_matrices, lambda train, groups: ShardedMuon(groups)),
    "adamw_8bit": OptimizerChoice(lambda model: {p for p in model.parameters() if is_quantized(p)}, eight_bit_adamw),
}


def make_optimizer(train: TrainConfig, model: nn.Module, rate: str) -> Optimizer:
    """The optimizer of `train.optimizer` over the weights of a model that are trained; the model is sharded already.

    Args:
        rate: the setting that has the learning rate of all weights but those of a value head.

    Raises:
        ConfigError: the optimizer cannot be used here.
    """
    choice = OPTIMIZERS[train.optimizer]
    own = choice.takes(model)
    groups = parameter_groups(train, model, rate, own.__contains__)
    others = parameter_groups(train, model, rate, lambda weight: weight not in own)
    makers = [(choice.make, groups), (_adamw, others)]
    parts = [make(train, some) for make, some in makers if some]  # torch makes no optimizer of nothing
    return parts[0] if len(parts) == 1 else Joined(*parts)


def set_lr(group: dict[str, object], lr: float) -> None:
    """Sets the learning rate of a parameter group. torchao's is a tensor, which its compiled step reads."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr
