"""A sweep over branches from one checkpoint of a run: rlx whatif RUN@30 --space FILE --trials 4 --steps 20

Left out: the sweep itself (rlx.cli.sweep), of which each trial is a branch.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlx.cli import sweep as sweeps
from rlx.cli.options import parse
from rlx.cli.timemachine import pairing, running
from rlx.config.errors import ConfigError
from rlx.config.experiment import keys_at_default, without
from rlx.config.loading import from_tree, with_overrides
from rlx.config.sections.records import CheckpointConfig

if TYPE_CHECKING:
    from rlx.replay.branches import Branch
    from rlx.storage.filesystem import Storage


def sweep_branches(args: argparse.Namespace, others: Sequence[str]) -> int:
    """Runs the control and then the sweep, and compares each trial with the control.

    Args:
        others: options of `rlx sweep`.
    """
    from rlx.replay import pairs, recorded
    from rlx.storage.addresses import open_storage

    options = sweep_options(args.space, others)
    which, step = running.split_step(args.run, args.storage)
    run = recorded.RecordedRun.read(which, args.storage)
    control, _ = pairs.pair_of(run, step, args.steps, {}, trust=args.trust)
    logged = recorded.logged_metrics(run, args.tracking_uri, trust=args.trust)
    storage = open_storage(run.storage)
    name = pairs.pair_names(storage / "runs", run, step)[0]
    tree = with_overrides(trials_tree(control, name.removesuffix(".control")), running.here(args))
    check_space(args.space, tree)
    check_plan(options, tree, storage)
    with running.processes() as shared:
        comparison, folder = pairing.do_control(args, pairing.with_name(args, control, name), logged, shared)
    print("\n" + "\n".join(pairing.control_lines(run, comparison, control)) + "\n")
    failed = sweeps.start_sweep(options, tree, {})
    print(f"\n{trials_text(storage / 'sweeps' / tree['name'] / 'runs', folder, control)}")
    return failed or (0 if comparison.holds or not comparison.metrics else 1)


def sweep_options(space: str, words: Sequence[str]) -> argparse.Namespace:
    """Reads the options of `rlx sweep` that go with branches.

    Raises:
        ConfigError: one of them does not.
    """
    options, given = parse(sweeps.argument_parser(), ["--space", space, *words])
    if given or options.config:
        wrong = min(given, default="config")
        raise ConfigError(f"--{wrong.replace('_', '-')}: branches have the settings of the run and of --space")
    if options.seeds > 1 or options.resume is not None or options.scheduler in ("race", "pbt"):
        raise ConfigError("branches go on from one state, with its seed: leave --seeds, --resume, race and pbt out")
    if options.interleave > 1:
        raise ConfigError("branches have the engines and GPUs of the run, as their control has: leave --interleave out")
    sweeps.refuse_options(options, given)
    return options


def trials_tree(control: Branch, name: str) -> dict[str, Any]:
    """Returns the settings that all trials share: those of the control, which ends with the trials.

    Defaults that follow other settings are left out, since they follow those that the trials vary.

    Raises:
        ConfigError: trials could not be compared with the control.
    """
    from rlx.runs import run_folder

    tree, until = control.tree(), control.until
    config = from_tree(tree)
    if until != config.train.steps and (config.train.lr_schedule != "constant" or until % (config.eval.every or until)):
        end = f"eval.every ({config.eval.every}), or to the end of the run ({config.train.steps})"
        raise ConfigError(f"--steps: trials end at step {until}: branch to a multiple of {end}")
    shared = with_overrides(tree, {"name": name, "storage": control.run.storage, "train.steps": until})
    following = [key for key in keys_at_default(shared) if not run_folder.is_fixed(key)]
    return _without_default_best(without(shared, following), config.checkpoint)


def _without_default_best(tree: dict[str, Any], checkpoint: CheckpointConfig) -> dict[str, Any]:
    """Returns the settings of a run without those of its best checkpoint, unless the run has chosen some itself."""
    names = ("best_by", "best_mode")
    if any(getattr(checkpoint, name) != CheckpointConfig.model_fields[name].default for name in names):
        return tree
    return tree | {"checkpoint": {key: value for key, value in tree["checkpoint"].items() if key not in names}}


def check_space(space: str, tree: dict[str, Any]) -> None:
    """Raises ConfigError if a search space cannot be used, or varies what cannot change within a run."""
    from rlx.runs import run_folder
    from rlx.sweeps.space import load_space

    if fixed := [key for key in load_space(space, tree) if run_folder.is_fixed(key)]:
        raise ConfigError(f"--space {space}: {fixed[0]} cannot change within a run")


def check_plan(options: argparse.Namespace, tree: Mapping[str, Any], storage: Storage) -> None:
    """Refuses before the control has run what would be refused after it.

    Args:
        options: those of `rlx sweep`.
        tree: the settings that all trials share.

    Raises:
        ConfigError: the sweep cannot be run, or its name is taken.
    """
    from rlx.sweeps import plans, records

    plan = sweeps.new_plan(options, tree, tree["name"])
    records.refuse_existing(storage / "sweeps" / plan.name)
    plans.check_sweep(plan)


def trials_text(runs: Storage, control: Storage, branch: Branch) -> str:
    """Returns a table for each trial that compares its last evaluations with those of the control."""
    from rlx.replay import pairs
    from rlx.runs import run_folder

    parts = []
    for name in runs.names():
        if run_folder.holds_run(runs / name):
            rows = pairs.paired_evaluations(control, runs / name, branch.until - 1)
            rows += pairs.paired_prompts(control, runs / name, branch.steps)
            table = pairing.paired_table(rows) if rows else "nothing kept"
            parts.append(f"{name} beside the control\n\n{table}")
    return "\n\n".join(parts)
