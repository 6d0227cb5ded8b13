"""How the doctor judges its figures; test_run runs its real steps."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rlx.config.loading import from_tree
from rlx.runs import doctor
from rlx.training.stats import LossStats, UpdateStats

SOUND = {
    "untrained": 0.0,
    "ratio": 0.0,
    "clipped": 0.0,
    "kl": 0.0,
    "gap": 1e-6,
    "moved": 0.0,
    "sync_gap": 1e-6,
    "stale_gap": 0.1,
    "grad_norm/policy": 1.0,
    "signal": 1.0,
}


@pytest.mark.parametrize(
    ("figure", "value"),
    [
        ("untrained", 1.0),
        ("ratio", 1e-3),
        ("clipped", 1e-4),
        ("kl", 1e-3),
        ("gap", 0.01),
        ("gap", float("nan")),
        ("moved", 1.0),
        ("sync_gap", 0.02),
        ("stale_gap", 1e-6),
        ("grad_norm/policy", float("nan")),
        ("grad_norm/policy", 0.0),
    ],
)
def test_the_doctor_sees_each_fault(figure: str, value: float) -> None:
    assert failed({}) == []
    assert failed({figure: value}) == [pytest.approx(value, nan_ok=True)]


def test_no_gradient_is_no_fault_where_all_scores_are_equal() -> None:
    assert failed({"grad_norm/policy": 0.0, "signal": 0.0}) == []
    assert failed({"grad_norm/critic": 0.0}) == []


def failed(changes: dict[str, float]) -> list[float]:
    """Returns the figures that the doctor fails when the sound figures are changed."""
    lines = doctor.verdicts(SOUND | changes, "float32", starts_at_reference=True)
    return [line.figure for line in lines if not line.passed]


def test_engine_and_trainer_are_compared_for_any_old_logprobs() -> None:
    config = from_tree({"algorithm": {"old_logprobs": "rollout"}})
    assert doctor.with_no_learning(config).algorithm.old_logprobs == "recomputed"


def test_engines_report_the_logprobs_that_the_doctor_compares() -> None:
    config = from_tree({"rollout": {"logprobs_every": 7}})
    assert doctor.with_no_learning(config).resolved_logprobs_every == 1


@pytest.mark.parametrize(
    ("tree", "is_there"),
    [
        ({}, True),
        ({"model": {"reference_path": "teacher"}}, False),
        ({"algorithm": {"kl_coef": 0}}, False),
        ({"checkpoint": {"init_from": "c"}}, True),
        ({"checkpoint": {"init_from": "c"}, "model": {"reference_weights": "model"}}, False),
        ({"checkpoint": {"init_from": "c", "init_state": "all"}}, False),
        ({"model": {"lora_rank": 4}}, True),
        ({"model": {"lora_rank": 4}, "checkpoint": {"init_from": "c"}}, False),
    ],
)
def test_the_kl_at_the_start_is_judged_where_it_has_to_be_0(tree: dict[str, Any], is_there: bool) -> None:
    config = from_tree(tree)
    at_reference = doctor.starts_at_reference(config.resolved_reference, config.model, config.checkpoint)
    assert at_reference == is_there
    lines = doctor.verdicts(SOUND | {"kl": 0.06}, "float32", at_reference)
    assert [line.figure for line in lines if not line.passed] == [0.06] * is_there


def test_a_round_that_trains_on_nothing_has_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = {"policy/ratio": 0.0, "policy/clip_fraction": 0.0}
    stats = UpdateStats(LossStats(sums), grad_norms={"policy": 0.0}, optimizer_steps=1)
    batch = SimpleNamespace(mask=torch.ones(2, 3), advantages=torch.ones(2, 3))
    trainer: Any = SimpleNamespace(sum_over_ranks=floats, max_over_ranks=list)
    monkeypatch.setattr(doctor, "generate", lambda *given: batch)
    monkeypatch.setattr(doctor, "compute_logprobs", lambda *given: batch)
    monkeypatch.setattr(doctor, "compute_advantages", lambda *given: (batch, {"kl/penalty": 0.0}))
    monkeypatch.setattr(doctor, "update", lambda *given: (batch, stats))
    monkeypatch.setattr(doctor, "engine_gap", lambda *given: 0.0)
    figures = doctor._round_figures(trainer, cast(Any, None))
    lines = doctor.verdicts(SOUND | figures, "float32", starts_at_reference=True)
    assert [line.what for line in lines if not line.passed] == ["rounds without a token to train on"]


def floats(values: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}
