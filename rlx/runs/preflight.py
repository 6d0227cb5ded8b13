"""What a run starts from: the model folder, the prompt tables, the reward functions; checked before anything starts."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlx.config.errors import ConfigError, one_line
from rlx.config.run import RunConfig
from rlx.config.sections import flatten
from rlx.data import prompts, sources
from rlx.rewards import remote, scoring
from rlx.storage.addresses import local_folder, resolve_address


def prepare(
    config: RunConfig,
    progress: Callable[[int, int, float], None] | None = None,
    tables: Mapping[str, Any] | None = None,
) -> str:
    """The model to start from, as `model_folder`; what needs no cluster is checked, as much as can be before a model is
    made. Where there are `tables` of the prompts already, their files need not be on this machine.

    Raises:
        ConfigError: see `check_files`, `check_rewards` and `check`.
    """
    if not tables:
        check_files(config)
    check_rewards(config)
    path = model_folder(config, progress)
    check_model(config, path)
    return path


def check_files(config: RunConfig) -> None:
    """ConfigError for a prompt file that is not there, or is none."""
    named = {"data.source": config.data.source, "data.ptx_source": config.data.ptx_source}
    for setting, source in (named | {"eval.source": config.eval.source}).items():
        if source:
            sources.check_source(source, setting)


def model_folder(config: RunConfig, progress: Callable[[int, int, float], None] | None = None) -> str:
    """The model to start from; makes rlx's own tiny one if that is asked for and not there yet."""
    if config.model.path != "tiny":
        return config.model.path
    from rlx.models import tiny

    recipe = zlib.crc32(repr(tiny.WarmStart()).encode())
    folder = local_folder(config.storage) / "models" / f"tiny-{recipe:08x}"
    if not folder.exists():
        tiny.make_tiny_model(folder, progress)
    return str(folder)


def check_model(config: RunConfig, path: str) -> None:
    """ConfigError for a model or a context length that cannot work; needs no cluster."""
    _check_layers(config, path)
    needed = config.data.max_prompt_tokens + config.rollout.max_tokens
    if not _is_folder(path, "model.path"):
        return  # the engines look it up
    folder = Path(path)
    split = config.rollout.tensor_parallel
    try:
        described = json.loads((folder / "config.json").read_text())
        positions, heads = described.get("max_position_embeddings"), described.get("num_attention_heads")
    except (ValueError, AttributeError):
        raise ConfigError(f"model.path {path}: its config.json is no JSON object") from None
    if positions and needed > positions:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_tokens = {needed}, but {path} has {positions} positions"
        )
    if heads and heads % split:
        raise ConfigError(f"rollout.tensor_parallel {split} does not divide the {heads} attention heads of {path}")


def _check_layers(config: RunConfig, path: str) -> None:
    """ConfigError if the model's layers cannot be cut as parallel.tp asks; a name on the hub is for the workers."""
    if config.parallel.tp == 1 or not _is_folder(path, "model.path"):
        return
    from transformers import AutoConfig

    from rlx.models import tensor_parallel

    try:
        found = AutoConfig.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path {path}: {one_line(error)}") from None
    tensor_parallel.layer_plan(found, config.parallel.tp)


def _is_folder(path: str, setting: str) -> bool:
    """Whether it is a Hugging Face model on disk, rather than a name on the hub; ConfigError if it is neither."""
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{setting} {path}: no Hugging Face model, there is no config.json in it")
        return True
    on_disk = path.startswith((".", "/", "~")) or path.count("/") > 1
    if on_disk or (folder.parent != Path() and folder.parent.is_dir()):
        raise ConfigError(f"{setting} {path}: no such folder")
    return False


def prompt_tables(config: RunConfig, path: str) -> dict[str, Any]:
    """The prepared training and held-out prompts, as Ray datasets by name; of generated questions none is in both."""
    settings = config.data
    training, held_out = sources.training_and_held_out_rows(settings, config.eval)
    trust = config.model.trust_remote_code
    rows_by_table = {"train": training, "held_out": held_out}
    if settings.ptx_source:
        rows_by_table["ptx"] = sources.read_rows(settings.ptx_source, settings, "data.ptx_source")
    tables = {name: prompts.tokenize_rows(rows, settings, path, trust) for name, rows in rows_by_table.items()}
    if (count := tables["train"].count()) < config.train.prompts_per_step:
        raise ConfigError(f"train.prompts_per_step ({config.train.prompts_per_step}) is more than the {count} prompts")
    return tables


def absolute_paths(config: RunConfig) -> dict[str, str]:
    """The settings that name something on this disk, by dotted key, good from any working directory: workers, trials
    and whoever resumes have their own."""
    flat = flatten(config)
    named = {key: flat[key] for key in ("model.path", "data.source", "data.ptx_source", "eval.source", "reward.model")}
    there = {key: path for key, path in named.items() if path and path != "tiny" and Path(path).exists()}
    return {key: str(Path(path).resolve()) for key, path in there.items()} | {
        "storage": resolve_address(config.storage)
    }


def check_rewards(config: RunConfig) -> None:
    """Loads the functions of one's own, reads the remote scorer's key: ConfigError if one cannot work."""
    scoring.scorers(config.reward, lambda given, expected, entry: 0.0)
    if config.reward.model:
        _is_folder(config.reward.model, "reward.model")
    if config.reward.url:
        remote.RemoteReward.from_config(config.reward)
