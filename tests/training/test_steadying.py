"""The whole loop with all that steadies training: each has its effect, and a stopped run keeps all of its state."""

from pathlib import Path
from typing import Any

import pytest
from shared import OnRanks
from test_loop import Outcome, Stopping, trained, unmeasured

STEADY: dict[str, Any] = {
    "model__value_head_init": "normal",
    "train__critic_warmup": 1,
    "train__ema_decay": 0.5,
    "train__gradient_checkpointing": True,
    "train__warmup_steps": 0,
    "eval__sets": [{"name": "held", "samples": 2, "temperature": 0.7, "every": 1}],
    "algorithm__target_kl": 1e-7,
    "algorithm__normalize_rewards": True,
    "algorithm__reward_clip": 2.0,
    "algorithm__missing_eos_penalty": 0.5,
    "algorithm__overlong_buffer": 4,
    "algorithm__entropy_coef": 0.01,
    "algorithm__adaptive_kl_target": 0.1,
    "algorithm__adaptive_kl_horizon": 100,
    "algorithm__rollout_correction": "tis",
    "algorithm__rollout_correction_level": "sequence",
}
"""also of the runs with engines and workers in tests/runs"""
PLAIN = {"data__ptx_source": None, "data__ptx_batch": 32, "algorithm__ptx_coef": 0.0}


def stopped_and_resumed(rank: int, ranks: int, path: str, folder: str) -> list[Outcome]:
    """A run to its end; one that stops after two steps, and what continues it."""
    whole = trained(path, f"{folder}/whole", **STEADY | PLAIN)
    first = trained(path, f"{folder}/stopped", Stopping(), **STEADY | PLAIN)
    return [whole, first, trained(path, f"{folder}/stopped", **STEADY | PLAIN)]


@pytest.fixture(scope="module")
def runs(on_ranks: OnRanks, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    return on_ranks(1, stopped_and_resumed, str(tiny_model), str(tmp_path_factory.mktemp("steady")))[0]


@pytest.fixture(scope="module")
def rows(runs: list[Outcome]) -> list[dict[str, float]]:
    """The metrics of each step of the whole run, from step 0."""
    return [dict(row) for row in runs[0].reporter.metrics]


@pytest.mark.slow
def test_the_policy_stays_while_the_critic_warms_up(rows: list[dict[str, float]]) -> None:
    assert "policy/loss" not in rows[1] and "value/loss" in rows[1]
    assert abs(rows[2]["kl/ref"]) <= 1e-9 < abs(rows[3]["kl/ref"])


def test_epochs_end_early_by_kl(rows: list[dict[str, float]]) -> None:
    assert [row["policy/updates"] for row in rows[2:]] == [1, 1, 1]  # of four


def test_the_average_is_evaluated_beside_the_policy(rows: list[dict[str, float]]) -> None:
    assert rows[0]["eval/ema/accuracy"] == rows[0]["eval/accuracy"]
    assert [step for step, row in enumerate(rows) if "eval/ema/reward" in row] == [0, 2, 4]


def test_penalties_are_taken_off_and_scores_normalised(rows: list[dict[str, float]]) -> None:
    assert rows[1]["response/truncated_fraction"] == 1  # of 6 tokens, all that there is room for
    assert rows[1]["reward/length"] - rows[1]["reward/mean"] == pytest.approx(0.5 + 1)  # no end; the whole buffer
    assert rows[1]["reward/running_mean"] == pytest.approx(rows[1]["reward/mean"], abs=1e-6)
    assert rows[4]["reward/running_std"] > 0


def test_a_resumed_run_has_all_of_that_state(runs: list[Outcome]) -> None:
    whole, first, second = runs
    steps = {row["step"]: unmeasured(row) for row in (*first.reporter.metrics, *second.reporter.metrics)}
    assert steps == {row["step"]: unmeasured(row) for row in whole.reporter.metrics}
