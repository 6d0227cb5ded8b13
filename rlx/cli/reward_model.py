"""Train a reward model on preferences: python experiments/reward_model.py [--pairs FILE.jsonl] [--out FOLDER] ..."""

from __future__ import annotations

import argparse
import os
import shlex
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlx.cli.options import exit_code
from rlx.config.run import RunConfig
from rlx.tracking.base import RunWriter

DRAWN = 16_384  # questions drawn for the generated pairs; a quarter of them are different
LINES = 20  # off a terminal, a line every so many steps


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it tells of the new layer in ten lines
    return exit_code(lambda: train(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Bradley-Terry reward model from preference pairs, for ppo.py --reward.model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--pairs", metavar="FILE", help="{prompt, chosen, rejected} per line (default: generated sums)")
    parser.add_argument("--base", metavar="MODEL", help="folder or name to start from (default: rlx's tiny model)")
    parser.add_argument("--out", metavar="FOLDER", help="new folder for it (default: models/reward-N in the storage)")
    parser.add_argument("--epochs", type=_count, default=5, help="passes over the pairs")
    parser.add_argument("--batch", type=_count, default=64, help="pairs per optimizer step")
    parser.add_argument("--lr", type=float, default=5e-4, help="highest learning rate")
    parser.add_argument("--held-out", type=_count, default=256, help="last pairs, kept for measuring")
    parser.add_argument("--seed", type=int, default=0, help="of generated pairs, their order and the new layer")
    parser.add_argument("--storage", default=RunConfig().storage, help="folder for the model and MLflow's records")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text!r}")
    return int(text)


def train(args: argparse.Namespace) -> int:
    """Trains the reward model and shows it."""
    from rlx.rewards import preferences
    from rlx.runs import preflight
    from rlx.storage.addresses import local_folder, open_storage, resolve_address
    from rlx.storage.filesystem import free_name
    from rlx.tracking import console

    started, given = time.monotonic(), vars(args)
    config = RunConfig(storage=resolve_address(args.storage))
    pairs = preferences.read_pairs(args.pairs) if "pairs" in given else preferences.generated_pairs(args.seed, DRAWN)
    pairs, held_out = preferences.hold_out_pairs(pairs, args.held_out)
    models = open_storage(str(local_folder(config.storage) / "models"))
    folder = Path(given.get("out") or f"{models.path}/{free_name(models, 'reward')}").resolve()
    preferences.check_new(folder)
    recipe = preferences.Recipe(args.epochs, args.batch, args.lr, args.seed)
    steps = recipe.steps(len(pairs))
    with console.RunProgress(steps) as shown, _recorded(config, folder.name, given) as record:
        base = given.get("base") or preflight.model_folder(config, shown.warm_start)
        shown.status(f"{len(pairs)} pairs, {len(held_out)} held out; {steps} steps from {base}")
        begun = time.monotonic()

        def on_step(done: int, metrics: dict[str, float]) -> None:
            record.log({f"reward_model/{key}": value for key, value in metrics.items()}, done, _milliseconds())
            if done and (shown.console.is_terminal or done % LINES == 0 or done == steps):
                left = console.duration_text((time.monotonic() - begun) / done * (steps - done))
                shown.status(f"step {done}/{steps}  {described(metrics)}  left {left}")

        result = preferences.train(base, folder, pairs, held_out, recipe, progress=on_step)
    seconds = time.monotonic() - started
    print(f"held-out pair accuracy {result['before']:.3f} -> {result['after']:.3f} in {seconds:.0f} s")
    print(
        f"use it: python experiments/ppo.py --reward.model {shlex.quote(str(folder))} --reward.functions '{{model: 1}}'"
    )
    return 0


def described(metrics: Mapping[str, float]) -> str:
    """A step in one line."""
    return "loss {loss:.3f}  accuracy {accuracy:.3f}  {pairs_per_s:.0f} pairs/s".format(**metrics)


@contextmanager
def _recorded(config: RunConfig, name: str, params: Mapping[str, Any]) -> Iterator[RunWriter]:
    """An MLflow run for the time of the training."""
    from rlx.runs import launch
    from rlx.tracking.tracker import service_at

    service, status = service_at(launch.tracking_uri(config)), "FAILED"
    service.check()
    texts, tags = {key: str(value) for key, value in params.items()}, {"rlx.kind": "reward_model"}
    experiment, now = config.tracking.experiment, _milliseconds()
    run_id = service.make_run(uuid.uuid4().hex, experiment, name, parent=None, params=texts, tags=tags, at=now)
    record = service.writer(run_id)
    try:
        yield record
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        record.end(status, _milliseconds())


def _milliseconds() -> int:
    return int(time.time() * 1000)
