"""AdamW whose two averages have 8 bits per number, by torchao.

Numbers of a block share a scale. Only matrices whose rows are whole blocks are taken: then blocks, and with them the
weights that are learnt, are the same on any number of ranks. Left out: how codes and scales are kept
(rlx.storage.checkpoint_files).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rlx.config.errors import ConfigError
from rlx.config.sections.train import TrainConfig
from rlx.models.loading import can_compile
from rlx.training.optimizers.groups import Groups

QUANTIZED_BLOCK = 64
"""numbers that share a scale: hidden sizes are multiples of it"""
LEAST = 4096
"""numbers of a shard below which torchao keeps all bits"""


def is_quantized(weight: nn.Parameter) -> bool:
    """Whether the averages of a weight, sharded or not, get 8 bits."""
    return weight.ndim == 2 and weight.shape[1] % QUANTIZED_BLOCK == 0 and weight.numel() >= LEAST


def eight_bit_adamw(train: TrainConfig, groups: Groups) -> Optimizer:
    """torchao's AdamW of matrices that are quantized; the work of Dettmers et al. 2021 (arXiv 2110.02861).

    Raises:
        ConfigError: torchao or a compiler is missing, or a rank has too little of a matrix.
    """
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(f"train.optimizer adamw_8bit needs torchao: pip install 'rlx[torchao]' ({error})") from None
    if not can_compile():
        raise ConfigError(
            "train.optimizer adamw_8bit is compiled when it first steps: this machine has no C++ compiler"
        )
    _check_shards(weight for group in groups for weight in group["params"])
    adamw: Optimizer = AdamW8bit(groups, betas=train.adam_betas, eps=train.adam_eps, block_size=QUANTIZED_BLOCK)
    return adamw


def _check_shards(weights: Iterable[nn.Parameter]) -> None:
    """Raises ConfigError if torchao would keep all bits of a matrix on some ranks, and 8 on others."""
    for weight in weights:
        ranks = weight.device_mesh.size() if isinstance(weight, DTensor) else 1
        rows, columns = weight.shape
        per_rank = math.ceil(rows / ranks)  # FSDP cuts rows; the last rank that has some may have fewer
        if columns * (rows % per_rank or per_rank) < LEAST:
            raise ConfigError(
                f"train.optimizer adamw_8bit: a matrix of {rows} x {columns} on {ranks} workers leaves one of them "
                f"fewer than {LEAST} numbers: use fewer workers, or adamw"
            )
