"""run(config) -> Result: checks the input, reserves, starts engines and trainers side by side, relays, cleans up.

The same function runs from the command line and inside a Tune trial. A run's folder on the storage is its identity:
what is found there is what a resume continues.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
import ray.train
import yaml
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.placement_group import placement_group, remove_placement_group

from rlx import archive, controller, inputs, report, reward_model, run_folder
from rlx.config import ConfigError, RunConfig, flatten, one_line
from rlx.controller import Report, RunStopped, Say
from rlx.rollout import pool
from rlx.settings import ALL_LAYERS
from rlx.storage import Storage, check_writable, local_folder, open_storage

if TYPE_CHECKING:  # it imports torch and transformers
    from rlx.doctor import Verdict

# Nobody preempts or scrapes a cluster that lives in this process: no actors for that.
_OWN_CLUSTER = {
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}

# Ray Train's list of the checkpoints that it was told of. It is rewritten in place and asks for this very version of
# Ray: what there is to go on from is read from the folders themselves.
_TRAIN_RECORD = "checkpoint_manager_snapshot.json"
_LOG = logging.getLogger("rlx")
_STARTS = 10  # of the workers, a minute each, before the run fails for want of room


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    name: str
    folder: str  # on its storage
    metrics: dict[str, Any]  # of the last step
    mlflow_run: str


@dataclass(frozen=True)
class Plan:
    """What a run needs of the cluster at once."""

    workers: list[dict[str, float]]
    engines: list[dict[str, float]]
    reward_models: list[dict[str, float]] = field(default_factory=list)

    @property
    def beside(self) -> list[dict[str, float]]:
        """What the driver holds beside the workers: engines, then reward models."""
        return [*self.engines, *self.reward_models]

    def total(self) -> dict[str, float]:
        """All bundles together, e.g. {"CPU": 2.0}."""
        bundles = [*self.workers, *self.beside]
        return {name: sum(b.get(name, 0.0) for b in bundles) for b in bundles for name in b}

    def __str__(self) -> str:
        models = f" and {len(self.reward_models)} reward models" if self.reward_models else ""
        return f"{len(self.workers)} workers and {len(self.engines)} engines{models}"

    def fits(self, nodes: Sequence[Mapping[str, float]]) -> int:
        """How many such runs the nodes hold at once, each bundle on one node; those that ask for most come first."""
        free, count = [dict(node) for node in nodes], 0
        bundles = sorted([*self.workers, *self.beside], key=lambda bundle: (len(bundle), sum(bundle.values())))
        while all(_placed(bundle, free) for bundle in reversed(bundles)):
            count += 1
        return count


def _placed(bundle: Mapping[str, float], free: list[dict[str, float]]) -> bool:
    """Takes a bundle from the first node that has room for it."""
    for node in free:
        if all(node.get(name, 0.0) + 1e-9 >= amount for name, amount in bundle.items()):
            node |= {name: node.get(name, 0.0) - amount for name, amount in bundle.items()}
            return True
    return False


def nodes() -> list[dict[str, float]]:
    """What each live node of the cluster has in all."""
    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def plan(config: RunConfig) -> Plan:
    """What a config asks for."""
    per_worker = dict(config.scaling.resources_per_worker)
    if config.scaling.use_gpu:
        per_worker.setdefault("GPU", 1.0)
    return Plan(
        workers=[per_worker] * config.scaling.num_workers,
        engines=[dict(config.rollout.resources_per_engine)] * config.rollout.engines,
        reward_models=[dict(config.reward.resources_per_model)]
        * (config.reward.model_replicas if config.reward.model else 0),
    )


def connect(config: RunConfig) -> None:
    """Joins the cluster, or starts one in this process, unless that is done already.

    Raises:
        ConfigError: the cluster cannot be reached, or can never hold the config's plan.
    """
    if not ray.is_initialized():
        _quiet_environment()
        own = {}
        if config.ray_address is None:
            own = {"num_cpus": os.cpu_count(), "include_dashboard": False}
            os.environ.update(_OWN_CLUSTER)
        try:
            ray.init(address=config.ray_address or "local", log_to_driver=False, logging_level=logging.ERROR, **own)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"ray_address {config.ray_address}: {one_line(error, 500)}") from None
    needed, cluster = plan(config), ray.cluster_resources()
    if needed.fits(nodes()) < 1:
        lacking = [name for name, amount in needed.total().items() if amount > cluster.get(name, 0.0) + 1e-9]
        numbers = ", ".join(f"{needed.total()[n]:g} {n} but the cluster has {cluster.get(n, 0.0):g}" for n in lacking)
        numbers = numbers or f"more on one node than any of the {len(nodes())} nodes has"
        raise ConfigError(f"scaling: {needed} need {numbers}")


def create_run(config: RunConfig, folder: Storage, parent: str | None = None) -> None:
    """Makes the folder and the MLflow run of a new run; ConfigError if the folder holds one already."""
    run_folder.check_new(config, folder)
    _record_run(config, folder, parent)


def _record_run(config: RunConfig, folder: Storage, parent: str | None) -> str:
    """A new MLflow run, named in the run's folder with the config."""
    uri = tracking_uri(config)
    params = {key: value for key, value in flatten(config).items() if value is not None}
    run_id = report.start_run(
        uri,
        config.tracking.experiment,
        config.name or "run",
        parent=parent,
        params=params,
        tags={"rlx.kind": "run", "rlx.folder": folder.path},
    )
    _save_config(config, folder, run_id)
    run_folder.write(folder / "run.json", json.dumps({"mlflow_run": run_id}))
    return run_id


def run(
    config: RunConfig,
    folder: Storage,
    *,
    resume: bool = False,
    parent: str | None = None,
    tables: Mapping[str, Any] | None = None,
    on_report: Report | None = None,
    say: Say | None = None,
) -> Result:
    """Trains to the last step and gives the last step's metrics; whatever happens, nothing of it is left running.

    Args:
        folder: where the run is kept; one there already is continued if `resume`, and otherwise an error.
        parent: MLflow run of the sweep that it belongs to.
        tables: what `inputs.prompt_tables` gave for this config, to spare doing it again.
        on_report: called with each step's metrics as they come.
        say: called with what a person should know beside them, e.g. that an engine died; kept with the run as well.

    Raises:
        ConfigError: the input cannot be used.
        RunError: training failed.
        RunStopped: `abort_running` was called meanwhile.
    """
    uri, path, status = tracking_uri(config), inputs.model_folder(config), "FAILED"
    inputs.check(config, path)
    check_writable(folder)
    if config.checkpoint.start_from and not (resume and archive.whole(folder)):
        run_folder.check_start(config)
    with _beside(config, path) as (engines, reward_models):
        # Before there is a run: one without prompts leaves no trace.
        tables = tables or inputs.prompt_tables(config, path)
        run_id = _open_run(config, folder, resume, parent, say)
        try:
            box, events = controller.new_box(), _Events(uri, run_id, say)
            setup = {"model": path, "tracking": (uri, run_id), "engines": engines, "reward_models": reward_models}
            trainer = _trainer(config, setup | {"box": box}, folder, tables)
            metrics = controller.fit(trainer, box, on_report or _ignore, events, config.checkpoint.grace_s)
            run_folder.write(folder / "result.json", json.dumps(metrics))
            status = "FINISHED"
        except (RunStopped, SystemExit):  # Tune's report exits the thread of a trial that it has stopped
            status = "FINISHED"
            raise
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            report.end_run(uri, run_id, status)
    return Result(config.name or "", folder.path, metrics, run_id)


def examine(config: RunConfig) -> list[Verdict]:
    """What the doctor says of a config: a few steps that change nothing and leave nothing, neither a run nor a record.

    Raises:
        ConfigError: the input cannot be used.
        RunError: a step failed.
    """
    from rlx import doctor

    path = inputs.model_folder(config)
    inputs.check(config, path)
    with _beside(config, path) as (engines, reward_models), tempfile.TemporaryDirectory(prefix="rlx-check-") as folder:
        tables = inputs.prompt_tables(config, path)
        box, calm, place = controller.new_box(), doctor.rest(config), open_storage(f"{folder}/check")
        setup = {"model": path, "tracking": ("", None), "engines": engines, "reward_models": reward_models}
        trainer = _trainer(calm, setup | {"box": box, "examine": True}, place, tables)
        figures = controller.fit(trainer, box, _ignore, lambda words: None)
    return doctor.verdicts(figures, config)


def tracking_uri(config: RunConfig) -> str:
    """Where MLflow keeps what the config's runs report."""
    return config.tracking.uri or report.default_uri(local_folder(config.storage))


def engine_options(config: RunConfig) -> dict[str, Any]:
    """vLLM's engine arguments for a config."""
    settings = config.rollout
    return pool.engine_options(
        dtype=config.model.dtype,
        max_model_len=config.data.max_prompt_tokens + settings.max_tokens,
        max_num_seqs=settings.max_num_seqs,
        on_gpu=settings.resources_per_engine.get("GPU", 0) > 0,
        kv_cache_mib=settings.kv_cache_mib,
        gpu_memory=settings.gpu_memory_utilization,
        eager=settings.enforce_eager,
        trust_remote_code=config.model.trust_remote_code,
        lora_rank=config.model.lora_rank if config.model.lora_sync == "adapter" else 0,
    )


def adapter(config: RunConfig) -> dict[str, Any] | None:
    """peft's description of the adapters that engines are sent; None if they are sent the whole model."""
    chosen = config.model
    if chosen.lora_sync != "adapter":
        return None
    targets = list(chosen.lora_targets) or ALL_LAYERS
    return {"peft_type": "LORA", "r": chosen.lora_rank, "lora_alpha": chosen.lora_alpha, "target_modules": targets}


# ---------------------------------------------------------------------------------------------------------------------
# Engines and trainers


@contextmanager
def _beside(config: RunConfig, path: str) -> Iterator[tuple[list[Any], list[Any]]]:
    """Engines and reward models, starting: in the bundles that a Tune trial holds for them, or in a new group."""
    needed = plan(config)
    held = ray.util.get_current_placement_group()
    group, first = held or placement_group(needed.beside), 1 if held else 0
    actors: list[Any] = []
    try:
        if not group.wait(60):
            raise ConfigError(f"no room for {needed} within 60 s: {needed.beside} are not free")
        engines = pool.start_engines(
            len(needed.engines), path, engine_options(config), needed.engines[0], group, first, adapter(config)
        )
        actors += engines
        models = _reward_models(config, needed.reward_models, group, first + len(engines))
        actors += models
        yield engines, models
    finally:
        for actor in actors:
            ray.kill(actor)
        if not held:
            remove_placement_group(group)


def _reward_models(config: RunConfig, bundles: list[dict[str, float]], group: Any, first: int) -> list[Any]:
    if not bundles:
        return []
    settings = config.reward
    return reward_model.start_reward_models(
        len(bundles),
        str(settings.model),
        system=config.data.system,
        batch_tokens=settings.model_batch_tokens,
        resources=bundles[0],
        group=group,
        first_bundle=first,
        trust_remote_code=config.model.trust_remote_code,
    )


def _open_run(config: RunConfig, folder: Storage, resume: bool, parent: str | None, say: Say | None) -> str:
    if not resume:
        create_run(config, folder, parent)
        return run_folder.mlflow_run(folder)
    uri, run_id = tracking_uri(config), run_folder.mlflow_run(folder)
    (folder / _TRAIN_RECORD).delete()
    try:
        report.resume_run(uri, run_id)
    except Exception:  # each kind of MLflow store has its own; e.g. on another machine, with a database of its own
        (say or _LOG.warning)(f"MLflow run {run_id} is not in {uri}: what comes now is recorded in a new one")
        return _record_run(config, folder, parent)
    _save_config(config, folder, run_id)  # what was changed for the rest of the run holds for a later resume too
    return run_id


def _save_config(config: RunConfig, folder: Storage, run_id: str) -> None:
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    report.log_file(tracking_uri(config), run_id, "config.yaml", text)
    run_folder.write(folder / "config.yaml", text)


def _trainer(config: RunConfig, setup: dict[str, Any], folder: Storage, tables: Mapping[str, Any]) -> TorchTrainer:
    scaling = config.scaling
    parent, _, name = folder.path.rpartition("/")
    return TorchTrainer(
        _train,
        train_loop_config=setup | {"config": config.model_dump(), "folder": folder},
        torch_config=TorchConfig(backend="nccl" if scaling.use_gpu else "gloo"),
        datasets=dict(tables),
        dataset_config=ray.train.DataConfig(datasets_to_split=[]),  # each rank takes its own rows: see data.py
        scaling_config=ray.train.ScalingConfig(
            num_workers=scaling.num_workers,
            use_gpu=scaling.use_gpu,
            resources_per_worker=plan(config).workers[0],
            accelerator_type=scaling.accelerator_type,
            placement_strategy=scaling.placement_strategy,
        ),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=parent,
            storage_filesystem=folder.filesystem,
            failure_config=ray.train.FailureConfig(max_failures=scaling.max_failures, controller_failure_limit=_STARTS),
        ),
    )


def _train(setup: dict[str, Any]) -> None:
    # Here, so that Train's controller need not import torch and transformers.
    from rlx import doctor
    from rlx.train_loop import train_loop

    controller.note_workers(setup["folder"].path)
    with controller.fatal_errors_posted(setup["box"], ray.train.get_context().get_world_rank()):
        if setup.get("examine"):
            doctor.examine(setup)
        else:
            train_loop(setup)


def _ignore(metrics: dict[str, Any], checkpoint: str | None) -> None:
    pass


class _Events:
    """What a run says beside its metrics: passed on, and kept as a text file with its MLflow run."""

    def __init__(self, uri: str, run_id: str, say: Say | None) -> None:
        self.uri, self.run_id, self.say = uri, run_id, say
        self.lines: list[str] = []

    def __call__(self, words: str) -> None:
        self.lines.append(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {words}\n")
        if self.say:
            self.say(words)
        try:
            report.log_file(
                self.uri, self.run_id, f"events_{self.lines[0][:19].replace(' ', '_')}.txt", "".join(self.lines)
            )
        except Exception as error:  # a run does not end for want of a note
            _LOG.warning("not noted in MLflow: %s", one_line(error, 500))


def _quiet_environment() -> None:
    """What the libraries read when they start: fewer words, and reports as often as steps."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    quiet = {
        "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths in a config mean the same everywhere
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # also how often a report is taken in
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_AIR_NEW_OUTPUT": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
