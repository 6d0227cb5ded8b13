"""Copies of a state that is on a GPU: pinned memory, taken once, always with the newest numbers."""

import pytest
import torch
from torch import nn

from rlx.storage.checkpoint_files import ModelAndOptimizer, copy_shards
from rlx.training.checkpointing import PinnedMemory

pytestmark = pytest.mark.gpu


def stepped(trained: ModelAndOptimizer) -> ModelAndOptimizer:
    for parameter in trained.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    trained.optimizer.step()
    return trained


def test_pinned_copies_are_those_of_other_memory_and_take_no_new_one() -> None:
    model = nn.Linear(300, 40, device="cuda")
    trained = stepped(ModelAndOptimizer(model, torch.optim.AdamW(model.parameters(), fused=True)))
    memory, average, places = PinnedMemory(print), {"model.weight": torch.ones(3, device="cuda")}, []
    for _ in range(3):
        pinned = copy_shards({"policy": stepped(trained)}, average, memory.copies)
        plain = copy_shards({"policy": trained}, average)
        assert pinned.keys() == plain.keys()
        for key, shard in plain.items():
            assert (pinned[key].offset, pinned[key].shape) == (shard.offset, shard.shape)
            assert torch.equal(pinned[key].local, shard.local)
        weight = pinned["policy.model.weight"].local
        assert weight.is_pinned()
        places.append(weight.data_ptr())
    assert len(set(places)) == 1
