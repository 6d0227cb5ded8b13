"""Checks what a run starts from: the model folder, the prompt files, the reward functions, this machine, the disk.

`prepare` does it once per run, before any process is started, and returns a `PreparedRun` that everything else takes.
It needs neither Ray nor torch, so that most mistakes are refused within two seconds; what takes longer comes last.
Left out: what needs a cluster (`connection.connect`), and whether the run's folder can be used (`run_folder`).
"""

from __future__ import annotations

import importlib.metadata
import logging
import urllib.error
import urllib.request
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.cluster.machine import address_of, check_place
from rlx.cluster.resources import ResourcePlan, plan_resources
from rlx.config.errors import ConfigError, nearest, one_line
from rlx.config.loading import from_tree, with_overrides
from rlx.config.run import RunConfig
from rlx.config.sections import DataConfig, EvalConfig, ModelConfig, RewardConfig, TrackingConfig, flatten
from rlx.data import prompts, sources
from rlx.data.parsers import Row
from rlx.models.folder import ModelShape, check_hub_name, check_model_files, count_parameters, is_model_folder
from rlx.rewards import custom, remote, scoring
from rlx.rewards.custom import RewardError
from rlx.storage.addresses import local_folder, open_storage, resolve_address
from rlx.storage.filesystem import Storage, check_free
from rlx.tracking import mlflow
from rlx.tracking.base import TrackingService
from rlx.tracking.tracker import service_at
from rlx.types import Prompt

if TYPE_CHECKING:
    from rlx.models.tiny import Progress

_LOG = logging.getLogger("rlx")
_ANSWER_S = 2.0
_SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "file", "databricks", "databricks-uc", "uc")
"""of MLflow's own stores"""
_TRIED_ROWS = 2
_TINY_BYTES = 8 << 20
_CHECKPOINT_BYTES = 12
"""for each number of a model: it and AdamW's two averages, in float32"""
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
        ConfigError: a prompt file, a reward function, the model, the resources or the disk cannot be used.
        RewardError: a reward function fails.
    """
    config = from_tree(with_overrides(config.model_dump(), absolute_paths(config)))
    check_quickly(config, has_prompts=bool(tables))
    resources = plan_resources(config)
    if not tables:
        rows = sources.first_rows(config.data, _TRIED_ROWS)
        try_rewards(config.reward, rows, on_gpu=bool(resources.workers[0].get("GPU")))
    path = model_path or model_folder(config.model.path, config.storage, progress)
    check_model(config, path)
    return PreparedRun(config, path, resources, tables)


def check_quickly(config: RunConfig, *, has_prompts: bool = False) -> None:
    """Checks all that takes a moment; makes nothing.

    Args:
        has_prompts: the prompts are known, so their files need not be here.

    Raises:
        ConfigError: a prompt file, a reward function, the model or the resources cannot be used.
    """
    if not has_prompts:
        check_files(config.data, config.eval)
    check_rewards(config.reward)
    check_place(plan_resources(config), config.ray_address)
    if config.model.path == "tiny":
        return
    if is_model_folder(config.model.path, "model.path"):
        check_model(config, config.model.path)
    elif not address_of(config.ray_address):  # nodes of a cluster may reach more than this machine
        check_hub_name(config.model.path, "model.path")


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
            sources.check_source(address, data, setting)


def check_tracking(tracking: TrackingConfig) -> None:
    """Raises ConfigError if an address is of no kind that MLflow knows, or of a server that does not answer.

    Databases are opened later, by MLflow.
    """
    address = tracking.uri or ""
    scheme = address.partition("://")[0].partition("+")[0]
    plugins = [plugin.name for plugin in importlib.metadata.entry_points(group="mlflow.tracking_store")]
    if "://" in address and scheme not in (known := [*_SCHEMES, *plugins]):
        raise ConfigError(
            f"tracking.uri {mlflow.without_password(address)}: MLflow knows no {scheme}{nearest(scheme, known)}"
        )
    if not address.startswith(("http://", "https://")):
        return
    try:
        urllib.request.urlopen(address, timeout=_ANSWER_S).close()
    except (urllib.error.HTTPError, TimeoutError):  # it is there, and may take its time
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(
            f"tracking.uri {mlflow.without_password(address)}: no server answers there ({reason})"
        ) from None


def _check_disk(model: ModelConfig, critic: str, path: str, storage: str) -> None:
    """Raises StorageError if a disk of this machine has no room for a checkpoint of the model that is trained."""
    if not model.lora_rank:
        numbers = count_parameters(path) * (2 if critic == "separate" else 1)
        folder = open_storage(storage, create=False)
        check_free(folder, numbers * _CHECKPOINT_BYTES, "a checkpoint of this model")


def check_rewards(reward: RewardConfig) -> None:
    """Loads the user's reward functions and reads the remote scorer's key.

    Raises:
        ConfigError: one of them cannot be used.
    """
    custom.check_functions(reward)
    if reward.model:
        is_model_folder(reward.model, "reward.model")
    if reward.url:
        remote.RemoteReward.from_config(reward)


def check_model(config: RunConfig, path: str) -> None:
    """Raises ConfigError if the model cannot be loaded, split or saved as configured, or its context is too short."""
    if not is_model_folder(path, "model.path"):
        return  # a name on the hub: the workers and engines look it up
    shape = ModelShape.read(path)
    if config.parallel.tp > 1:
        _check_layers(path, config.parallel.tp, config.model.trust_remote_code)
    needed = config.data.max_prompt_tokens + config.rollout.max_tokens
    if shape.positions and needed > shape.positions:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_tokens = {needed}, but {path} has {shape.positions} positions"
        )
    split = config.rollout.tensor_parallel
    if shape.heads and shape.heads % split:
        raise ConfigError(
            f"rollout.tensor_parallel {split} does not divide the {shape.heads} attention heads of {path}"
        )
    check_model_files(path, "model.path")
    _check_disk(config.model, config.resolved_critic, path, config.storage)


def try_rewards(reward: RewardConfig, rows: Sequence[Row], *, on_gpu: bool) -> None:
    """Calls the user's reward functions with a few prompts, before anything starts.

    Args:
        reward: which functions, and their limits.
        rows: the prompts.
        on_gpu: workers have GPUs; this machine may have none, so a failure is only shown.

    Raises:
        RewardError: one of them fails.
    """
    tried = [Prompt(i, (), row["question"], row["answer"]) for i, row in enumerate(rows)]
    try:
        scoring.try_functions(reward, tried)
    except RewardError as error:
        if not on_gpu:
            raise
        _LOG.warning("on this machine, which need not be like those of the workers: %s", error)


def _check_layers(path: str, tp: int, trust_remote_code: bool) -> None:
    """Raises ConfigError if the model's layers cannot be split over `tp` workers."""
    from transformers import AutoConfig

    from rlx.models import tensor_parallel

    try:
        model_config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path {path}: {one_line(error)}") from None
    tensor_parallel.layer_plan(model_config, tp)


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
        check_free(Storage.local(folder), _TINY_BYTES, "the tiny model")  # before the minute that it takes
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
    return tables
