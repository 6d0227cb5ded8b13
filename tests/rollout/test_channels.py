"""How memory that two processes share is named: what is written is what is read, and nothing of it is code."""

import os
import pickle

import pytest
import torch

from rlx.rollout.weight_sync import channels

# As torch describes memory on a GPU: number, handle, size, offset, gradient, counter, its offset, event, wait.
ON_GPU = [0, b"\x00\xff" * 32, 1 << 20, 512, False, b"/torch_1", 3, bytes(range(64)), True]


def test_a_note_says_again_what_was_noted() -> None:
    assert channels.read_note(channels.noted(4096, ON_GPU)) == (4096, ON_GPU)
    assert channels.read_note(channels.noted(0, ["/proc/1/fd/3"])) == (0, ["/proc/1/fd/3"])


def test_a_pickle_is_no_note() -> None:
    with pytest.raises(ValueError):
        channels.read_note(pickle.dumps((4096, ON_GPU)))


def test_memory_is_the_same_on_both_sides_until_it_is_forgotten() -> None:
    own, note = channels.shared(1000, torch.device("cpu"))
    other = channels.mapped(note, torch.device("cpu"))
    own.copy_(torch.arange(1000) % 251)
    assert other.tolist() == own.tolist()
    _, (path,) = channels.read_note(note)
    assert os.path.exists(path)
    channels.forget(note)
    assert not os.path.exists(path)
    assert other[7] == 7  # whoever has it keeps it
