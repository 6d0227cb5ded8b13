"""What engines tell Prometheus: the work of each run under its own name, although engines outlive runs."""

import pytest

from rlx.rollout import engine_metrics
from rlx.rollout.base import Request
from rlx.rollout.engine_metrics import EngineMetrics
from rlx.types import Sampling

Shown = dict[tuple[str, str], float]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    """What Prometheus would read: a value by metric and run."""
    values: Shown = {}

    class Metric:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            self.name, self.keys = name, tag_keys

        def set(self, value: float, tags: dict[str, str]) -> None:
            assert tuple(tags) == self.keys
            values[self.name, tags["run"]] = value

        def inc(self, value: float, tags: dict[str, str]) -> None:
            assert value > 0  # Ray refuses others
            self.set(values.get((self.name, tags["run"]), 0.0) + value, tags)

    monkeypatch.setattr(engine_metrics, "Gauge", Metric)
    monkeypatch.setattr(engine_metrics, "Counter", Metric)
    return values


def requests(count: int) -> list[Request]:
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=8, stop_token_ids=())
    return [Request((1, 2), seed, sampling) for seed in range(count)]


def test_the_work_of_a_run_is_shown_under_its_name(shown: Shown) -> None:
    metrics = EngineMetrics(cache_tokens=40)
    metrics.begin("first")
    metrics.asked(requests(2))
    assert shown == {("rlx_engine_requests", "first"): 2, ("rlx_engine_cache_demand", "first"): 0.5}
    metrics.ended(requests(2), tokens=5)
    assert shown["rlx_engine_requests", "first"] == shown["rlx_engine_cache_demand", "first"] == 0
    assert shown["rlx_engine_tokens", "first"] == 5


def test_what_a_stopped_run_has_left_counts_for_the_next_one(shown: Shown) -> None:
    metrics = EngineMetrics(cache_tokens=40)
    metrics.begin("first")
    metrics.asked(requests(1))
    metrics.begin("second")
    assert (shown["rlx_engine_requests", "first"], shown["rlx_engine_requests", "second"]) == (0, 1)
    metrics.ended(requests(1), tokens=0)
    metrics.begin("second")
    assert shown["rlx_engine_requests", "second"] == 0
