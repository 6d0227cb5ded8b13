"""Checks what a run starts from: the model folder, the prompt files, the reward functions.

`prepare` does it once per run, before any process is started, and returns a `PreparedRun` that everything else takes.
Left out: what needs a cluster (`connection.connect`), and whether the run's folder can be used (`run_folder`).
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.cluster.resources import ResourcePlan, plan_resources
from rlx.config.errors import ConfigError, one_line
from rlx.config.loading import from_tree, with_overrides
from rlx.config.run import RunConfig
from rlx.config.sections import DataConfig, EvalConfig, RewardConfig, TrackingConfig, flatten
from rlx.data import prompts, sources
from rlx.rewards import custom, remote, scoring
from rlx.storage.addresses import local_folder, resolve_address
from rlx.tracking import mlflow
from rlx.tracking.base import TrackingService
from rlx.tracking.tracker import service_at
from rlx.types import Prompt

if TYPE_CHECKING:
    from rlx.models.tiny import Progress

_LOG = logging.getLogger("rlx")
_PATH_SETTINGS = ("model.path", "reward.model")
_PROMPT_SETTINGS = ("data.source", "data.ptx_source", "eval.source")


@dataclass(frozen=True)
class PreparedRun:
    """A checked run: its config, and what follows from the config. Made once by `prepare` and handed down."""

    config: RunConfig  # its paths are absolute
    model_path: str  # the model's folder, or its name on the hub
    resources: ResourcePlan
    tables: Mapping[str, Any] | None = None  # prompts as Ray datasets; None: `launch.run` makes them
    tracking_service: TrackingService | None = None  # None: the one at the address in the config

    @property
    def name(self) -> str:
        return self.config.name or "run"

    @property
    def tracking(self) -> TrackingService:
        """Where the run's records go."""
        return self.tracking_service or tracking_service(self.config.tracking, self.config.storage)


def prepare(
    config: RunConfig,
    progress: Progress | None = None,
    tables: Mapping[str, Any] | None = None,
    model_path: str | None = None,
) -> PreparedRun:
    """Checks all that can be checked without a cluster, and makes rlx's tiny model if the config asks for it.

    Args:
        progress: called while the tiny model is made.
        tables: prompt tables that `prompt_tables` made for this config. The prompt files need not be on this machine
            then.
        model_path: the model's folder or name, if it is known already.

    Raises:
        ConfigError: a prompt file, a reward function, the model or the resources cannot be used.
    """
    config = from_tree(with_overrides(config.model_dump(), absolute_paths(config)))
    if not tables:
        check_files(config.data, config.eval)
    check_rewards(config.reward)
    path = model_path or model_folder(config.model.path, config.storage, progress)
    check_model(config, path)
    return PreparedRun(config, path, plan_resources(config), tables)


def absolute_paths(config: RunConfig) -> dict[str, str]:
    """Returns the settings that name something on this disk as absolute paths, by dotted key.

    Workers, trials and a later resume have other working directories.
    """
    settings = {key: value for key, value in flatten(config).items() if value}
    paths = {key: settings[key] for key in _PATH_SETTINGS if settings.get(key, "tiny") != "tiny"}
    existing = {key: str(Path(path).resolve()) for key, path in paths.items() if Path(path).exists()}
    prompt_files = {key: sources.resolve(settings[key]) for key in _PROMPT_SETTINGS if key in settings}
    changed = {key: address for key, address in prompt_files.items() if address != settings[key]}
    return existing | changed | {"storage": resolve_address(config.storage)}


def tracking_uri(tracking: TrackingConfig, storage: str) -> str:
    """Returns the address of the MLflow store that runs report to; makes the folder of a local one."""
    return tracking.uri or mlflow.default_uri(local_folder(storage))


def tracking_service(tracking: TrackingConfig, storage: str) -> TrackingService:
    """Returns the tracking service that runs report to; makes the folder of a local one."""
    return service_at(tracking_uri(tracking, storage))


# ---------------------------------------------------------------------------------------------------------------------
# Checks


def check_files(data: DataConfig, evaluation: EvalConfig) -> None:
    """Raises ConfigError if a prompt source cannot be used, e.g. a file that does not exist."""
    addresses = {"data.source": data.source, "data.ptx_source": data.ptx_source, "eval.source": evaluation.source}
    for setting, address in addresses.items():
        if address:
            sources.check_source(address, setting)


def check_rewards(reward: RewardConfig) -> None:
    """Loads the user's reward functions and reads the remote scorer's key.

    Raises:
        ConfigError: one of them cannot be used.
    """
    custom.check_functions(reward)
    if reward.model:
        _is_model_folder(reward.model, "reward.model")
    if reward.url:
        remote.RemoteReward.from_config(reward)


def check_model(config: RunConfig, path: str) -> None:
    """Raises ConfigError if the model cannot be loaded or split as configured, or its context is too short."""
    if not _is_model_folder(path, "model.path"):
        return  # a name on the hub: the workers and engines look it up
    if config.parallel.tp > 1:
        _check_layers(path, config.parallel.tp, config.model.trust_remote_code)
    positions, heads = _model_shape(path)
    needed = config.data.max_prompt_tokens + config.rollout.max_tokens
    if positions and needed > positions:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_tokens = {needed}, but {path} has {positions} positions"
        )
    split = config.rollout.tensor_parallel
    if heads and heads % split:
        raise ConfigError(f"rollout.tensor_parallel {split} does not divide the {heads} attention heads of {path}")


def _model_shape(path: str) -> tuple[int | None, int | None]:
    """Returns the positions and the attention heads in the model's config.json; None if it does not have them."""
    try:
        content = json.loads((Path(path) / "config.json").read_text())
        return content.get("max_position_embeddings"), content.get("num_attention_heads")
    except (ValueError, AttributeError):
        raise ConfigError(f"model.path {path}: its config.json is not a JSON object") from None


def _check_layers(path: str, tp: int, trust_remote_code: bool) -> None:
    """Raises ConfigError if the model's layers cannot be split over `tp` workers."""
    from transformers import AutoConfig

    from rlx.models import tensor_parallel

    try:
        model_config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path {path}: {one_line(error)}") from None
    tensor_parallel.layer_plan(model_config, tp)


def _is_model_folder(path: str, setting: str) -> bool:
    """Returns whether a path is a Hugging Face model on disk (True) or may be a name on the hub (False).

    Raises:
        ConfigError: it is neither.
    """
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{setting} {path}: not a Hugging Face model, it has no config.json")
        return True
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local or (folder.parent != Path() and folder.parent.is_dir()):
        raise ConfigError(f"{setting} {path}: no such folder")
    return False


# ---------------------------------------------------------------------------------------------------------------------
# Model and prompts


def model_folder(path: str, storage: str, progress: Progress | None = None) -> str:
    """Returns the model to start from; makes rlx's tiny model in the storage if `path` is "tiny" and it is missing."""
    if path != "tiny":
        return path
    from rlx.models import tiny

    recipe = zlib.crc32(repr(tiny.WarmStart()).encode())
    folder = local_folder(storage) / "models" / f"tiny-{recipe:08x}"
    if not folder.exists():
        tiny.make_tiny_model(folder, progress)
    return str(folder)


def prompt_tables(config: RunConfig, path: str) -> dict[str, Any]:
    """Returns the tokenized prompts as Ray datasets: train, held_out, and ptx if the config has a `data.ptx_source`.

    Args:
        path: the model's folder or name, for its tokenizer.

    Raises:
        ConfigError: there are no prompts, or fewer than a step needs.
    """
    data, tokenizer = config.data, prompts.TokenizerSource.of(path, config.model.trust_remote_code)
    train, held_out = sources.training_and_held_out_rows(data, config.eval)
    rows: dict[str, Any] = {"train": train, "held_out": held_out}
    if data.ptx_source:
        rows["ptx"] = sources.read_rows(data.ptx_source, data, "data.ptx_source")
    tables = {name: prompts.tokenize_rows(table, data, tokenizer) for name, table in rows.items()}
    if (count := tables["train"].count()) < config.train.prompts_per_step:
        raise ConfigError(f"train.prompts_per_step ({config.train.prompts_per_step}) is more than the {count} prompts")
    on_gpu = bool(config.scaling.resources_per_worker.get("GPU"))
    try_rewards(config.reward, tables["train"], on_gpu)
    return tables


def try_rewards(reward: RewardConfig, rows: Any, on_gpu: bool) -> None:
    """Calls the user's reward functions with the first two prompts, before engines and workers start.

    Args:
        reward: which functions, and their limits.
        rows: the prompts.
        on_gpu: workers have GPUs; this machine may have none, so a failure is only shown.

    Raises:
        ConfigError: one of them fails.
    """
    if any(":" in name for name in reward.functions):
        tried = [Prompt(i, (), row["question"], row["answer"]) for i, row in enumerate(rows.take(2))]
        try:
            scoring.try_functions(reward, tried)
        except ConfigError as error:
            if not on_gpu:
                raise
            _LOG.warning("on this machine, which need not be like those of the workers: %s", error)
