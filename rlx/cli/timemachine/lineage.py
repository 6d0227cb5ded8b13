"""Makes a schedule of what population based training found: rlx lineage [SWEEP]

Left out: how a lineage is read from the records of a sweep (rlx.sweeps.schedulers.lineage).
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rlx.cli import listing
from rlx.cli.analyze import sweep_words
from rlx.cli.arguments import add_storage, find_sweep_place, terminal_width
from rlx.cli.options import CommandParser, exit_code
from rlx.config.errors import ConfigError
from rlx.config.run import storage_words

if TYPE_CHECKING:
    from rlx.sweeps.records import SweepPlan
    from rlx.sweeps.schedulers.lineage import Stretch

_SEEDS, _FRESH = 5, 100  # how many seeds a rerun has, and the first of them: no sweep begins there


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(
        description="Shows how the best trial of a sweep by --scheduler pbt came about, and writes its settings as "
        "schedules, to be run from the start on fresh seeds beside the best constant setting.",
        allow_abbrev=False,
    )
    shown = "a sweep's name, or its folder or address (default: the newest)"
    parser.add_argument("sweep", metavar="SWEEP", nargs="?", help=shown)
    parser.add_argument("--trial", metavar="NAME", help="the trial, e.g. trial_00003 (default: the best)")
    parser.add_argument("--out", metavar="DIR", help="folder for the files (default: analysis/SWEEP in the storage)")
    add_storage(parser, "sweeps")
    parser.add_argument("--trust", action="store_true", help="take the settings of a sweep that another person wrote")
    return exit_code(lambda: write_lineage(parser.parse_args(argv)))


def write_lineage(args: argparse.Namespace) -> int:
    """Prints the lineage, writes the configs, and says how to compare them."""
    from rlx.storage.addresses import local_folder, open_storage
    from rlx.sweeps.records import TrialRecords, find_sweep

    sweep, address = find_sweep_place(args.sweep, args.storage)
    storage = open_storage(address, create=False)
    find_sweep(storage, sweep)
    from rlx.sweeps import plans  # takes seconds to import
    from rlx.sweeps.schedulers import lineage
    from rlx.sweeps.space import load_space

    plan = plans.saved_sweep(storage, sweep, trust=args.trust)
    if plan.scheduler != "pbt":
        raise ConfigError(f"sweep {plan.name} had --scheduler {plan.scheduler}: only settings of pbt change")
    folder, varied = storage / "sweeps" / plan.name, list(load_space(plan.space, plan.tree))
    records = TrialRecords(folder).all()
    winner = args.trial or lineage.best_trial(plan, records)
    lineages: dict[str, list[Stretch]] = {}
    for name, record in records.items():
        try:
            if record.reports:
                lineages[name] = lineage.lineage_of(folder, name, record.step, varied)
        except ConfigError:  # it took a checkpoint over and was not evaluated since
            if name == winner:
                raise
    if winner not in lineages:
        raise ConfigError(f"--trial {winner}: sweep {plan.name} has {', '.join(lineages)}")
    print(f"{winner} of sweep {plan.name}: {plan.metric} {records[winner].reports[-1][1]:.4g}\n")
    print(f"{stretches_table(lineages[winner])}\n")
    if lineage.never_changed(lineages[winner]):
        print(f"{winner} never changed its settings: there is no schedule to compare with constant ones")
        return 0
    constant, which = lineage.constant_settings(plan, records, lineages, winner)
    schedule = lineage.scheduled_settings(lineages[winner])
    print(f"the constant settings beside it are {which}\n")
    out = Path(args.out) if args.out else local_folder(address) / "analysis" / plan.name
    write_files(out, plan, {"schedule": schedule, "constant": constant}, varied)
    print("\n".join(rerun_commands(out, plan, address)))
    return 0


def stretches_table(lineage: Sequence[Stretch]) -> str:
    """A table with a row per stretch of a lineage."""
    rows = [
        {"steps": f"{each.start + 1} to {each.end}", "run": each.run}
        | {key: str(value) for key, value in each.settings.items()}
        for each in lineage
    ]
    return listing.markdown_table(rows, terminal_width(), set(lineage[0].settings))


def write_files(out: Path, plan: SweepPlan, found: Mapping[str, dict[str, Any]], varied: Sequence[str]) -> None:
    """Writes NAME.yaml, a config, and NAME.py, a space with that one setting, for each of the found settings."""
    from rlx.sweeps.schedulers import lineage

    out.mkdir(parents=True, exist_ok=True)
    for name, settings in found.items():
        tree = lineage.rerun_tree(plan, settings)
        (out / f"{name}.yaml").write_text(f"# {name} of sweep {plan.name}\n{yaml.safe_dump(tree, sort_keys=False)}")
        choices = "".join(f"        {key!r}: tune.choice([{settings[key]!r}]),\n" for key in varied)
        body = f"from ray import tune\n\n\ndef space():\n    return {{\n{choices}    }}\n"
        (out / f"{name}.py").write_text(f'"""The {name} of sweep {plan.name}: one setting."""\n\n{body}')


def rerun_commands(out: Path, plan: SweepPlan, storage: str) -> list[str]:
    """The command lines that run both on fresh seeds and compare them."""
    place = storage_words(storage)
    metric = ["--metric", plan.metric, "--mode", plan.mode]
    names = {name: f"{plan.name}-{name}" for name in ("schedule", "constant")}
    seeds = ["--trials", "1", "--seeds", str(_SEEDS), "--seed", str(_FRESH)]
    lines = [
        ["sweep", "--config", f"{out}/{name}.yaml", "--space", f"{out}/{name}.py", *seeds, "--name", sweep]
        for name, sweep in names.items()
    ]
    lines = [[*words, *metric, *place] for words in lines]
    found = sweep_words(names["schedule"], storage, plan.config.tracking)
    lines.append(["analyze", *found, "--against", names["constant"], *metric])
    return [shlex.join(["rlx", *words]) for words in lines]
