"""Real sweeps: their trials follow each other at once, stop early, learn from each other, die and are resumed."""

import gc
import json
import os
import shutil
import signal
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import ray
import torch
from ray import tune
from run_cases import comparable
from safetensors import safe_open
from shared import LIKE_TINY, History, NothingLeft, Script, mlflow_history

import rlx
from rlx.cli.sweep import checked_plan
from rlx.cluster import connection
from rlx.cluster.resources import cluster_nodes, plan_resources
from rlx.config.errors import ConfigError
from rlx.config.experiment import over_experiment
from rlx.config.loading import from_tree, with_overrides
from rlx.config.sections.data import DataConfig
from rlx.config.sweep import DEFAULT_METRIC, SearchName
from rlx.data import sources
from rlx.runs import launch, run_folder
from rlx.runs.mailbox import start_mailbox
from rlx.runs.run_folder import saved_config
from rlx.storage import signatures
from rlx.storage.addresses import open_storage
from rlx.storage.filesystem import Storage
from rlx.sweeps import choices, plans, room, searchers, tuner
from rlx.sweeps.records import SweepPlan, TrialRecord, TrialRecords
from rlx.sweeps.space import load_space
from rlx.sweeps.trainable import Attempt, PPOTrial, attempt_config
from rlx.tracking import outbox
from rlx.tracking.base import ERROR_TAG
from rlx.tracking.services import mlflow

ACTORS = {"environment": {"name": "calculator", "num_actors": 2}}
COLUMNS = {"data.prompt_column": "q", "data.answer_column": "a", "data.system_column": "s"}
JUDGED = {"reward": {"functions": {"model": 1.0}, "model": "org/a"}}


@pytest.fixture(autouse=True)
def with_tables(tmp_path: Path, empty_database: Path) -> None:
    """MLflow's tables, which take seconds to make."""
    shutil.copy(empty_database, tmp_path)


def test_concurrency_never_exceeds_the_room(ray_cluster: None, tmp_path: Path) -> None:
    tree = {"scaling": {"num_workers": 2}, "train": {"prompts_per_step": 8}}
    space, found = space_file(tmp_path, "{'train.ppo_epochs': tune.choice([1, 2])}"), cluster_nodes()
    assert room.concurrency(SweepPlan("s", tree, space), found) == 2  # of 1.5 CPU each, in 4
    assert room.concurrency(SweepPlan("s", tree, space, max_concurrent=1), found) == 1
    assert room.concurrency(SweepPlan("s", tree, space, max_concurrent=9), found) == 2
    assert room.concurrency(SweepPlan("s", tree, space, candidates=1), found) == 1


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"seeds": 2, "body": "{'seed': tune.choice([1, 2])}"}, "--seeds 2: {space} varies the seed already"),
        ({"scheduler": "pbt", "max_concurrent": 1}, "--max-concurrent: --scheduler pbt pauses and resumes its trials"),
        ({"scheduler": "pbt", "search": "grid"}, "--scheduler pbt changes settings by itself: leave --search"),
        ({"scheduler": "pbt", "seeds": 2}, "--scheduler pbt changes settings by itself: leave --search and --seeds"),
        ({"scheduler": "pbt", "body": "{'seed': tune.choice([1, 2])}"}, "seed cannot change within a run"),
        ({"metric": "reward/mean"}, "--metric reward/mean: trials are compared by what every evaluation measures: "),
        ({"metric": "eval/ema/reward"}, "--metric eval/ema/reward: it needs train.ema_decay"),
        ({"search": "bayesopt"}, "--search bayesopt needs an unbroken range for train.ppo_epochs"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], line: str, tmp_path: Path) -> None:
    space = space_file(tmp_path, options.pop("body", "{'train.ppo_epochs': tune.choice([1, 2])}"))
    with pytest.raises(ConfigError) as error:
        plans.check_sweep(SweepPlan("s", {}, space, **options))
    assert line.format(space=space) in str(error.value)


@pytest.mark.parametrize(
    ("given", "key", "values", "is_refused"),
    [
        (ACTORS, "environment.num_actors", "tune.choice([2, 3])", True),
        (ACTORS, "environment.num_actors", "tune.randint(2, 3)", False),  # always 2
        (ACTORS, "environment.resources_per_actor.CPU", "tune.uniform(0.5, 1.0)", True),
        (ACTORS, "environment.label_selector", "{'zone': 'a'}", True),
        (ACTORS, "environment.name", "tune.choice(['calculator', 'guess_number'])", False),
        ({}, "environment.name", "tune.grid_search(['calculator', None])", True),
        (JUDGED, "reward.model", "tune.choice(['org/a', 'org/b'])", False),
    ],
)
def test_trials_share_their_resources(
    given: dict[str, Any], key: str, values: str, is_refused: bool, tmp_path: Path
) -> None:
    space = space_file(tmp_path, f"{{'{key}': {values}}}")
    plan = SweepPlan("s", given, space)
    line = f"^--space {space}: {key} changes the resources of a trial, which all trials share$"
    with pytest.raises(ConfigError, match=line) if is_refused else nullcontext():
        plans.check_sweep(plan)


@pytest.mark.parametrize("search", ["random", "grid", "optuna"])
@pytest.mark.parametrize(
    ("varied", "line"),
    [
        ({"data.source": ["good.jsonl", "splits"]}, "data.source splits: it has files of several splits; "),
        ({"data.source": ["good.jsonl", "gone.jsonl"]}, "data.source gone.jsonl: no such file"),
        (
            {"data.source": ["good.jsonl", "other.jsonl"]},
            "data.source .*other.jsonl: no column 'question', it has text",
        ),
        ({"data.source": ["good.jsonl", "more.jsonl"]}, ""),
        ({"data.source": ["other.jsonl"], "data.prompt_column": ["text", "more"]}, ""),  # neither alone
        ({"data.source": ["good.jsonl", "more.jsonl"], "data.answer_column": ["answer", "text"]}, ".*no column 'text'"),
    ],
)
def test_prompts_that_trials_may_have_are_refused_as_those_of_a_run(
    varied: dict[str, list[str]], line: str, search: SearchName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("good", "more", "other", "splits/train", "splits/test"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        questions = {"text": "1+1", "more": "1+1?"} if name == "other" else {"question": "1+1"}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({**questions, "answer": "2"}))
    monkeypatch.chdir(tmp_path)
    space = space_file(tmp_path, f"{{{', '.join(f'{key!r}: tune.choice({varied[key]})' for key in varied)}}}")
    tree = {"data": {"source": "good.jsonl", "params": {}}}
    plan = SweepPlan("s", tree, space, search=search, candidates=16)
    with pytest.raises(ConfigError, match=f"^{line}") if line else nullcontext():
        plans.check_sweep(plan)


@pytest.mark.parametrize("search", ["random", "optuna"])
@pytest.mark.parametrize(
    ("varied", "times"),
    [
        ({"data.max_prompt_tokens": [20, 30], "data.num_prompts": [1, 2], "data.system_prompt": ["a", "b"]}, {0}),
        ({"data.max_prompt_tokens": [20, 30], "data.answer_column": ["answer", "other"]}, {2}),
        ({key: [f"{name}{i}" for i in range(20)] for key, name in COLUMNS.items()}, {12, 20}),
    ],
)
def test_prompts_are_read_once_for_each_way_to_read_them(
    varied: dict[str, list[Any]], times: set[int], search: SearchName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = space_file(tmp_path, f"{{{', '.join(f'{key!r}: tune.choice({varied[key]})' for key in varied)}}}")
    columns = ["question", "answer", "other", *(f"{name}{i}" for name in COLUMNS.values() for i in range(20))]
    (tmp_path / "good.jsonl").write_text(json.dumps(dict.fromkeys(columns, "1")))
    read, check = list[DataConfig](), sources.check_source
    monkeypatch.setattr(sources, "check_source", lambda *given: (read.append(given[1]), check(*given)))
    tree = {"data": {"source": str(tmp_path / "good.jsonl"), "params": {}}}
    plans.check_sweep(SweepPlan("s", tree, space, search=search, candidates=12))
    assert len(read) in times
    if len(read) == 20:
        assert {each.answer_column for each in read} == {f"a{i}" for i in range(20)}


@pytest.mark.parametrize(
    ("given", "best"),
    [
        ({}, ("eval/length", "min")),
        ({"best_by": "kl/ref", "best_mode": "max"}, ("kl/ref", "max")),
        ({"best_by": "eval/accuracy"}, ("eval/accuracy", "max")),  # not the worst one
        ({"best_mode": "max"}, ("eval/accuracy", "max")),
    ],
)
def test_the_best_checkpoints_are_by_the_metric_of_the_sweep(
    given: dict[str, Any], best: tuple[str, str], tmp_path: Path
) -> None:
    space = space_file(tmp_path, "{'train.ppo_epochs': tune.choice([1, 2])}")
    plan = plans.check_sweep(SweepPlan("s", {"checkpoint": given}, space, metric="eval/length", mode="min"))
    assert (plan.config.checkpoint.best_by, plan.config.checkpoint.best_mode) == best


@pytest.mark.parametrize(("every", "needed"), [(10, 5), (2, 5), (5, 5), (1, 1), (0, 5)])
def test_trials_of_a_race_have_a_checkpoint_where_they_pause(every: int, needed: int, tmp_path: Path) -> None:
    space = space_file(tmp_path, "{'train.ppo_epochs': tune.choice([1, 2])}")
    tree = {"train": {"steps": 20}, "eval": {"every": 5}, "checkpoint": {"every": every}}
    plan = plans.check_sweep(SweepPlan("s", tree, space, scheduler="race", seeds=3))
    assert (plan.config.checkpoint.every, plan.config.checkpoint.async_save) == (needed, False)


def test_a_scheduler_is_told_what_trials_did_before_a_resume_by_their_names(tmp_path: Path) -> None:
    known = {"trial_00001": TrialRecord(settings={}, reports=[(5, 0.5)])}
    plan = SweepPlan("s", {}, space_file(tmp_path, "{'train.ppo_epochs': tune.choice([1, 2])}"), candidates=7, seeds=2)
    schedule = plans.schedule_of(plan, {}, known)
    assert (schedule.known, schedule.candidates, schedule.seeds, schedule.max_seeds) == (known, 7, 2, 2)


def created(plan: SweepPlan, storage: Storage) -> SweepPlan:
    """A new sweep as it will run, in its folder."""
    plan = plans.check_sweep(plan)
    plans.create_sweep(plan, storage)
    return plan


def test_a_sweep_whose_trials_the_cluster_cannot_hold_cannot_begin(ray_cluster: None, tmp_path: Path) -> None:
    space = space_file(tmp_path, "{'train.actor_lr': tune.uniform(0, 1)}")
    tree = {"storage": str(tmp_path), "scaling": {"placement_strategy": "STRICT_PACK"}}
    plan = SweepPlan("s", tree, space, scheduler="pbt", candidates=40)
    with pytest.raises(ConfigError, match=r"^--scheduler pbt with 40 trials, \d at once, needs scaling"):
        plans.check_can_begin(plan)
    plans.check_can_begin(replace(plan, scheduler="asha"))


def test_a_grid_within_a_random_search_is_counted_once(tmp_path: Path) -> None:
    text = "{'train.actor_lr': tune.loguniform(1e-6, 1e-4), 'algorithm.kl_coef': tune.grid_search([0, 0.01, 0.1])}"
    storage, space = open_storage(str(tmp_path)), space_file(tmp_path, text)
    made = created(SweepPlan("s", {"storage": str(tmp_path)}, space, candidates=2), storage)
    assert made.candidates == plans.saved_sweep(storage, "s").candidates == 6


def test_a_resume_uses_the_search_space_as_it_was(tmp_path: Path) -> None:
    storage, space = open_storage(str(tmp_path)), space_file(tmp_path, "{'train.ppo_epochs': tune.choice([1, 2])}")
    made = created(SweepPlan("s", {"storage": str(tmp_path)}, space), storage)
    Path(space).unlink()  # it may be on another machine
    saved = plans.saved_sweep(storage, None)
    assert replace(saved, space=made.space) == made
    assert load_space(saved.space, saved.tree)["train.ppo_epochs"].categories == [1, 2]


def test_a_sweep_of_before_goes_on_with_the_defaults_of_before(tmp_path: Path) -> None:
    storage, space = open_storage(str(tmp_path)), space_file(tmp_path, "{'train.ppo_epochs': tune.choice([1, 2])}")
    tree = {"storage": str(tmp_path), "model": {"path": "org/name"}, "train": {"steps": 4, "actor_lr": 3e-6}}
    made = created(SweepPlan("s", tree, space), storage)
    assert plans.saved_sweep(storage, "s").tree == made.tree == tree
    file = tmp_path / "sweeps" / "s" / "sweep.json"
    old = json.loads(file.read_text())
    del old["defaults"]  # as the plan was written when every model had the tiny one's defaults
    file.write_text(json.dumps(old))
    config = plans.saved_sweep(storage, "s", trust=True).config
    assert (config.model.path, config.train.steps, config.train.actor_lr) == ("org/name", 4, 3e-6)
    assert (config.train.critic_lr, config.algorithm.gae_lambda, config.rollout.max_tokens) == (1e-4, 0.95, 16)


def test_a_sweep_of_before_goes_on_with_the_engines_of_before(tmp_path: Path) -> None:
    storage, space = open_storage(str(tmp_path)), space_file(tmp_path, "{'train.ppo_epochs': tune.choice([1, 2])}")
    scaling = {"use_gpu": True, "num_workers": 2}
    given = {"rollout": {"resources_per_engine": {"CPU": 1.0, "GPU": 1.0}}}
    tree = {"storage": str(tmp_path), "model": {"path": "org/name"}, "scaling": scaling} | given
    made = created(SweepPlan("s", tree, space), storage)
    assert plans.saved_sweep(storage, "s").resources == made.resources and made.gpus == 4
    file = tmp_path / "sweeps" / "s" / "sweep.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"defaults": 2}))
    before = plans.saved_sweep(storage, "s", trust=True)
    assert (before.config.rollout.num_engines, before.gpus) == (1, 3)
    assert before.config.rollout.resources_per_engine == given["rollout"]["resources_per_engine"]
    on_cpus = SweepPlan("s", {"scaling": {"use_gpu": True}}, space, defaults=2).with_its_defaults()
    assert on_cpus.resources.total() == {"CPU": 1.0, "GPU": 1.0}
    in_turns = replace(on_cpus, tree={"scaling": scaling, "rollout": {"placement": "colocated", "num_engines": 2}})
    assert replace(in_turns, defaults=2).with_its_defaults().gpus == 2


def test_a_sweep_of_before_goes_on_with_the_rewards_of_before(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    space = space_file(tmp_path, "{'reward.functions.environment': tune.choice([0.5, 1.0])}")
    tree = {"storage": str(tmp_path), "model": {"path": "org/name"}, "environment": {"name": "calculator"}}
    created(SweepPlan("s", tree, space), storage)
    file = tmp_path / "sweeps" / "s" / "sweep.json"

    def rewards(defaults: int) -> dict[str, float]:
        file.write_text(json.dumps(json.loads(file.read_text()) | {"defaults": defaults}))
        plan = plans.saved_sweep(storage, "s", trust=True)
        first = Attempt("trial_00000", "trial_00000")
        return attempt_config(plan, {"reward.functions.environment": 0.5}, first).reward.functions

    assert rewards(2) == {"task": 1.0, "environment": 0.5}
    assert rewards(3) == {"environment": 0.5}


def test_a_sweep_whose_record_begins_with_a_resume_names_the_original_of_its_space(tmp_path: Path) -> None:
    storage, space = open_storage(str(tmp_path)), space_file(tmp_path, "{'train.ppo_epochs': tune.choice([1, 2])}")
    created(SweepPlan("s", {"storage": str(tmp_path)}, space), storage)
    plans.open_record(plans.saved_sweep(storage, "s"), storage / "sweeps" / "s")
    run = mlflow.client(mlflow.default_uri(tmp_path)).get_run(outbox.run_id(storage / "sweeps" / "s"))
    assert run.data.params["space"] == space


def test_a_start_that_was_killed_before_its_plan_leaves_its_record_to_no_other_sweep(tmp_path: Path) -> None:
    storage, space = open_storage(str(tmp_path)), space_file(tmp_path, "{'train.ppo_epochs': tune.choice([1, 2])}")
    plan, folder = SweepPlan("s", {"storage": str(tmp_path)}, space), storage / "sweeps" / "s"
    plans.open_record(created(plan, storage), folder)
    dead = outbox.run_id(folder)
    (tmp_path / "sweeps" / "s" / "sweep.json").unlink()  # an older rlx opened the record first
    plans.open_record(created(replace(plan, candidates=7), storage), folder)
    run = mlflow.client(mlflow.default_uri(tmp_path)).get_run(outbox.run_id(folder))
    assert (run.info.run_id != dead, run.data.params["trials"]) == (True, "7")


@pytest.mark.parametrize(("scheduler", "rungs"), [("asha", "[10, 20]"), ("race", "[10, 20]"), ("none", None)])
def test_the_rungs_of_a_sweep_are_recorded_with_it(
    scheduler: Any, rungs: str | None, ray_cluster: None, tmp_path: Path
) -> None:
    storage, space = open_storage(str(tmp_path)), space_file(tmp_path, "{'train.ppo_epochs': tune.choice([1, 2])}")
    plan = created(SweepPlan("s", {"storage": str(tmp_path)}, space, scheduler=scheduler, seeds=2), storage)
    plans.open_record(plan, storage / "sweeps" / "s")
    run = mlflow.client(mlflow.default_uri(tmp_path)).get_run(outbox.run_id(storage / "sweeps" / "s"))
    assert run.data.tags.get("rlx.rungs") == rungs


def test_a_new_sweep_tells_once_of_what_can_have_no_schedule(
    ray_cluster: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage, space = open_storage(str(tmp_path)), space_file(tmp_path, "{'train.ppo_epochs': tune.choice([1, 2])}")
    created(SweepPlan("s", {"storage": str(tmp_path)}, space, scheduler="pbt"), storage)
    plans.saved_sweep(storage, "s")
    assert [message for message in caplog.messages if "train.ppo_epochs can have no schedule" in message] == [ANY]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"candidates": 4}, ["warning: 2 of 4 trials repeat another's settings"]),
        ({"candidates": 4, "budget": "8steps"}, []),  # the first two are different
        ({"search": "optuna"}, []),
        ({"candidates": 1, "scheduler": "median"}, [ANY]),
        ({"search": "grid", "candidates": 1, "scheduler": "median"}, []),
    ],
)
def test_a_new_sweep_tells_of_settings_that_repeat_or_are_alone(
    options: dict[str, Any], told: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    space = space_file(tmp_path, "{'train.ppo_epochs': tune.choice([1, 2])}")
    tree = {"storage": str(tmp_path), "train": {"steps": 4}, "eval": {"every": 2}}
    created(SweepPlan("s", tree, space, **options), open_storage(str(tmp_path)))
    assert caplog.messages == told


@pytest.mark.parametrize(
    ("varied", "tree", "told"),
    [
        ("", {"algorithm": {"advantage": "grpo"}}, True),
        ("", {}, False),
        ("'algorithm.advantage': 'grpo', ", {}, True),
        ("'algorithm.advantage': tune.choice(['grpo', 'gae']), ", {}, False),
        ("'algorithm.advantage': tune.choice(['grpo', 'rloo']), ", {}, True),
        ("'algorithm.advantage': tune.choice(['gae', 'grpo']), ", {"algorithm": {"advantage": "grpo"}}, False),
    ],
)
def test_a_new_sweep_tells_of_a_setting_that_does_nothing_in_any_trial(
    varied: str, tree: dict[str, Any], told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    both = "'train.actor_lr': tune.loguniform(1e-5, 1e-3), 'train.critic_lr': tune.loguniform(1e-5, 1e-3)"
    space = space_file(tmp_path, f"{{{varied}{both}}}")
    created(SweepPlan("s", {"storage": str(tmp_path), **tree}, space), open_storage(str(tmp_path)))
    assert caplog.messages == told * [
        f"warning: --space {space}: train.critic_lr does nothing with algorithm.advantage grpo: trials that differ in "
        "nothing else are the same"
    ]


@pytest.mark.parametrize(("search", "candidates"), [("grid", 1), ("random", 12)])
def test_more_settings_than_a_sweep_has_are_not_made(
    search: SearchName, candidates: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million of a grid, and twelve random ones with each value of a list, where a hundred are the most.

    The grid's values are not even checked: that takes minutes for some.
    """
    for module in (choices, searchers):
        monkeypatch.setattr(module, "MOST_TRIALS", 100)
    grid = ", ".join(f"'algorithm.{key}': tune.choice(['?'] * 100)" for key in ("kl_coef", "clip_low", "clip_high"))
    lists = "'train.actor_lr': tune.uniform(0, 1), 'algorithm.kl_coef': tune.grid_search([0.1] * 10)"
    space = space_file(tmp_path, f"{{{grid if search == 'grid' else lists}}}")
    plan = SweepPlan("s", {"storage": str(tmp_path)}, space, search=search, candidates=candidates)
    for check in (checked_plan, plans.check_sweep):
        with pytest.raises(ConfigError, match=r"^a sweep has at most 100 trials"):
            check(plan)


def test_what_all_trials_of_a_population_share_is_neither_refused_nor_told_of(
    ray_cluster: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "{'seed': 7, 'train.ppo_epochs': 2, 'train.actor_lr': tune.uniform(1e-5, 1e-3)}"
    plan = SweepPlan("s", {"storage": str(tmp_path)}, space_file(tmp_path, text), scheduler="pbt")
    created(plan, open_storage(str(tmp_path)))
    assert not [message for message in caplog.messages if "schedule" in message]
    listed = replace(plan, space=space_file(tmp_path, "{'seed': tune.grid_search([1, 2])}"))  # handed over
    with pytest.raises(ConfigError, match=r"seed cannot change within a run, as --scheduler pbt would$"):
        plans.check_sweep(listed)


def test_rungs_in_tokens_are_recorded_and_read_back(tmp_path: Path) -> None:
    storage, space = open_storage(str(tmp_path)), space_file(tmp_path, "{'train.ppo_epochs': tune.choice([1, 2])}")
    plan = SweepPlan("s", {"storage": str(tmp_path)}, space, scheduler="asha", rung_by="tokens")
    plans.open_record(created(plan, storage), storage / "sweeps" / "s")
    assert plans.saved_sweep(storage, "s").rung_by == "tokens"
    tags = mlflow.client(mlflow.default_uri(tmp_path)).get_run(outbox.run_id(storage / "sweeps" / "s")).data.tags
    assert (tags["rlx.rung_by"], tags.get("rlx.rungs")) == ("tokens", None)


def test_a_sweep_of_another_person_is_not_resumed_unless_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, space = open_storage(str(tmp_path)), space_file(tmp_path, "{'train.ppo_epochs': tune.choice([1, 2])}")
    created(SweepPlan("s", {"storage": str(tmp_path)}, space), storage)
    code = tmp_path / "sweeps" / "s" / "space.py"
    code.write_text(code.read_text() + "# and more")
    with pytest.raises(ConfigError, match=r"this user did not write sweep 's', whose search space is code: read space"):
        plans.saved_sweep(storage, "s")
    assert plans.saved_sweep(storage, "s", trust=True) == replace(plans.saved_sweep(storage, "s"), space=ANY)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another"))
    with pytest.raises(ConfigError, match="this user did not write"):
        plans.saved_sweep(storage, "s")


EDITS = [{"trials": "many"}, {"trials": -3}, {"seeds": 0}, {"search": "zzz"}, {"name": "../x"}]


@pytest.mark.parametrize("change", EDITS)
def test_an_edited_plan_is_damaged(change: dict[str, Any], tmp_path: Path) -> None:
    storage, space = open_storage(str(tmp_path)), space_file(tmp_path, "{'train.ppo_epochs': tune.choice([1, 2])}")
    created(SweepPlan("s", {"storage": str(tmp_path)}, space), storage)
    file = tmp_path / "sweeps" / "s" / "sweep.json"
    for content in (json.loads(file.read_text()) | change, [change], 4, None):
        file.write_text(json.dumps(content))
        with pytest.raises(ConfigError, match="is damaged: it is not what rlx wrote"):
            plans.saved_sweep(storage, "s", trust=True)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model.path": "evil"}, "the sweep does not vary model.path"),
        ({"reward.functions": {"evil:f": 1.0}}, r"the sweep does not have reward.functions \{'evil:f': 1.0\}"),
        ({"reward.functions": {"task": 1.0}, "seed": 3}, None),
        ({"reward.timeout_s": 3.25, "data.sources": [{"source": "a.jsonl"}]}, None),
        ({"reward.timeout_s": 9.5}, r"the sweep does not have reward.timeout_s 9.5"),
    ],
)
def test_a_trial_has_only_settings_of_the_sweep(settings: dict[str, Any], said: str | None, tmp_path: Path) -> None:
    known = {"trial_00000": TrialRecord(settings=settings)}
    space = {"reward.functions": tune.choice([{"task": 1.0}]), "reward.timeout_s": tune.uniform(1, 8)}
    space["data.sources"] = tune.choice([({"source": "a.jsonl"},)])
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        tuner._check_settings(known, space, open_storage(str(tmp_path)))


def space_file(folder: Path, body: str) -> str:
    path = folder / "space.py"
    path.write_text(f"from ray import tune\n\ndef space():\n    return {body}\n")
    return str(path)


# ---------------------------------------------------------------------------------------------------------------------
# Real ones


@dataclass
class News:
    """What a sweep told who watches it."""

    metrics: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)

    def watch(self, trial: str, settings: Mapping[str, Any], metrics: Mapping[str, Any], state: str) -> None:
        self.states[trial] = state
        if metrics:
            self.metrics.setdefault(trial, []).append(metrics)


@pytest.fixture
def place(tmp_path: Path, empty_database: Path) -> Path:
    """A folder with a storage in it that has MLflow's database already."""
    (tmp_path / "storage").mkdir()
    shutil.copy(empty_database, tmp_path / "storage")
    return tmp_path


def small_tree(model: Path, folder: Path, answer: str = "") -> dict[str, Any]:
    """Settings with which `()` as what counts as an answer finds it in every completion, and `(?!)` in none."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"question": f"{i} + 1 =", "answer": answer}) + "\n" for i in range(60)))
    tree = {
        "storage": str(folder / "storage"),
        "model": {"path": str(model)},
        "data": {"source": str(prompts), "max_prompt_tokens": 32},
        "train": {"steps": 10, "prompts_per_step": 4, "samples_per_prompt": 2},
        "rollout": {"max_tokens": 4, "kv_cache_mib": 16},
        "reward": {"answer_pattern": "()"},
        "eval": {"every": 2, "num_prompts": 6},
        "checkpoint": {"every": 2},
    }
    return over_experiment(tree)


def prepared(
    model: Path, folder: Path, space: str, settings: Mapping[str, Any] = {}, **options: Any
) -> tuple[SweepPlan, Storage]:
    """A sweep with these settings, ready to run."""
    tree = {**small_tree(model, folder), **settings}
    storage = open_storage(tree["storage"])
    config = from_tree(tree)
    connection.connect(config, plan_resources(config))
    return created(SweepPlan("s", tree, space_file(folder, space), **options), storage), storage


def run_of(plan: SweepPlan, storage: Storage) -> str:
    return outbox.run_id(storage / "sweeps" / plan.name)


def children(plan: SweepPlan, storage: Storage) -> dict[str, Any]:
    """MLflow's runs below the sweep's, by trial."""
    client = mlflow.client(mlflow.default_uri(Path(storage.path)))
    experiment = client.get_experiment_by_name("rlx").experiment_id
    runs = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{run_of(plan, storage)}'")
    return {run.info.run_name.rpartition(".")[2]: run for run in runs}


def status_of(plan: SweepPlan, storage: Storage) -> str:
    return str(mlflow.client(mlflow.default_uri(Path(storage.path))).get_run(run_of(plan, storage)).info.status)


def history(plan: SweepPlan, storage: Storage, leg: str) -> History:
    """The metrics of a trial's run, by step."""
    run_id = outbox.run_id(storage / "sweeps" / plan.name / "runs" / leg)
    return mlflow_history(Path(storage.path), run_id)


@pytest.mark.slow  # test_schedulers has the stops without training, and the next but one a sweep with training
def test_a_sweep_stops_bad_trials_and_leaves_nothing(tiny_model: Path, place: Path, nothing_left: NothingLeft) -> None:
    space = "{'reward.answer_pattern': tune.choice(['()', '(?!)', '(?!)'])}"
    plan, storage = prepared(tiny_model, place, space, search="grid", scheduler="asha", max_concurrent=1)
    news = News()
    results = tuner.run_sweep(plan, storage, watch=news.watch)
    nothing_left(15)

    states = {name: record.state for name, record in results.items()}
    assert states == news.states and states["trial_00000"] == "finished"
    assert set(states.values()) == {"finished", "stopped"}
    runs = children(plan, storage)
    assert sorted(runs) == sorted(states) == ["trial_00000", "trial_00001", "trial_00002"]
    assert {run.info.status for run in runs.values()} == {status_of(plan, storage)} == {"FINISHED"}
    assert [results[name].reports[-1][1] for name in sorted(results)] == [1.0, 0.0, 0.0]
    for name, run in runs.items():
        assert run.data.tags["rlx.trial"] == name and run.data.params["train.steps"] == "10"
        assert ("rlx.stopped" in run.data.tags) == (states[name] == "stopped")
        assert max(history(plan, storage, name)["reward/mean"]) == results[name].step >= 2
        assert run.data.tags.get("rlx.stopped", "10") == str(results[name].step)
    processes = {name: {metrics["pid"] for metrics in told if "pid" in metrics} for name, told in news.metrics.items()}
    assert len(set().union(*processes.values())) == 1  # all ran where the first did, also after one was stopped
    assert (storage / "sweeps" / "s").names() == [
        "run.json", "runs", "signature", "space.py", "sweep.json", "told.jsonl", "trials", "tune",
    ]  # fmt: skip


@pytest.mark.slow  # two sweeps
def test_a_trial_computes_the_same_alone_and_beside_another(tiny_model: Path, tmp_path: Path, place: Path) -> None:
    space, found = "{'train.actor_lr': tune.grid_search([1e-4, 3e-4])}", []
    for at_once in (1, 2):
        folder = tmp_path / f"at_once_{at_once}"
        (folder / "storage").mkdir(parents=True)
        shutil.copy(place / "storage" / "mlflow.db", folder / "storage")
        rollout = small_tree(tiny_model, folder)["rollout"] | {"alternate": True}
        plan, storage = prepared(tiny_model, folder, space, {"rollout": rollout}, search="grid", max_concurrent=at_once)
        states = {name: record.state for name, record in tuner.run_sweep(plan, storage, watch=News().watch).items()}
        assert states == {"trial_00000": "finished", "trial_00001": "finished"}
        found.append({name: comparable(history(plan, storage, name), range(11)) for name in states})
        if at_once == 2:
            began, ended = zip(*(run_seconds(run) for run in children(plan, storage).values()), strict=True)
            assert max(began) < min(ended)  # they did run beside each other
    assert found[0] == found[1] and all(len(metrics) > 30 for metrics in found[0].values())
    assert found[0]["trial_00000"] != found[0]["trial_00001"]


def run_seconds(run: Any) -> tuple[int, int]:
    """When a run of MLflow began and ended, in milliseconds."""
    return run.info.start_time, run.info.end_time


# Metrics of a step that its update has no part in, nor what was measured after it.
BEFORE_UPDATE = ("reward/", "response/", "task/", "groups/", "mismatch/", "kl/ref", "policy/entropy", "value/explained")


@pytest.mark.slow  # whole runs, of what test_schedulers and test_run hold together
def test_a_trial_that_goes_on_from_a_better_one_continues_it_bit_for_bit(
    tiny_model: Path, place: Path, nothing_left: NothingLeft
) -> None:
    space = "{'reward.answer_pattern': tune.grid_search(['()', '(?!)']), 'train.actor_lr': tune.loguniform(1e-5, 1e-3)}"
    plan, storage = prepared(tiny_model, place, space, scheduler="pbt", candidates=1)
    results = tuner.run_sweep(plan, storage, watch=News().watch)
    nothing_left(15)

    assert {record.state for record in results.values()} == {"finished"}
    assert [record.reports[-1] for record in results.values()] == [(10, 1.0), (10, 1.0)]
    folder = storage / "sweeps" / "s" / "runs"
    legs = [leg for leg in folder.names() if "." in leg]
    assert "trial_00001.2" in legs  # those that are as good as the best may change places with it, too
    for leg in legs:
        trial, config = leg.partition(".")[0], from_tree(saved_config(folder / leg))
        donor, name = str(config.checkpoint.init_from).split("/")[-2:]
        step = int(name.rpartition("_")[2])
        after = step + 1
        run = mlflow.client(mlflow.default_uri(Path(storage.path))).get_run(outbox.run_id(folder / leg))
        assert run.data.tags["rlx.kind"] == "attempt"
        assert run.data.tags["rlx.from"] == f"{donor.partition('.')[0]}@{step}"
        assert run.data.tags["mlflow.parentRunId"] == outbox.run_id(folder / trial)
        theirs = from_tree(saved_config(folder / donor))
        assert config.reward.answer_pattern == theirs.reward.answer_pattern == "()"
        assert 1e-5 <= config.train.actor_lr <= 1e-3 and config.train.actor_lr != theirs.train.actor_lr
        own, source = history(plan, storage, leg), history(plan, storage, donor)
        compared = [name for name in own if name.startswith(BEFORE_UPDATE) and after in own[name]]
        assert len(compared) > 10
        assert {name: own[name][after] for name in compared} == {name: source[name][after] for name in compared}
        assert own["policy/grad_norm"][step] == source["policy/grad_norm"][step]


def test_whoever_knows_ray_alone_finds_what_they_expect(
    tiny_model: Path, place: Path, nothing_left: NothingLeft
) -> None:
    tree = with_overrides(small_tree(tiny_model, place), {"train.steps": 6, "checkpoint.every": 1})
    config = from_tree({"name": "s", **tree})
    space = {"reward.answer_pattern": tune.grid_search(["(x)", "()"]), "train.actor_lr": 1e-4}
    tuner = rlx.tuner(config, space=space, search="grid", max_concurrent=1)
    assert isinstance(tuner, tune.Tuner)
    grid = tuner.fit()
    assert not grid.errors and len(grid) == 2
    best = grid.get_best_result()
    assert (best.metrics["step"], best.metrics["eval/accuracy"]) == (6, 1.0)
    assert best.config == {"reward.answer_pattern": "()", "train.actor_lr": 1e-4}
    run = place / "storage" / "sweeps" / "s" / "runs" / "trial_00001"
    assert best.metrics["checkpoint_path"] == f"{run}/step_000006"
    for result in grid:
        assert_checkpoints(result, run.with_name(result.path.rpartition("/")[2]))
    with pytest.raises(
        ConfigError, match=r"a Tuner runs once: rlx\.resume_tuner\('s', storage='.*'\) makes one for what is left"
    ):
        tuner.fit()

    model, tokenizer = rlx.load_model(best.checkpoint)
    weight = model.get_input_embeddings().weight
    with safe_open(run / "step_000006" / "rank_00000.safetensors", "pt") as file:
        names = list(file.keys())
        (name,) = (each for each in names if each.endswith("embed_tokens.weight") and each.startswith("policy"))
        assert torch.equal(weight, file.get_tensor(name))
    assert tokenizer.decode(model.generate(**tokenizer("1 + 1 =", return_tensors="pt"), max_new_tokens=2)[0])

    again = tune.Tuner.restore(str(place / "storage" / "sweeps" / "s" / "tune"), PPOTrial)
    assert again.get_results().get_best_result(DEFAULT_METRIC, "max").metrics == best.metrics
    records = {file: file.read_bytes() for file in (place / "storage" / "sweeps" / "s" / "trials").iterdir()}
    with pytest.raises(ConfigError, match=r"rlx\.resume_tuner\('s', storage='.*'\)\.fit\(\) continues it"):
        again.fit()
    assert len(records) == 2 and all(file.read_bytes() == content for file, content in records.items())
    nonce = (run / "signature").read_text().partition(":")[0]
    assert not files_with(signatures._derived_key(nonce), place)  # who copies a sweep cannot sign
    nothing_left(15)
    plan, storage = saved_sweep(place)
    assert status_of(plan, storage) == "FINISHED"


def test_a_sweep_that_cannot_begin_leaves_nothing(
    tiny_model: Path, place: Path, ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, space = from_tree({"name": "s", **small_tree(tiny_model, place)}), {"train.actor_lr": tune.uniform(0, 1)}
    storage = open_storage(str(place / "storage"))
    with monkeypatch.context() as patched, pytest.raises(ConfigError, match=r"^no room$"):
        patched.setattr(tuner, "most_at_once", refuse)  # the last refusal: a node has gone meanwhile
        rlx.tuner(config, space=space)
    assert (storage / "sweeps").names() == (storage / "search_spaces").names() == []

    started = list[Any]()
    monkeypatch.setattr(tuner, "start_mailbox", lambda: started.append(start_mailbox()) or started[-1])
    made = rlx.tuner(config, space=space)  # the name is free
    folder = storage / "sweeps" / "s"
    assert outbox.run_id(folder) is None  # its run begins with the fit, which may never come
    ray.get(started[-1].__ray_ready__.remote())
    del made
    gc.collect()
    with pytest.raises(ray.exceptions.ActorDiedError):  # with the Tuner, which was never fitted
        ray.get(started[-1].__ray_ready__.remote())
    with monkeypatch.context() as patched, pytest.raises(ConfigError, match=r"^no room$"):
        patched.setattr(tuner, "most_at_once", refuse)
        rlx.resume_tuner("s", storage=str(place / "storage"))
    assert outbox.run_id(folder) is None


def refuse(plan: SweepPlan) -> int:
    raise ConfigError("no room")


def assert_checkpoints(result: tune.Result, run: Path) -> None:
    """Train was given each step's checkpoint, and Tune keeps the newest, all with the metrics of their own steps."""
    given = json.loads((run / launch._TRAIN_RECORD).read_text())["checkpoint_results"]
    assert {each["checkpoint_dir_name"]: each["metrics"]["step"] for each in given} == {
        f"step_{step:06d}": step for step in range(1, 7)
    }
    ((checkpoint, metrics),) = result.best_checkpoints
    pointed = run_folder.pointed_checkpoint(Storage(checkpoint.filesystem, checkpoint.path))
    assert (pointed.step, pointed.folder.path) == (metrics["step"], f"{run}/step_{metrics['step']:06d}")


def files_with(content: bytes, folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and content in file.read_bytes()]


def saved_sweep(place: Path) -> tuple[SweepPlan, Storage]:
    storage = open_storage(str(place / "storage"))
    return plans.saved_sweep(storage, "s"), storage


@pytest.mark.slow
@pytest.mark.parametrize("from_scratch", [False, True])
def test_trials_that_failed_run_again_when_that_is_asked_for(
    tiny_model: Path, place: Path, nothing_left: NothingLeft, from_scratch: bool
) -> None:
    flag = place / "broken"
    flag.touch()
    space = "{'reward.functions': tune.choice([{'tests.my_rewards:fragile': 1.0}, {'exact_match': 1.0}])}"
    config = from_tree({"name": "s", **small_tree(tiny_model, place, answer=str(flag))})
    grid = rlx.tuner(config, space=space_file(place, space), search="grid").fit()
    words = "worker 0: RewardError: reward tests.my_rewards:fragile: raised ValueError('no luck') at "
    assert len(grid.errors) == 1 and words in str(grid.errors[0])

    plan, storage = saved_sweep(place)
    results = TrialRecords(storage / "sweeps" / "s").all()
    assert [record.state for _, record in sorted(results.items())] == ["failed", "finished"]
    (failure,) = tuner.failures(results)
    assert failure.startswith(f"trial_00000: {words}")
    (details,) = (place / "storage" / "sweeps" / "s" / "runs" / "trial_00000").glob("reward_error_*.txt")
    assert "Traceback" in details.read_text() and '"completions"' in details.read_text()
    before = {name: history(plan, storage, name) for name in sorted(results)}
    assert plans.ended_trials(plan, storage) == len(results) and plans.is_finished(plan, len(results))
    with pytest.raises(ConfigError, match=r"sweep 's' is finished: no trial is left to run; rlx\.load_sweep\('s'\)"):
        rlx.resume_tuner("s", storage=str(place / "storage"))
    assert tuner.run_sweep(plan, storage, watch=News().watch) == results  # nothing is left to do
    flag.unlink()
    assert plans.restart_failed(plan, storage, from_scratch=from_scratch) == ["trial_00000"]
    again = tuner.run_sweep(plan, storage, watch=News().watch)
    nothing_left(15)
    assert {record.state for record in again.values()} == {"finished"}
    newest = "trial_00000.2" if from_scratch else "trial_00000"
    if from_scratch:
        assert {name: history(plan, storage, name) for name in sorted(results)} == before
    assert sorted(history(plan, storage, newest)["reward/mean"]) == list(range(1, 11))
    assert (ERROR_TAG in children(plan, storage)["trial_00000"].data.tags) == from_scratch


@pytest.mark.slow
@pytest.mark.parametrize("retries", [0, 1])
def test_a_killed_trial_goes_on_or_leaves_nothing(
    retries: int, tiny_model: Path, place: Path, nothing_left: NothingLeft, caplog: pytest.LogCaptureFixture
) -> None:
    again = {"scaling": {"max_failures": retries}}
    plan, storage = prepared(tiny_model, place, "{'reward.answer_pattern': '()'}", again, candidates=1)
    news = News()
    killed: list[int] = []

    def kill_at_step_2(trial: str, settings: Mapping[str, Any], metrics: Mapping[str, Any], what: str) -> None:
        news.watch(trial, settings, metrics, what)
        if what == "running" and metrics.get("step") == 3 and not killed:
            killed.append(metrics["pid"])
            os.kill(metrics["pid"], signal.SIGKILL)

    results = tuner.run_sweep(plan, storage, watch=kill_at_step_2)
    nothing_left(15)
    state = "finished" if retries else "failed"
    assert news.states == {"trial_00000": state} == {name: record.state for name, record in results.items()}
    assert tuner.failures(results) == ([] if retries else ["trial_00000: its process was killed"])
    assert caplog.text.count("trial_00000: its process was killed - it is started again") == retries
    assert [run.info.status for run in children(plan, storage).values()] == ["FINISHED" if retries else "FAILED"]
    steps = [metrics["step"] for metrics in news.metrics["trial_00000"] if "step" in metrics]
    assert 0 in steps and steps.count(0) == 1  # it went on from a checkpoint


@pytest.mark.slow
def test_a_watcher_that_fails_does_not_end_the_sweep(
    tiny_model: Path, place: Path, nothing_left: NothingLeft, caplog: pytest.LogCaptureFixture
) -> None:
    plan, storage = prepared(tiny_model, place, "{'reward.answer_pattern': '()'}", candidates=1)

    def broken(trial: str, settings: Mapping[str, Any], metrics: Mapping[str, Any], what: str) -> None:
        raise BrokenPipeError("the terminal is gone")

    assert tuner.run_sweep(plan, storage, watch=broken)["trial_00000"].state == "finished"
    assert "the sweep goes on: BrokenPipeError" in caplog.text
    nothing_left(15)


@pytest.mark.slow
def test_a_trial_that_ends_takes_nothing_from_the_others(
    tiny_model: Path, place: Path, nothing_left: NothingLeft
) -> None:
    """Two at a time, each in a process of its own that ends with it; no trial is tried again."""
    once = {"scaling": {"max_failures": 0}}
    space = "{'reward.answer_pattern': tune.grid_search(['()', '(?!)', '.'])}"
    plan, storage = prepared(tiny_model, place, space, once, search="grid", reuse="none")
    results = tuner.run_sweep(plan, storage, watch=News().watch)
    nothing_left(15)
    assert [str(record.state) for record in results.values()] == ["finished"] * 3, tuner.failures(results)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_sweep_is_resumed(tiny_model: Path, tmp_path: Path, script: Any) -> None:
    storage = open_storage(str(tmp_path / "storage"))
    words = ["--storage", storage.path, *LIKE_TINY, "--model.path", str(tiny_model), "--name", "s"]
    small = [
        "--train.prompts-per-step",
        "4",
        "--eval.num-prompts",
        "6",
        "--train.steps",
        "8",
        "--checkpoint.every",
        "2",
        "--eval.every",
        "5",
    ]
    first: Script = script("ppo_sweep.py", *words, *small, "--trials", "3", "--max-concurrent", "1")
    first.wait_for("trial_00000 finished")
    first.wait_for("trial_00001 running  step 5/8")
    first.kill()
    plan = plans.saved_sweep(storage, "s")
    before = children(plan, storage)
    finished = mlflow_history(Path(storage.path), before["trial_00000"].info.run_id)

    second: Script = script("ppo_sweep.py", "--storage", storage.path, "--resume")
    assert second.process.wait(400) == 0, second.output.read_text()
    runs = children(plan, storage)
    assert sorted(runs) == ["trial_00000", "trial_00001", "trial_00002"]
    assert {run.info.status for run in runs.values()} == {status_of(plan, storage)} == {"FINISHED"}
    assert mlflow_history(Path(storage.path), runs["trial_00000"].info.run_id) == finished
    assert {name: run.data.tags.get("rlx.attempt") for name, run in runs.items()} == {
        "trial_00000": None,
        "trial_00001": "2",
        "trial_00002": None,
    }
    for run in runs.values():
        steps = mlflow_history(Path(storage.path), run.info.run_id)["reward/mean"]
        assert {step: len(values) for step, values in steps.items()} == {step: 1 for step in range(1, 9)}
    assert "trial_00001 running  step 0/8" not in second.output.read_text()
