"""The whole loop in a plain process: fakes for engines and reports, real models, real files, no Ray and no MLflow."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from shared import OnRanks

from rlx.config.experiment import over_experiment
from rlx.config.loading import from_tree, with_overrides
from rlx.data.prompts import load_tokenizer
from rlx.data.sources import set_table
from rlx.data.stream import Share, TableRows
from rlx.mesh import Mesh
from rlx.rollout.base import PendingRollout
from rlx.rollout.fake_engine import FakeEngines
from rlx.samples.gradients import read_shares
from rlx.storage.addresses import open_storage
from rlx.storage.checkpoint_catalog import checkpoint_name
from rlx.storage.checkpoint_writer import FinishedCheckpoint
from rlx.tracking.metrics import meaning
from rlx.training import loop
from rlx.training.reporting import MemoryReporter
from rlx.training.setup.inputs import TrainingInputs, WeightSource
from rlx.training.setup.rank import build_rank, close_rank
from rlx.types import Prompt, Replay, Sampling

STEPS = 4
Runs = tuple[Any, Any, Any, Any, bool]


class NotingEngines(FakeEngines):
    """Notes the temperature of each round of training."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed)
        self.temperatures: list[float] = []

    def begin(self, prompts: Sequence[Prompt], samplings: Sequence[Sampling], version: int) -> PendingRollout:
        self.temperatures += [samplings[0].temperature] * (samplings[0].temperature > 0)
        return super().begin(prompts, samplings, version)


EnginesOf = Callable[[WeightSource], FakeEngines]


@dataclass
class Outcome:
    """What a run in this process left behind."""

    reporter: MemoryReporter
    engines: FakeEngines


class Stopping(MemoryReporter):
    """Asks to stop at the end of step 2."""

    def should_stop(self, step: int) -> bool:
        return len(self.metrics) == 2


class Judged(MemoryReporter):
    """Is asked to stop because of the evaluation that it reports at step 2."""

    def report(self, metrics: Mapping[str, float], *, is_last: bool, checkpoints: Sequence[FinishedCheckpoint]) -> None:
        super().report(metrics, is_last=is_last, checkpoints=checkpoints)
        self.stopping = metrics["step"] == 2


def trained(
    path: str,
    folder: str,
    reporter: MemoryReporter | None = None,
    save_every: int = 1,
    engines_of: EnginesOf | None = None,
    replay: Replay | None = None,
    **changes: Any,
) -> Outcome:
    """Trains from the newest checkpoint in the folder, or from the start; a__b among the changes is the setting a.b."""
    tree = {
        "model": {"path": path},
        "data": {"source": "sums.jsonl", "params": {}, "ptx_source": "sums.jsonl", "ptx_batch": 2},
        "algorithm": {"ptx_coef": 0.5},
        "train": {"steps": STEPS, "prompts_per_step": 4, "samples_per_prompt": 2},
        "rollout": {"max_tokens": 6},
        "eval": {"every": 2},
        "checkpoint": {"every": save_every, "keep_last": None},
        "reward": {"functions": {"length": 1.0}, "length_target": 3},
    }
    changed = {key.replace("__", "."): value for key, value in changes.items()}
    config = from_tree(with_overrides(over_experiment(tree), changed))
    tokenizer, reporter = load_tokenizer(path), reporter or MemoryReporter()
    questions = [f"{i} + {i}" for i in range(8)]
    ids = [tokenizer(question).input_ids for question in questions]
    table = pa.table({"question": questions, "answer": [str(2 * i) for i in range(8)], "token_ids": ids})
    tables = {"train": table, "held_out": table.slice(0, 3), "ptx": table.slice(3, 5)}
    if config.data.sources:
        tables |= {"train.0": table.slice(0, 5), "train.1": table.slice(5), "held_out.0": table, "held_out.1": table}
    tables |= {set_table(each.name): table.slice(2, 3) for each in config.eval.sets if each.source}
    engines: list[FakeEngines] = []

    def connect(mesh: Mesh, weights: WeightSource) -> FakeEngines:
        assert {weight.name for weight in weights()} >= {"model.embed_tokens.weight"}
        engines.append(engines_of(weights) if engines_of else NotingEngines(config.seed))
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
        replay=replay,
    )
    trainer, collector, checkpointer = build_rank(inputs)
    loop.train(trainer, collector, checkpointer, reporter)
    close_rank(trainer, collector, checkpointer, reporter)
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


MIXED: dict[str, Any] = {
    "data__source": "reasoning_gym:chain_sum",
    "data__ptx_source": None,
    "data__ptx_batch": 32,
    "algorithm__ptx_coef": 0.0,
    "data__sources": [
        {"source": "sums.jsonl", "weight": 2, "reward": {"exact_match": 1}},
        {"source": "hf:someone/products", "weight": 1, "reward": {"length": 2.0, "exact_match": 0}},
    ],
    "reward__functions": {"length": 1.0, "exact_match": 1.0},
    "train__prompts_per_step": 6,
    "data__curriculum": "difficulty",
    "data__curriculum_period": 3,
}


def mixed_and_resumed(rank: int, ranks: int, path: str, folder: str) -> list[Outcome]:
    """Runs of two sources with a curriculum: to the end; on one rank also one that stops, and what continues it."""
    whole = trained(path, f"{folder}/whole", **MIXED)
    if ranks > 1:
        return [whole]
    first = trained(path, f"{folder}/stopped", Stopping(), **MIXED)
    return [whole, first, trained(path, f"{folder}/stopped", **MIXED)]


@pytest.mark.slow
def test_two_sources_have_their_rewards_and_metrics_on_any_ranks_and_resume(
    on_ranks: OnRanks, tiny_model: Path, tmp_path: Path
) -> None:
    by_ranks = {n: on_ranks(n, mixed_and_resumed, str(tiny_model), str(tmp_path / f"{n}"))[0] for n in (1, 2, 3)}
    names = [
        f"{name}/{label}"
        for label in ("sums", "products")
        for name in ("reward/mean", "task/accuracy", "source/fraction")
    ]
    whole, first, second = by_ranks[1]
    steps = {row["step"]: unmeasured(row) for row in (*first.reporter.metrics, *second.reporter.metrics)}
    alone = whole.reporter.metrics
    assert steps == {row["step"]: unmeasured(row) for row in alone}
    for step, row in enumerate(alone[1:], 1):
        assert {*names, "reward/exact_match", "reward/length"} <= row.keys()
        assert row["source/fraction/sums"] + row["source/fraction/products"] == pytest.approx(1.0)
        shared = [by_ranks[n][0].reporter.metrics[step] for n in (2, 3)]
        for name in (*names, "reward/exact_match", "reward/length", "response/length_mean"):
            assert [other[name] for other in shared] == pytest.approx([row[name]] * 2, abs=1e-5)
        assert row["reward/mean/products"] == pytest.approx(2 * row["reward/length"], abs=1e-6)  # of that source alone
    passed_over = [row["curriculum/passed_over_fraction"] for row in alone[1:]]
    assert passed_over[0] == 0 < passed_over[-1]
    for other in (by_ranks[2][0], by_ranks[3][0]):  # rows that are looked at follow from all scores of all ranks
        assert [row["curriculum/passed_over_fraction"] for row in other.reporter.metrics[1:]] == passed_over
    assert all(meaning(name) for name in alone[-1] if name.startswith("curriculum/"))
    evaluated = alone[0]
    assert {"eval/accuracy/sums", "eval/reward/products"} <= evaluated.keys()


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
        assert names == [checkpoint_name(step) for step in steps]
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


@dataclass
class Ordered(MemoryReporter):
    """Notes steps among what engines are asked for."""

    order: list[str] = field(default_factory=list)
    stop_at: int | None = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        super().log(metrics, step)
        self.order.append(f"step {step}")

    def should_stop(self, step: int) -> bool:
        return step == self.stop_at


def order_of(path: str, folder: str, stop_at: int | None = None, **changes: Any) -> list[str]:
    """What happens in a run of three steps with evaluations after the second and the last one, in its order."""
    reporter = Ordered(stop_at=stop_at)

    class Asked(FakeEngines):
        def begin(self, prompts: Sequence[Prompt], samplings: Sequence[Sampling], version: int) -> PendingRollout:
            held_out = samplings[0].temperature == 0
            reporter.order.append(f"{'questions' if held_out else 'round'} with {version}")
            return super().begin(prompts, samplings, version)

    trained(path, folder, reporter, engines_of=lambda weights: Asked(), train__steps=3, **changes)
    return reporter.order


def orders(rank: int, ranks: int, path: str, folder: str) -> list[list[str]]:
    by_tokens = {"rollout__temperature": {0: 1.0, "20 tokens": 0.5}}
    others: list[dict[str, Any]] = [MIXED, by_tokens, {"replay": Replay(STEPS, evaluated=frozenset({1}))}]
    return [order_of(path, f"{folder}/{i}", **each) for i, each in enumerate([{}, *others])]


def test_a_round_begins_before_the_step_before_it_is_reported(
    on_ranks: OnRanks, tiny_model: Path, tmp_path: Path
) -> None:
    """But after the report of an evaluation, because of which a run may be stopped, and with a curriculum."""
    plain, curriculum, by_tokens, replayed = on_ranks(1, orders, str(tiny_model), str(tmp_path))[0]
    first, evaluated = ["questions with 0", "step 0", "round with 0"], ["questions with 2", "step 2", "round with 2"]
    last = ["questions with 3", "step 3"]
    assert plain == by_tokens == [*first, "round with 1", "step 1", *evaluated, *last]
    late = [*first, "step 1", "round with 1", *evaluated, *last]
    assert [each for each in curriculum if each in late] == late
    assert replayed == [*first, "questions with 1", "step 1", "round with 1", *evaluated, *last]  # as its run did


def test_a_run_that_is_stopped_leaves_no_round_behind(on_ranks: OnRanks, tiny_model: Path, tmp_path: Path) -> None:
    assert on_ranks(1, stopped_order, str(tiny_model), str(tmp_path))[0] == [
        *("questions with 0", "step 0", "round with 0", "step 1")
    ]


def stopped_order(rank: int, ranks: int, path: str, folder: str) -> list[str]:
    """Like `order_of` a run that is asked to stop while its first step is trained."""
    return order_of(path, folder, stop_at=1)


def resumed_with_other_sets(rank: int, ranks: int, path: str, folder: str) -> Outcome:
    """What continues a run of three eval.sets with fewer samples of one, the same ones of another, and no third."""
    two, once = {"name": "two", "samples": 2}, {"name": "once", "samples": 1}
    trained(path, folder, Stopping(), eval__sets=[{"name": "four"}, two, once])
    return trained(path, folder, eval__sets=[{"name": "four", "samples": 2}, two], eval__every=0)


@pytest.mark.slow
def test_an_evaluation_that_a_resumed_run_no_longer_makes_is_not_reported(
    on_ranks: OnRanks, tiny_model: Path, tmp_path: Path
) -> None:
    (outcome,) = on_ranks(1, resumed_with_other_sets, str(tiny_model), str(tmp_path))
    kept = {"pass_at_1", "pass_at_2", "reward", "length"}  # four had them, too
    names = [{name for name in row if name.startswith("eval/")} for row in outcome.reporter.reports]
    plain = {"eval/accuracy", "eval/reward", "eval/length", "eval/questions"}
    both = {f"eval/two/{each}" for each in (*kept, "avg_at_2", "maj_at_2")} | {f"eval/four/{each}" for each in kept}
    own = {name for name in names[0] if not name.endswith("_se")}
    assert plain | both == own
    assert all(each.removesuffix("_se") in own for each in names[0]) and "eval/four/reward_se" in names[0]
    assert "eval/four/avg_at_2" in names[-1] and "eval/four/avg_at_4" not in names[-1]


def opened_or_not(rank: int, ranks: int, path: str, folder: str) -> list[Any]:
    """A run that opens its third step, a plain one, and the shares that each has kept of steps 2 to 4."""
    opened = trained(path, f"{folder}/3", replay=Replay(3, attributes_gradient=True))
    plain = trained(path, f"{folder}/None")
    kept = [[read_shares(open_storage(f"{folder}/{each}"), step) for step in (2, 3, 4)] for each in (3, None)]
    return [opened, plain, *kept]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_step_that_is_opened_is_as_any_other(ranks: int, on_ranks: OnRanks, tiny_model: Path, tmp_path: Path) -> None:
    """It has the numbers of a step that is not, to the last bit, and so have the steps after it."""
    opened, plain, kept, none = on_ranks(ranks, opened_or_not, str(tiny_model), str(tmp_path))[0]
    assert [unmeasured(row) for row in opened.reporter.metrics] == [unmeasured(row) for row in plain.reporter.metrics]
    before, shares, after = kept
    assert before is after is None and none == [None] * 3
    assert len(shares) == 4 and sum(shares.values()) == pytest.approx(1, abs=1e-6)


SCHEDULES: dict[str, Any] = {
    "train__actor_lr": {0: 1e-3, 1: 0.0, 3: 1e-4},
    "train__warmup_steps": 0,
    "algorithm__kl_coef": {0: 0.1, "20 tokens": 0.2, "interpolate": "linear"},
    "algorithm__ptx_coef": {0: 0.5, 2: 0},
    "rollout__temperature": {0: 1.0, 2: 0.5},
    "rollout__max_staleness": 1,
}


def scheduled_and_resumed(rank: int, ranks: int, path: str, folder: str) -> list[Outcome]:
    """Runs whose settings change: to the end, and one that stops after two steps with what continues it.

    And one whose supervised loss begins where that of the others ends.
    """
    whole = trained(path, f"{folder}/whole", **SCHEDULES)
    first = trained(path, f"{folder}/stopped", Stopping(), **SCHEDULES)
    second = trained(path, f"{folder}/stopped", **SCHEDULES)
    return [whole, first, second, trained(path, f"{folder}/later", **SCHEDULES | {"algorithm__ptx_coef": {0: 0, 2: 1}})]


def test_settings_with_a_schedule_change_and_a_resume_is_exact(
    on_ranks: OnRanks, tiny_model: Path, tmp_path: Path
) -> None:
    whole, first, second, later = on_ranks(1, scheduled_and_resumed, str(tiny_model), str(tmp_path))[0]
    rows = whole.reporter.metrics[1:]
    assert ["ptx/loss" in row for row in rows] == [True, True, False, False]
    assert ["ptx/loss" in row for row in later.reporter.metrics[1:]] == [False, False, True, True]
    assert [row["policy/lr"] for row in rows] == [row["schedule/train.actor_lr"] for row in rows] == [1e-3, 0, 0, 1e-4]
    assert [row["schedule/rollout.temperature"] for row in rows] == [1, 1, 0.5, 0.5]
    of_both = {row["step"]: row for row in (*first.reporter.metrics, *second.reporter.metrics) if row["step"]}
    seconds = [of_both[step]["time/total"] for step in sorted(of_both)]
    assert seconds == pytest.approx(list(accumulate(of_both[step]["time/step"] for step in sorted(of_both))))
    before = [0.0, *(row["tokens/total"] for row in rows[:-1])]
    expected = [0.1 + 0.1 * min(1, tokens / 20) for tokens in before]
    assert [row["kl/coef"] for row in rows] == pytest.approx(expected, abs=1e-9)
    assert isinstance(whole.engines, NotingEngines) and whole.engines.temperatures == [1, 1, 0.5, 0.5]
    steps = {row["step"]: unmeasured(row) for row in (*first.reporter.metrics, *second.reporter.metrics)}
    assert steps == {row["step"]: unmeasured(row) for row in whole.reporter.metrics}
