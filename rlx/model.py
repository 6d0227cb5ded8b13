"""The trained models: policy, critic and frozen reference, sharded with FSDP2, scoring responses token by token.

Everything is evaluated without dropout: scored twice, a token has the same log-probability. Padding is on the
right and attention is causal, so no attention mask is needed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlx.config.errors import ConfigError
from rlx.config.sections import ALL_LAYERS
from rlx.logprobs import KEPT, Scores, logit_scores, token_logprobs
from rlx.types import Weight

_ADAPTER = "default"  # peft's name for the only adapter
_BASE = ".base_layer."
UNIT = 2**27
"""weights of decoder layers that are gathered together: 256 MiB in bfloat16"""


class Tokens:
    """The N response tokens of padded rows, row by row: no head is ever applied to prompts or padding."""

    def __init__(self, ids: Tensor, prompt_lengths: Tensor, mask: Tensor, places: tuple[Tensor, Tensor]) -> None:
        """See `Policy.forward`."""
        self._ids, self._shape, self._places = ids, mask.shape, places
        rows, columns = places
        self._before = rows * ids.shape[1] + prompt_lengths[rows] - 1 + columns  # the position whose output scores it

    @property
    def targets(self) -> Tensor:
        """`[N]` token ids."""
        return self._ids.flatten()[self._before + 1]

    def hidden(self, backbone: nn.Module) -> Tensor:
        """`[N, H]` last hidden states, of the position before each token."""
        states = backbone(input_ids=self._ids, use_cache=False).last_hidden_state
        return states.flatten(0, 1).index_select(0, self._before)

    def grid(self, flat: Tensor) -> Tensor:
        """`[B, T]` of a number for each token, `[N]`; zero where there is none."""
        return flat.new_zeros(self._shape).index_put(self._places, flat)


class Scored(NamedTuple):
    """What a policy says about responses; every tensor `[B, T]` float32 over response tokens, zero where padded.

    A tuple, as FSDP in torch 2.11 finds no tensors in a dataclass, and without them no end of the backward pass.
    """

    logprobs: Tensor
    entropy: Tensor | None  # if it was asked for
    values: Tensor | None  # of a value head on the policy


class Policy(nn.Module):
    """A causal language model that scores given responses, with a value head if the critic shares its layers."""

    def __init__(self, lm: nn.Module, value_head: nn.Module | None = None) -> None:
        super().__init__()
        self.lm = lm
        self.value_head = value_head
        self.scores: Scores = logit_scores  # or the same, compiled
        self.kept = KEPT  # roles.py gives a GPU's number; 0 where memory counts more than time

    def forward(
        self,
        ids: Tensor,
        prompt_lengths: Tensor,
        mask: Tensor,
        places: tuple[Tensor, Tensor],
        temperature: float,
        entropy: bool = False,
    ) -> Scored:
        """Scores the response tokens.

        Args:
            ids: `[B, L]`, prompt then response then padding.
            prompt_lengths: `[B]`.
            mask: `[B, T]`, 1 where column t is scored: the t-th token after the prompt.
            places: `[N]` each, the rows and columns of these ones, row by row.
            temperature: the logits are divided by it, as they were when the response was drawn.
            entropy: whether that of each token's distribution is wanted too.
        """
        lm: Any = self.lm
        tokens = Tokens(ids, prompt_lengths, mask, places)
        hidden, head = tokens.hidden(lm.base_model), lm.get_output_embeddings()
        vocabulary, targets = head.weight.shape[0], tokens.targets
        logprobs, entropies = token_logprobs(
            head, vocabulary, hidden, targets, temperature, entropy, self.scores, self.kept
        )
        values = None if self.value_head is None else self.value_head(hidden).squeeze(-1).float()
        spread = None if entropies is None else tokens.grid(entropies)
        return Scored(tokens.grid(logprobs), spread, None if values is None else tokens.grid(values))


class Critic(nn.Module):
    """A transformer of its own with a value head."""

    def __init__(self, backbone: nn.Module, value_head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.value_head = value_head

    def forward(self, ids: Tensor, prompt_lengths: Tensor, mask: Tensor, places: tuple[Tensor, Tensor]) -> Tensor:
        """Values `[B, T]`: column t is the value before the response's token t is drawn, zero where padded."""
        tokens = Tokens(ids, prompt_lengths, mask, places)
        return tokens.grid(self.value_head(tokens.hidden(self.backbone)).squeeze(-1).float())


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
        part.scores = torch.compile(logit_scores)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that a model repeats: what its architecture says is not to be split."""
    names = {name for part in model.modules() for name in (getattr(part, "_no_split_modules", None) or ())}
    return [part for part in model.modules() if type(part).__name__ in names]


def shard(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, offload: bool = False) -> nn.Module:
    """Moves a model to the mesh's devices, one shard per rank: each few decoder layers a unit, the rest another.

    Weights stay float32; forward and backward run in `dtype`, gradients are reduced in float32. What is gathered at a
    time is a unit: a layer of a large model, several of a small one, where Python's part in it would take longer than
    the GPU's.

    Args:
        offload: shards, their gradients and with them the optimizer stay in host memory, and a unit's weights are
            brought to the device when its turn comes.
    """
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    home = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    model.to(mesh.device_type)
    # Where no other rank has a part, giving weights up between forward and backward would free little.
    after = False if mesh.size() == 1 and not offload else None
    for unit in (*_units(decoder_layers(model)), [model]):
        fully_shard(unit, mesh=mesh, mp_policy=precision, offload_policy=home, reshard_after_forward=after)
    return model


def reshard(model: nn.Module) -> None:
    """Gives up what forward passes have left gathered, which is no part of the weights that are trained."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _units(layers: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Runs of layers with at least UNIT weights together; none if there would be only one."""
    units: list[list[nn.Module]] = [[]]
    for layer in layers:
        if sum(p.numel() for one in units[-1] for p in one.parameters()) >= UNIT:
            units.append([])
        units[-1].append(layer)
    return units if len(units) > 1 else []


def gathered(tensor: Tensor) -> Tensor:
    """The full tensor of an FSDP shard; all ranks call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip_gradients(model: nn.Module, limit: float) -> Tensor:
    """Scales gradients down to a global norm of at most `limit`; gives the norm before, a scalar on its device, so that
    nobody has to wait for it. All ranks call it."""
    meshes: dict[Any, list[Tensor]] = {}  # layers that are cut lie on one of two dimensions; torch takes one at a time
    for weight in model.parameters():
        if weight.grad is not None:
            meshes.setdefault(getattr(weight, "device_mesh", None), []).append(weight)
    gradients = ([w.grad for w in weights if w.grad is not None] for weights in meshes.values())
    norm = nn.utils.get_total_norm([gathered(nn.utils.get_total_norm(of_one)) for of_one in gradients])
    for weights in meshes.values():
        nn.utils.clip_grads_with_norm_(weights, limit, norm)
    return norm


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

    def weight(name: str, base: Tensor) -> Weight:
        layer = name.removesuffix(f"{_BASE}weight")
        down, up = (named.get(f"{layer}.{side}.{_ADAPTER}.weight") for side in ("lora_A", "lora_B"))
        if layer == name or down is None or up is None:
            return Weight(name.replace(_BASE, "."), tuple(base.shape), (base,))
        adapted: Any = policy.get_submodule(f"lm.{layer}")
        merged = partial(_merged, scale=adapted.scaling[_ADAPTER])
        return Weight(f"{layer}.weight", tuple(base.shape), (base, down, up), merged)

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
