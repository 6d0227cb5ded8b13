"""Loads policy, critic and reference from a Hugging Face folder, and prepares them for training.

Left out: sharding (fsdp, tensor_parallel), and which of them a run needs (training). The functions here change a model
before it is sharded.
"""

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
    """Loads the model in `path` with float32 weights, not sharded.

    Args:
        head: how a value head is initialised, a key of VALUE_HEADS; None: the policy has no value head.
        seed: of the value head.
        adapters: are trained instead of the weights.

    Raises:
        ConfigError: the model computes logits from hidden states in a way that Policy does not, or it lacks the layers
            that adapters are for.
    """
    lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, trust_remote_code=trust_remote_code).eval()
    policy = Policy(lm, _value_head(lm.config.hidden_size, head, seed) if head else None)
    _check_logits(policy, path)
    if adapters:
        add_adapters(lm, adapters)
    return policy


def load_critic(path: str, *, head: str, seed: int = 0, trust_remote_code: bool = False) -> Critic:
    """Loads a critic with the weights in `path`, which are those of the policy, and a new value head (VALUE_HEADS)."""
    backbone = AutoModel.from_pretrained(path, dtype=torch.float32, trust_remote_code=trust_remote_code).eval()
    return Critic(backbone, _value_head(backbone.config.hidden_size, head, seed))


def load_reference(path: str, *, trust_remote_code: bool = False) -> Policy:
    """Loads a frozen policy: the reference that the KL is measured from."""
    return load_policy(path, head=None, trust_remote_code=trust_remote_code).requires_grad_(False)


def transformer(model: Any) -> Any:
    """The model of transformers in a policy or critic."""
    return model.lm if isinstance(model, Policy) else model.backbone


def checkpoint_gradients(model: nn.Module) -> None:
    """Makes a policy or critic drop the activations of its layers and compute them again in the backward pass."""
    if isinstance(model, Policy):
        model.stored_logits = 0
    for module in list(model.modules()):
        if isinstance(module, PreTrainedModel) and module.supports_gradient_checkpointing:
            module.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True  # transformers requires it for checkpointing; the modules inside stay in eval mode
            for name, value in vars(layer).items():  # some layers apply dropout themselves
                if "dropout" in name and isinstance(value, float):
                    setattr(layer, name, 0.0)


def compile_layers(model: nn.Module) -> None:
    """Makes decoder layers, and the scores of logits, compile when they first run, for any number of rows and tokens.

    On a GPU with Triton, `logprobs.kernel_scores` scores the logits, compiled or not.

    Call it before `fsdp.shard`. It works in place, so the names of weights do not change.

    Raises:
        ConfigError: the C++ compiler that torch.compile needs is missing.
    """
    if not can_compile():
        raise ConfigError(f"train.compile: this machine has no C++ compiler {_compiler()}")
    # All layers of policy, critic and reference share the code of one function: with and without gradients, ...
    torch._dynamo.config.recompile_limit = 32
    for layer in decoder_layers(model):
        layer.forward = torch.compile(layer.forward, dynamic=True)  # `layer.compile` would include the hooks of FSDP
    if isinstance(model, Policy):
        model.logit_scorer = torch.compile(score_logits)


def can_compile() -> bool:
    """Whether this machine has the C++ compiler that torch.compile needs."""
    return shutil.which(_compiler()) is not None


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _zero(weight: Tensor, seed: int) -> None:
    nn.init.zeros_(weight)


def _normal(weight: Tensor, seed: int) -> None:
    nn.init.normal_(weight, std=(weight.shape[1] + 1) ** -0.5, generator=torch.Generator().manual_seed(seed))


VALUE_HEADS = {"zero": _zero, "normal": _normal}
"""initial weights of a new value head; normal: Stiennon et al. 2020 (arXiv 2009.01325), app. B.1"""


def _value_head(hidden_size: int, kind: str, seed: int) -> nn.Linear:
    head = nn.Linear(hidden_size, 1)
    VALUE_HEADS[kind](head.weight, seed)
    nn.init.zeros_(head.bias)
    return head


@torch.no_grad()
def _check_logits(policy: Policy, path: str) -> None:
    """Refuses models that change hidden states before the output layer, or logits after it: Policy does neither.

    For the check the output layer returns logits from -100 to 100, so that a change shows for any weights.
    """
    lm: Any = policy.lm
    head = lm.get_output_embeddings()
    wide = torch.linspace(-100.0, 100.0, head.weight.shape[0])
    head_inputs: list[Tensor] = []

    def widen(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        head_inputs.append(inputs[0])
        return wide.expand_as(output)

    ids = torch.tensor([[0, 1, 2, 3]])
    hook = head.register_forward_hook(widen)
    logits = lm(input_ids=ids, use_cache=False).logits
    hook.remove()
    hidden = lm.base_model(input_ids=ids, use_cache=False).last_hidden_state
    if not torch.allclose(logits, wide.expand_as(logits)) or not torch.allclose(head_inputs[0], hidden, rtol=1e-4):
        raise ConfigError(f"model.path {path}: this architecture changes the input or the output of its output layer")
