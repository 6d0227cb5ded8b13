"""Loaded by veRL: its replay buffer, looking for finished completions twenty times a second instead of every two.

Two seconds, for which veRL has no setting, are much of a step that takes six.
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class Attentive(ReplayBuffer):
    def __init__(self, **given: Any) -> None:
        prompts = given["sampler_kwargs"]["prompts"]  # a step's; veRL gives them to its own replay buffer alone
        super().__init__(**given, train_batch_size=prompts, gen_batch_size=prompts, poll_interval=0.05)
