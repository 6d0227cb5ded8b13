"""Whole runs that generate ahead of training, or score while they generate."""

from pathlib import Path
from typing import Any

import pytest
from run_cases import STEPS, Done, comparable, small, train
from shared import NothingLeft

from rlx.config.run import RunConfig
from rlx.runs.train_run import RunStopped

AHEAD = {"rollout__max_staleness": 1}


@pytest.fixture(scope="module")
def storage(nothing_left: NothingLeft, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def ahead(tiny_model: Path, storage: Path) -> Done:
    return train(small(tiny_model, storage, "ahead", **AHEAD))


@pytest.mark.slow
def test_completions_are_one_step_old_from_the_second_step_on(ahead: Done) -> None:
    assert {step: values[0] for step, values in ahead.history["staleness/mean"].items()} == {1: 0, 2: 1, 3: 1, 4: 1}


def test_the_first_step_is_that_of_a_run_on_policy_and_later_ones_are_corrected(ahead: Done) -> None:
    assert ahead.config.resolved_rollout_correction == "tis"
    assert ahead.history["mismatch/kl"][1][0] < 1e-8 < ahead.history["mismatch/kl"][STEPS][0]
    assert ahead.history["mismatch/weight_max"][STEPS][0] > 1.0001


def stopped_and_resumed(config: RunConfig, after: int) -> Done:
    """A run that is stopped after that step's report, with a checkpoint of the step that it is in, and goes on.

    Its engines and workers stay, as those of a trial that a scheduler stops.
    """

    def stop(metrics: dict[str, object], checkpoint: str | None) -> None:
        if metrics["step"] == after:
            raise RunStopped("by the test")

    with pytest.raises(RunStopped, match="by the test"):
        train(config, on_report=stop)
    return train(config, resume=True)


def test_a_resumed_run_trains_on_what_was_drawn_before(ahead: Done, tiny_model: Path, storage: Path) -> None:
    """Its checkpoint holds the round that was drawn ahead, with weights that are gone."""
    config = small(tiny_model, storage, "stopped", **AHEAD)
    resumed = stopped_and_resumed(config, after=0)
    assert resumed.reports[0][0]["step"] in (1, 2, 3)
    assert comparable(resumed.history, range(STEPS + 1)) == comparable(ahead.history, range(STEPS + 1))


@pytest.mark.slow  # two runs; the resume before it has the queue, and test_loop the last step
def test_the_last_step_may_have_nothing_but_what_was_drawn_before(tiny_model: Path, storage: Path) -> None:
    config = small(tiny_model, storage, "longer", train__steps=3, checkpoint__every=2, **AHEAD)
    resumed = stopped_and_resumed(config, after=1)
    assert sorted(resumed.history["reward/mean"]) == [1, 2, 3]


@pytest.mark.slow  # a run; test_engine continues completions under new weights
def test_completions_in_progress_go_on_with_new_weights(tiny_model: Path, storage: Path) -> None:
    """Two steps ahead, and what is being drawn waits for no update."""
    done = train(small(tiny_model, storage, "partial", rollout__max_staleness=2, rollout__partial_rollouts=True))
    ages = {step: values[0] for step, values in done.history["staleness/mean"].items()}
    assert ages == {1: 0, 2: 1, 3: 2, 4: 2}
    assert len(done.history["reward/mean"]) == STEPS


@pytest.mark.slow  # a run; test_update has the losses
def test_ratios_can_be_to_the_policy_that_drew(tiny_model: Path, storage: Path) -> None:
    once = {"train__ppo_epochs": 1, "train__num_minibatches": 1, "train__warmup_steps": 0, "train__steps": 2}
    done = train(small(tiny_model, storage, "theirs", algorithm__old_logprobs="rollout", **once, **AHEAD))
    first, second = (done.history["policy/approx_kl"][step][0] for step in (1, 2))
    assert first < 1e-8 < 1e-6 < second  # recomputed, it is 0 at both
    assert done.history["mismatch/kl"][2] == [pytest.approx(second)]
    assert "mismatch/max_abs" not in done.history


ALONE = {"algorithm__advantage": "grpo", "algorithm__kl_coef": 0.0, "model__reference": "none"}


@pytest.mark.parametrize("way", [{}, pytest.param(ALONE, marks=pytest.mark.slow)], ids=["with a critic", "alone"])
def test_scoring_part_by_part_changes_nothing_but_rounding(
    tiny_model: Path, storage: Path, way: dict[str, Any]
) -> None:
    whole, parts = (
        train(small(tiny_model, storage, f"parts{n}-{len(way)}", rollout__num_chunks=n, train__steps=1, **way))
        for n in (1, 2)
    )
    metrics = comparable(whole.history, range(2))
    if way:  # at once, it is of the second mini-batch alone
        del metrics["policy/entropy"]
    for name, by_step in metrics.items():
        assert parts.history[name][1 if 1 in by_step else 0] == pytest.approx(by_step[max(by_step)], abs=1e-5, rel=1e-4)
