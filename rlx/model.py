"""The trained models: policy, critic and frozen reference, sharded with FSDP2, scoring responses token by token.

Everything is evaluated without dropout: the ratio of PPO is then exactly 1 before the first update. Padding is on the
right and attention is causal, so no attention mask is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModel, AutoModelForCausalLM

from rlx.config import ConfigError


@dataclass(frozen=True, slots=True)
class Scored:
    """What a policy says about responses; every tensor `[B, T]` over response tokens, arbitrary where padded."""

    logprobs: Tensor
    entropy: Tensor  # without gradient: it is a statistic only
    values: Tensor | None  # of a value head on the policy


class Policy(nn.Module):
    """A causal language model that scores given responses, with a value head if the critic shares its layers."""

    def __init__(self, lm: nn.Module, value_head: nn.Module | None = None) -> None:
        super().__init__()
        self.lm = lm
        self.value_head = value_head

    def forward(self, ids: Tensor, prompt_lengths: Tensor, width: int, temperature: float) -> Scored:
        """Scores the `width` tokens after each prompt.

        Args:
            ids: `[B, L]`, prompt then response then padding.
            prompt_lengths: `[B]`.
            width: T, the longest response.
            temperature: the logits are divided by it, as they were when the response was drawn.
        """
        lm: Any = self.lm
        hidden = _at_responses(lm.base_model, ids, prompt_lengths, width)
        scores = torch.log_softmax(lm.get_output_embeddings()(hidden).float() / temperature, dim=-1)
        targets = ids.gather(1, (_positions(prompt_lengths, width) + 1).clamp(max=ids.shape[1] - 1))
        logprobs = scores.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():  # its graph would keep two more tensors of the size of the scores
            entropy = -(scores.exp() * scores).sum(-1)
        values = None if self.value_head is None else self.value_head(hidden).squeeze(-1).float()
        return Scored(logprobs, entropy, values)


class Critic(nn.Module):
    """A transformer of its own with a value head."""

    def __init__(self, backbone: nn.Module, value_head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.value_head = value_head

    def forward(self, ids: Tensor, prompt_lengths: Tensor, width: int) -> Tensor:
        """Values `[B, T]`: column t is the value before the response's token t is drawn."""
        hidden = _at_responses(self.backbone, ids, prompt_lengths, width)
        return self.value_head(hidden).squeeze(-1).float()


def load_policy(path: str, *, head: bool, trust_remote_code: bool = False) -> Policy:
    """The model in `path` with float32 weights, not sharded yet.

    Args:
        head: add a value head, its weights zero, so that the first values are zero.

    Raises:
        ConfigError: the model turns hidden states into logits in some way that Policy does not repeat.
    """
    lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, trust_remote_code=trust_remote_code).eval()
    policy = Policy(lm, _value_head(lm.config.hidden_size) if head else None)
    _check_logits(policy, path)
    return policy


def load_critic(path: str, *, trust_remote_code: bool = False) -> Critic:
    """A critic that starts from the same weights as the policy, its value head zero."""
    backbone = AutoModel.from_pretrained(path, dtype=torch.float32, trust_remote_code=trust_remote_code).eval()
    return Critic(backbone, _value_head(backbone.config.hidden_size))


def load_reference(path: str, *, trust_remote_code: bool = False) -> Policy:
    """A frozen copy of the policy's start."""
    return load_policy(path, head=False, trust_remote_code=trust_remote_code).requires_grad_(False)


def shard(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> nn.Module:
    """Moves a model to the mesh's devices, one shard per rank: each decoder layer a unit, the rest another.

    Weights stay float32; forward and backward run in `dtype`, gradients are reduced in float32.
    """
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    names = {name for part in model.modules() for name in (getattr(part, "_no_split_modules", None) or ())}
    model.to(mesh.device_type)
    for part in list(model.modules()):
        if type(part).__name__ in names:
            fully_shard(part, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    return model


def engine_parameters(policy: nn.Module) -> list[tuple[str, Tensor]]:
    """The policy's parameters under their Hugging Face names, as the engines load them; no value head."""
    return [(name.removeprefix("lm."), p) for name, p in policy.named_parameters() if name.startswith("lm.")]


def _positions(prompt_lengths: Tensor, width: int) -> Tensor:
    """[B, T] the position whose output scores each response token: the one before it."""
    return prompt_lengths.unsqueeze(1) - 1 + torch.arange(width, device=prompt_lengths.device)


def _at_responses(backbone: nn.Module, ids: Tensor, prompt_lengths: Tensor, width: int) -> Tensor:
    """[B, T, H] last hidden states where responses are scored, so that no logits of prompts are ever made."""
    hidden = backbone(input_ids=ids, use_cache=False).last_hidden_state
    index = _positions(prompt_lengths, width).clamp(max=ids.shape[1] - 1)
    return hidden.gather(1, index.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))


def _value_head(hidden_size: int) -> nn.Linear:
    head = nn.Linear(hidden_size, 1)
    nn.init.zeros_(head.weight)
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
