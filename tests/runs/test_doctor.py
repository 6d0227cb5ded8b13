"""How the doctor judges its figures; test_run runs its real steps."""

import pytest

from rlx.config.loading import from_tree
from rlx.runs import doctor

SOUND = {
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
    lines = doctor.verdicts(SOUND | changes, "float32", has_reference=True)
    return [line.figure for line in lines if not line.passed]


def test_engine_and_trainer_are_compared_for_any_old_logprobs() -> None:
    config = from_tree({"algorithm": {"old_logprobs": "rollout"}})
    assert doctor.with_no_learning(config).algorithm.old_logprobs == "recomputed"


def test_engines_report_the_logprobs_that_the_doctor_compares() -> None:
    config = from_tree({"rollout": {"logprobs_every": 7}})
    assert doctor.with_no_learning(config).resolved_logprobs_every == 1
