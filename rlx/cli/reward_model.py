"""Train a reward model on preferences: rlx reward-model [--pairs FILE.jsonl] [--out FOLDER] ...

The command makes what `rewards.preferences` does not: questions for generated pairs, the base model, the folder, and
the record of the training. Left out: using the model, which the settings under `reward` do.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import shlex
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.cli.arguments import positive_int
from rlx.cli.options import CommandParser, exit_code
from rlx.config.errors import ConfigError
from rlx.config.run import RunConfig
from rlx.config.sections.data import DataConfig
from rlx.tracking.base import RunStatus, RunWriter, TrackingService

if TYPE_CHECKING:
    from rlx.rewards.preferences import OnStep, Pair, Recipe, TrainingResult
    from rlx.tracking.console import RunProgress

NUM_QUESTIONS = 16_384
"""questions drawn for the generated pairs; a quarter of them are different"""
QUESTION_SEED, SEED_SPACING = 30_000_000, 1_000_000
"""the first seed of questions, far from those of prompts; the distance between the questions of two seeds"""
LOG_EVERY = 20
"""steps between two lines where the output is no terminal"""


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the command line, trains, and returns the exit code."""
    args = _parser().parse_args(argv)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # else it reports the new layer in ten lines
    return exit_code(lambda: train_reward_model(args))


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        description="Bradley-Terry reward model from preference pairs, for rlx train --reward.model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--pairs", metavar="FILE", help="{prompt, chosen, rejected} per line (default: generated sums)")
    parser.add_argument("--base", metavar="MODEL", help="folder or name to start from (default: rlx's tiny model)")
    parser.add_argument("--out", metavar="FOLDER", help="new folder for it (default: models/reward-N in the storage)")
    parser.add_argument("--epochs", type=positive_int, default=5, help="passes over the pairs")
    parser.add_argument("--batch", type=positive_int, default=64, help="pairs per optimizer step")
    parser.add_argument("--lr", type=_rate, default=5e-4, help="highest learning rate")
    parser.add_argument(
        "--held-out", type=positive_int, default=256, help="pairs for measuring, about: those of the last prompts"
    )
    parser.add_argument("--seed", type=int, default=0, help="of generated pairs, their order and the new layer")
    parser.add_argument("--storage", default=RunConfig().storage, help="folder for the model and the MLflow records")
    return parser


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")
    return value


def train_reward_model(args: argparse.Namespace) -> int:
    """Trains the reward model, shows its progress and how to use it.

    Raises:
        ConfigError: the pairs, the base model or the folder cannot be used.
        RuntimeError: a gradient is not finite.
    """
    started, options = time.monotonic(), vars(args)
    if "pairs" in options and (not (file := Path(args.pairs)).exists() or file.is_dir()):  # a pipe is as good
        what = "it is a folder, expected a .jsonl file" if file.is_dir() else "no such file"
        raise ConfigError(f"--pairs {args.pairs}: {what}")
    from rlx.models.folder import is_model_folder

    if "base" in options:
        is_model_folder(args.base, "--base")  # or it may be a name on the hub
    from rlx.rewards import preferences  # slow to import
    from rlx.runs import preflight
    from rlx.storage.addresses import resolve_address
    from rlx.tracking import console
    from rlx.tracking.services.mlflow import MLflowService

    config = RunConfig(storage=resolve_address(args.storage))
    pairs = preferences.read_pairs(args.pairs) if "pairs" in options else generated_pairs(args.seed, NUM_QUESTIONS)
    pairs, held_out = preferences.hold_out_pairs(pairs, args.held_out)
    recipe = preferences.Recipe(args.epochs, args.batch, args.lr, args.seed)
    steps = recipe.steps(len(pairs))
    service = MLflowService(preflight.tracking_uri(config.tracking, config.storage))
    experiment = config.tracking.experiment
    with (
        new_folder(config.storage, options.get("out")) as folder,
        console.RunProgress(steps) as progress,
        _recorded(service, experiment, folder.name, options) as writer,
    ):
        base = options.get("base") or preflight.model_folder(config.model.path, config.storage, progress.warm_start)
        progress.status(f"{len(pairs)} pairs, {len(held_out)} held out; {steps} steps from {base}")
        on_step = _StepReport(progress, writer, steps)
        result = train_and_save(base, folder, pairs, held_out, recipe, on_step)
    seconds = time.monotonic() - started
    print(f"held-out pair accuracy {result.accuracy_before:.3f} -> {result.accuracy_after:.3f} in {seconds:.0f} s")
    print(f"use it: rlx train --reward.model {shlex.quote(str(folder))} --reward.functions '{{model: 1}}'")
    return 0


def generated_pairs(seed: int, size: int) -> list[Pair]:
    """Pairs from `size` questions that the default task draws, each question once: the answer, and a number near it."""
    from rlx.data import reasoning_gym
    from rlx.rewards import preferences

    rows = reasoning_gym.generated_questions(DataConfig(), QUESTION_SEED + seed * SEED_SPACING, size)
    return preferences.pairs_of_questions([(row["question"], row["answer"]) for row in rows], seed)


@contextmanager
def new_folder(storage: str, out: str | None) -> Iterator[Path]:
    """Gives the folder of the new reward model: `out`, or a free name in the storage. Nobody else gets it meanwhile.

    Raises:
        ConfigError: it exists.
        ClaimedError: another process makes it.
    """
    from rlx.storage import claims
    from rlx.storage.addresses import local_folder
    from rlx.storage.filesystem import Storage

    models = local_folder(storage) / "models"
    choices = [Path(out).resolve()] if out else (models / f"reward-{i}" for i in itertools.count(1))
    for folder in choices:
        if not out and folder.exists():
            continue
        try:  # beside the folder, which appears complete or not at all
            claim = claims.take(Storage.local(folder.parent / f".{folder.name}.claim"), f"reward model {folder.name!r}")
        except claims.ClaimedError:
            if out:
                raise
            continue
        with claim:
            _check_new(folder)
            yield folder
        return


def _check_new(folder: Path) -> None:
    """Checks that nothing exists at the path of the new reward model.

    Raises:
        ConfigError: something exists.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists, and a reward model overwrites nothing")


def train_and_save(
    base: str,
    folder: Path,
    pairs: Sequence[Pair],
    held_out: Sequence[Pair],
    recipe: Recipe,
    on_step: OnStep = lambda done, metrics: None,
) -> TrainingResult:
    """Trains a reward model from `base`, and writes its Hugging Face folder completely or not at all.

    The same recipe and pairs always give the same weights on the CPUs of one machine.

    Raises:
        ConfigError: the folder exists, or the base model cannot be used.
        RuntimeError: a gradient is not finite.
    """
    from rlx.models import tiny
    from rlx.rewards import preferences
    from rlx.rewards.reward_model import load_classifier

    _check_new(folder)
    with tiny.private_torch_state(recipe.seed), tiny.no_progress_bars():
        classifier = load_classifier(base, new_head=True, setting="base model")
        result = preferences.fit_preferences(classifier, pairs, held_out, recipe, on_step)
        with tiny.atomic_folder(folder) as unfinished:
            classifier.save(unfinished)
    return result


class _StepReport:
    """Records the metrics of each step, and shows some of them."""

    def __init__(self, progress: RunProgress, writer: RunWriter, steps: int) -> None:
        self._progress, self._writer, self._steps = progress, writer, steps
        self._started = time.monotonic()

    def __call__(self, done: int, metrics: Mapping[str, float]) -> None:
        from rlx.tracking import console

        self._writer.log({f"reward_model/{key}": value for key, value in metrics.items()}, done, _milliseconds())
        if done and (self._progress.console.is_terminal or done % LOG_EVERY == 0 or done == self._steps):
            left = console.duration_text((time.monotonic() - self._started) / done * (self._steps - done))
            self._progress.status(f"step {done}/{self._steps}  {step_line(metrics)}  left {left}")


def step_line(metrics: Mapping[str, float]) -> str:
    """The metrics of a step on one line."""
    return "loss {loss:.3f}  accuracy {accuracy:.3f}  {pairs_per_s:.0f} pairs/s".format(**metrics)


@contextmanager
def _recorded(service: TrackingService, experiment: str, name: str, params: Mapping[str, Any]) -> Iterator[RunWriter]:
    """A run at the tracking service that lasts as long as the training."""
    service.check(experiment)
    status, now = RunStatus.FAILED, _milliseconds()
    texts, tags = {key: str(value) for key, value in params.items()}, {"rlx.kind": "reward_model"}
    run_id = service.make_run(uuid.uuid4().hex, experiment, name, parent=None, params=texts, tags=tags, at=now)
    writer = service.writer(run_id)
    try:
        yield writer
        status = RunStatus.FINISHED
    except KeyboardInterrupt:
        status = RunStatus.KILLED
        raise
    finally:
        writer.end(status, _milliseconds())


def _milliseconds() -> int:
    return int(time.time() * 1000)
