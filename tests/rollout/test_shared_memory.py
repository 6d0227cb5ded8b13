"""Memory that two processes share: a handle survives its encoding, and is not code."""

import os
import pickle
from pathlib import Path

import pytest
import torch

from rlx.rollout.weight_sync import shared_memory
from rlx.types import WeightSyncError

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


def test_a_note_that_names_another_file_opens_and_makes_none(tmp_path: Path) -> None:
    there, foreign = tmp_path / "there", os.memfd_create("foreign")
    there.write_bytes(b"secret")
    _, handle = shared_memory.allocate_shared(1000, torch.device("cpu"))
    _, (own,) = shared_memory.decode_handle(handle)
    with there.open("rb") as opened:
        links = [f"/proc/{os.getpid()}/fd/{file}" for file in (foreign, opened.fileno(), 99999)]
        for path in (str(tmp_path / "new"), str(there), f"{own}/../../../..{tmp_path}/new", *links, 7, None):
            with pytest.raises(WeightSyncError, match="is no memory of a trainer"):
                shared_memory.map_shared(shared_memory.encode_handle(6, [path]), torch.device("cpu"))
    with pytest.raises(WeightSyncError):  # it would grow
        shared_memory.map_shared(shared_memory.encode_handle(1 << 20, [own]), torch.device("cpu"))
    assert [path.name for path in tmp_path.iterdir()] == ["there"] and there.read_bytes() == b"secret"
    os.close(foreign)
    shared_memory.forget(handle)
