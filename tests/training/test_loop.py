"""The whole loop in a plain process: fakes for engines and reports, real models, real files, no Ray and no MLflow."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from conftest import OnRanks

from rlx.config.loading import from_tree
from rlx.data.prompts import load_tokenizer
from rlx.data.stream import Share, TableRows
from rlx.mesh import Mesh
from rlx.rollout.fake_engine import FakeEngines
from rlx.storage.addresses import open_storage
from rlx.storage.checkpoint_catalog import checkpoint_name
from rlx.storage.checkpoint_writer import FinishedCheckpoint
from rlx.training import loop, setup
from rlx.training.reporting import MemoryReporter
from rlx.training.setup import TrainingInputs, WeightSource

STEPS = 4
Runs = tuple[Any, Any, Any, Any, bool]


@dataclass
class Outcome:
    """What a run in this process left behind."""

    reporter: MemoryReporter
    engines: FakeEngines


class Stopping(MemoryReporter):
    """Asks to stop at the end of step 2."""

    def should_stop(self) -> bool:
        return len(self.metrics) == 2


class Judged(MemoryReporter):
    """Is asked to stop because of the evaluation that it reports at step 2."""

    def report(self, metrics: Mapping[str, float], *, is_last: bool, checkpoints: Sequence[FinishedCheckpoint]) -> None:
        super().report(metrics, is_last=is_last, checkpoints=checkpoints)
        self.stopping = metrics["step"] == 2


def trained(path: str, folder: str, reporter: MemoryReporter | None = None, save_every: int = 1) -> Outcome:
    """Trains from the newest checkpoint in the folder, or from the start."""
    tree = {
        "model": {"path": path},
        "data": {"source": "sums.jsonl", "ptx_source": "sums.jsonl", "ptx_batch": 2},
        "algorithm": {"ptx_coef": 0.5},
        "train": {"steps": STEPS, "prompts_per_step": 4, "samples_per_prompt": 2},
        "rollout": {"max_tokens": 6},
        "eval": {"every": 2},
        "checkpoint": {"every": save_every, "keep_last": None},
        "reward": {"functions": {"length": 1.0}, "length_target": 3},
    }
    config = from_tree(tree)
    tokenizer, reporter = load_tokenizer(path), reporter or MemoryReporter()
    questions = [f"{i} + {i}" for i in range(8)]
    ids = [tokenizer(question).input_ids for question in questions]
    table = pa.table({"question": questions, "answer": [str(2 * i) for i in range(8)], "token_ids": ids})
    tables = {"train": table, "held_out": table.slice(0, 3), "ptx": table.slice(3, 5)}
    engines: list[FakeEngines] = []

    def connect(mesh: Mesh, weights: WeightSource) -> FakeEngines:
        assert {weight.name for weight in weights()} >= {"model.embed_tokens.weight"}
        engines.append(FakeEngines(seed=config.seed))
        return engines[-1]

    inputs = TrainingInputs(
        config=config,
        model_path=path,
        device=torch.device("cpu"),
        tables={name: Share(TableRows(rows), dist.get_rank(), dist.get_world_size()) for name, rows in tables.items()},
        folder=open_storage(folder),
        reporter=reporter,
        connect_engines=connect,
        connect_scorers=lambda mesh: {},
    )
    trainer, collector, checkpointer = setup.build(inputs)
    loop.train(trainer, collector, checkpointer, reporter)
    setup.close(trainer, collector, checkpointer, reporter)
    return Outcome(reporter, engines[0])


def stopped_and_resumed(rank: int, ranks: int, path: str, folder: str) -> Runs:
    """A run to the end; one that is asked to stop after two steps, by itself or by a scheduler; what continues it."""
    whole = trained(path, f"{folder}/whole")

    first = trained(path, f"{folder}/stopped", Stopping())
    second = trained(path, f"{folder}/stopped")
    folder = f"{folder}/judged"
    judged = trained(path, folder, Judged(), save_every=3), trained(path, folder, save_every=3)
    imported = any(name.split(".")[0] in ("mlflow", "vllm") for name in sys.modules)
    return whole, first, second, judged, imported


def unmeasured(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics that do not measure time or memory."""
    return {
        name: value
        for name, value in metrics.items()
        if not name.startswith(("time/", "memory/")) and not name.endswith("_per_s")
    }


@pytest.fixture(scope="module")
def runs(on_ranks: OnRanks, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    return on_ranks(1, stopped_and_resumed, str(tiny_model), str(folder))[0]


def test_every_step_is_logged_and_reported(runs: Runs) -> None:
    whole, *_, imported = runs
    assert not imported
    assert [row["step"] for row in whole.reporter.metrics] == [row["step"] for row in whole.reporter.reports]
    assert [row["step"] for row in whole.reporter.metrics] == list(range(STEPS + 1))
    assert [step for step, _ in whole.reporter.samples] == [0, 2, 4]
    assert whole.engines.pushed == list(range(STEPS + 1)) and whole.engines.is_closed
    assert all(row["policy/loss"] == row["policy/loss"] for row in whole.reporter.metrics[1:])
    assert all(row["ptx/loss"] > 0 for row in whole.reporter.metrics[1:])


def test_checkpoints_are_reported_once_they_are_complete(runs: Runs) -> None:
    for outcome, steps in zip(runs[:3], (range(1, 5), range(1, 3), range(3, 5)), strict=True):
        names = [Path(path).name for path in outcome.reporter.checkpoints]
        # Of two that become complete between two reports, the newer one is reported.
        assert names == sorted(set(names)) and set(names) <= {checkpoint_name(step) for step in steps}
        assert names[-1] == checkpoint_name(steps[-1])
        written = {
            path.parent.name for path in Path(outcome.reporter.checkpoints[0]).parent.glob("step_*/manifest.json")
        }
        assert written >= {checkpoint_name(step) for step in steps}


def test_a_run_that_was_stopped_continues_as_if_it_had_not_been(runs: Runs) -> None:
    whole, first, second, *_ = runs
    assert [row["step"] for row in first.reporter.metrics] == [0, 1, 2]
    assert [row["step"] for row in second.reporter.metrics] == [2, 3, 4]
    steps = {row["step"]: unmeasured(row) for row in (*first.reporter.metrics, *second.reporter.metrics)}
    assert steps == {row["step"]: unmeasured(row) for row in whole.reporter.metrics}


def test_a_run_ends_at_the_evaluation_because_of_which_it_is_stopped(runs: Runs) -> None:
    whole, _, _, (first, second), _ = runs
    assert [row["step"] for row in first.reporter.metrics] == [0, 1, 2]
    assert [row["step"] for row in first.reporter.reports] == [0, 1, 2, 2]  # once more, as the last one
    assert [Path(path).name for path in first.reporter.checkpoints] == [checkpoint_name(2)]  # none was due
    assert unmeasured(first.reporter.reports[-1]) == unmeasured(first.reporter.reports[-2])
    steps = {row["step"]: unmeasured(row) for row in second.reporter.metrics}
    assert steps == {row["step"]: unmeasured(row) for row in whole.reporter.metrics if row["step"] >= 2}
