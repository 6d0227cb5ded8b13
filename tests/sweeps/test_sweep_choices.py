"""What is refused in a plan of a sweep before Ray is imported."""

from pathlib import Path
from typing import Any

import pytest

from rlx.config.errors import ConfigError
from rlx.config.sweep import SchedulerName
from rlx.sweeps.choices import check_choices, check_key, tell_few, tell_unscheduled
from rlx.sweeps.plans import schedule_of
from rlx.sweeps.records import SweepPlan, plan_content, read_plan

FILES = {
    "space.py": "def space(): return {'train.actor_lr': 1, key: 2, **more}",
    "broken.py": "\ndef space(:",
    "none.py": "x = 1",
    "cost.py": "x = 1",
    "binary.py": b"\xff",
    "misspelt.py": "from ray import tune\ndef space():\n    return {'train.actor_rl': tune.uniform(0, 1)}",
    "evals.py": "from ray import tune\ndef space():\n    return {'eval.every': tune.grid_search([2, 3])}",
    "steps.py": "def space():\n    if x:\n        return {'train.steps': 1}\n    return {}",
}


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"metric": "eval/acuracy"}, "--metric eval/acuracy: .*; nearest: eval/accuracy"),
        ({"metric": "eval/ema/accuracy"}, "--metric eval/ema/accuracy: it needs train.ema_decay"),
        ({"scheduler": "hyperband", "max_concurrent": 2}, "--max-concurrent: --scheduler hyperband pauses"),
        ({"scheduler": "pbt", "seeds": 2}, "--scheduler pbt changes settings by itself"),
        ({"scheduler": "race"}, "--scheduler race compares settings on the same seeds: --seeds 3, at least 2"),
        ({"scheduler": "race", "seeds": 3, "max_seeds": 2}, "--max-seeds 2: not below --seeds 3"),
        ({"scheduler": "race", "seeds": 3, "alpha": 0.7}, "--alpha 0.7: a chance between 0 and 0.5"),
        ({"scheduler": "race", "seeds": 3, "search": "optuna"}, "--scheduler race starts all settings at once"),
        ({"scheduler": "hyperband", "search": "optuna"}, "--scheduler hyperband starts all settings at once: --search"),
        ({"scheduler": "race", "seeds": 3, "max_concurrent": 2}, "--max-concurrent: --scheduler race pauses"),
        ({"scheduler": "asha", "seeds": 3, "max_seeds": 4}, "--max-seeds 4: it is for --scheduler race"),
        ({"alpha": 0.1}, "--alpha 0.1: it is for --scheduler race"),
        (
            {"rung_by": "tokens"},
            "--rung-by tokens: --scheduler none stops no trial; leave --rung-by out, or take",
        ),
        (
            {"rung_by": "tokens", "scheduler": "pbt"},
            "--rung-by tokens: --scheduler pbt hands over checkpoints at",
        ),
        ({"rung_by": "gpu-seconds", "scheduler": "race", "seeds": 2}, "--rung-by gpu-seconds: --scheduler race pairs"),
        (
            {"rung_by": "gpu-seconds", "scheduler": "asha"},
            "--rung-by gpu-seconds: runs use no GPU; give --rung-by",
        ),
        ({"candidates": 10**8}, "a sweep has at most 100,000 trials, those of all seeds counted: give fewer --trials"),
        ({"candidates": 50_001, "seeds": 2, "search": "optuna"}, "a sweep has at most 100,000 trials"),
        ({"budget": "8 hours"}, "--budget 8 hours: an amount such as 500steps, 2Mtokens, 90gpu-min or 8gpu-h"),
        ({"space": "spce.py"}, "--space .*/spce.py: no such file; nearest: space.py"),
        ({"space": "nosuch.py"}, "--space .*/nosuch.py: no such file$"),
        ({"space": "broken.py"}, "--space .*/broken.py:2: not Python: invalid syntax"),
        ({"space": "binary.py"}, "--space .*/binary.py: not a Python file: "),
        ({"space": "none.py"}, r"--space .*/none.py: no function space\(\) that returns settings"),
        ({"space": "misspelt.py"}, "--space .*/misspelt.py: unknown setting train.actor_rl; nearest: train.actor_lr"),
        ({"space": "evals.py"}, "--space .*/evals.py: eval.every is the same for all trials of a sweep"),
        ({"space": "steps.py"}, "--space .*/steps.py: train.steps is the same for all trials"),
    ],
)
def test_what_does_not_go_together_is_one_line(options: dict[str, Any], line: str, tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    check_choices(SweepPlan("s", {}, str(tmp_path / "space.py")))
    named = {"space": "space.py"} | options
    with pytest.raises(ConfigError, match=f"^{line}"):
        check_choices(SweepPlan("s", {}, str(tmp_path / named.pop("space")), **named))


def plan(tmp_path: Path, metric: str) -> SweepPlan:
    (tmp_path / "space.py").write_text(FILES["space.py"])
    sets = [{"name": "aime", "samples": 4, "every": 4}, {"name": "held", "samples": 8}]
    tree = {"train": {"steps": 20}, "eval": {"every": 5, "sets": sets}}
    return SweepPlan("s", tree, str(tmp_path / "space.py"), metric=metric)


def test_a_sweep_is_judged_by_any_metric_of_its_sets_when_that_is_measured(tmp_path: Path) -> None:
    rungs = {"eval/aime/avg_at_4": [4, 8, 16], "eval/held/pass_at_2": [5, 10], "eval/reward": [5, 10]}
    for metric, expected in rungs.items():
        check_choices(plan(tmp_path, metric))
        assert schedule_of(plan(tmp_path, metric), {}).rungs == expected
    assert read_plan(plan_content(plan(tmp_path, "eval/held/maj@8"))).metric == "eval/held/maj_at_8"


def test_a_plan_of_before_has_its_rungs_in_steps(tmp_path: Path) -> None:
    content = plan_content(plan(tmp_path, "eval/reward"))
    del content["rung_by"]
    assert read_plan(content) == plan(tmp_path, "eval/reward")
    assert read_plan(content | {"rung_by": "tokens"}).rung_by == "tokens"
    with pytest.raises(ConfigError, match=r"^rung_by 'hours': Input should be 'steps', 'tokens' or 'gpu-seconds'$"):
        read_plan(content | {"rung_by": "hours"})


@pytest.mark.parametrize("metric", ["eval/aime/avg_at_8", "eval/amie/avg_at_4", "eval/aime/avg_at_4_se"])
def test_a_metric_that_no_set_measures_is_refused_with_the_nearest(metric: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^--metric {metric}: .*; nearest: eval/aime/avg_at_4$"):
        check_choices(plan(tmp_path, metric))


def test_a_sweep_without_mlflow_is_refused_in_one_line(tmp_path: Path) -> None:
    tree = {"tracking": {"backends": ["tensorboard"]}}
    with pytest.raises(ConfigError, match=r"^tracking\.backends: a sweep needs mlflow among them"):
        check_choices(SweepPlan("s", tree, str(tmp_path / "space.py")))


@pytest.mark.parametrize(
    ("scheduler", "every", "is_told"), [("asha", 4, True), ("asha", 0, True), ("asha", 2, False), ("none", 4, False)]
)
def test_a_scheduler_that_has_nothing_to_decide_is_told_of(
    scheduler: SchedulerName, every: int, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "space.py").write_text(FILES["space.py"])
    tree = {"train": {"steps": 4}, "eval": {"every": every}}
    check_choices(plan := SweepPlan("s", tree, str(tmp_path / "space.py"), scheduler=scheduler))
    assert (plan.scheduler != "none" and not schedule_of(plan, {}).rungs) == is_told
    assert caplog.messages == is_told * [
        f"warning: --scheduler {scheduler}: it has nothing to decide: trials are evaluated before the first and after "
        "the last step only; give a smaller --eval.every"
    ]


@pytest.mark.parametrize(
    ("scheduler", "candidates", "is_told"), [("asha", 1, True), ("asha", 2, False), ("none", 1, False)]
)
def test_a_scheduler_with_one_setting_is_told_of(
    scheduler: SchedulerName, candidates: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tell_few(SweepPlan("s", {}, "space.py", scheduler=scheduler, candidates=candidates, seeds=3), [])
    assert caplog.messages == is_told * [
        "warning: --scheduler asha: it has nothing to decide: the sweep tries one setting"
    ]


def test_settings_that_repeat_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    once: list[dict[str, Any]] = [{"seed": 1, "reward.functions": {"task": 1.0}}, {"seed": 2, "reward.functions": {}}]
    tell_few(SweepPlan("s", {}, "space.py", candidates=2), once)
    assert not caplog.messages
    tell_few(SweepPlan("s", {}, "space.py", candidates=3, seeds=2), [*once, dict(reversed(once[0].items()))])
    assert caplog.messages == ["warning: 2 of 6 trials repeat another's settings"]


def test_pbt_tells_of_what_can_have_no_schedule(caplog: pytest.LogCaptureFixture) -> None:
    keys = ["train.actor_lr", "train.ppo_epochs"]
    for scheduler in ("none", "pbt"):
        tell_unscheduled(SweepPlan("s", {}, "space.py", scheduler=scheduler), keys)
    tell_unscheduled(SweepPlan("s", {}, "space.py", scheduler="pbt"), keys[:1])
    assert caplog.messages == [
        "warning: --scheduler pbt: train.ppo_epochs can have no schedule: rlx lineage will refuse a trial in which it "
        "changed; leave it out of the space"
    ]


def test_a_scheduler_that_can_spare_little_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "space.py").write_text(FILES["space.py"])
    for every in (3, 2):
        tree = {"train": {"steps": 4}, "eval": {"every": every}}
        check_choices(SweepPlan("s", tree, str(tmp_path / "space.py"), scheduler="asha"))
    assert caplog.messages == [
        "warning: --scheduler asha: trials are first compared at step 3 of 4, so that it can spare only the steps "
        "after it; give a smaller --eval.every"
    ]


@pytest.mark.parametrize(
    ("reward", "metric", "is_told"),
    [
        ({"length_target": 8, "functions": {"length": 1.0}}, "eval/accuracy", True),
        ({"length_target": 8, "functions": {"length": 1.0}}, "eval/reward", False),
        ({"length_target": 8, "functions": {"length": 1.0, "task": 0.0}}, "eval/accuracy", True),
        ({"length_target": 8, "functions": {"length": 0.1, "task": 1.0}}, "eval/accuracy", False),
    ],
)
def test_a_metric_of_what_is_not_rewarded_is_told_of(
    reward: dict[str, Any], metric: str, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "space.py").write_text(FILES["space.py"])
    check_choices(SweepPlan("s", {"reward": reward}, str(tmp_path / "space.py"), metric=metric))
    assert is_told == any("--metric eval/reward compares them" in message for message in caplog.messages)


def test_a_section_in_a_space_is_told_how_its_settings_are_written() -> None:
    with pytest.raises(ConfigError, match=r"^--space s\.py: train: settings have dotted keys here, such as train\."):
        check_key("train", "s.py")
