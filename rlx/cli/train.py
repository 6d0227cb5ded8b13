"""One PPO run, or the rest of one: python experiments/ppo.py [--resume NAME | --from CHECKPOINT] [--SETTING VALUE]"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from rlx.cli.options import add_settings, end_on_sigterm, exit_code, parse
from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, read_yaml, with_overrides
from rlx.config.run import RunConfig


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="PPO on a language model. Every setting has a default that runs on a 2-core machine.",
        usage="%(prog)s [--config FILE] [--resume NAME | --from CHECKPOINT | --check] [--SECTION.SETTING VALUE ...]",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings; the command line overrides it")
    parser.add_argument("--resume", metavar="NAME", help="continue the run of this name from its newest checkpoint")
    parser.add_argument(
        "--from",
        dest="start",
        metavar="CHECKPOINT",
        help="a new run from another's weights (all of its state with --checkpoint.init-state all), and its settings "
        "unless --config gives others: NAME, NAME@10, NAME@best, or a folder or address",
    )
    parser.add_argument("--check", action="store_true", help="train nothing: see whether all parts agree, line by line")
    add_settings(parser)

    def script() -> int:
        args, given = parse(parser, sys.argv[1:] if argv is None else argv)
        if args.resume and args.config:
            raise ConfigError("--resume has the run's own settings: change some of them by options, not by --config")
        if (args.resume or args.start) and args.check:
            raise ConfigError("--check is for the start of a run: leave --resume and --from out")
        if args.resume and args.start:
            raise ConfigError("--resume goes on with a run, --from begins a new one: give one of them")
        base = read_yaml(args.config) if args.config else {}
        if not args.resume and not args.start:  # refused before anything is imported
            from_tree(with_overrides(base, given), args.config or "command line")
        if args.start:
            base = started_from(args.start, base, given)
        return check(base, given) if args.check else train(args, base, given)

    return exit_code(script, "interrupted: --resume continues the run")


def started_from(which: str, base: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The settings of a new run that starts from a checkpoint: that run's own, unless `base` has some."""
    from rlx.runs import run_folder

    storage = given.get("storage") or from_tree(base).storage
    address, found = run_folder.checkpoint_of(which, storage)
    assert found.manifest
    of_its_own = {
        "name": None,
        "storage": storage,
        "checkpoint.init_from": address,
        "checkpoint.init_state": "weights",
    }
    return with_overrides(base or run_folder.settings_of(found, print), of_its_own)


def train(args: argparse.Namespace, base: dict[str, Any], given: dict[str, Any]) -> int:
    """Starts or resumes the run and shows it."""
    from rlx.runs import launch, preflight, run_folder
    from rlx.storage.addresses import open_storage
    from rlx.storage.filesystem import free_name
    from rlx.tracking import console
    from rlx.tracking.tracker import service_at

    started = time.monotonic()
    storage = given.get("storage") or from_tree(base).storage
    runs = open_storage(storage) / "runs"
    if args.resume:  # its storage may have been moved since
        base = run_folder.saved_config(run_folder.find(runs, args.resume)) | {"storage": storage}
    config = from_tree(with_overrides(base, given))
    if args.resume:
        run_folder.check_resumable(config, from_tree(base))
    name = args.resume or config.name or free_name(runs, "ppo")
    config = from_tree(with_overrides(config.model_dump(), {"name": name} | preflight.absolute_paths(config)))
    folder = runs / name
    if not args.resume:
        run_folder.check_new(config, folder)
    elif done := run_folder.finished(config, folder):
        print(f"run {name} is finished: {config.train.steps} steps, {console.metrics_line(done)}")
        launch.send_pending(config, folder, print)
        return 0
    first: dict[str, Any] = {}
    with console.RunProgress(config.train.steps) as shown:

        def on_report(metrics: dict[str, Any], checkpoint: str | None) -> None:
            first.update(first or metrics)
            shown.step(metrics, checkpoint)

        shown.console.print(f"run {name}: {config.train.steps} steps, in {folder.path}")
        preflight.prepare(config, shown.warm_start)
        shown.status("starting")
        launch.connect(config)
        end_on_sigterm()
        result = launch.run(config, folder, resume=bool(args.resume), on_report=on_report, say=shown.message)
    print(summary(config, first, result.metrics, time.monotonic() - started))
    print(f"curves: {service_at(launch.tracking_uri(config)).browse_command()}")
    return 0


def check(base: dict[str, Any], given: dict[str, Any]) -> int:
    """Prints the doctor's lines; 1 if one of them failed."""
    from rlx.runs import launch, preflight
    from rlx.tracking import console

    config = from_tree(with_overrides(base, given))
    config = from_tree(with_overrides(config.model_dump(), preflight.absolute_paths(config)))
    with console.RunProgress(1) as shown:
        preflight.prepare(config, shown.warm_start)
        shown.status("a few steps at learning rate 0")
        launch.connect(config)
        verdicts = launch.examine(config)
    for line in verdicts:
        print(f"{'passed' if line.passed else 'FAILED'}  {line.what}: {line.figure:.3g} ({line.demand})")
    failed = sum(not line.passed for line in verdicts)
    print(f"{failed} of {len(verdicts)} checks failed" if failed else f"all {len(verdicts)} checks passed")
    return 1 if failed else 0


def summary(config: RunConfig, first: dict[str, Any], last: dict[str, Any], seconds: float) -> str:
    """What the run came to, in one line."""
    before, after = (metrics.get("eval/accuracy", float("nan")) for metrics in (first, last))
    return f"run {config.name} finished: held-out accuracy {before:.3f} -> {after:.3f} in {seconds:.0f} s"
