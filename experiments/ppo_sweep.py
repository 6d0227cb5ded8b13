"""A hyperparameter sweep of PPO: python experiments/ppo_sweep.py [--trials N] [--scheduler asha] [--SETTING VALUE]"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlx.command_line import add_settings, end_on_sigterm, exit_code, parse
from rlx.config import ConfigError, from_tree, read_yaml, with_overrides

HERE = Path(__file__).resolve().parent


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="A sweep of PPO runs; every setting that the search space does not vary can be given too.",
        usage="%(prog)s [--space FILE] [--trials N] [--scheduler NAME] [--resume [NAME]] [--SECTION.SETTING VALUE ...]",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", default=str(HERE / "configs" / "sweep.yaml"), help="YAML settings")
    parser.add_argument("--space", metavar="FILE", default=str(HERE.parent / "search_spaces" / "ppo.py"))
    parser.add_argument("--trials", metavar="N", type=int, default=4, help="settings to try (random search)")
    parser.add_argument("--search", choices=["random", "grid"], default="random")
    parser.add_argument("--scheduler", choices=["none", "asha"], default="none", help="asha stops bad trials early")
    parser.add_argument("--max-concurrent", metavar="N", type=int, help="at most so many trials at once")
    parser.add_argument("--resume", metavar="NAME", nargs="?", const="", help="continue this sweep, or the newest")
    add_settings(parser)

    def script() -> int:
        words = list(sys.argv[1:] if argv is None else argv)
        args, given = parse(parser, words)
        if args.resume is not None and (set(given) - {"storage"} or len(words) > 2 + 2 * len(given)):
            raise ConfigError("--resume has the sweep's own settings: give it nothing else but --storage")
        tree = with_overrides(read_yaml(args.config), given)
        from_tree(tree, args.config)  # refused before anything is imported
        return run_sweep(args, tree)

    return exit_code(script, "interrupted: --resume continues the sweep")


def run_sweep(args: argparse.Namespace, tree: dict[str, Any]) -> int:
    """Starts or resumes the sweep, shows it, and writes its analysis."""
    from rlx import analysis, inputs, launch, progress, sweep
    from rlx.storage import local_folder, open_storage

    started = time.monotonic()
    tree = with_overrides(tree, inputs.absolute_paths(from_tree(tree)))
    storage = open_storage(tree["storage"])
    if args.resume is not None:
        plan = sweep.saved_sweep(storage, args.resume or None)
    else:
        name = tree.pop("name", None) or (storage / "sweeps").free_name("sweep")
        plan = sweep.Sweep(name, tree, args.space, args.trials, args.search, args.scheduler, args.max_concurrent)
    config = from_tree(plan.tree)
    uri = launch.tracking_uri(config)
    with progress.SweepProgress(config.train.steps) as shown:
        with progress.RunProgress(config.train.steps, shown.console) as making:
            inputs.check(config, inputs.model_folder(config, making.warm_start))
        launch.connect(config)
        end_on_sigterm()
        if args.resume is None:
            plan = sweep.create_sweep(plan, storage)
        at_once = sweep.concurrency(plan)
        shown.console.print(
            f"sweep {plan.name}: {sweep.planned(plan)} trials, {at_once} at once, {config.train.steps} steps"
        )
        results = sweep.run(plan, storage, resume=args.resume is not None, watch=shown.watch)
    loaded = analysis.load_sweep(uri, config.tracking.experiment, plan.name)
    paths = analysis.write(loaded, local_folder(config.storage) / "analysis" / plan.name, uri)
    print(analysis.format_table(analysis.rank(loaded)))
    print(f"sweep {plan.name} finished in {time.monotonic() - started:.0f} s; " + ", ".join(str(p) for p in paths))
    print(f"curves: mlflow ui --backend-store-uri {uri}")
    failed = sweep.failures(results)
    for reason in failed:
        print(f"error: {reason}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
