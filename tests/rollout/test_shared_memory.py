"""Memory that two processes share: a handle survives its encoding, and is not code."""

import os
import pickle

import pytest
import torch

from rlx.rollout.weight_sync import shared_memory

# How torch describes memory on a GPU: number, handle, size, offset, gradient, counter, its offset, event, wait.
ON_GPU = [0, b"\x00\xff" * 32, 1 << 20, 512, False, b"/torch_1", 3, bytes(range(64)), True]


def test_a_handle_survives_its_encoding() -> None:
    assert shared_memory.decode_handle(shared_memory.encode_handle(4096, ON_GPU)) == (4096, ON_GPU)
    assert shared_memory.decode_handle(shared_memory.encode_handle(0, ["/proc/1/fd/3"])) == (0, ["/proc/1/fd/3"])


def test_a_pickle_is_refused() -> None:
    with pytest.raises(ValueError):
        shared_memory.decode_handle(pickle.dumps((4096, ON_GPU)))


def test_memory_is_the_same_on_both_sides_until_it_is_forgotten() -> None:
    memory, handle = shared_memory.allocate_shared(1000, torch.device("cpu"))
    other = shared_memory.map_shared(handle, torch.device("cpu"))
    memory.copy_(torch.arange(1000) % 251)
    assert other.tolist() == memory.tolist()
    _, (path,) = shared_memory.decode_handle(handle)
    assert os.path.exists(path)
    shared_memory.forget(handle)
    assert not os.path.exists(path)
    assert other[7] == 7  # a process that has it mapped keeps it
