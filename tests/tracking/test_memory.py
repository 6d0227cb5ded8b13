"""The tracker that keeps its records in memory."""

from rlx.tracking.base import RunStatus, Tracker
from rlx.tracking.memory import MemoryTracker


def test_records_are_kept_by_step_and_name() -> None:
    memory = MemoryTracker()
    tracker: Tracker = memory
    tracker.open("rlx", "one", params={"a.b": 0.5}, tags={"rlx.kind": "run"})
    tracker.log_samples([{"prompt": "1 + 1 =", "score": 1.0}], 0)
    tracker.log_samples([], 1)
    tracker.log({"reward/mean": 1}, 0)
    tracker.log({"reward/mean": 0.25}, 1)
    tracker.log_text("config.yaml", "seed: 1\n")
    tracker.set_tags({"rlx.winner": "yes"})
    tracker.flush()
    tracker.end(RunStatus.FINISHED)
    assert tracker.close(0) == 0
    assert memory == MemoryTracker(
        name="one",
        params={"a.b": 0.5},
        tags={"rlx.kind": "run", "rlx.winner": "yes"},
        metrics={0: {"reward/mean": 1.0}, 1: {"reward/mean": 0.25}},
        samples={0: [{"prompt": "1 + 1 =", "score": 1.0}]},
        texts={"config.yaml": "seed: 1\n"},
        status="FINISHED",
        is_closed=True,
    )


def test_a_repeated_step_keeps_its_first_values() -> None:
    tracker = MemoryTracker()
    for value in (0.5, 0.75):
        tracker.log_samples([{"score": value}], 3)
        tracker.log({"reward/mean": value}, 3)
    assert tracker.metrics == {3: {"reward/mean": 0.5}}
    assert tracker.samples == {3: [{"score": 0.5}]}
