"""Loaded by veRL: its replay buffer, looking for finished completions twenty times a second instead of every two.

Two seconds, for which veRL has no setting, are much of a step that takes six.
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

_EVERY_S = 0.05


class Attentive(ReplayBuffer):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given, poll_interval=_EVERY_S)


class AttentiveAhead(ReplayBufferAsync):
    """Of its asynchronous trainers."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given, poll_interval=_EVERY_S)
