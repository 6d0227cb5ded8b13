"""Loads policy, critic and reference from a Hugging Face folder, and prepares them for training.

Left out: sharding (fsdp, tensor_parallel), which gives weights their precision, and which models a run needs
(training). The functions here change a model before it is sharded.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from rlx.config.errors import ConfigError, one_line
from rlx.config.sections.model import ModelConfig
from rlx.models.fsdp import decoder_layers
from rlx.models.logprobs import score_logits
from rlx.models.lora import Adapters, add_adapters, check_targets
from rlx.models.policy import Critic, Policy

Precision = torch.dtype | Literal["auto"]
"""type of weights when they are loaded; "auto": the one in which the model was saved"""


def load_policy(
    path: str,
    *,
    head: str | None,
    seed: int = 0,
    adapters: Adapters | None = None,
    trust_remote_code: bool = False,
    dtype: Precision = torch.float32,
    setting: str = "model.path",
) -> Policy:
    """Loads the model in `path`, not sharded.

    Args:
        head: how a value head is initialised, a key of VALUE_HEADS; None: the policy has no value head.
        seed: of the value head.
        adapters: are trained instead of the weights.
        dtype: of the weights.
        setting: where the path comes from, for the text of errors.

    Raises:
        ConfigError: the model computes logits from hidden states in a way that Policy does not, or it lacks the layers
            that adapters are for.
    """
    lm = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=trust_remote_code).eval()
    policy = Policy(lm, _value_head(lm.config.hidden_size, head, seed) if head else None)
    _check_logits(policy, f"{setting} {path}")
    if adapters:
        add_adapters(lm, adapters)
    return policy


def check_adapted_layers(path: str, model: ModelConfig) -> None:
    """Raises ConfigError if the model in `path` lacks the layers of model.lora_targets; its weights are not read."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=model.trust_remote_code)
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path {path}: {one_line(error, 200)}") from None
    check_targets(lm, model.lora_targets)


def end_tokens(path: str, tokenizer: Any, trust_remote_code: bool = False) -> tuple[int, ...]:
    """Returns the tokens that end an answer of the model: its tokenizer's EOS first, then those of its
    generation_config.json, or of its config.json if it has none.

    vLLM ends answers with all of them, asked or not, and draws none before `rollout.min_tokens`
    (`SamplingParams.update_from_generation_config`); so the trainer has to know them, too.
    """
    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:  # there is no such file
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        generation = GenerationConfig.from_model_config(config)
    further = generation.eos_token_id
    ends = [tokenizer.eos_token_id, *(further if isinstance(further, list) else [further])]
    return tuple(dict.fromkeys(end for end in ends if end is not None))


def load_critic(
    path: str,
    *,
    head: str,
    seed: int = 0,
    trust_remote_code: bool = False,
    dtype: Precision = torch.float32,
    setting: str = "model.path",
) -> Critic:
    """Loads a critic with the weights in `path`, those of the policy, of a reward model or of any other model.

    A reward model is a sequence classifier with one label; the layer that gives its score becomes the value head, as in
    Ouyang et al. 2022 (arXiv 2203.02155) app. C.4. Other models get a new head.

    Args:
        head: how a new head is initialised, a key of VALUE_HEADS.
        seed: of a new head.
        dtype: of the transformer's weights.
        setting: where the path comes from, for the text of errors.

    Raises:
        ConfigError: a classifier has several labels or no linear layer that scores, or a token's output depends on
            later tokens.
    """
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    if any(name.endswith("ForSequenceClassification") for name in config.architectures or ()):
        classifier = AutoModelForSequenceClassification.from_pretrained(path, **options).eval()
        backbone, value_head = classifier.base_model, _score_head(classifier, f"{setting} {path}")
    else:
        backbone = AutoModel.from_pretrained(path, **options).eval()
        value_head = _value_head(backbone.config.hidden_size, head, seed)
    if not _is_causal(backbone):
        raise ConfigError(
            f"{setting} {path}: a critic's values may not depend on later tokens, as those of this model do"
        )
    return Critic(backbone, value_head)


def _score_head(classifier: Any, where: str) -> nn.Linear:
    """A value head with the weights of the layer that scores; 0 where that layer has no bias."""
    score = getattr(classifier, "score", None)
    if not isinstance(score, nn.Linear) or score.out_features != 1:
        raise ConfigError(f"{where}: its classifier has no linear layer `score` for one label")
    head = nn.Linear(score.in_features, 1)
    with torch.no_grad():
        head.weight.copy_(score.weight)
        head.bias.copy_(torch.zeros(1) if score.bias is None else score.bias)
    return head


@torch.no_grad()
def _is_causal(backbone: Any) -> bool:
    """Whether a token's output depends on it and earlier tokens alone, tried on two texts of different ends."""
    ends = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4]])
    states = backbone(input_ids=ends, use_cache=False).last_hidden_state[:, :3]
    return torch.allclose(states[0], states[1], rtol=1e-3, atol=1e-3 * float(states.abs().max()))


def load_reference(
    path: str,
    *,
    adapters: Adapters | None = None,
    trust_remote_code: bool = False,
    dtype: Precision = torch.float32,
    setting: str = "model.path",
) -> Policy:
    """Loads a frozen policy: the reference that the KL is measured to; with adapters, which change nothing at first."""
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "dtype": dtype, "setting": setting}
    policy = load_policy(path, head=None, adapters=adapters, **options)
    return policy.requires_grad_(False)


def transformer(model: Any) -> Any:
    """The model of transformers in a policy or critic."""
    return model.lm if isinstance(model, Policy) else model.backbone


def checkpoint_gradients(model: nn.Module, share: float = 1.0) -> None:
    """Makes a policy or critic drop the activations of its layers, or of the first ones up to a share of them, and
    compute them again in the backward pass."""
    if isinstance(model, Policy):
        model.stored_logits = 0
    for module in list(model.modules()):
        if isinstance(module, PreTrainedModel) and module.supports_gradient_checkpointing:
            module.gradient_checkpointing_enable({"use_reentrant": False})
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for place, layer in enumerate(layers):
        layer.gradient_checkpointing = place < math.ceil(len(layers) * share)
        if layer.gradient_checkpointing:
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
        layer.forward = _for_any_shape(torch.compile(layer.forward))  # `layer.compile` would include the hooks of FSDP
    if isinstance(model, Policy):
        model.logit_scorer = torch.compile(score_logits)


def _for_any_shape(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled function that takes tensors of any shape from its first call on.

    With `dynamic=True` the numbers that FSDP's modules hold, such as the size of a head, would be unknown to it, too,
    and rotary embeddings would take ten times as long.
    """

    def run(*given: Any, **named: Any) -> Any:
        for tensor in _tensors((given, named)):
            for dim in range(tensor.ndim):
                torch._dynamo.maybe_mark_dynamic(tensor, dim)
        return compiled(*given, **named)

    return run


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in tuples, lists and dicts, however deep."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


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
def _check_logits(policy: Policy, where: str) -> None:
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
        raise ConfigError(f"{where}: this architecture changes the input or the output of its output layer")
