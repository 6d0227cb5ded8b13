"""The settings of the models. Whether a model folder exists is checked by rlx.models."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat

from rlx.config.addresses import Address
from rlx.config.sections.base import NonEmptyText, Section

ALL_LAYERS = "all-linear"
"""peft's name for the layers that get adapters when model.lora_targets names none"""


class ModelConfig(Section):
    """The models of a run: where they come from, their critic and reference, adapters and precision."""

    path: Address = "tiny"
    """folder or Hugging Face name of the model; "tiny": a character-level model that rlx trains once by itself, with
    settings of its own (experiments/configs/arithmetic.yaml) in place of the defaults shown here; "tiny-calculator":
    one that may use a calculator (experiments/configs/calculator.yaml)"""
    critic: Literal["auto", "separate", "head", "none"] = "auto"
    """separate: a value model with its own weights; head: a value head on the policy's last hidden state; none: no
    critic; auto: with algorithm.advantage gae separate, or head with LoRA, otherwise none"""
    critic_path: Address | None = None
    """folder or Hugging Face name of the model that a separate critic starts from; the scoring layer of a reward model
    (a sequence classifier with one label) becomes the value head; unset: model.path"""
    value_head_init: Literal["zero", "normal"] = "zero"
    """weights of a new value head. zero: all first values are 0; normal: with variance 1 / (hidden size + 1)"""
    reference: Literal["auto", "copy", "lora_off", "none"] = "auto"
    """model that the KL is measured to. copy: a frozen copy of the initial policy, or model.reference_path; lora_off:
    the policy without its LoRA weights; none: no reference model; auto: none with algorithm.kl_coef 0, lora_off with
    LoRA unless model.reference_path is given, otherwise copy"""
    reference_path: Address | None = None
    """folder or Hugging Face name of another model as the reference: a teacher, with the same tokenizer; unset: none"""
    reference_weights: Literal["start", "model"] = "start"
    """weights of a copy, for a run that starts from a checkpoint. start: those of that checkpoint; model: those of
    model.path, which lora_off always measures to"""
    lora_rank: NonNegativeInt = 0
    """rank of the LoRA adapters that are trained instead of the weights; 0: train the weights"""
    lora_alpha: PositiveFloat = 32.0
    """adapters are scaled by lora_alpha / lora_rank"""
    lora_targets: tuple[NonEmptyText, ...] = ()
    """names of the linear layers that get adapters, e.g. q_proj,v_proj; empty: all except the output layer"""
    lora_sync: Literal["merged", "adapter"] = "merged"
    """weights that engines receive. merged: full weights with the adapters merged in; adapter: only the adapters, which
    sends less and generates slower"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """precision of forward passes, generation and frozen weights (of a reference, beside adapters); trained weights are
    always stored in float32; unset: bfloat16 with scaling.use_gpu, otherwise float32"""
    offload: tuple[Literal["critic", "reference"], ...] = ()
    """models that stay in host memory and move to the GPU layer by layer when they run: less GPU memory, slower; the
    optimizer of an offloaded critic runs on the CPU"""
    trust_remote_code: bool = False
    """run Python code from the model folder"""
