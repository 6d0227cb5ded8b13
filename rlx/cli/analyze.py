"""Analyzes a sweep from MLflow as a page, tables and figures: rlx analyze [--sweep NAME]

Left out: the analysis itself (rlx.analysis).
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rlx.cli.arguments import add_tracking_uri, find_sweep_place, terminal_width
from rlx.cli.options import CommandParser, exit_code
from rlx.config.errors import ConfigError
from rlx.config.run import storage_words, valid_name
from rlx.config.sections.records import TrackingConfig
from rlx.config.sweep import Mode, metric_name
from rlx.storage import signatures
from rlx.storage.addresses import local_folder, open_storage
from rlx.storage.filesystem import Storage
from rlx.tracking.services import mlflow, mlflow_errors
from rlx.tracking.services.reachable import check_mlflow

if TYPE_CHECKING:
    from rlx.analysis.loading import Sweep, Trial


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = CommandParser(
        description="Ranks and plots the settings of a sweep, and stores the files with the sweep in MLflow.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--sweep", metavar="NAME", help="the sweep to analyze, or its folder or address (default: the newest)"
    )
    parser.add_argument("--against", metavar="NAME", help="another sweep: compare the best setting of each")
    parser.add_argument("--experiment", help="MLflow experiment of the sweep (default: as the sweep has it, or rlx)")
    add_tracking_uri(parser, "MLflow server or database (default: as the sweep in --storage has it, or there)")
    parser.add_argument("--storage", default="storage", help="folder with the runs (default: %(default)s)")
    parser.add_argument(
        "--metric", type=metric_name, help="metric to rank settings by (default: the one that the sweep compared by)"
    )
    parser.add_argument(
        "--mode", choices=get_args(Mode), help="whether high or low is good (default: as in the sweep, or max)"
    )
    parser.add_argument(
        "--by",
        metavar="SETTING",
        help="also compare the values of this setting over all runs",
    )
    parser.add_argument("--trust", action="store_true", help="take code, models and addresses that somebody else wrote")
    parser.add_argument("--out", metavar="DIR", help="folder for the files (default: analysis/SWEEP in the storage)")
    args = parser.parse_args(argv)

    def script() -> int:
        try:
            return print_analysis(args)
        except Exception as error:  # the server or the database may go away while it is read
            if type(error).__module__ != "mlflow.exceptions":  # which is slow to import
                raise
            raise ConfigError(f"MLflow does not answer any more: {mlflow_errors.cause(error)}") from None

    return exit_code(script)


def print_analysis(args: argparse.Namespace) -> int:
    """Prints the ranking of the sweep and writes its files; returns the exit status."""
    asked, address = find_sweep_place(args.sweep, args.storage)
    storage = local_folder(address)
    tracking = tracking_of(args, asked, address)
    check_mlflow(tracking.uri)
    uri, experiment = tracking.uri or existing_uri(storage), tracking.experiment
    mlflow.find_experiment(uri, experiment)  # before what is slow to import
    from rlx.analysis import loading, report, tables
    from rlx.analysis.comparison.wording import gap_sentence, sweep_verdict

    names = loading.sweep_names(uri, experiment)
    name = asked or names[0]
    if args.against == name:
        raise ConfigError(f"--against {name} is the analyzed sweep itself: --sweep and --against name two sweeps")
    sweep = loading.load_sweep(uri, experiment, name, [args.metric] if args.metric else [])
    metric, mode = judged_by(args, sweep)
    against = loading.load_sweep(uri, experiment, args.against, [metric]) if args.against else None
    for each in filter(None, (sweep, against) if args.metric else ()):
        loading.check_logged(uri, each, metric)
    if not asked and len(names) > 1:
        print(f"sweeps, newest first: {', '.join(names)}; --sweep NAME picks another\n")
    print(f"sweep {sweep.name}: {len(sweep.trials)} trials by {metric}\n")
    compared = report.comparisons(sweep, metric, mode, args.by, against)
    for groups in compared.values():
        print(f"{tables.format_table(tables.group_table(groups), terminal_width())}\n")
    candidates = compared[report.SETTINGS]
    evidence = report.evidence_of(sweep, compared, uri, metric, mode)
    print(f"{sweep_verdict(candidates, evidence, metric)}\n")
    if evidence.against:
        print(f"{gap_sentence(evidence.against)}\n")
    place = report.other_place(sweep, metric, mode)
    if candidates[0].is_compared:
        run = loading.trial_address(uri, candidates[0].ended[0]) or "RUN"
        step = "newest" if place else "best"  # which is best is kept by the sweep's own metric
        print(f"its model: {shlex.join(['rlx', 'export', f'{run}@{step}', '--register', 'NAME'])}\n")
    folder = Path(args.out) if args.out else storage / "analysis" / sweep.name / place
    runs = open_storage(address, create=False) / "sweeps" / sweep.name / "runs"
    withheld = report.withhold_nothing if args.trust else partial(_not_own, runs)
    paths = report.write_report(sweep, folder, uri, metric, mode, compared, evidence, withheld)
    print("\n".join(["files, also in MLflow under analysis/:", *map(str, paths)]))
    return 0


def sweep_words(name: str, storage: str, tracking: TrackingConfig) -> list[str]:
    """The options with which this command finds a sweep that is kept in a storage."""
    default = TrackingConfig()
    words = ["--sweep", name, *storage_words(storage)]
    words += ["--experiment", tracking.experiment] if tracking.experiment != default.experiment else []
    return words + (["--tracking.uri", tracking.uri] if tracking.uri else [])


def tracking_of(args: argparse.Namespace, sweep: str | None, storage: str) -> TrackingConfig:
    """Where a sweep is recorded: as the options say, else as its own plan does, else by default.

    Raises:
        ConfigError: somebody else wrote the address in the plan, to which the user's own key for MLflow would go.
    """
    from rlx.sweeps import records

    given = {"uri": args.tracking_uri, "experiment": args.experiment}
    planned = TrackingConfig()
    if not args.tracking_uri:
        planned = records.planned_tracking(open_storage(storage, create=False), sweep, trust=args.trust)
    return planned.model_copy(update={key: value for key, value in given.items() if value})


def judged_by(args: argparse.Namespace, sweep: Sweep) -> tuple[str, Mode]:
    """The metric to rank by and whether high or low is good: those of the sweep, unless others are given."""
    metric = args.metric or sweep.metric
    return metric, args.mode or (sweep.mode if metric == sweep.metric else "max")


def _not_own(runs: Storage, trial: Trial, tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a trial that name code, models or addresses, unless this user has signed them."""
    is_name = valid_name(trial.name) == trial.name
    return {} if is_name and signatures.is_own_folder(runs / trial.name, tree) else signatures.powers(tree)


def existing_uri(storage: Path) -> str:
    """The address of the MLflow store in a storage folder, which is not created.

    Raises:
        ConfigError: the folder does not exist.
    """
    if not storage.is_dir():
        raise ConfigError(f"no storage folder {storage}; --tracking.uri names the MLflow store of a sweep elsewhere")
    return mlflow.default_uri(storage)
