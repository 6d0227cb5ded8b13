"""A checkpoint's policy as a Hugging Face folder that transformers and vLLM load, or its adapters as one for peft.

The tensors are read from the checkpoint's files into a model on the CPU, without a cluster or a process group. The
written folder is loaded again and compared with the trainer's model before it gets its final name.
Left out: critics, value heads and optimizers.
"""

from __future__ import annotations

import logging
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
from rlx.config.loading import from_tree
from rlx.config.run import RunConfig
from rlx.config.sections.data import DataConfig
from rlx.config.sections.model import ALL_LAYERS, ModelConfig
from rlx.data import prompts, sources
from rlx.models import loading, lora
from rlx.models.policy import Policy
from rlx.models.tiny import atomic_folder, no_progress_bars
from rlx.rollout.weight_sync import gather
from rlx.runs import preflight, run_folder
from rlx.storage import checkpoint_catalog, checkpoint_files, checkpoint_keys, signatures
from rlx.storage.checkpoint_catalog import CheckpointEntry
from rlx.storage.filesystem import retry
from rlx.training import experience
from rlx.training.setup.models import adapters_of
from rlx.types import Completion, Prompt

_LOG = logging.getLogger("rlx")
PROMPTS, TOKENS = 8, 8  # of the comparison: held-out prompts, and tokens after each
_LIMITS = {"float32": 1e-4, "bfloat16": 0.2}
"""largest accepted difference of a log-probability, by dtype: from the order of sums, or from rounded weights"""


class ExportError(RuntimeError):
    """The written folder is not the trained policy; it was deleted."""


@dataclass(frozen=True, slots=True)
class Export:
    """Which weights of a checkpoint to export, and how."""

    config: RunConfig  # of the run
    average: bool = False  # the average of the policy's weights instead of the last ones
    adapter: bool = False  # the adapters alone, for peft, instead of the model with adapters merged in


def export(checkpoint: CheckpointEntry, options: Export, folder: Path) -> float:
    """Writes a checkpoint's policy as a Hugging Face folder in the config's dtype: completely or not at all.

    Args:
        checkpoint: a complete checkpoint; the checksums of all its files are verified first.
        folder: must not exist yet, or be empty.

    Returns:
        The largest difference between the log-probabilities of the trainer's float32 policy and of the written folder,
        on the run's held-out prompts.

    Raises:
        ConfigError: the checkpoint has no such weights, or the run's model cannot be loaded.
        DamagedError, CheckpointError: the checkpoint's files are not what was written, or not of this model.
        StorageError, OSError: the checkpoint cannot be read, or the folder cannot be written.
        ExportError: the written policy differs from the trained one.
    """
    assert checkpoint.manifest
    config = options.config
    _check_options(options)
    reading = f"reading checkpoint {checkpoint.name}"
    retry(partial(checkpoint_catalog.verify, checkpoint, checkpoint.manifest.files), reading)
    path = preflight.model_folder(config.model.path, config.storage)
    with no_progress_bars():
        policy, tokenizer = _load(config.model, config.seed, path)
        retry(partial(_fill, policy, checkpoint, options.average), reading)
        count = min(TOKENS, config.rollout.max_tokens)  # the model may have no more positions
        completions = _completions(policy, tokenizer, config.data, config.eval.seed, count)
        trained = _trainer_logprobs(policy, completions)
        with atomic_folder(folder) as unfinished:
            _write(policy, tokenizer, options, path, unfinished)
            written = _written_logprobs(unfinished, options, path, completions)
            return _checked_difference(trained, written, _LIMITS[config.model.dtype])


def exported_model(checkpoint: CheckpointEntry, storage: str) -> tuple[Any, Any]:
    """Returns a checkpoint's policy as a model of transformers, in float32, adapters merged in, and its tokenizer.

    model.trust_remote_code counts as unset if somebody else wrote the checkpoint.

    Args:
        storage: the address of the storage in which a model of rlx's own is, or is made: not that in the checkpoint,
            which may have been moved, or be another person's.

    Raises:
        ConfigError, DamagedError, CheckpointError, StorageError, OSError: as `export`.
    """
    assert checkpoint.manifest
    used = signatures.USED_BY_EXPORTS
    config = from_tree(run_folder.inherited_settings(checkpoint, _LOG.warning, used=used))
    reading = f"reading checkpoint {checkpoint.name}"
    retry(partial(checkpoint_catalog.verify, checkpoint, checkpoint.manifest.files), reading)
    with no_progress_bars():
        policy, tokenizer = _load(config.model, config.seed, preflight.model_folder(config.model.path, storage))
    retry(partial(_fill, policy, checkpoint, average=False), reading)
    _merge_adapters(policy)
    return policy.lm, tokenizer


def _checked_difference(trained: Tensor, written: Tensor, limit: float) -> float:
    """Returns the largest difference of two `[B, T]` tensors; raises ExportError if it is over the limit or NaN."""
    difference = float((trained - written).abs().max())
    if not difference <= limit:  # NaN is not
        raise ExportError(
            f"the written folder gives other log-probabilities than the trained policy: they differ by up to "
            f"{difference:.2g}, more than {limit:g}; the folder was deleted"
        )
    return difference


def _check_options(options: Export) -> None:
    config = options.config
    if options.average and config.train.ema_decay is None:
        raise ConfigError(f"run {config.name} keeps no average of its weights: it has no train.ema_decay")
    if options.adapter and not config.model.lora_rank:
        raise ConfigError(f"run {config.name} has no adapters: its model.lora_rank is 0")


def _load(model: ModelConfig, seed: int, path: str) -> tuple[Policy, Any]:
    """Returns the policy as the trainer builds it, without a value head, and its tokenizer.

    Raises:
        ConfigError: the model cannot be loaded.
    """
    trust, adapters = model.trust_remote_code, adapters_of(model, seed)
    try:
        policy = loading.load_policy(path, head=None, adapters=adapters, trust_remote_code=trust)
        return policy, prompts.load_tokenizer(path, trust)
    except (OSError, ValueError) as error:  # transformers' errors have many lines
        raise ConfigError(one_line(error)) from None


@torch.no_grad()
def _fill(policy: Policy, checkpoint: CheckpointEntry, average: bool) -> None:
    """Copies the checkpoint's weights into the policy. It has no frozen weights; those stay as loaded."""
    with checkpoint_files.CheckpointReader(checkpoint.files) as reader:
        for name, weight in policy.named_parameters():
            if weight.requires_grad:
                key = checkpoint_keys.ema_weight(name) if average else checkpoint_keys.model_weight("policy", name)
                weight.copy_(reader.read(key, (0,) * weight.dim(), weight.shape, weight.shape))


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def _write(policy: Policy, tokenizer: Any, options: Export, path: str, folder: Path) -> None:
    """Writes the folder's files. Changes the policy: adapters are merged and weights are cast to the config's dtype."""
    dtype = getattr(torch, options.config.model.dtype)
    try:
        if options.adapter:
            _write_adapters(policy, options.config.model, path, dtype, folder)
        else:
            _write_model(policy, tokenizer, dtype, folder)
    except (SafetensorError, OSError, ValueError) as error:  # a full disk; settings that transformers does not write
        raise OSError(f"{folder.parent} cannot be written: {one_line(error)}; --out names another folder") from None
    for item in (folder, *folder.rglob("*")):  # temporary folders and safetensors' files are private to their owner
        item.chmod(0o755 if item.is_dir() else 0o644)


def _write_model(policy: Policy, tokenizer: Any, dtype: torch.dtype, folder: Path) -> None:
    _merge_adapters(policy)
    for weight in policy.parameters():  # not Module.to: buffers keep their precision, as under FSDP
        weight.data = weight.data.to(dtype)
    lm: Any = policy.lm
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def _merge_adapters(policy: Policy) -> None:
    """Replaces each weight that has an adapter by the merged weight that engines are sent."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    weights = {weight.name: weight for weight in lora.engine_weights(policy)}
    for name, layer in list(policy.lm.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            base: Any = layer.get_base_layer()
            base.weight.copy_(*gather.gather_full([weights[f"{name}.weight"]], base.weight.dtype))
            policy.lm.set_submodule(name, base)


def _write_adapters(policy: Policy, model: ModelConfig, path: str, dtype: torch.dtype, folder: Path) -> None:
    from peft import LoraConfig

    LoraConfig(
        r=model.lora_rank,
        lora_alpha=model.lora_alpha,  # type: ignore[arg-type]
        target_modules=list(model.lora_targets) or ALL_LAYERS,
        base_model_name_or_path=path,
        task_type="CAUSAL_LM",
        inference_mode=True,
    ).save_pretrained(str(folder))
    weights = lora.adapter_weights(policy)
    full = gather.gather_full(weights, dtype)
    tensors = {weight.name: tensor.to(dtype).contiguous() for weight, tensor in zip(weights, full, strict=True)}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


# ---------------------------------------------------------------------------------------------------------------------
# Comparing


@torch.no_grad()
def _completions(policy: Policy, tokenizer: Any, data: DataConfig, seed: int, count: int) -> list[Completion]:
    """Returns `count` greedy tokens of the policy after each of some held-out prompts.

    The prompts are sums if the run's prompts come from a file, which need not be on this machine.
    """
    completions = []
    for row in sources.sample_questions(data, seed, PROMPTS):
        ids = prompts.encode_prompt(tokenizer, row["question"], data.system_prompt, data.chat_template_args)
        ids = ids[-data.max_prompt_tokens :]
        tokens = _greedy_tokens(policy, ids, count)
        prompt = Prompt(row["entry"], tuple(ids), row["question"], row["answer"])
        completions.append(Completion(prompt, 0, tokens, (0.0,) * len(tokens), True, 0))
    return completions


def _greedy_tokens(policy: Policy, ids: list[int], count: int) -> tuple[int, ...]:
    lm: Any = policy.lm
    generated = lm.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
    )
    return tuple(generated[0, len(ids) :].tolist())


@torch.no_grad()
def _trainer_logprobs(policy: Policy, completions: Sequence[Completion]) -> Tensor:
    """Returns `[B, T]` log-probabilities as the trainer computes them, at temperature 1."""
    batch = experience.build_batch(completions, 0)
    logprobs: Tensor = policy(batch.response_tokens(), 1.0).logprobs
    return logprobs


@torch.no_grad()
def _written_logprobs(folder: Path, options: Export, path: str, completions: Sequence[Completion]) -> Tensor:
    """Returns `[B, T]` log-probabilities of the written folder, by transformers alone, one completion at a time.

    They are computed in float32, so that only the weights can differ.
    """
    source, trust = path if options.adapter else str(folder), options.config.model.trust_remote_code
    lm: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, trust_remote_code=trust).eval()
    if options.adapter:
        from peft import PeftModel

        lm = PeftModel.from_pretrained(lm, str(folder))
    rows = []
    for completion in completions:
        prompt, tokens = completion.prompt.token_ids, torch.tensor(completion.token_ids)
        logits = lm(input_ids=torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
        rows.append(torch.log_softmax(logits.float(), dim=-1).gather(-1, tokens[:, None]).squeeze(-1))
    return torch.stack(rows)
