"""A checkpoint's policy as a Hugging Face folder that transformers and vLLM load, or its adapters as one for peft.

The tensors are read straight from the checkpoint's files into a model on the CPU: no cluster, no process group. What
has been written is loaded afresh and compared with the trainer's model before the folder gets its name. Critics, value
heads and optimizers are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlx.config.errors import ConfigError, one_line
from rlx.config.run import RunConfig
from rlx.config.sections import ALL_LAYERS
from rlx.data import prompts, sources
from rlx.models import loading, lora
from rlx.models.policy import Policy
from rlx.models.tiny import atomic_folder, no_progress_bars
from rlx.rollout.weight_sync import gather
from rlx.runs import preflight
from rlx.storage import checkpoint_catalog, checkpoint_files, checkpoint_keys
from rlx.storage.checkpoint_catalog import CheckpointEntry
from rlx.storage.filesystem import retry
from rlx.training import experience, setup
from rlx.types import Completion, Prompt, ScoredCompletion

PROMPTS, TOKENS = 8, 8  # what the comparison is made on: held-out prompts, and tokens after each
_LIMITS = {"float32": 1e-4, "bfloat16": 0.2}
"""largest difference of a log-probability: sums in another order, or weights rounded to eight bits"""


class ExportError(RuntimeError):
    """What was written is not the policy that was trained; nothing of it is left."""


@dataclass(frozen=True, slots=True)
class Export:
    """Which of a checkpoint's weights, and how."""

    config: RunConfig  # of the run
    average: bool = False  # the average of the policy's weights rather than the last ones
    adapter: bool = False  # the adapters alone, for peft, rather than merged into the model


def export(found: CheckpointEntry, wanted: Export, folder: Path) -> float:
    """Writes a checkpoint's policy as a Hugging Face folder, in the config's dtype, whole or not at all.

    Args:
        found: a whole checkpoint; the checksums of all its files are verified first.
        folder: must not be there yet, or be empty.

    Returns:
        The largest difference between a log-probability that the trainer's float32 policy gives and that of what was
        written, on the run's own held-out prompts.

    Raises:
        ConfigError: the checkpoint has no such weights, or the run's model cannot be loaded.
        DamagedError, CheckpointError: the checkpoint's files are not what was written, or not of this model.
        StorageError, OSError: it cannot be read, or the folder cannot be written.
        ExportError: what was written differs from what was trained.
    """
    assert found.manifest
    _check(wanted)
    retry(partial(checkpoint_catalog.verify, found, found.manifest.files), f"reading checkpoint {found.name}")
    path = preflight.model_folder(wanted.config)
    with no_progress_bars():
        policy, tokenizer = _loaded(wanted.config, path)
        retry(partial(_fill, policy, found, wanted.average), f"reading checkpoint {found.name}")
        completions = _completions(policy, tokenizer, wanted.config)
        trained = _scored(policy, completions)
        with atomic_folder(folder) as unfinished:
            _write(policy, tokenizer, wanted, path, unfinished)
            apart = float((trained - _scored_afresh(unfinished, wanted, path, completions)).abs().max())
            limit = _LIMITS[wanted.config.model.dtype]
            if not apart <= limit:  # nor NaN
                raise ExportError(
                    f"what was written gives other log-probabilities than the policy that was trained: they differ by "
                    f"up to {apart:.2g}, more than {limit:g}; nothing is left of it"
                )
    return apart


def _check(wanted: Export) -> None:
    config = wanted.config
    if wanted.average and config.train.ema_decay is None:
        raise ConfigError(f"run {config.name} keeps no average of its weights: it has no train.ema_decay")
    if wanted.adapter and not config.model.lora_rank:
        raise ConfigError(f"run {config.name} has no adapters: its model.lora_rank is 0")


def _loaded(config: RunConfig, path: str) -> tuple[Policy, Any]:
    """The policy as the trainer builds it, without a value head, and its tokenizer; ConfigError if there is none."""
    trust = config.model.trust_remote_code
    try:
        policy = loading.load_policy(
            path, head=None, adapters=setup.adapters(config.model, config.seed), trust_remote_code=trust
        )
        return policy, prompts.load_tokenizer(path, trust)
    except (OSError, ValueError) as error:  # transformers' are of many lines
        raise ConfigError(one_line(error)) from None


@torch.no_grad()
def _fill(policy: Policy, found: CheckpointEntry, average: bool) -> None:
    """Puts the checkpoint's weights into the policy; frozen ones are not in it, and stay as the model folder has
    them."""
    with checkpoint_files.CheckpointReader(found.files) as parts:
        for name, weight in policy.named_parameters():
            if weight.requires_grad:
                key = checkpoint_keys.ema_weight(name) if average else checkpoint_keys.model_weight("policy", name)
                weight.copy_(parts.read(key, (0,) * weight.dim(), weight.shape, weight.shape))


# ---------------------------------------------------------------------------------------------------------------------
# What is written


def _write(policy: Policy, tokenizer: Any, wanted: Export, path: str, folder: Path) -> None:
    """The folder's files; the policy's adapters are merged for good, and its weights change their precision."""
    dtype = getattr(torch, wanted.config.model.dtype)
    try:
        if wanted.adapter:
            _write_adapters(policy, wanted.config, path, dtype, folder)
        else:
            _write_model(policy, tokenizer, dtype, folder)
    except (SafetensorError, ValueError) as error:  # a full disk; settings that transformers reads but does not write
        raise OSError(f"the folder cannot be written: {one_line(error)}") from None
    for part in (folder, *folder.rglob("*")):  # a temporary folder and what safetensors writes are their owner's alone
        part.chmod(0o755 if part.is_dir() else 0o644)


def _write_model(policy: Policy, tokenizer: Any, dtype: torch.dtype, folder: Path) -> None:
    _merge(policy)
    for weight in policy.parameters():  # not Module.to: buffers keep their precision, as under FSDP
        weight.data = weight.data.to(dtype)
    lm: Any = policy.lm
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def _merge(policy: Policy) -> None:
    """Puts what engines are sent in the place of weights with adapters beside them."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    weights = {weight.name: weight for weight in lora.engine_weights(policy)}
    for name, layer in list(policy.lm.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            base: Any = layer.get_base_layer()
            base.weight.copy_(*gather.gather_full([weights[f"{name}.weight"]], base.weight.dtype))
            policy.lm.set_submodule(name, base)


def _write_adapters(policy: Policy, config: RunConfig, path: str, dtype: torch.dtype, folder: Path) -> None:
    from peft import LoraConfig

    chosen = config.model
    LoraConfig(
        r=chosen.lora_rank,
        lora_alpha=chosen.lora_alpha,  # type: ignore[arg-type]
        target_modules=list(chosen.lora_targets) or ALL_LAYERS,
        base_model_name_or_path=path,
        task_type="CAUSAL_LM",
        inference_mode=True,
    ).save_pretrained(str(folder))
    weights = lora.adapter_weights(policy)
    full = gather.gather_full(weights, dtype)
    tensors = {weight.name: tensor.to(dtype).contiguous() for weight, tensor in zip(weights, full, strict=True)}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


# ---------------------------------------------------------------------------------------------------------------------
# What is compared


@torch.no_grad()
def _completions(policy: Policy, tokenizer: Any, config: RunConfig) -> list[Completion]:
    """The policy's likeliest tokens after held-out prompts; after sums, if those are in a file, which need not be on
    this machine."""
    lm: Any = policy.lm
    count = min(TOKENS, config.rollout.max_tokens)  # the model may have no more positions
    drawn = []
    for row in sources.sample_questions(config.data, config.eval.seed, PROMPTS):
        ids = prompts.encode_prompt(tokenizer, row["question"], config.data.system_prompt)[
            -config.data.max_prompt_tokens :
        ]
        prompt = Prompt(row["entry"], tuple(ids), row["question"], row["answer"])
        found = lm.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
        )
        tokens = tuple(found[0, len(ids) :].tolist())
        drawn.append(Completion(prompt, 0, tokens, (0.0,) * len(tokens), True, 0))
    return drawn


@torch.no_grad()
def _scored(policy: Policy, completions: Sequence[Completion]) -> Tensor:
    """`[B, T]` log-probabilities as the trainer has them, at temperature 1."""
    batch = experience.build_batch([ScoredCompletion(one, 0.0, False, {}) for one in completions], 0)
    scored: Tensor = policy(*batch.inputs, 1.0).logprobs
    return scored


@torch.no_grad()
def _scored_afresh(folder: Path, wanted: Export, path: str, completions: Sequence[Completion]) -> Tensor:
    """`[B, T]` the same from what is in the folder, by transformers alone, each completion by itself; reckoned in
    float32, so that what differs is the weights."""
    source, trust = path if wanted.adapter else str(folder), wanted.config.model.trust_remote_code
    lm: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, trust_remote_code=trust).eval()
    if wanted.adapter:
        from peft import PeftModel

        lm = PeftModel.from_pretrained(lm, str(folder))
    rows = []
    for one in completions:
        prompt, tokens = one.prompt.token_ids, torch.tensor(one.token_ids)
        logits = lm(input_ids=torch.tensor([prompt + one.token_ids])).logits[0, len(prompt) - 1 : -1]
        rows.append(torch.log_softmax(logits.float(), dim=-1).gather(-1, tokens[:, None]).squeeze(-1))
    return torch.stack(rows)
