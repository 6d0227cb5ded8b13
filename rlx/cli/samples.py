"""Shows the completions that a run has kept, in the terminal or as one HTML page: rlx samples RUN [--html FILE]

Left out: what is kept and how it is chosen (rlx.samples).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from rlx.cli import listing
from rlx.cli.arguments import add_storage, positive_int, terminal_width
from rlx.cli.options import CommandParser, exit_code
from rlx.config.errors import ConfigError, one_line, printable
from rlx.runs import run_folder
from rlx.samples import choosing, page, reader
from rlx.samples.columns import Kind
from rlx.samples.reader import KeptCompletion, KeptStep
from rlx.storage.filesystem import Storage, rewrite_file

_ROWS, _CHARACTERS = 16, 280  # of the terminal's table, and of a text in it
_SHARE = "tracking.completions is the share of the prompts that are kept"


def main(argv: Sequence[str] | None = None) -> int:
    args = _argument_parser().parse_args(argv)
    return exit_code(lambda: write_page(args) if args.html else print_completions(args))


def _argument_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        description="Shows the completions that a run has kept (tracking.completions), in the terminal or as a page.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", type=listing.run_argument, help="a run's name, or its folder or address")
    parser.add_argument("--step", metavar="N", type=int, action="append", help="of this step; may be given again")
    parser.add_argument("--held-out", action="store_true", help="answers of evaluations, not completions of training")
    parser.add_argument(
        "--prompt", metavar="I", type=int, help="of the prompt in this row of the prompt table, in all steps"
    )
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--worst", metavar="K", type=positive_int, help="the K completions with the lowest scores")
    order.add_argument("--best", metavar="K", type=positive_int, help="the K completions with the highest scores")
    parser.add_argument("--full", action="store_true", help="show texts in full")
    parser.add_argument("--html", metavar="FILE", help="write a page instead, with both kinds")
    parser.add_argument(
        "--against",
        metavar="RUN",
        type=listing.run_argument,
        help="with --html: another run, side by side on the same prompts",
    )
    add_storage(parser)
    return parser


def print_completions(args: argparse.Namespace) -> int:
    """Prints a table of one step's completions: of the newest one, unless others or a prompt are given."""
    if args.against:
        raise ConfigError(f"--against {args.against} needs --html FILE")
    run, kind = run_folder.locate(args.run, args.storage)[1], Kind.HELD_OUT if args.held_out else Kind.TRAINING
    steps = [step for step in choosing.kept_of(run, args.run, args.step or ()) if step.kind == kind]
    if not steps:
        raise ConfigError(f"run {args.run} has kept no {kind} completions of that")
    is_newest = not args.step and args.prompt is None
    chosen, table = newest(run, args.run, steps) if is_newest else completions_of(run, steps, args.prompt)
    few = choosing.by_score(table, args.worst, args.best)
    few = few if args.worst or args.best or args.full else few.slice(0, _ROWS)
    print(completions_table(reader.completions(few), terminal_width(), _CHARACTERS if not args.full else None))
    print(f"\n{kept_summary(run, chosen, table, len(few))}")
    if is_newest and chosen[0] != steps[-1]:
        print(f"step {steps[-1].number} is newer and has kept none: {_SHARE}")
    return 0


def newest(run: Storage, name: str, steps: Sequence[KeptStep]) -> tuple[list[KeptStep], pa.Table]:
    """Returns the newest step that has kept completions, and these.

    Raises:
        ConfigError: no step has kept any, or a file is damaged.
    """
    for step in reversed(steps):
        if len(table := reader.read(run, step)):
            return [step], table
    raise ConfigError(f"no step of run {name} has kept a completion: {_SHARE}")


def completions_of(run: Storage, steps: Sequence[KeptStep], prompt: int | None) -> tuple[list[KeptStep], pa.Table]:
    """Returns the completions of steps, of all prompts or of one, and the steps that have some.

    Raises:
        ConfigError: there are none, or a file is damaged.
    """
    tables = ((step, reader.read(run, step)) for step in steps)
    if prompt is not None:
        tables = ((step, choosing.of_prompt(table, prompt)) for step, table in tables)
    found = [(step, table) for step, table in tables if len(table)]
    if not found:
        where = f"step {steps[0].number}" if len(steps) == 1 else f"{len(steps)} steps"
        if prompt is None:
            raise ConfigError(f"{where} has kept no completion: {_SHARE}")
        raise ConfigError(f"--prompt {prompt} has no completion in {where}: it was not drawn, or not kept")
    return [step for step, _ in found], pa.concat_tables([each for _, each in found], promote_options="default")


def kept_summary(run: Storage, steps: Sequence[KeptStep], table: pa.Table, shown: int) -> str:
    """Returns a sentence on all completions of the steps, of which so many are shown."""
    right, mean = pc.mean(table["correct"]).as_py(), pc.mean(table["score"]).as_py()
    missing, failed = sum(step.missing for step in steps), reader.count_failed(table)
    parts = [
        f"{shown} of {len(table)} completions of step {', '.join(str(step.number) for step in steps)}",
        f"mean score {mean:.4g}, {right:.0%} right",
        *([f"the environments of {failed} failed"] if failed else []),
        *([f"{missing} files of other ranks are missing"] if missing else []),
        f"in {run}/completions",
    ]
    return "; ".join(parts)


def completions_table(rows: Sequence[KeptCompletion], width: int | None, characters: int | None) -> str:
    """Returns a table with a row per completion; a column that is empty in all rows is left out.

    Args:
        characters: to which texts are cut; None: not at all.
    """
    found = {row.source for row in rows if row.answer != row.completion.strip()}  # elsewhere it is the whole text
    cells = [
        {
            "step": str(row.step),
            "source": readable(row.source or "", characters),
            "prompt": f"{row.prompt_index}.{row.sample}",
            "right": "yes" if row.correct else "no",
            "score": f"{row.score:.4g}",
            "parts": "  ".join(f"{name} {value:.4g}" for name, value in row.rewards.items()),
            "advantage": "" if row.mean_advantage is None else f"{row.mean_advantage:.3g}",
            "mismatch": "" if row.mismatch is None else f"{max(map(abs, row.mismatch), default=0.0):.2g}",
            "finish": _finish(row),
            "tokens": str(len(row.tokens)),
            "question": readable(row.question, characters),
            "expected": readable(row.expected, characters),
            "answer": readable(_answer(row), characters) if row.source in found else "",
            "completion": readable(row.completion, characters),
            "failure": readable(row.played.told_failure if row.played else "", characters),
        }
        for row in rows
    ]
    return listing.markdown_table(cells, width, {"step", "score", "advantage", "mismatch", "tokens"})


def _answer(row: KeptCompletion) -> str:
    """What was taken for the answer, as the page names it."""
    return "none found" if row.answer is None else row.answer


def _finish(row: KeptCompletion) -> str:
    """How a completion ended; an episode whose environment failed has ended with that."""
    if not (row.played and row.played.failure):
        return row.finish
    return f"failed: {row.played.kind}" if row.played.kind else "failed"  # files of older versions have no kind


def readable(text: str, characters: int | None) -> str:
    r"""Returns a text in one line, with \n for a new line; what controls terminals is shown, not sent to one."""
    shown = printable(text)
    return shown if characters is None or len(shown) <= characters else f"{shown[: characters - 1]}…"


def write_page(args: argparse.Namespace) -> int:
    """Writes a page of a run, or of two, and says where: on standard error, if the page is what is printed."""
    if args.worst or args.best or args.prompt is not None or args.full or args.held_out:
        raise ConfigError(
            "--html shows all kinds and has filters and orders itself: leave out all but --step, --against"
        )
    file, names = Path(args.html), [args.run, *([args.against] if args.against else [])]
    if not file.parent.is_dir():
        raise ConfigError(f"--html {file}: no folder {file.parent}")
    runs = [(name, run_folder.locate(name, args.storage)[1]) for name in names]
    steps = [(name, run, choosing.kept_of(run, name, args.step or ())) for name, run in runs]
    if not (shown := choosing.shown(steps)):
        raise ConfigError(f"no step of run {' and run '.join(names)} has kept a completion: {_SHARE}")
    title = f"Completions of run {' and run '.join(names)}"
    facts = {name: f"{run}/completions" for name, run in runs}
    told = sys.stderr if is_printed(file) else sys.stdout
    try:
        rewrite_file(file, page.completions_page(title, shown, facts).encode())
    except OSError as error:  # a full disk; what was there stays
        raise ConfigError(f"--html {file} cannot be written: {one_line(error)}") from None
    count, kept = sum(len(step.rows) for step in shown), sum(step.kept for step in shown)
    print(f"{count} of {kept} completions of {len(shown)} steps and evaluations are in {file}", file=told)
    return 0


def is_printed(file: Path) -> bool:
    """Whether what is written into a file goes where standard output goes."""
    with suppress(OSError):
        return os.path.samestat(file.stat(), os.fstat(1))
    return False
