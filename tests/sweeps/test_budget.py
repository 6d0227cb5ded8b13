"""What a sweep's budget pays for, and what a plan says before it starts."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray import tune
from sweep_cases import Run, log_sweep, sweep, trial

from rlx.analysis.comparison.cost import cost_line
from rlx.config.errors import ConfigError
from rlx.storage.checkpoint_catalog import checkpoint_name, commit
from rlx.storage.checkpoint_manifest import Manifest
from rlx.storage.filesystem import Storage
from rlx.sweeps import plans
from rlx.sweeps.records import SweepPlan
from rlx.tracking.services import mlflow

SPACE = "from ray import tune\ndef space():\n    return {'train.actor_lr': tune.choice([1e-4, 2e-4, 3e-4])}\n"
GPU = {"use_gpu": True, "resources_per_worker": {"CPU": 1, "GPU": 1}}


@pytest.fixture
def plan(tmp_path: Path, empty_database: Path) -> SweepPlan:
    """Four settings on three seeds, of 20 steps with 4 x 2 answers of at most 10 tokens: 240 steps, 19200 tokens."""
    shutil.copy(empty_database, tmp_path)
    (tmp_path / "space.py").write_text(SPACE)
    tree = {
        "storage": str(tmp_path),
        "train": {"steps": 20, "prompts_per_step": 4, "samples_per_prompt": 2},
        "rollout": {"max_tokens": 10},
    }
    return SweepPlan("s", tree, str(tmp_path / "space.py"), candidates=4, seeds=3)


def with_budget(plan: SweepPlan, budget: str, **more: Any) -> SweepPlan:
    return plans.check_sweep(replace(plan, budget=budget, **more))


def test_a_plan_costs_what_its_runs_cost_at_most(plan: SweepPlan) -> None:
    assert plans.planned_cost(plan, {}) == (240, 19200, 0)
    assert plans.planned_cost(replace(plan, max_seeds=5), {}).steps == 400


def test_each_trial_costs_at_most_what_the_largest_numbers_of_the_space_do(plan: SweepPlan) -> None:
    sizes = {"train.samples_per_prompt": tune.choice([2, 8]), "rollout.max_tokens": tune.randint(5, 21)}
    assert plans.planned_cost(plan, sizes).tokens == 240 * (4 * 8) * 20
    varied = "from ray import tune\ndef space():\n    return {'train.prompts_per_step': tune.choice([8, 16])}\n"
    Path(plan.space).write_text(varied)
    assert with_budget(plan, "30ktokens").candidates == 1  # each at most 60 steps with 16 x 2 answers of 10 tokens
    assert plans.prospects(plan)[0] == "at most 240 steps, 76,800 tokens"


@pytest.mark.parametrize(
    ("algorithm", "space", "answers"),  # of a step, to each of its four prompts
    [
        ({"advantage": "grpo"}, {}, 2),
        ({"advantage": "dapo"}, {}, 2 * 8),
        ({"advantage": "dapo", "filter_rounds": 3}, {}, 2 * 3),
        ({"advantage": "dapo", "filter_groups": False}, {}, 2),
        ({"advantage": "remax"}, {}, 2 + 1),
        ({"advantage": "grpo"}, {"algorithm.filter_groups": tune.choice([True, False])}, 2 * 8),
        ({"advantage": "dapo"}, {"algorithm.filter_rounds": tune.randint(2, 6)}, 2 * 5),
        ({}, {"algorithm.advantage": tune.choice(["remax", "dapo"])}, 2 * 8),
        ({}, {"algorithm.advantage": tune.grid_search(["remax", "grpo"])}, 2 + 1),
        ({"filter_groups": False}, {"algorithm.advantage": tune.choice(["grpo", "dapo"])}, 2),
    ],
)
def test_answers_that_are_not_trained_on_count(
    plan: SweepPlan, algorithm: dict[str, Any], space: dict[str, Any], answers: int
) -> None:
    assert plans.planned_cost(replace(plan, tree=plan.tree | {"algorithm": algorithm}), space).tokens == (
        240 * 4 * answers * 10
    )


def test_as_many_settings_are_tried_as_the_budget_pays_for(plan: SweepPlan) -> None:
    assert [with_budget(plan, text).candidates for text in ("120steps", "200steps", "15ktokens", "9000steps")] == [
        2,
        3,
        3,
        4,
    ]
    assert with_budget(plan, "240steps", search="grid").candidates == 3
    with pytest.raises(ConfigError, match=r"^--budget 120steps pays for 2 settings, the grid has 3$"):
        with_budget(plan, "120steps", search="grid")
    with pytest.raises(ConfigError, match=r"^--budget in gpu-h: runs use no GPU; give steps or tokens$"):
        with_budget(plan, "8gpu-h")


def test_gpu_hours_need_a_run_that_has_told_how_long_a_step_takes(plan: SweepPlan) -> None:
    with_gpus = replace(plan, tree=plan.tree | {"scaling": GPU})
    gpus = with_gpus.resources.total()["GPU"]
    with pytest.raises(ConfigError, match=r"no run of this model has told yet how long a step takes$"):
        with_budget(with_gpus, "8gpu-h")
    assert math.isnan(plans.planned_cost(with_gpus, {}).gpu_seconds)
    own = {f"{section}.{key}": value for section in ("train", "rollout") for key, value in plan.tree[section].items()}
    log_sweep(plan.tracking_uri, "before", [Run(own, {0: 0.1, 4: 0.5})], [])  # two seconds a step
    # Half a second was its evaluation. A run of 20 steps has three: before the first, after the tenth and the last.
    step, pauses = 1.5, 0.5 * 3 / 20
    assert plans.planned_cost(with_gpus, {}).gpu_seconds == pytest.approx(240 * (step + pauses) * gpus)
    twice = {"rollout.max_tokens": tune.choice([5, 20])}
    assert plans.planned_cost(with_gpus, twice).gpu_seconds == pytest.approx(240 * 2 * (step + pauses) * gpus)
    more = {"train.prompts_per_step": tune.choice([4, 12])}
    assert plans.planned_cost(with_gpus, more).gpu_seconds == pytest.approx(240 * (3 * step + pauses) * gpus)
    assert with_budget(with_gpus, f"{math.ceil(3 * 60 * 1.575 * gpus)}gpu-s").candidates == 3
    often = replace(with_gpus, tree=with_gpus.tree | {"eval": {"every": 0, "sets": [{"name": "held", "every": 5}]}})
    assert plans.planned_cost(often, {}).gpu_seconds == pytest.approx(240 * (step + 0.5 * 5 / 20) * gpus)


def test_pauses_of_other_steps_are_no_part_of_the_last_one(plan: SweepPlan) -> None:
    with_gpus = replace(plan, tree=plan.tree | {"scaling": GPU})
    gpus, uri = with_gpus.resources.total()["GPU"], plan.tracking_uri
    own = {f"{section}.{key}": value for section in ("train", "rollout") for key, value in plan.tree[section].items()}
    log_sweep(uri, "before", [Run(own, {0: 0.1, 4: 0.5})], [])
    run = mlflow.find_runs(uri, mlflow.find_experiment(uri, "rlx"), kind="run")[-1].id
    mlflow.client(uri).log_metric(run, "time/step", 3.0, step=5)
    mlflow.client(uri).log_metric(run, "time/checkpoint", 0.25, step=5)
    assert plans.planned_cost(with_gpus, {}).gpu_seconds == pytest.approx(240 * (3.0 - 0.25 + 0.075) * gpus)
    mlflow.client(uri).log_metric(run, "time/step", 3.0, step=6)
    assert plans.planned_cost(with_gpus, {}).gpu_seconds == pytest.approx(240 * (3.0 + 0.075) * gpus)


def test_a_branched_sweep_costs_the_steps_that_its_trials_do(plan: SweepPlan, tmp_path: Path) -> None:
    start = tmp_path / "runs" / "parent" / checkpoint_name(15)
    parts = ("metrics", "kl", "scores", "cursor", "evaluation", "config", "files")
    empty: dict[str, Any] = {key: {} for key in parts}
    commit(Storage.local(start), Manifest(rlx="0", step=15, ranks=1, tokens=0, mlflow_run_id=None, **empty))
    whole = {"checkpoint": {"init_from": str(start), "init_state": "all"}}
    branched = replace(plan, tree=plan.tree | whole)
    assert plans.planned_cost(branched, {}) == (12 * 5, 12 * 5 * 8 * 10, 0)
    assert with_budget(branched, "35steps").candidates == 2  # each takes three seeds of five steps
    shutil.rmtree(start)  # a resume says again what the sweep costs
    assert plans.planned_cost(branched, {}).steps == 60
    fresh = replace(plan, tree=plan.tree | {"checkpoint": {"init_from": str(start)}})
    assert plans.planned_cost(fresh, {}).steps == 240
    own = {f"{section}.{key}": value for section in ("train", "rollout") for key, value in plan.tree[section].items()}
    log_sweep(plan.tracking_uri, "before", [Run(own, {0: 0.1, 4: 0.5})], [])
    with_gpus = replace(branched, tree=branched.tree | {"scaling": GPU})
    cost = plans.planned_cost(with_gpus, {})  # it evaluates after the last step alone
    assert cost.gpu_seconds == pytest.approx(12 * (5 * 1.5 + 0.5) * with_gpus.resources.total()["GPU"])


def test_a_plan_says_what_it_costs_and_shows(plan: SweepPlan) -> None:
    cost, shows, more, questions = plans.prospects(with_budget(plan, "9000steps"))
    assert cost == "at most 240 steps, 19,200 tokens of a budget of 9000steps"
    assert shows.startswith("3 seeds and 256 questions can show a difference of 0.1 in four of five sweeps (an ass")
    assert "5 seeds: " in more
    assert questions == "at most 256 questions: one that repeats counts once, and fewer show less"
    population = plans.prospects(replace(plan, scheduler="pbt", seeds=1))[0]
    assert population == "at most 80 steps, 6,400 tokens, without steps that pbt discards"
    for unknown in ("eval/reward", "eval/accuracy/web"):  # of all questions, and of those of one source
        assert len(plans.prospects(replace(plan, metric=unknown))) == 1


@pytest.mark.slow
def test_a_plan_knows_how_settings_of_the_newest_sweep_differed(plan: SweepPlan, tmp_path: Path) -> None:
    run = log_sweep(plan.tracking_uri, "before", [Run({}, {0: 0.1})], [])
    content = {"metric": "eval/accuracy", "spread_of_differences": {"seed": 1e-6, "question": 0.0, "rest": 0.01}}
    (tmp_path / "evidence.json").write_text(json.dumps(content))
    mlflow.log_files(plan.tracking_uri, run, [tmp_path / "evidence.json"], "analysis")
    assert "(as settings of the newest sweep differ)" in plans.prospects(plan)[1]


def test_the_end_says_what_was_spent_of_what_was_planned_at_the_start(plan: SweepPlan) -> None:
    ended = sweep(trial(0, {"train.actor_lr": 1.0}, {0: 0.1, 12: 0.5}))
    assert cost_line(ended) == ""  # of a sweep of before nothing was recorded
    line = cost_line(replace(ended, planned=plans.planned_cost(plan, {})._asdict() | {"gpus": 0.0}))
    assert line == "spent 12 steps, 1,200 tokens; planned at most 240 steps, 19,200 tokens: 5% of its steps"


def test_gpu_seconds_are_those_of_all_gpus_of_a_trial(plan: SweepPlan) -> None:
    with_gpus = replace(plan, tree=plan.tree | {"scaling": GPU}, scheduler="asha", rung_by="gpu-seconds")
    gpus = with_gpus.resources.total()["GPU"]
    assert plans.schedule_of(plans.check_sweep(with_gpus), {}).amount({"step": 4, "time/total": 30.0}) == 30 * gpus


def test_hyperband_takes_steps_alone(plan: SweepPlan) -> None:
    """Its settings wait for one another, and one that is past the rung already would wait for ever."""
    with pytest.raises(
        ConfigError, match=r"^--rung-by tokens: --scheduler hyperband has its settings wait .* asha, median$"
    ):
        plans.check_sweep(replace(plan, scheduler="hyperband", rung_by="tokens"))
