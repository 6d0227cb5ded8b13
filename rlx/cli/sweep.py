"""Runs a sweep of PPO: rlx sweep [--trials N] [--SETTING VALUE]. Left out: what a plan is made of (rlx.sweeps)."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rlx.cli.arguments import terminal_width
from rlx.cli.options import NotingParser, add_help, add_settings, end_on_signals, exit_code, parse, signal_received
from rlx.cluster.resources import naming_ways_out, sharing_gpus
from rlx.config.errors import ConfigError, one_line
from rlx.config.experiment import DEFAULT_EXPERIMENT, TINY, has_tiny_model, takes_experiment, with_experiment
from rlx.config.loading import from_tree, read_yaml, with_overrides
from rlx.config.run import storage_words
from rlx.config.sections.model import ModelConfig
from rlx.config.sweep import (
    DEFAULT_ALPHA,
    DEFAULT_METRIC,
    OF_THE_MACHINE,
    Mode,
    ReuseName,
    RungUnit,
    SchedulerName,
    SearchName,
    metric_name,
)

if TYPE_CHECKING:
    from rlx.runs.preflight import PreparedRun
    from rlx.storage.filesystem import Storage
    from rlx.sweeps.records import SweepPlan, TrialRecord
    from rlx.tracking.console import SweepProgress
    from rlx.types import Notify

_OF_THE_PLAN = (
    "space",
    "trials",
    "seeds",
    "max_seeds",
    "alpha",
    "search",
    "scheduler",
    "max_concurrent",
    "reuse",
    "metric",
    "mode",
    "budget",
    "rung_by",
)
"""options that the plan of a sweep keeps"""
_DEFAULTS = Path(__file__).parent / "defaults"
DEFAULT_SETTINGS = _DEFAULTS / "sweep.yaml"
"""the settings of a sweep of the default experiment"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argument_parser()

    def script() -> int:
        args, given = parse(parser, list(sys.argv[1:] if argv is None else argv))
        refuse_options(args, given)
        own = read_yaml(args.config) if args.config else None
        tree = new_tree(own, given)
        # Bad settings are refused before anything slow is imported.
        config = from_tree(tree, "command line", given, file=args.config)
        if args.interleave > 1:
            shared = sharing_gpus(args.interleave, config.scaling, config.rollout, config.reward)
            tree = with_overrides(tree, shared)
        if args.resume is None and takes_experiment(with_overrides(own or {}, given)):
            print(DEFAULT_EXPERIMENT)
        return start_sweep(args, tree, given)

    return exit_code(script)


def argument_parser() -> argparse.ArgumentParser:
    """The options of `rlx sweep`."""
    parser = NotingParser(
        description="A sweep of PPO runs; every setting that the search space does not vary can be given too.",
        usage="%(prog)s [--space FILE] [--trials N] [--seeds K] [--search NAME] [--scheduler NAME] [--resume [NAME]] "
        "[--SECTION.SETTING VALUE ...]",
        allow_abbrev=False,
        add_help=False,
    )
    add_help(parser)
    parser.add_argument("--config", metavar="FILE", help="YAML settings (default: the tiny model's, and its sweep's)")
    parser.add_argument(
        "--space",
        metavar="FILE",
        help="Python file with the search space (default: learning rates of this kind of model, KL, and without "
        "--scheduler pbt passes)",
    )
    parser.add_argument("--trials", metavar="N", type=int, default=4, help="settings to try (a grid tries all)")
    parser.add_argument("--seeds", metavar="K", type=int, default=1, help="runs of each setting, with different seeds")
    parser.add_argument("--search", choices=get_args(SearchName), default="random", help="how settings are chosen")
    parser.add_argument(
        "--scheduler", choices=get_args(SchedulerName), default="none", help="which trials are stopped early"
    )
    parser.add_argument(
        "--rung-by",
        choices=get_args(RungUnit),
        default="steps",
        help="with asha, median: compare trials at equal steps, tokens or GPU-seconds (default: steps)",
    )
    parser.add_argument("--max-seeds", metavar="K", type=int, help="with --scheduler race: add seeds up to K")
    parser.add_argument(
        "--alpha", type=float, default=DEFAULT_ALPHA, help="with --scheduler race: its chance of dropping the best"
    )
    parser.add_argument(
        "--metric", "--objective", type=metric_name, default=DEFAULT_METRIC, help="compare trials by it (%(default)s)"
    )
    parser.add_argument("--mode", choices=get_args(Mode), default="max", help="whether high or low is good")
    parser.add_argument(
        "--budget", metavar="AMOUNT", help="try no more settings than this pays for: 500steps, 2Mtokens, 8gpu-h"
    )
    _add_places(parser)
    _add_resume_options(parser)
    add_settings(parser)
    return parser


def _add_places(parser: argparse.ArgumentParser) -> None:
    """Options that say where trials run; they change no number that a trial computes."""
    parser.add_argument("--max-concurrent", metavar="N", type=int, help="run at most N trials at once")
    parser.add_argument(
        "--interleave",
        metavar="N",
        type=int,
        default=1,
        help="N trials share the GPUs that one would have: while one updates, engines draw for another (default: 1)",
    )
    parser.add_argument(
        "--reuse",
        choices=get_args(ReuseName),
        default="engines",
        help="what stays for the next trial: engines, engines and workers (short trials), or none",
    )


def _add_resume_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resume", metavar="NAME", nargs="?", const="", help="continue this sweep, or the newest")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="with --resume: run the code and the settings of a sweep that another person wrote, or this one elsewhere",
    )
    parser.add_argument(
        "--restart-errored",
        action="store_true",
        help="with --resume: failed trials go on from their newest checkpoints",
    )
    parser.add_argument(
        "--from-scratch", action="store_true", help="with --restart-errored: they run again from the first step"
    )


def refuse_options(args: argparse.Namespace, given: Mapping[str, Any]) -> None:
    """Raises ConfigError for options that exclude each other, and for counts below 1."""
    for option in ("restart_errored", "trust"):
        if getattr(args, option) and args.resume is None:
            raise ConfigError(f"--{option.replace('_', '-')} needs --resume")
    if args.from_scratch and not args.restart_errored:
        raise ConfigError("--from-scratch needs --restart-errored")
    of_new = {"config", "interleave", *_OF_THE_PLAN} & args.noted
    if args.resume is not None and (set(given) - set(OF_THE_MACHINE) or of_new):
        allowed = ", ".join(f"--{key.replace('_', '-')}" for key in OF_THE_MACHINE)
        more = "; it keeps its number of trials: a new sweep with another --seed tries other settings"
        raise ConfigError(
            f"--resume uses the sweep's own settings: only {allowed}, --trust, --restart-errored and --from-scratch go "
            f"with it{more if 'trials' in of_new else ''}"
        )
    for option in ("trials", "seeds", "max_seeds", "max_concurrent", "interleave"):
        if (value := getattr(args, option)) is not None and value < 1:
            raise ConfigError(f"--{option.replace('_', '-')} {value}: at least 1")


def new_tree(own: Mapping[str, Any] | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config tree of a new sweep.

    Args:
        own: the settings of the user's file; None: without a file, the tiny model has those of DEFAULT_SETTINGS.
        given: the settings of the command line by dotted key, which override the file.
    """
    tree = with_overrides(own or {}, given)
    if own is None and has_tiny_model(tree):
        tree = with_overrides(read_yaml(DEFAULT_SETTINGS), given)
    return with_experiment(tree)


def default_space(model: ModelConfig, scheduler: SchedulerName = "none") -> Path:
    """Returns the search space for a kind of model: their learning rates are hundreds of times apart.

    That of pbt has only settings that can have a schedule.
    """
    name = "pbt" if scheduler == "pbt" else "ppo"
    if model.path == TINY:
        return _DEFAULTS / f"{name}_tiny.py"
    return _DEFAULTS / (f"{name}_lora.py" if model.lora_rank else f"{name}.py")


def start_sweep(args: argparse.Namespace, tree: dict[str, Any], given: Mapping[str, Any]) -> int:
    """Starts or resumes a sweep, shows it, and writes its analysis; returns 1 if a trial failed."""
    from rlx.runs import preflight, run_folder
    from rlx.storage.addresses import open_storage
    from rlx.tracking import console
    from rlx.types import Phase

    end_on_signals()
    started, is_resume = time.monotonic(), args.resume is not None
    config = from_tree(tree)
    sizes = preflight.lengths(config.data, config.rollout, config.model.path)  # the same for all trials
    tree = with_overrides(tree, preflight.absolute_paths(config) | sizes)
    storage = open_storage(tree["storage"])
    way_out = nullcontext() if is_resume else naming_ways_out(tree)
    with way_out, claimed_plan(args, storage, tree, given) as (plan, restarted):
        from rlx.sweeps import plans, verdict  # slow to import

        if is_resume and not restarted and plans.is_finished(plan, plans.ended_trials(plan, storage)):
            return show_finished(plan, storage)
        with console.SweepProgress(plan.config.train.steps, plan.metric) as progress:
            with (
                console.RunProgress(plan.config.train.steps, progress.console) as preparing,
                run_folder.keeping_details(storage / "sweeps" / plan.name),
            ):
                prepared = preflight.prepare(plan.config, preparing.warm_start)
            connect_cluster(prepared, plan, storage, progress.message)
            lines = [plans.describe(plan), *plans.prospects(plan), *(f"{trial} runs again" for trial in restarted)]
            progress.message("\n".join(lines))
            progress.message(Phase("prompts and first trial"))
            results = _run(plan, storage, progress)
        failures = show_failures(results)
        print(f"sweep {plan.name} finished in {time.monotonic() - started:.0f} s")
        print("".join(f"{line}\n" for line in verdict.race_lines(plan, results)), end="")
        write_analysis(plan, storage)
    print("\n".join(tracking_lines(plan, storage)))
    return 1 if failures else 0


def show_finished(plan: SweepPlan, storage: Storage) -> int:
    """Shows a sweep that has run to its end, and sends what MLflow has not got yet; returns 1 if a trial failed."""
    from rlx.sweeps import records, tuner

    folder = storage / "sweeps" / plan.name
    failures = show_failures(records.TrialRecords(folder).all())
    again = "; --restart-errored runs those that failed again" if failures else ""
    print(f"sweep {plan.name} is finished: no trial is left to run{again}")
    tuner.send_pending(plan.tracking, folder)
    write_analysis(plan, storage)
    return 1 if failures else 0


def show_failures(results: Mapping[str, TrialRecord]) -> list[str]:
    """Prints why trials failed, a line each, and returns the lines."""
    from rlx.sweeps import tuner

    failures = tuner.failures(results)
    print("".join(f"error: {reason}\n" for reason in failures), end="", file=sys.stderr)
    return failures


def _run(plan: SweepPlan, storage: Storage, progress: SweepProgress) -> dict[str, TrialRecord]:
    """Runs the sweep, and says where it is recorded; says how to go on if it is interrupted."""
    from rlx.sweeps import tuner

    def on_begin() -> None:
        progress.message("\n".join(tracking_lines(plan, storage)))

    try:
        return tuner.run_sweep(plan, storage, watch=progress.update, on_begin=on_begin)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(way_on(plan, storage)) from None


def way_on(plan: SweepPlan, storage: Storage) -> str:
    """How a sweep that was interrupted goes on; it begins anew if no plan was kept."""
    from rlx.sweeps import records

    if not (storage / "sweeps" / plan.name / records.PLAN_FILE).exists():
        return "start it again"
    command = shlex.join(["rlx", "sweep", "--resume", plan.name, *storage_words(plan.config.storage)])
    return f"{command} continues the sweep"


@contextmanager
def claimed_plan(
    args: argparse.Namespace, storage: Storage, tree: Mapping[str, Any], given: Mapping[str, Any]
) -> Iterator[tuple[SweepPlan, list[str]]]:
    """Claims the folder of the sweep; gives its plan and, of a resumed one, the failed trials that run again."""
    from rlx.storage import claims
    from rlx.sweeps import records

    if args.resume is None:
        with claims.take_new(storage / "sweeps", tree.get("name"), "sweep", "sweep") as claim:
            records.refuse_existing(claim.folder)
            yield checked_plan(new_plan(args, tree, claim.folder.name)), []
    else:
        folder = records.find_sweep(storage, args.resume or None)
        with claims.take(folder, f"sweep {folder.name!r}"):
            yield resumed_plan(args, storage, folder.name, tree, given)


def connect_cluster(prepared: PreparedRun, plan: SweepPlan, storage: Storage, notify: Notify) -> None:
    """Connects to the cluster; SIGTERM and SIGHUP still interrupt the sweep, and it ends if its own cluster dies."""
    from rlx.cluster import connection
    from rlx.cluster.watch import end_with_ray

    connection.connect(prepared.config, prepared.resources, notify)
    end_on_signals()  # again: Ray has installed a handler of its own
    end_with_ray(lambda: way_on(plan, storage), notify, signal_received)


def new_plan(args: argparse.Namespace, tree: Mapping[str, Any], name: str) -> SweepPlan:
    """Returns the plan that the options describe."""
    from rlx.sweeps.records import SweepPlan

    return SweepPlan(
        name=name,
        tree={key: value for key, value in tree.items() if key != "name"},
        space=str(Path(args.space or default_space(from_tree(dict(tree)).model, args.scheduler)).resolve()),
        candidates=args.trials,
        **{option: getattr(args, option) for option in _OF_THE_PLAN if option not in ("space", "trials")},
    )


def checked_plan(plan: SweepPlan) -> SweepPlan:
    """Returns a new plan as it will run. What takes a moment is checked first: the space may import Ray.

    Raises:
        ConfigError: something of it cannot be used.
    """
    from rlx.sweeps import choices

    choices.check_quickly(plan)
    from rlx.sweeps.space import load_space  # imports ray.tune, as the space itself may

    load_space(plan.space, plan.tree, plan)
    from rlx.sweeps import plans  # slower to import

    return plans.check_sweep(plan)


def resumed_plan(
    args: argparse.Namespace, storage: Storage, name: str, tree: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[SweepPlan, list[str]]:
    """Returns the saved plan, with the addresses of today, and the failed trials that run again."""
    from rlx.sweeps import plans

    moved = {key: reduce(getitem, key.split("."), tree) for key in given}  # as absolute paths
    plan = plans.continued_sweep(storage, name, {**moved, "storage": tree["storage"]}, trust=args.trust)
    return plan, plans.restart_failed(plan, storage, from_scratch=args.from_scratch) if args.restart_errored else []


def tracking_lines(plan: SweepPlan, storage: Storage) -> list[str]:
    """Returns where a sweep is in its tracking services."""
    from rlx.tracking import outbox

    lines = []
    for service in plan.tracking:
        run_id = outbox.run_id(storage / "sweeps" / plan.name, service.name)
        lines += [f"in {service.title}: {service.browse_command()}", f"at: {service.run_page(run_id)}"]
    return lines


def write_analysis(plan: SweepPlan, storage: Storage) -> None:
    """Prints the table of a sweep and which setting is best, then writes its analysis, without which these stay."""
    from rlx.analysis import loading, report, tables
    from rlx.analysis.comparison import cost
    from rlx.analysis.comparison.wording import sweep_verdict
    from rlx.cli.analyze import sweep_words
    from rlx.storage.addresses import local_folder
    from rlx.tracking import outbox

    try:
        run_id = outbox.run_id(storage / "sweeps" / plan.name)  # a server may know other sweeps of that name
        sweep = loading.load_sweep(
            plan.tracking_uri, plan.config.tracking.experiment, run_id or plan.name, [plan.metric]
        )
        folder = local_folder(plan.config.storage) / "analysis" / plan.name
        compared = report.comparisons(sweep, plan.metric, plan.mode)
        evidence = report.evidence_of(sweep, compared, plan.tracking_uri, plan.metric, plan.mode)
        if spent := cost.cost_line(sweep):
            print(spent)
        print(tables.format_table(tables.group_table(compared[report.SETTINGS]), terminal_width()))
        print(sweep_verdict(compared[report.SETTINGS], evidence, plan.metric))
        paths = report.write_report(sweep, folder, plan.tracking_uri, plan.metric, plan.mode, compared, evidence)
        print("\n".join(str(path) for path in paths))
    except Exception as error:  # each kind of MLflow store has its own errors
        again = shlex.join(["rlx", "analyze", *sweep_words(plan.name, plan.config.storage, plan.config.tracking)])
        print(f"no analysis: {one_line(error, 300)}; later: {again}", file=sys.stderr)
