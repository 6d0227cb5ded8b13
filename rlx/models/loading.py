"""TODO rlx.models.loading."""

from __future__ import annotations

import os
import shutil
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlx.config.errors import ConfigError
from rlx.models.fsdp import decoder_layers
from rlx.models.logprobs import score_logits
from rlx.models.lora import Adapters, add_adapters
from rlx.models.policy import Critic, Policy


def load_policy(
    path: str,
    *,
    head: str | None,
    seed: int = 0,
    adapters: Adapters | None = None,
    trust_remote_code: bool = False,
) -> Policy:
    """The model in `path` with float32 weights, not sharded yet.

    Args:
        head: how to begin a value head, a key of VALUE_HEADS; None: without one.
        adapters: to be trained instead of the weights.

    Raises:
        ConfigError: the model turns hidden states into logits in some way that Policy does not repeat, or it has no
            such layers to adapt.
    """
    lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, trust_remote_code=trust_remote_code).eval()
    policy = Policy(lm, _value_head(lm.config.hidden_size, head, seed) if head else None)
    _check_logits(policy, path)
    if adapters:
        add_adapters(lm, adapters)
    return policy


def load_critic(path: str, *, head: str, seed: int = 0, trust_remote_code: bool = False) -> Critic:
    """A critic that starts from the same weights as the policy, with a new value head."""
    backbone = AutoModel.from_pretrained(path, dtype=torch.float32, trust_remote_code=trust_remote_code).eval()
    return Critic(backbone, _value_head(backbone.config.hidden_size, head, seed))


def load_reference(path: str, *, trust_remote_code: bool = False) -> Policy:
    """A frozen copy of the policy's start."""
    return load_policy(path, head=None, trust_remote_code=trust_remote_code).requires_grad_(False)


def checkpoint_gradients(part: nn.Module) -> None:
    """Has decoder layers and the output layer forget activations and compute them again in the backward pass."""
    if isinstance(part, Policy):
        part.kept = 0
    for module in list(part.modules()):
        if isinstance(module, PreTrainedModel) and module.supports_gradient_checkpointing:
            module.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in part.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True  # what transformers asks for it; all within the layer stays in eval mode
            for name, value in vars(layer).items():  # some layers drop out by themselves
                if "dropout" in name and isinstance(value, float):
                    setattr(layer, name, 0.0)


def compile_layers(part: nn.Module) -> None:
    """Has each decoder layer compiled when it first runs, for any number of rows and tokens, and what becomes of
    logits; call it before `shard`.

    In place, so that names stay as they are.

    Raises:
        ConfigError: there is no C++ compiler, without which torch.compile makes no code.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(f"train.compile: this machine has no C++ compiler {compiler}")
    # All layers of policy, critic and reference share one function's code: with and without gradients, adapters, ...
    torch._dynamo.config.recompile_limit = 32
    for layer in decoder_layers(part):
        layer.forward = torch.compile(layer.forward, dynamic=True)  # not `layer.compile`: FSDP's hooks stay outside
    if isinstance(part, Policy):
        part.scores = torch.compile(score_logits)


def _zero(weight: Tensor, seed: int) -> None:
    nn.init.zeros_(weight)


def _normal(weight: Tensor, seed: int) -> None:
    nn.init.normal_(weight, std=(weight.shape[1] + 1) ** -0.5, generator=torch.Generator().manual_seed(seed))


VALUE_HEADS = {"zero": _zero, "normal": _normal}
"""how the weights of a new value head begin; normal: Stiennon et al. 2020 (arXiv 2009.01325), app. B.1"""


def _value_head(hidden_size: int, kind: str, seed: int) -> nn.Linear:
    head = nn.Linear(hidden_size, 1)
    VALUE_HEADS[kind](head.weight, seed)
    nn.init.zeros_(head.bias)
    return head


@torch.no_grad()
def _check_logits(policy: Policy, path: str) -> None:
    """Some models change hidden states or logits around the output layer; Policy repeats none of it: refused.

    The output layer is made to give wide logits, so that what is done to them shows whatever the weights are.
    """
    lm: Any = policy.lm
    head = lm.get_output_embeddings()
    wide = torch.linspace(-100.0, 100.0, head.weight.shape[0])
    entered: list[Tensor] = []

    def widen(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        entered.append(inputs[0])
        return wide.expand_as(output)

    ids = torch.tensor([[0, 1, 2, 3]])
    hook = head.register_forward_hook(widen)
    logits = lm(input_ids=ids, use_cache=False).logits
    hook.remove()
    hidden = lm.base_model(input_ids=ids, use_cache=False).last_hidden_state
    if not torch.allclose(logits, wide.expand_as(logits)) or not torch.allclose(entered[0], hidden, rtol=1e-4):
        raise ConfigError(f"model.path {path}: this architecture scales or caps what enters or leaves the output layer")
