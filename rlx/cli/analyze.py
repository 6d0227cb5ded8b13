"""A sweep's results from MLflow as a page, tables and figures: python experiments/analyze.py [--sweep NAME]"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rlx.config.errors import ConfigError
from rlx.config.sections import DEFAULT_METRIC
from rlx.storage.addresses import local_folder
from rlx.tracking import mlflow


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Ranks a sweep's settings, draws them, and stores both with the sweep in MLflow.",
        allow_abbrev=False,
    )
    parser.add_argument("--sweep", metavar="NAME", help="the sweep to analyse (default: the newest)")
    parser.add_argument("--against", metavar="NAME", help="another sweep, to compare the best setting of each")
    parser.add_argument("--experiment", default="rlx", help="MLflow experiment that it is in (default: %(default)s)")
    parser.add_argument("--tracking-uri", metavar="URI", help="MLflow server or database (default: that of --storage)")
    parser.add_argument("--storage", default="storage", help="where the runs are kept (default: %(default)s)")
    parser.add_argument("--metric", default=DEFAULT_METRIC, help="what settings are ranked by (default: %(default)s)")
    parser.add_argument("--mode", choices=("max", "min"), default="max", help="which end of the metric is good")
    parser.add_argument(
        "--by", metavar="SETTING", help="compare its values: mean and 95 %% interval over the runs of each"
    )
    parser.add_argument("--out", metavar="DIR", help="folder for the files (default: analysis/SWEEP in the storage)")
    try:
        return analyze(parser.parse_args(argv))
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def analyze(args: argparse.Namespace) -> int:
    """Shows the sweep and writes its files."""
    from rlx.analysis import loading, report, statistics, tables

    storage = local_folder(args.storage)
    uri = args.tracking_uri or default_uri(storage)
    names = loading.sweep_names(uri, args.experiment)
    sweep = loading.load_sweep(uri, args.experiment, args.sweep or names[0], [args.metric])
    against = loading.load_sweep(uri, args.experiment, args.against, [args.metric]) if args.against else None
    if not args.sweep and len(names) > 1:
        print(f"sweeps, newest first: {', '.join(names)}; --sweep NAME picks another\n")
    print(f"sweep {sweep.name}: {len(sweep.trials)} trials by {args.metric}\n")
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    shown = report.compared(sweep, args.metric, args.mode, args.by, against)
    for found in shown.values():
        print(f"{tables.format_table(tables.table(found), width)}\n")
    print(f"{statistics.summary_sentence(shown['settings'], args.metric)}\n")
    if against:
        print(f"{statistics.difference_sentence(*shown[f'against {against.name}'])}\n")
    if (best := shown["settings"][0]).ended:
        run = mlflow.client(uri).get_run(best.trials[0].runs[-1]).data.tags.get("rlx.folder", "RUN")
        print(f"its model: python experiments/export.py {run} --checkpoint best --register NAME\n")
    folder = Path(args.out) if args.out else storage / "analysis" / sweep.name
    paths = report.write(sweep, folder, uri, args.metric, args.mode, args.by, against)
    print("\n".join(["files, also in MLflow under analysis/:", *map(str, paths)]))
    return 0


def default_uri(storage: Path) -> str:
    """The storage's own MLflow store; ConfigError if nothing has run there yet, rather than a new folder."""
    if not storage.is_dir():
        raise ConfigError(f"no storage folder {storage}")
    return mlflow.default_uri(storage)
