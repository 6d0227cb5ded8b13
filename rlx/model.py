"""The trained models: policy, critic and frozen reference, sharded with FSDP2, scoring responses token by token.

Everything is evaluated without dropout: the ratio of PPO is then exactly 1 before the first update. Padding is on the
right and attention is causal, so no attention mask is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlx.config import ConfigError
from rlx.settings import ALL_LAYERS
from rlx.types import Weight

_ADAPTER = "default"  # peft's name for the only adapter
_BASE = ".base_layer."


@dataclass(frozen=True, slots=True)
class Scored:
    """What a policy says about responses; every tensor `[B, T]` over response tokens, arbitrary where padded."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None  # of a value head on the policy


class Policy(nn.Module):
    """A causal language model that scores given responses, with a value head if the critic shares its layers."""

    def __init__(self, lm: nn.Module, value_head: nn.Module | None = None) -> None:
        super().__init__()
        self.lm = lm
        self.value_head = value_head

    def forward(
        self, ids: Tensor, prompt_lengths: Tensor, width: int, temperature: float, entropy_grad: bool = False
    ) -> Scored:
        """Scores the `width` tokens after each prompt.

        Args:
            ids: `[B, L]`, prompt then response then padding.
            prompt_lengths: `[B]`.
            width: T, the longest response.
            temperature: the logits are divided by it, as they were when the response was drawn.
            entropy_grad: let gradients flow through the entropy.
        """
        lm: Any = self.lm
        hidden = _at_responses(lm.base_model, ids, prompt_lengths, width)
        scores = torch.log_softmax(lm.get_output_embeddings()(hidden).float() / temperature, dim=-1)
        targets = ids.gather(1, (_positions(prompt_lengths, width) + 1).clamp(max=ids.shape[1] - 1))
        logprobs = scores.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        # A graph of the entropy keeps two more tensors of the size of the scores.
        with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
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


@dataclass(frozen=True, slots=True)
class Adapters:
    """Low-rank adapters beside frozen weights: W + alpha / rank * B A (Hu et al. 2021, arXiv 2106.09685)."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # names of linear layers; none: all but the output layer
    seed: int  # of A; B is zero, so that a policy starts as its reference


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
        _adapt(lm, adapters)
    return policy


def load_critic(path: str, *, head: str, seed: int = 0, trust_remote_code: bool = False) -> Critic:
    """A critic that starts from the same weights as the policy, with a new value head."""
    backbone = AutoModel.from_pretrained(path, dtype=torch.float32, trust_remote_code=trust_remote_code).eval()
    return Critic(backbone, _value_head(backbone.config.hidden_size, head, seed))


def load_reference(path: str, *, trust_remote_code: bool = False) -> Policy:
    """A frozen copy of the policy's start."""
    return load_policy(path, head=None, trust_remote_code=trust_remote_code).requires_grad_(False)


def checkpoint_gradients(part: nn.Module) -> None:
    """Has decoder layers forget their activations and compute them again in the backward pass."""
    for module in list(part.modules()):
        if isinstance(module, PreTrainedModel) and module.supports_gradient_checkpointing:
            module.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in part.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True  # what transformers asks for it; all within the layer stays in eval mode
            for name, value in vars(layer).items():  # some layers drop out by themselves
                if "dropout" in name and isinstance(value, float):
                    setattr(layer, name, 0.0)


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


def gathered(tensor: Tensor) -> Tensor:
    """The full tensor of an FSDP shard; all ranks call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextmanager
def adapters_off(policy: nn.Module) -> Iterator[None]:
    """Within it the policy is what it was before its adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [part for part in policy.modules() if isinstance(part, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True  # its own method also makes the adapters untrainable
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def engine_weights(policy: nn.Module) -> list[Weight]:
    """The policy's weights as the engines load them: Hugging Face names, adapters merged in, no value head."""
    named = {name.removeprefix("lm."): p for name, p in policy.named_parameters() if name.startswith("lm.")}
    scales = {
        name.removeprefix("lm."): part.scaling for name, part in policy.named_modules() if hasattr(part, "scaling")
    }

    def weight(name: str, base: Tensor) -> Weight:
        layer = name.removesuffix(f"{_BASE}weight")
        down, up = (named.get(f"{layer}.{side}.{_ADAPTER}.weight") for side in ("lora_A", "lora_B"))
        if layer == name or down is None or up is None:
            return Weight(name.replace(_BASE, "."), tuple(base.shape), (base,))
        return Weight(
            f"{layer}.weight", tuple(base.shape), (base, down, up), partial(_merged, scale=scales[layer][_ADAPTER])
        )

    return [weight(name, p) for name, p in named.items() if ".lora_" not in name]


def adapter_weights(policy: nn.Module) -> list[Weight]:
    """The adapters alone, under the names that peft gives them in a file."""
    named = [(name, p) for name, p in policy.named_parameters() if ".lora_" in name]
    return [
        Weight(
            f"base_model.model.{name.removeprefix('lm.').replace(f'.{_ADAPTER}.', '.')}",
            tuple(p.shape),
            (p,),
        )
        for name, p in named
    ]


def _merged(base: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    return base + scale * (up @ down)


def _adapt(lm: Any, adapters: Adapters) -> None:
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    targets, where = list(adapters.targets) or ALL_LAYERS, f"model.lora_targets {', '.join(adapters.targets)}"
    config = LoraConfig(r=adapters.rank, lora_alpha=adapters.alpha, target_modules=targets)  # type: ignore[arg-type]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(adapters.seed)  # every rank draws the same
        try:
            inject_adapter_in_model(config, lm, adapter_name=_ADAPTER)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
    for name, layer in lm.named_modules():
        if isinstance(layer, BaseTunerLayer) and not isinstance(layer.get_base_layer(), nn.Linear):
            raise ConfigError(f"{where}: {name} is no linear layer, and only these reach the engines")
    if isinstance(lm.get_output_embeddings(), BaseTunerLayer) and lm.config.tie_word_embeddings:
        raise ConfigError(
            f"{where}: the output layer is tied to the embedding here, its adapters would not reach the engines"
        )


def _positions(prompt_lengths: Tensor, width: int) -> Tensor:
    """[B, T] the position whose output scores each response token: the one before it."""
    return prompt_lengths.unsqueeze(1) - 1 + torch.arange(width, device=prompt_lengths.device)


def _at_responses(backbone: nn.Module, ids: Tensor, prompt_lengths: Tensor, width: int) -> Tensor:
    """[B, T, H] last hidden states where responses are scored, so that no logits of prompts are ever made."""
    hidden = backbone(input_ids=ids, use_cache=False).last_hidden_state
    index = _positions(prompt_lengths, width).clamp(max=ids.shape[1] - 1)
    return hidden.gather(1, index.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))


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
