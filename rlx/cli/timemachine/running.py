"""What the commands of the time machine share: their options, the screen while steps run, and tables of gaps.

Left out: which steps run, and what is made of them (the commands).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rlx.cli import listing
from rlx.cli.arguments import add_storage, add_tracking_uri, terminal_width
from rlx.cli.options import CommandParser, end_on_signals, parse, settings_parser, signal_received
from rlx.config.errors import ConfigError, meant
from rlx.config.run import is_setting, setting_keys
from rlx.tracking import console

if TYPE_CHECKING:
    from rlx.replay.branches import Branch
    from rlx.replay.comparing import Compared, Comparison
    from rlx.replay.recorded import StepMetrics
    from rlx.runs.preflight import PreparedRun
    from rlx.runs.processes import RunProcesses
    from rlx.storage.filesystem import Storage

_SHOWN = 12  # metrics that differ, of the first step in which any do
GPU_GAP = 0.05
"""relative gap of a metric that is allowed on GPUs, whose last bits depend on timing"""


def parser_of(description: str, usage: str) -> argparse.ArgumentParser:
    """A parser with the options that all of these commands have."""
    parser = CommandParser(description=description, usage=f"%(prog)s {usage}", allow_abbrev=False)
    add_storage(parser)
    add_tracking_uri(parser, "MLflow store of the record (default: the run's own)")
    parser.add_argument("--ray-address", metavar="ADDRESS", help="Ray cluster to join (default: that of RAY_ADDRESS)")
    parser.add_argument(
        "--trust", action="store_true", help="run the code, models and prompts that another person's run names"
    )
    return parser


def add_places(parser: argparse.ArgumentParser) -> None:
    """Adds --set, which says where the model or the prompts of a run are on this machine."""
    parser.add_argument(
        "--set", metavar="SETTING=PLACE", action="append", help="where the model or the prompts of the run are here"
    )


def add_gap(parser: argparse.ArgumentParser) -> None:
    """Adds --gap, by how much a metric may differ."""
    parser.add_argument(
        "--gap",
        metavar="X",
        type=gap,
        help=f"relative difference up to which a metric counts as equal (default: 0 on CPUs, {GPU_GAP} on GPUs)",
    )


def gap(text: str) -> float:
    """The value of --gap."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a share from 0 to below 1, not {text!r}")
    return value


def allowed_gap(args: argparse.Namespace, prepared: PreparedRun) -> float:
    """The gap that is allowed: the given one, or 0 on CPUs."""
    if args.gap is not None:
        return float(args.gap)
    return GPU_GAP if prepared.config.scaling.use_gpu else 0.0


@contextmanager
def processes() -> Iterator[RunProcesses]:
    """Engines and workers that stay from one branch to the next."""
    from rlx.runs.processes import RunProcesses  # slow to import

    shared = RunProcesses("workers")
    try:
        yield shared
    finally:
        shared.close()


def do_steps(prepared: PreparedRun, branch: Branch, shared: RunProcesses) -> tuple[Storage, StepMetrics]:
    """Runs a branch and shows its steps; returns its folder and what it has logged."""
    from rlx.cluster import connection
    from rlx.cluster.watch import end_with_ray
    from rlx.replay import branches, recorded
    from rlx.storage.addresses import open_storage

    end_on_signals()
    with console.RunProgress(branch.until) as progress:

        def on_report(metrics: dict[str, Any], checkpoint: str | None) -> None:
            progress.step(metrics, None)

        connection.connect(prepared.config, prepared.resources, progress.message)
        end_on_signals()  # again: Ray has installed a handler of its own
        end_with_ray(lambda: "the record is as it was", progress.message, signal_received)
        result = branches.run_branch(prepared, branch, on_report, progress.message, shared)
    logged = recorded.metrics_of(branches.records_of(prepared), result.mlflow_run or "")
    return open_storage(prepared.config.storage) / "runs" / result.name, logged


def here(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of this machine."""
    return {"ray_address": args.ray_address} if args.ray_address else {}


def check_run(which: str, storage: str) -> None:
    """Raises ConfigError if there is no such run; called before what does steps, which takes seconds to import."""
    from rlx.runs import run_folder

    run_folder.locate(which, storage)


def moved(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of this machine, and the places here of what the run names elsewhere.

    Raises:
        ConfigError: a setting would change what a step computes.
    """
    from rlx.replay.branches import MOVABLE

    given = changed_settings(args.set or ())
    if wrong := [key for key in given if key not in MOVABLE]:
        raise ConfigError(f"--set {wrong[0]}: only places may differ ({', '.join(MOVABLE)}); rlx whatif changes others")
    return {**given, **here(args)}


def changed_settings(words: Sequence[str]) -> dict[str, Any]:
    """Reads SETTING=VALUE as the options of `rlx train` are read.

    Raises:
        ConfigError: there is no such setting, or no value.
    """
    if wrong := [word for word in words if "=" not in word]:
        raise ConfigError(f"--set {wrong[0]}: expected SETTING=VALUE, such as algorithm.clip_high=0.28")
    for word in words:
        key = word.partition("=")[0].replace("-", "_")
        if not is_setting(key):
            raise ConfigError(f"--set {word}: unknown setting {key}{meant(key, setting_keys())}")
    parser = settings_parser("", "")
    return {key: value for word in words for key, value in parse(parser, [f"--{word}"])[1].items()}


def split_step(which: str, storage: str) -> tuple[str, int]:
    """Reads RUN@30; `storage`: the address where named runs are.

    Raises:
        ConfigError, StorageError: there is no step in it.
    """
    run, mark, step = which.rpartition("@")
    if mark and step.isdecimal():
        return run, int(step)
    from rlx.runs import run_folder
    from rlx.storage import checkpoint_catalog

    run = listing.run_of(which)
    checkpoints = checkpoint_catalog.complete_checkpoints(run_folder.locate(run, storage)[1])
    known = f"such as {run}@{checkpoints[0].step}" if checkpoints else f"and {run} has no checkpoint yet"
    raise ConfigError(f"{which}: expected RUN@STEP, {known}")


def difference_table(differences: Sequence[Compared]) -> str:
    """A table of the metrics that differ in the first step that has any."""
    first = min(each.step for each in differences)
    rows = [
        {
            "step": str(each.step),
            "metric": each.name,
            "logged": _exact(each.logged),
            "again": _exact(each.again),
            "gap": f"{each.gap:.1e}",
        }
        for each in differences
        if each.step == first
    ]
    left = len(differences) - len(rows[:_SHOWN])
    table = listing.markdown_table(rows[:_SHOWN], terminal_width(), {"step", "logged", "again", "gap"})
    return table + (f"\nand {left} more, in this step and later ones" if left else "")


def verdict_lines(comparison: Comparison, steps: range) -> list[str]:
    """What a replay has shown: a line each on metrics, completions, weights and questions; a table of differences."""
    lines = [compared_line(comparison, steps)]
    if comparison.completions is not None:
        different = ", ".join(comparison.completions)
        are = f"differ in {different}" if different else "are equal: tokens, log-probabilities, ratios, advantages"
        lines.append(f"completions of step {steps[-1]} {are}")
    if comparison.weights is not None:
        are = "are equal" if comparison.weights else "differ"
        lines.append(f"weights and optimizer state after step {steps[-1]} {are}, by checksum")
    lines += question_lines(comparison)
    return lines + ([f"\n{difference_table(comparison.different)}"] if comparison.different else [])


def question_lines(comparison: Comparison) -> list[str]:
    """Whether what came of each question came again: a line for each file that differs, or one for all."""
    if comparison.forged:
        return [f"evaluations/{file} differs in {', '.join(columns)}" for file, columns in comparison.forged.items()]
    count = len(comparison.questions)
    files = "1 evaluation file" if count == 1 else f"{count} evaluation files"
    return [f"outcomes of questions are equal: {files}"] if count else []


def compared_line(comparison: Comparison, steps: range) -> str:
    """One sentence on the metrics that were compared."""
    count, where = len(comparison.metrics), steps_text(steps)
    if not count:
        return f"nothing was logged of {where}: there is nothing to compare with"
    if comparison.first_fault is not None:
        within = f" by more than {comparison.allowed:g}" if comparison.allowed else ""
        return (
            f"{len(comparison.different)} of {count} metrics of {where} differ{within}; the first are of step "
            f"{comparison.first_fault}"
        )
    if comparison.largest:
        return f"{count} metrics of {where} are equal within {comparison.allowed:g}: {comparison.largest:.1e} at most"
    return f"{count} metrics of {where} are equal to the last bit"


def steps_text(steps: range) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"


def _exact(value: float | None) -> str:
    return "-" if value is None else repr(value)
