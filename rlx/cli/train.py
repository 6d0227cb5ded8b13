"""Trains a run, or resumes one: rlx train [--resume NAME | --from CHECKPOINT] [--SETTING VALUE]

Left out: the run itself (rlx.runs.launch).
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rlx.cli.options import end_on_signals, exit_code, parse, settings_parser, signal_received
from rlx.config.errors import ConfigError
from rlx.config.experiment import DEFAULT_EXPERIMENT, followers, settings_text, takes_experiment, with_experiment
from rlx.config.loading import from_tree, read_yaml, with_overrides
from rlx.config.run import RunConfig, storage_words
from rlx.config.sections.data import DataConfig, EvalConfig
from rlx.config.sections.model import ModelConfig
from rlx.config.sections.records import TrackingConfig
from rlx.config.sections.rollout import RolloutConfig
from rlx.config.sections.train import TrainConfig
from rlx.config.sweep import DEFAULT_METRIC

if TYPE_CHECKING:
    from rlx.storage.filesystem import Storage


def main(argv: Sequence[str] | None = None) -> int:
    parser = _argument_parser()

    def script() -> int:
        args, given = parse(parser, sys.argv[1:] if argv is None else argv)
        _check_options(args)
        if args.resume:
            return resume(args.resume, given, trust=args.trust)
        # Bad settings are refused before anything slow is imported.
        return start(new_config(args.config, given, args.start, trust=args.trust))

    return exit_code(script)


def _argument_parser() -> argparse.ArgumentParser:
    parser = settings_parser(
        "PPO on a language model. Without --config and --model.path: rlx's tiny model learns sums, on 2 cores.",
        "[--config FILE] [--resume NAME | --from CHECKPOINT] [--SECTION.SETTING VALUE ...]",
    )
    parser.add_argument("--resume", metavar="NAME", help="continue the run of this name from its newest checkpoint")
    parser.add_argument(
        "--from",
        dest="start",
        metavar="CHECKPOINT",
        help="start a new run from the weights of a checkpoint (from all of its state with --checkpoint.init-state "
        "all), and from its settings unless --config gives others: NAME, NAME@10, NAME@best, or a folder or address",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="with --resume and --from: also take settings that name code, models, addresses or patterns from what "
        "another person wrote, or this one elsewhere",
    )
    return parser


def _check_options(args: argparse.Namespace) -> None:
    """Raises ConfigError for options that exclude each other."""
    if args.resume and args.config:
        raise ConfigError("--resume uses the run's own settings: change single ones by options, not by --config")
    if args.resume and args.start:
        raise ConfigError("--resume continues a run, --from begins a new one: give one of them")
    if args.trust and not (args.resume or args.start):
        raise ConfigError("--trust goes with --resume or --from")


# ---------------------------------------------------------------------------------------------------------------------
# Settings


def new_config(
    file: str | None, given: Mapping[str, Any], start: str | None = None, *, trust: bool = False
) -> RunConfig:
    """Returns the config of a new run.

    Args:
        file: a YAML file of settings.
        given: the settings of the command line by dotted key, which override the file.
        start: the checkpoint that the run starts from.
        trust: take all of the checkpoint's settings, whoever wrote them.
    """
    tree = with_overrides(read_yaml(file) if file else {}, given)
    if start:
        base = with_experiment(tree) if file else {}
        storage = given.get("storage") or from_tree(base, given=given, file=file).storage
        whole = with_overrides(inherited_tree(start, storage, base, given, trust=trust), given)
    else:
        whole = with_experiment(tree)
    config = from_tree(whole, f"--from {start}" if start else "command line", given, file=file)
    if (file or not start) and takes_experiment(tree):
        print(DEFAULT_EXPERIMENT)
    return config


def inherited_tree(
    which: str, storage: str, base: dict[str, Any], given: Mapping[str, Any], *, trust: bool = False
) -> dict[str, Any]:
    """Returns the config tree of a new run that starts from a checkpoint: `base`, or else the checkpoint's settings.

    Of the checkpoint's settings, defaults that follow those that are given follow them, with a message.

    Args:
        storage: that of the new run, and of a run that is named.
    """
    from rlx.runs import run_folder

    address, checkpoint = run_folder.checkpoint_of(which, storage)
    start = {
        "name": None,
        "storage": storage,
        "checkpoint.init_from": address,
        "checkpoint.init_state": "weights",
    }
    if base:
        return with_overrides(base, start)
    saved = run_folder.inherited_settings(checkpoint, print, trust=trust, needed=given)
    changed = followers(saved, {**start, **given})
    if given.get("checkpoint.init_state") == "all":
        changed = {key: value for key, value in changed.items() if not run_folder.is_fixed(key)}
    if changed:
        print(f"defaults that follow what was given: {settings_text(changed)}")
    return with_overrides(saved, {**changed, **start})


# ---------------------------------------------------------------------------------------------------------------------
# Commands


def start(config: RunConfig) -> int:
    """Trains a new run."""
    from rlx.cluster.resources import naming_ways_out
    from rlx.runs import run_folder

    with naming_ways_out(config.model_dump(exclude_unset=True)), run_folder.new_run(config) as (config, folder):
        return train(config, folder, resume=False)


def resume(name: str, given: Mapping[str, Any], *, trust: bool = False) -> int:
    """Trains the rest of a run; of a finished one, only sends what MLflow has not got yet."""
    from rlx.runs import run_folder
    from rlx.tracking import console

    storage = given.get("storage") or RunConfig().storage
    if "@" in name or "/" in name:
        raise ConfigError(f"--resume {name}: expected a run's name; --storage says where, --from takes checkpoints")
    with run_folder.saved_run(name, storage, given, trust=trust) as (config, folder, last):
        if last:
            steps = max(config.train.steps, int(last.get("step", 0)))
            print(f"run {name} is finished: {steps} steps, {console.metrics_line(last)}")
            print(f"{resume_command(name, storage, '--train.steps', str(2 * steps))} goes on with it")
            _send_pending(config.tracking, config.storage, folder)
            return 0
        return train(config, folder, resume=True)


def resume_command(name: str, storage: str, *more: str) -> str:
    """The command line that continues a run."""
    return shlex.join(["rlx", "train", "--resume", name, *more, *storage_words(storage)])


def _send_pending(tracking: TrackingConfig, storage: str, folder: Storage) -> None:
    """Sends the records of a finished run that still wait."""
    from rlx.tracking import outbox

    if outbox.pending(folder):
        from rlx.runs import launch  # slow to import
        from rlx.tracking.tracker import services_of

        launch.send_pending(services_of(tracking, storage), folder, print)


def train(config: RunConfig, folder: Storage, *, resume: bool) -> int:
    """Runs the steps that are left and shows them."""
    from rlx.runs import preflight, run_folder
    from rlx.tracking import console
    from rlx.tracking.services.reachable import check_tracking

    started, first = time.monotonic(), dict[str, Any]()
    end_on_signals()
    with _telling(folder, config.storage), console.RunProgress(config.train.steps) as progress:

        def on_report(metrics: dict[str, Any], checkpoint: str | None) -> None:
            first.update(first or metrics)
            progress.step(metrics, checkpoint)

        if not resume:  # a resume keeps its records until the server answers
            check_tracking(config.tracking, config.storage)
            run_folder.check_start(config)
        with run_folder.keeping_details(folder):
            prepared = preflight.prepare(config, progress.warm_start)
        ready = prepared.config
        progress.message(f"run {config.name}: {config.train.steps} steps, in {folder}")
        progress.message(
            in_short(ready.model, ready.data, ready.rollout, ready.train, ready.eval, ready.resolved_critic)
        )
        from rlx.cluster import connection  # slow to import: what is wrong has been said by now
        from rlx.cluster.watch import end_with_ray
        from rlx.runs import launch
        from rlx.tracking import outbox

        connection.connect(config, prepared.resources, progress.message)
        end_on_signals()  # again: Ray has installed a handler of its own
        end_with_ray(lambda: _way_on(folder, config.storage) or "start it again", progress.message, signal_received)
        result = launch.run(prepared, folder, resume=resume, on_report=on_report, notify=progress.message)
    print(summary(prepared.name, first, result.metrics, time.monotonic() - started))
    for service in prepared.tracking:
        print(f"curves: {service.browse_command()}\nat: {service.run_page(outbox.run_id(folder, service.name))}")
    return 0


def in_short(
    model: ModelConfig,
    data: DataConfig,
    rollout: RolloutConfig,
    train: TrainConfig,
    evaluation: EvalConfig,
    critic: str,
) -> str:
    """Returns one line with what is to be trained, and with the settings whose defaults depend on the model."""
    of_critic = f", critic {train.in_short('critic_lr')}" if critic != "none" else ""
    rates = f"learning rate {train.in_short('actor_lr')}{of_critic}"
    sources = ", ".join(part.source for part in data.parts)
    return (
        f"{model.path} in {model.dtype}; prompts of {sources}, at most {data.max_prompt_tokens} tokens; responses "
        f"of at most {rollout.max_tokens}; {rates}; judged by at most {evaluation.num_prompts} held-out prompts"
    )


@contextmanager
def _telling(folder: Storage, storage: str) -> Iterator[None]:
    """Says how to go on when a run that has begun is interrupted or fails, unless its settings were refused."""
    try:
        yield
    except RuntimeError as error:
        from rlx.runs.train_run import RunError  # slow to import, unless it was raised

        refused = f": {ConfigError.__name__}: " in str(error)
        way = _way_on(folder, storage, refused) if isinstance(error, RunError) else ""
        raise RunError(f"{error}; {way}") if way else error from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_way_on(folder, storage) or "the run had not begun") from None


def _way_on(folder: Storage, storage: str, refused: bool = False) -> str:
    """What continues a run, and from where; empty if nothing does, or if its workers refused its settings.

    A checkpoint shows that workers have taken the settings before: then the cause may be a node.
    """
    from rlx.runs import run_folder
    from rlx.storage import checkpoint_catalog
    from rlx.storage.filesystem import StorageError

    resumes = resume_command(folder.name, storage)
    try:
        if not run_folder.holds_run(folder):
            return ""
        if saved := checkpoint_catalog.saved_checkpoints(folder):
            is_left = any(entry.manifest for entry in saved)
            return f"{resumes} continues the run from its newest checkpoint" if is_left else ""
    except (OSError, StorageError):  # which may be why the run has failed
        return f"{resumes} continues the run"
    return "" if refused else f"{resumes} begins it again: it has no checkpoint yet"


def summary(name: str, first: Mapping[str, Any], last: Mapping[str, Any], seconds: float) -> str:
    """Returns one line about a finished run, from its first and last metrics."""
    before, after = (metrics.get(DEFAULT_METRIC, float("nan")) for metrics in (first, last))
    since = f" since step {first['step']}" if first.get("step") else ""  # of a run that was resumed
    return f"run {name} finished: held-out accuracy {before:.3f} -> {after:.3f}{since} in {seconds:.0f} s"
