"""Checks what a run starts from: the model folder, the prompt files, the reward functions, this machine, the disk.

`prepare` does it once per run, before any process is started, and returns a `PreparedRun` that everything else takes.
It needs neither Ray nor torch, so that most mistakes are refused within two seconds; what takes longer comes last: a
tiny model is trained by `model_folder`. On a cluster `prompt_tables` makes Ray datasets of the prompts.
Left out: what needs a cluster (`connection.connect`), and whether the run's folder can be used (`run_folder`).
"""

from __future__ import annotations

import importlib.util
import logging
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.cluster.machine import address_of, check_place
from rlx.cluster.resources import ResourcePlan, plan_resources
from rlx.config import defaults, rules
from rlx.config.errors import ConfigError, one_line
from rlx.config.experiment import OWN_MODELS, TINY, idle_settings
from rlx.config.loading import from_tree, with_overrides
from rlx.config.reach import why_silent
from rlx.config.run import RunConfig
from rlx.config.sections.base import flatten
from rlx.config.sections.data import DataConfig, EvalConfig, EvalSetConfig, SourceConfig, held_out_setting
from rlx.config.sections.model import ModelConfig
from rlx.config.sections.records import TrackingConfig
from rlx.config.sections.reward import RewardConfig
from rlx.config.sections.rollout import RolloutConfig
from rlx.config.sections.scaling import ParallelConfig
from rlx.config.vllm_options import check_option_names
from rlx.data import prompts, sources
from rlx.data.stored.columns import ChatMessage, prompt_of
from rlx.data.stored.source import NO_ROWS
from rlx.data.tables import source_tables, supervised_table
from rlx.environments.base import load_environment
from rlx.environments.trial import try_environment
from rlx.models.folder import (
    ModelShape,
    check_classifier,
    check_hub_name,
    check_model_files,
    check_same_tokens,
    checkpoint_bytes,
    is_model_folder,
    shape_on_hub,
)
from rlx.rewards import custom, remote, scoring
from rlx.rewards.judge.cache import ReplyCache
from rlx.rewards.judge.rubric import rubric_text
from rlx.rewards.judge.scorer import Judge
from rlx.rewards.sandbox.pool import Sandbox
from rlx.storage.addresses import local_folder, open_storage, resolve_address
from rlx.storage.filesystem import Storage, check_free
from rlx.tracking import metrics
from rlx.tracking.base import TrackingService
from rlx.tracking.services import artifact_places, mlflow
from rlx.tracking.services.reachable import check_packages
from rlx.tracking.tracker import services_of
from rlx.types import Replay

if TYPE_CHECKING:
    from rlx.cluster.nodes import FolderCopies
    from rlx.models.tiny import Progress

_LOG = logging.getLogger("rlx")
_TRIED_ROWS, _TINY_BYTES = 2, 8 << 20
_PATH_SETTINGS = ("model.path", "model.critic_path", "model.reference_path", "reward.model")
_PROMPT_SETTINGS = ("data.source", "data.ptx_source", "eval.source")


@dataclass(frozen=True)
class PreparedRun:
    """A checked run: its config, and what follows from the config. Made once by `prepare` and handed down."""

    config: RunConfig  # its paths are absolute
    model_path: str  # the model's folder, or its name on the hub
    resources: ResourcePlan
    tables: Mapping[str, Any] | None = None  # prompts as Ray datasets; None: `launch.run` makes them
    reachable: Sequence[TrackingService] | None = None  # tracking services by `relay`; None: those of the config
    copies: FolderCopies | None = None  # of its models, for nodes that join later
    replay: Replay | None = None  # None: all steps that are left, for the first time
    replayed: Storage | None = None  # folder of the run that has done the steps of a replay

    @property
    def name(self) -> str:
        return self.config.name or "run"

    @property
    def tracking(self) -> Sequence[TrackingService]:
        """The tracking services of the run: each of them gets all of its records."""
        return self.reachable or services_of(self.config.tracking, self.config.storage)


def prepare(
    config: RunConfig,
    progress: Progress | None = None,
    tables: Mapping[str, Any] | None = None,
    model_path: str | None = None,
) -> PreparedRun:
    """Checks all that can be checked without a cluster, and makes models of rlx's own if the config asks for them.

    Args:
        progress: called while such a model is made.
        tables: prompt tables that `prompt_tables` made for this config; the prompt files need not be on this machine.
        model_path: the model's folder or name, if it is known already.

    Raises:
        ConfigError: a prompt file, a reward function, the model, the resources or the disk cannot be used.
        RewardError: a reward function fails.
    """
    config = from_tree(with_overrides(config.model_dump(exclude_unset=True), absolute_paths(config)))
    check_quickly(config, has_prompts=bool(tables))
    resources, chats = plan_resources(config), list[Sequence[ChatMessage]]()
    environment = config.environment
    if not tables:
        parts = enumerate(zip(config.data.parts, config.reward_parts, strict=True))
        tried_parts = {config.data.setting_of(number): each for number, each in parts}
        tried_parts |= config.eval.own_parts(config.data, config.reward)
        for setting, (part, reward) in tried_parts.items():
            rows = sources.first_rows(part, _TRIED_ROWS, setting, scoring.answer_check(reward, environment.name))
            if not rows:
                raise ConfigError(f"{setting} {part.source}: {NO_ROWS}")
            tried = [prompt_of(number, row, part.system_prompt) for number, row in enumerate(rows)]
            scoring.try_rewards(reward, tried, on_gpu=bool(resources.workers[0].get("GPU")))
            try_environment(environment, tried)
            chats += [chat for row in rows if (chat := row.get("messages"))]
        sources.check_enough(config.data, config.eval, config.train.prompts_per_step)
    path = model_path or model_folder(config.model.path, config.storage, progress)
    made = {key: model_folder(other, config.storage, progress) for key, other in companions(config.model).items()}
    if path != config.model.path or made != companions(config.model):  # `check_quickly` has seen another
        config = from_tree(with_overrides(config.model_dump(exclude_unset=True), made))
        check_model(config, path)
    if not tables and (is_model_folder(path, "model.path") or not address_of(config.ray_address)):
        prompts.check_template(config.data.chat_template_args, chats, path, config.model.trust_remote_code)
    # Dumped as a whole: from here on every setting counts as given, so that a resume takes no other defaults.
    config = from_tree(with_overrides(config.model_dump(), lengths(config.data, config.rollout, path)))
    lines = idle_settings(flatten(config), config.resolved_critic, config.resolved_rollout_correction)
    if not config.checkpoint.init_from:  # its critic has learnt
        lines += rules.warnings(config.algorithm, config.model, config.train, config.rollout)
    for line in lines:
        _LOG.warning("warning: %s", line)
    return PreparedRun(config, path, resources, tables)


def check_quickly(config: RunConfig, *, has_prompts: bool = False) -> None:
    """Checks all that takes a moment; makes nothing.

    Args:
        has_prompts: the prompts are known, so their files need not be here.

    Raises:
        ConfigError: a prompt file, a reward function, the model or the resources cannot be used.
    """
    check_packages(config.tracking)
    if not has_prompts:
        check_files(config.data, config.eval)
    check_rewards(config.reward)
    if config.environment.name:
        load_environment(config.environment.name)
    if not (has_prompts or address_of(config.ray_address)):  # nodes of a cluster may reach more than this machine
        check_servers(config.reward)
    if best_by := config.checkpoint.best_by:
        averaged = config.train.ema_decay is not None
        metrics.check_known(best_by, metrics.evaluated(config.eval, config.data, averaged=averaged))
    check_option_names(config.rollout)
    if config.train.optimizer == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
        raise ConfigError("train.optimizer adamw_8bit needs torchao: pip install 'rlx[torchao]'")
    check_place(plan_resources(config), config.ray_address)
    for setting, other in companions(config.model).items():
        if not (other in OWN_MODELS or is_model_folder(other, setting) or address_of(config.ray_address)):
            check_hub_name(other, setting)
    if config.model.path in OWN_MODELS:
        return
    if is_model_folder(config.model.path, "model.path"):
        check_model(config, config.model.path)
    elif not address_of(config.ray_address):
        check_hub_name(config.model.path, "model.path")


def absolute_paths(config: RunConfig) -> dict[str, Any]:
    """Returns the settings that name something on this disk as absolute paths, or a rubric as its text, by dotted key.

    Workers, trials and a later resume have other working directories.
    """
    settings = {key: value for key, value in flatten(config).items() if value}
    paths = {key: settings[key] for key in _PATH_SETTINGS if settings.get(key, TINY) not in OWN_MODELS}
    existing = {key: str(Path(path).resolve()) for key, path in paths.items() if Path(path).exists()}
    prompt_files = {key: sources.resolve(settings[key]) for key in _PROMPT_SETTINGS if key in settings}
    changed: dict[str, Any] = {key: address for key, address in prompt_files.items() if address != settings[key]}
    if rubric := rubric_text(config.reward):  # of its file, which other nodes may not have
        changed["reward.judge_rubric"] = rubric
    if config.data.sources:
        changed["data.sources"] = [_resolved(each) for each in config.data.sources]
    if config.eval.sets:
        changed["eval.sets"] = [_resolved(each) for each in config.eval.sets]
    if config.tracking.uri:
        changed["tracking.uri"] = artifact_places.absolute_uri(config.tracking.uri)
    return existing | changed | {"storage": resolve_address(config.storage)}


def lengths(data: DataConfig, rollout: RolloutConfig, path: str) -> dict[str, int]:
    """Returns the longest prompt and response in tokens, by dotted key: those given, or as long as the model allows.

    Args:
        path: the model's folder or name. Of "tiny" nothing is said: its folder may not exist yet.
    """
    if path in OWN_MODELS:
        return {}
    if "max_prompt_tokens" in data.model_fields_set and "max_tokens" in rollout.model_fields_set:
        return defaults.fitting_lengths(data, rollout, None)  # whatever the model is
    shape = ModelShape.read(path) if is_model_folder(path, "model.path") else shape_on_hub(path)
    return defaults.fitting_lengths(data, rollout, shape.positions)


def _resolved(source: SourceConfig | EvalSetConfig) -> dict[str, Any]:
    """One of data.sources or eval.sets as plain values, with addresses that mean the same in any working directory."""
    given = source.model_dump(exclude_none=True)
    return given | {key: sources.resolve(given[key]) for key in ("source", "held_out") if key in given}


def tracking_uri(tracking: TrackingConfig, storage: str) -> str:
    """Returns the address of the MLflow store that runs report to; makes the folder of a local one."""
    return tracking.uri or mlflow.default_uri(local_folder(storage))


# ---------------------------------------------------------------------------------------------------------------------
# Checks


def check_files(data: DataConfig, evaluation: EvalConfig) -> None:
    """Raises ConfigError if a prompt source cannot be used, e.g. a file that does not exist."""
    for number, part in enumerate(data.parts):
        setting = data.setting_of(number)
        sources.check_source(part.source, part, setting)
        if held_out := evaluation.part(data, number).source:
            sources.check_source(held_out, part, held_out_setting(setting))
    for each in evaluation.sets:
        if each.source:
            sources.check_source(each.source, each.prompts(data), f"eval.sets {each.name}")
    if data.ptx_source:
        sources.check_source(data.ptx_source, data, "data.ptx_source")


def check_disk(needed: int, storage: str, ray_address: str | None) -> None:
    """Raises StorageError if a disk of this machine has no room for a checkpoint of so many bytes."""
    folder, what = open_storage(storage, create=False), "a checkpoint of this model"
    check_free(folder, needed, what)
    if not folder.is_local and not address_of(ray_address):  # all workers write here before they send it
        temporary = Storage.local(Path(tempfile.gettempdir()))
        check_free(temporary, needed, f"{what}, before it is sent,", "set TMPDIR to another folder")


def check_rewards(reward: RewardConfig) -> None:
    """Loads the user's reward functions, tries the sandbox of programs, and reads servers' keys.

    Raises:
        ConfigError: one of them cannot be used.
    """
    custom.check_functions(reward)
    if "code" in reward.functions:
        Sandbox.open(strict=reward.sandbox == "strict")
    if reward.model and is_model_folder(reward.model, "reward.model"):
        check_classifier(reward.model, "reward.model")
    if reward.url:
        remote.RemoteReward.from_config(reward)
    if reward.judge_url:
        Judge.from_config(reward, ReplyCache())


def check_servers(reward: RewardConfig) -> None:
    """Raises ConfigError if no server answers at the address of the rewards or of the judge."""
    servers = [remote.RemoteReward.from_config(reward).server] if reward.url else []
    servers += [Judge.from_config(reward, ReplyCache()).server] if reward.judge_url else []
    for server in servers:
        if reason := why_silent(server.url):
            raise ConfigError(f"reward.{server.name} {server.address}: no server answers there ({reason})")


def check_model(config: RunConfig, path: str) -> None:
    """Raises ConfigError if the model cannot be loaded, split, adapted or saved as configured, or has a short context;
    StorageError if a disk has no room for its checkpoints."""
    if not is_model_folder(path, "model.path"):
        return  # a name on the hub: the workers and engines look it up
    shape = ModelShape.read(path)
    if config.parallel.neighbours > 1:
        _check_layers(path, config.parallel, config.model.trust_remote_code)
    needed = sum(lengths(config.data, config.rollout, path).values())
    tp, rank = config.rollout.tensor_parallel, config.model.lora_rank
    shape.check(path, positions=needed, tensor_parallel=tp, lora_rank=rank)
    check_model_files(path, "model.path")
    size = checkpoint_bytes(path, config.model, config.train, config.resolved_critic)
    check_disk(size, config.storage, config.ray_address)
    for setting, other in companions(config.model).items():
        if other in OWN_MODELS:
            continue  # `prepare` makes it and checks it then
        _check_companion(path, other, setting, needed)
        if config.parallel.neighbours > 1 and is_model_folder(other, setting):
            _check_layers(other, config.parallel, config.model.trust_remote_code, setting)
    if config.model.lora_targets:
        from rlx.models.loading import check_adapted_layers

        check_adapted_layers(path, config.model)


def companions(model: ModelConfig) -> dict[str, str]:
    """Returns the models beside the policy that score its tokens, by setting."""
    paths = {"model.critic_path": model.critic_path, "model.reference_path": model.reference_path}
    return {setting: path for setting, path in paths.items() if path}


def _check_companion(path: str, other: str, setting: str, needed: int) -> None:
    """Raises ConfigError if a folder cannot be the critic or the reference of the policy in `path`.

    Args:
        other: the folder, or a name on the hub, which the workers look up.
        needed: positions of the longest prompt and response.
    """
    if not is_model_folder(other, setting):
        return
    check_model_files(other, setting)
    check_same_tokens(path, other, setting)
    positions = ModelShape.read(other, setting).positions
    if positions and needed > positions:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_tokens = {needed}, but {setting} {other} has {positions} positions"
        )


def _check_layers(path: str, parallel: ParallelConfig, trust_remote_code: bool, setting: str = "model.path") -> None:
    """Raises ConfigError if neighbouring workers cannot share the model's layers or rows."""
    from transformers import AutoConfig

    from rlx.models import packing, tensor_parallel

    try:
        model_config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting} {path}: {one_line(error)}") from None
    if parallel.tp > 1:
        tensor_parallel.layer_plan(model_config, parallel.tp)
    elif reason := packing.config_obstacle(model_config, parallel.sp):
        raise ConfigError(f"parallel.sp {parallel.sp}: {setting} {path}: {reason}")


# ---------------------------------------------------------------------------------------------------------------------
# Model and prompts


def model_folder(path: str, storage: str, progress: Progress | None = None) -> str:
    """Returns the model to start from; makes one of rlx's own in the storage if `path` names it and it is missing."""
    if path not in OWN_MODELS:
        return path
    from rlx.models import tiny

    recipe = tiny.RECIPES[path]
    folder = local_folder(storage) / "models" / f"{path}-{zlib.crc32(repr(recipe).encode()):08x}"
    if not folder.exists():
        check_free(Storage.local(folder), _TINY_BYTES, "the tiny model")  # before the minute that it takes
        tiny.make_tiny_model(folder, progress, recipe)
    return str(folder)


def prompt_tables(config: RunConfig, path: str) -> dict[str, Any]:
    """Returns the tokenized prompts as Ray datasets, by `sources.table_names` and `set_table`, and ptx if there is a
    `data.ptx_source`.

    Args:
        path: the model's folder or name, for its tokenizer.

    Raises:
        ConfigError: there are no prompts, or fewer than a step needs, or a row cannot be used.
    """
    data, environment, tokenizer = (
        config.data,
        config.environment,
        prompts.TokenizerSource.of(path, config.model.trust_remote_code),
    )
    checks = [scoring.answer_check(reward, environment.name) for reward in config.reward_parts]
    has_episodes = environment.name is not None
    tables = source_tables(data, config.eval, checks, tokenizer, has_episodes)
    for each in (each for each in config.eval.sets if each.source):
        part, reward = each.prompts(data), config.reward.part(each.reward, each.answer_pattern)
        asked = sources.set_rows(part, config.eval.of(each), each.name, scoring.answer_check(reward, environment.name))
        tables[sources.set_table(each.name)] = prompts.tokenize_rows(
            asked, part, tokenizer, f"prompts of eval.sets {each.name}", has_episodes
        )
    if data.ptx_source:
        held_out = [tables[name] for name in sources.table_names(data, "held_out")]
        tables["ptx"] = supervised_table(data, held_out, tokenizer)
    count = sum(tables[name].count() for name in sources.table_names(data, "train"))
    if count < config.train.prompts_per_step:
        raise ConfigError(
            f"train.prompts_per_step ({config.train.prompts_per_step}) is more than the {count} prompts to train on"
        )
    return tables
