"""The settings of the steps and the optimizers."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rlx.config.sections.base import Decay
from rlx.config.sections.schedule import ScheduledSection


class TrainConfig(ScheduledSection):
    """Size and number of PPO steps, and the optimizers."""

    CHANGING: ClassVar[tuple[str, ...]] = ("actor_lr", "critic_lr", "max_grad_norm", "ema_decay")

    steps: PositiveInt = 40
    """PPO steps; each step generates completions and updates the models on them"""
    prompts_per_step: PositiveInt = 64
    """prompts per step, over all workers"""
    samples_per_prompt: PositiveInt = 4
    """completions per prompt"""
    ppo_epochs: PositiveInt = 1
    """passes over a step's completions; the default is veRL's and OpenRLHF's"""
    num_minibatches: PositiveInt = 4
    """optimizer steps per pass; the default is veRL's"""
    shuffle_minibatches: bool = True
    """deal a step's prompts to mini-batches anew in each pass after the first; false: all passes have the same ones"""
    micro_batch_tokens: PositiveInt = 16_384
    """maximum number of tokens, padding included, in one forward and backward pass of a worker; a longer completion
    has a pass to itself"""
    packing: bool | None = None
    """completions of a pass stand in one row without padding, and a prompt stands there once for all of its
    completions; unset: on GPUs in half precision and with parallel.sp, for models that can"""
    optimizer: Literal["adamw", "muon", "adamw_8bit"] = "adamw"
    """muon: for the matrices of decoder layers, with adamw for all other weights; it takes adamw's learning rates.
    adamw_8bit: adamw whose averages take a quarter of the memory; needs torchao"""
    actor_lr: NonNegativeFloat = 1e-6
    """learning rate of the policy, or a schedule such as {0: 1e-6, 200: 1e-7} by steps, as other numbers may have
    (docs/algorithms.md); unset: 1e-6 as in veRL and OpenRLHF, with model.lora_rank 1e-4"""
    critic_lr: NonNegativeFloat = 1e-5
    """learning rate of the critic and of a value head; unset: 1e-5 as in veRL, with model.lora_rank 1e-4 unless
    model.critic is separate, which trains all of its weights"""
    critic_warmup: NonNegativeInt = 0
    """number of first steps that train only a separate critic and leave the policy unchanged"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """learning rates after the warm-up: constant, or linear or cosine decay to zero"""
    warmup_steps: NonNegativeInt = 4
    """optimizer steps over which the learning rates rise from zero"""
    weight_decay: NonNegativeFloat = 0.0
    """decoupled weight decay, of matrices only: norms and biases do not decay"""
    adam_betas: tuple[Decay, Decay] = (0.9, 0.95)
    """beta1 and beta2 of AdamW"""
    adam_eps: PositiveFloat = 1e-8
    """epsilon of AdamW. 1e-8 is torch's, as in veRL, OpenRLHF and TRL; OpenAI's PPO has 1e-5"""
    max_grad_norm: PositiveFloat = 1.0
    """gradients with a larger global norm are scaled down to it"""
    gradient_checkpointing: bool = False
    """recompute the activations of decoder layers in the backward pass: less memory, about a third more time"""
    checkpointed_layers: float = Field(default=1.0, gt=0, le=1)
    """the share of decoder layers, the first ones, for which gradient_checkpointing does so: a smaller share takes less
    time and more memory"""
    compile: bool | None = None
    """compile decoder layers with torch.compile: the first steps take a minute or two more, later ones a third less; a
    resumed run then equals an uninterrupted one only up to rounding; unset: on GPUs, for runs of 100 steps or more"""
    ema_decay: Decay | None = None
    """keep an exponential moving average of the policy's weights with this decay per optimizer step, and evaluate it
    too; unset: no average"""
