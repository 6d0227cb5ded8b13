"""The weights that the KL is measured to, in runs that start from the checkpoint of another run."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from shared import OnRanks
from test_loop import Stopping, trained, unmeasured

from rlx.storage.filesystem import StorageError

FAST = {"train__actor_lr": 1e-3, "train__warmup_steps": 0}
Rows = list[dict[str, float]]


def rows(path: str, folder: str, *reporter: Any, **changes: Any) -> Rows:
    """The metrics of a run's steps."""
    return [unmeasured(row) for row in trained(path, folder, *reporter, **(FAST | changes)).reporter.metrics]


def started(rank: int, ranks: int, path: str, folder: str) -> dict[str, Rows]:
    """Runs that start from one that has moved away from its model, in the ways that there are."""
    rows(path, f"{folder}/donor", train__steps=2)
    start = {"checkpoint__init_from": f"{folder}/donor/step_000002"}
    found = {"whole": rows(path, f"{folder}/whole", **start)}
    found["model"] = rows(path, f"{folder}/model", **start, model__reference_weights="model", train__steps=1)
    found["stopped"] = rows(path, f"{folder}/stopped", Stopping(), **start)
    fork = {"checkpoint__init_from": f"{folder}/stopped/step_000001", "checkpoint__init_state": "all"}
    shutil.rmtree(f"{folder}/donor")
    found["resumed"] = rows(path, f"{folder}/stopped", **start)
    found["fork"] = rows(path, f"{folder}/fork", Stopping(), **fork)
    shutil.rmtree(f"{folder}/stopped")
    found["fork resumed"] = rows(path, f"{folder}/fork", **fork)
    return found


def told_later(rank: int, ranks: int, path: str, folder: str) -> list[Rows]:
    """A run whose KL has no weight before it is resumed, as it goes on then; and once more, its start being gone."""
    rows(path, f"{folder}/donor", train__steps=2)
    start = {"checkpoint__init_from": f"{folder}/donor/step_000002"}
    rows(path, f"{folder}/run", Stopping(), **start, algorithm__kl_coef=0.0, train__actor_lr=0.0)
    resumed = rows(path, f"{folder}/run", **start, algorithm__kl_coef=0.1, train__steps=3)
    shutil.rmtree(f"{folder}/donor")
    return [resumed, rows(path, f"{folder}/run", **start, algorithm__kl_coef=0.1, train__steps=4)]


@pytest.mark.slow
def test_a_kl_that_is_switched_on_later_is_measured_to_the_weights_that_the_run_started_with(
    on_ranks: OnRanks, tiny_model: Path, tmp_path: Path
) -> None:
    ((first, second),) = on_ranks(1, told_later, str(tiny_model), str(tmp_path))
    assert first[-1]["step"] == 3 and abs(first[-1]["kl/ref"]) < 1e-9  # the policy had not moved
    assert second[-1]["step"] == 4 and second[-1]["kl/ref"] > 1e-5


@pytest.fixture(scope="module")
def runs(on_ranks: OnRanks, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rows]:
    return on_ranks(1, started, str(tiny_model), str(tmp_path_factory.mktemp("runs")))[0]


def test_the_kl_is_measured_to_the_weights_that_a_run_starts_with(runs: dict[str, Rows]) -> None:
    assert abs(runs["whole"][1]["kl/ref"]) < 1e-9 and runs["whole"][2]["kl/ref"] > 1e-5


def test_the_kl_can_be_measured_to_the_model_instead(runs: dict[str, Rows]) -> None:
    assert runs["model"][1]["kl/ref"] > 1e-5


def test_a_resumed_run_has_the_same_reference_also_when_its_start_is_gone(runs: dict[str, Rows]) -> None:
    assert [row["step"] for row in runs["stopped"]] == [0, 1, 2]
    steps = {row["step"]: row for row in (*runs["stopped"], *runs["resumed"])}
    assert steps == {row["step"]: row for row in runs["whole"]}


def test_a_run_that_continues_another_one_has_its_reference(runs: dict[str, Rows]) -> None:
    steps = {row["step"]: row for row in (*runs["fork"], *runs["fork resumed"])}
    expected = {row["step"]: row for row in runs["whole"] if row["step"] >= 1}
    assert steps == expected


def on_two_ranks(rank: int, ranks: int, path: str, folder: str) -> list[float]:
    """The KL of the first step of a run that starts from a checkpoint: of all weights, and of adapters."""
    found = []
    for name, adapters in (("full", {}), ("adapters", {"model__lora_rank": 2, "model__reference": "copy"})):
        trained(path, f"{folder}/{name}", **FAST, train__steps=2, **adapters)
        start = {"checkpoint__init_from": f"{folder}/{name}/step_000002", "train__steps": 2}
        found += [row["kl/ref"] for row in rows(path, f"{folder}/{name}-2", **adapters, **start)[1:]]
    return found


@pytest.mark.slow
def test_a_reference_is_read_on_any_number_of_ranks_and_has_adapters(
    on_ranks: OnRanks, tiny_model: Path, tmp_path: Path
) -> None:
    for first, second, adapters_first, adapters_second in on_ranks(2, on_two_ranks, str(tiny_model), str(tmp_path)):
        assert abs(first) < 1e-9 and abs(adapters_first) < 1e-9
        assert second > 1e-6 and adapters_second > 1e-9


def without_it(rank: int, ranks: int, path: str, folder: str) -> str:
    """What a resume says when the reference's weights are gone."""
    rows(path, f"{folder}/a", train__steps=1)
    start = {"checkpoint__init_from": f"{folder}/a/step_000001"}
    rows(path, f"{folder}/b", **start, train__steps=1)
    shutil.rmtree(f"{folder}/b/reference")
    with pytest.raises(StorageError) as failed:
        rows(path, f"{folder}/b", **start)
    return str(failed.value)


@pytest.mark.slow
def test_a_lost_reference_is_not_replaced_by_another(on_ranks: OnRanks, tiny_model: Path, tmp_path: Path) -> None:
    (said,) = on_ranks(1, without_it, str(tiny_model), str(tmp_path))
    assert f"{tmp_path}/b/reference/step_000000" in said
