"""Two branches from one checkpoint: which there are, and their answers question by question."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from replay_cases import evaluated, keep, run_of, with_score

from rlx.cli.timemachine import branched_sweep, pairing, running, whatif
from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, with_overrides
from rlx.config.sections.base import flatten
from rlx.config.sweep import DEFAULT_METRIC
from rlx.replay import pairs, recorded
from rlx.storage.addresses import open_storage


def test_a_pair_differs_in_the_changes_alone(tmp_path: Path) -> None:
    control, changed = pairs.pair_of(run_of(tmp_path), 10, 5, {"algorithm.clip_high": 0.28})
    assert control.steps == changed.steps == range(11, 16)
    assert (control.changes, changed.changes) == ({}, {"algorithm.clip_high": 0.28})
    assert control.tree() == changed.tree()


def test_defaults_follow_the_changes_of_a_pair(tmp_path: Path) -> None:
    """k1 in the loss has no gradient on average; an estimator that the run was given stays."""
    changes = {"algorithm.kl_placement": "loss"}
    control, changed = pairs.pair_of(run_of(tmp_path), 10, 5, changes)
    assert (control.changes, changed.changes) == ({}, {"algorithm.kl_estimator": "k3", **changes})
    run = run_of(tmp_path, "b", algorithm__kl_estimator="k2")
    assert pairs.pair_of(run, 10, 5, changes)[1].changes == changes
    # The dtype would follow, but cannot change within a run.
    run = run_of(tmp_path, "c", model__path="org/name")
    on_gpus = {"scaling.use_gpu": True, "rollout.resources_per_engine": {"CPU": 1.0, "GPU": 1.0}}
    assert pairs.pair_of(run, 10, 5, {"scaling.use_gpu": True})[1].changes == on_gpus


def test_defaults_follow_what_trials_of_a_branched_sweep_vary(tmp_path: Path) -> None:
    control, _ = pairs.pair_of(run_of(tmp_path), 10, 10, {})
    tree = branched_sweep.trials_tree(control, "b")
    trials = [from_tree(with_overrides(tree, {"algorithm.kl_placement": each})) for each in ("reward", "loss")]
    assert [each.algorithm.kl_estimator for each in trials] == ["k1", "k3"]
    assert flatten(trials[0]) == flatten(from_tree(control.tree())) | {"name": "b", "train.steps": 20}


def test_a_pair_that_goes_further_than_the_run_is_longer_on_both_sides(tmp_path: Path) -> None:
    control, changed = pairs.pair_of(run_of(tmp_path), 20, 15, {"algorithm.clip_high": 0.28})
    assert (control.until, control.changes) == (35, {"train.steps": 35})
    assert changed.changes == {"train.steps": 35, "algorithm.clip_high": 0.28}


def test_a_run_whose_learning_rate_follows_its_length_is_not_made_longer(tmp_path: Path) -> None:
    """Its control would have other learning rates than the run, and could not equal it."""
    run = run_of(tmp_path, train__lr_schedule="cosine")
    with pytest.raises(ConfigError, match=r"--steps 15: run a ends with step 30, and .* cosine\): at most 10 steps$"):
        pairs.pair_of(run, 20, 15, {"algorithm.clip_high": 0.28})
    assert pairs.pair_of(run, 20, 5, {"algorithm.clip_high": 0.28})[0].changes == {}


@pytest.mark.parametrize(
    ("step", "steps", "changes", "line"),
    [
        (15, 5, {}, "run a has no checkpoint of step 15: there are 10, 20; --checkpoint.keep-every keeps more"),
        (10, 0, {}, "--steps 0: at least 1"),
        (10, 5, {"seed": 1}, "seed cannot change within a run"),
        (10, 5, {"model.lora_rank": 8}, "model.lora_rank cannot change within a run"),
        (10, 5, {"algorithm.clip_high": 0.2}, "--set algorithm.clip_high=0.2: that is its value in run a"),
        (10, 5, {"algorithm.clip_high": "2e-1"}, "--set algorithm.clip_high=2e-1: that is its value in run a"),
        (10, 5, {"algorithm.clip_high": 0.3, "rollout.stop": []}, "--set rollout.stop=[]: that is its value in run a"),
        (10, 5, {"train.steps": 50}, "--set train.steps: --steps says how far both branches go"),
        (10, 5, {"name": "x"}, "--set name: each branch has its own"),
        (10, 5, {"tracking.completions": 0.5}, "--set tracking.completions: each branch has its own"),
    ],
)
def test_pairs_that_cannot_be(step: int, steps: int, changes: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        pairs.pair_of(run_of(tmp_path), step, steps, changes)
    assert line in str(error.value)


def test_a_control_goes_no_further_than_its_settings_hold(tmp_path: Path) -> None:
    """The run went on from step 20 with another learning rate, which the checkpoint of step 30 has."""
    changed = {"algorithm.clip_high": 0.28}
    run_of(tmp_path, train__actor_lr=1e-3)
    run = run_of(tmp_path, steps=(30,), train__actor_lr=2e-3)
    for told in (run, replace(run, changes={20: ["train.actor_lr"], 25: []})):  # not told: by an earlier version
        assert pairs.pair_of(told, 10, 10, changed)[0].until == 20
        assert pairs.pair_of(told, 20, 10, changed)[0].until == 30
        said = "--steps 11: a resume of run a changed train.actor_lr after step 20: at most 10 steps from a@10"
        with pytest.raises(ConfigError, match=rf"^{said}, or start from a@20$"):
            pairs.pair_of(told, 10, 11, changed)


def test_a_pair_starts_where_the_next_settings_are_known(tmp_path: Path) -> None:
    """The checkpoint of step 15, after which a resume changed the learning rate, is deleted."""
    run = replace(run_of(tmp_path), changes={15: ["train.actor_lr"]})
    for steps in (2, 20):
        with pytest.raises(ConfigError, match=r"^a@10: a resume of run a changed train.actor_lr between steps 10 and"):
            pairs.pair_of(run, 10, steps, {"algorithm.clip_high": 0.28})


def test_pairs_have_names_of_their_own(tmp_path: Path) -> None:
    run, runs = run_of(tmp_path), open_storage(str(tmp_path)) / "runs"
    assert pairs.pair_names(runs, run, 10) == ("a-at-10-1.control", "a-at-10-1.changed")
    (tmp_path / "runs" / "a-at-10-1.changed").mkdir()
    assert pairs.pair_names(runs, run, 10) == ("a-at-10-2.control", "a-at-10-2.changed")


def test_answers_are_paired_question_by_question(tmp_path: Path) -> None:
    """Of four questions two flip to right and one to wrong: differences 1, 1, -1, 0 with deviation sqrt(11 / 12)."""
    control, changed = (open_storage(str(tmp_path / name)) for name in ("control", "changed"))
    evaluated(control, 10, [True] * 4)  # before the branches
    evaluated(changed, 10, [True] * 4)
    evaluated(control, 12, [False, False, True, True])
    evaluated(changed, 12, [True, True, False, True])
    evaluated(control, 14, [True] * 4)  # of one branch alone
    (row,) = pairs.paired_evaluations(control, changed, 10)
    assert (row.what, row.step, row.questions, row.better, row.worse) == ("held_out", 12, 4, 2, 1)
    assert (row.control, row.changed, row.difference.value) == (0.5, 0.75, 0.25)
    assert row.difference.half_width == pytest.approx(3.182446305 * math.sqrt(11 / 12) / 2, rel=1e-8)


def test_scores_of_training_are_paired_prompt_by_prompt(tmp_path: Path) -> None:
    """Scores are 0, 0.25 of one prompt and 0.5, 0.75 of the other; in the branch one of them is higher by 1."""
    control, changed = (open_storage(str(tmp_path / name)) for name in ("control", "changed"))
    for number in (5, 6):
        keep(control, number)
        keep(changed, number, with_score(number, 0, 1.0))
    (row,) = pairs.paired_prompts(control, changed, range(5, 8))
    assert (row.what, row.step, row.questions, row.better, row.worse) == ("training prompts", 7, 4, 2, 0)
    assert (row.control, row.changed, row.difference.value) == (0.375, 0.625, 0.25)
    assert pairs.paired_prompts(control, open_storage(str(tmp_path / "none")), range(5, 8)) == []


def test_rounding_of_sums_is_no_difference() -> None:
    """The branch has the scores 0.1, 0.2, 0.3 of one prompt in another order."""
    mean, other = (0.1 + 0.2 + 0.3) / 3, (0.3 + 0.2 + 0.1) / 3
    assert mean != other
    (row,) = pairs._paired("training prompts", 1, {"a": mean, "b": 0.5}, {"a": other, "b": 0.5})
    assert (row.difference, row.better, row.worse) == ((0, 0), 0, 0)
    (row,) = pairs._paired("training prompts", 1, {"a": 0.2, "b": 0.3, "c": 0}, {"a": 0.3, "b": 0.4, "c": 0.1})
    assert (row.difference.half_width, row.better, row.worse) == (0, 3, 0)
    (row,) = pairs._paired("training prompts", 1, {"a": 0.1, "b": 0.2, "c": 0.3}, {"a": 0.3, "b": 0.1, "c": 0.2})
    assert (row.difference.value, row.better, row.worse) == (0, 1, 2)
    (row,) = pairs._paired("training prompts", 1, {"a": 0.5, "b": 0.5}, {"a": 0.5 + 1e-9, "b": 0.5})
    assert (row.better, row.worse) == (1, 0)


def test_a_step_that_is_not_named_is_answered_with_one_that_there_is(tmp_path: Path) -> None:
    run, storage = run_of(tmp_path), str(tmp_path)
    assert running.split_step("a@30", storage) == ("a", 30)
    assert running.split_step("me@work/runs/a@3", storage) == ("me@work/runs/a", 3)
    for which in ("a", "a@", "a@best"):
        with pytest.raises(ConfigError, match=rf"^{which}: expected RUN@STEP, such as a@10$"):
            running.split_step(which, storage)
    with pytest.raises(ConfigError, match=rf"expected RUN@STEP, such as {run.address}@10$"):
        running.split_step(f"{run.address}/step_000010", storage)
    run_of(tmp_path, "new", steps=())
    with pytest.raises(ConfigError, match=r"^new: expected RUN@STEP, and new has no checkpoint yet$"):
        running.split_step("new", storage)


def test_words_of_the_commands() -> None:
    words = ["algorithm.clip_high=0.28", "train.actor_lr={0: 1e-4, 40: 1e-5}"]
    assert running.changed_settings(words) == {
        "algorithm.clip_high": 0.28,
        "train.actor_lr": {0: ANY, 40: ANY},
    }
    with pytest.raises(ConfigError, match=r"--set algorithm.clip_high: expected SETTING=VALUE"):
        running.changed_settings(["algorithm.clip_high"])
    with pytest.raises(
        ConfigError, match=r"--set algorithm.clip-hi=3: unknown setting algorithm.clip_hi; nearest: algorithm.clip_high"
    ):
        running.changed_settings(["algorithm.clip-hi=3"])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "give --set SETTING=VALUE, or --space FILE"),
        (["--set", "seed=1", "--space", "x.py"], "give --set SETTING=VALUE, or --space FILE"),
        (["--space", "x.py", "--seeds", "3"], "branches go on from one state, with its seed"),
        (["--space", "x.py", "--scheduler", "pbt"], "branches go on from one state, with its seed"),
        (["--space", "x.py", "--interleave", "2"], "branches have the engines and GPUs of the run"),
        (["--space", "x.py", "--trials", "0"], "--trials 0: at least 1"),
        (["--space", "x.py", "--max-concurrent", "0"], "--max-concurrent 0: at least 1"),
        (["--space", "x.py", "--restart-errored"], "--restart-errored needs --resume"),
        (["--space", "x.py", "--train.actor-lr", "1"], "--train.actor-lr: branches have the settings of the run"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert whatif.main(["a@10", "--steps", "5", *words]) == 1
    assert line in capsys.readouterr().err


def test_trials_of_a_branched_sweep_end_where_the_control_can_be_compared(tmp_path: Path) -> None:
    run = run_of(tmp_path, eval__every=4)
    control, _ = pairs.pair_of(run, 10, 6, {})
    tree = branched_sweep.trials_tree(control, "b")
    assert (tree["name"], tree["train"]["steps"], tree["checkpoint"]["init_state"]) == ("b", 16, "all")
    assert not {"best_by", "best_mode"} & tree["checkpoint"].keys()  # the metric of the sweep decides
    with pytest.raises(ConfigError, match=r"trials end at step 15: branch to a multiple of eval.every \(4\)"):
        branched_sweep.trials_tree(pairs.pair_of(run, 10, 5, {})[0], "b")
    assert branched_sweep.trials_tree(pairs.pair_of(run, 20, 10, {})[0], "b")["train"]["steps"] == 30


@pytest.mark.parametrize(
    ("words", "domain", "line"),
    [
        (["--metric", "eval/none"], "tune.choice([1e-4])", "--metric eval/none: trials are compared by"),
        (["--search", "grid"], "tune.uniform(1e-5, 1e-4)", "--search grid needs a list of values for train.actor_lr"),
        (["--budget", "3 pounds"], "tune.choice([1e-4])", "3 pounds"),
        ([], "tune.choice([1e-4])", "sweep 'a-at-10-1' exists in "),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_before_its_control_runs(
    words: list[str],
    domain: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_of(tmp_path, eval__every=4)
    (tmp_path / "space.py").write_text(
        f"from ray import tune\n\ndef space():\n    return {{'train.actor_lr': {domain}}}\n"
    )
    if not words:
        (tmp_path / "sweeps" / "a-at-10-1").mkdir(parents=True)
        (tmp_path / "sweeps" / "a-at-10-1" / "sweep.json").write_text("{}")
    monkeypatch.setattr(recorded, "logged_metrics", lambda *_, **__: {})
    monkeypatch.setattr(pairing, "do_control", lambda *_: pytest.fail("the control has run"))
    arguments = ["a@10", "--storage", str(tmp_path), "--steps", "6", "--space", str(tmp_path / "space.py")]
    assert whatif.main([*arguments, *words]) == 1
    assert line in capsys.readouterr().err


def test_trials_of_a_branched_sweep_keep_the_best_checkpoint_that_the_run_has_chosen(tmp_path: Path) -> None:
    control, _ = pairs.pair_of(run_of(tmp_path, eval__every=4, checkpoint__best_mode="min"), 10, 6, {})
    kept = branched_sweep.trials_tree(control, "b")["checkpoint"]
    assert (kept["best_by"], kept["best_mode"]) == (DEFAULT_METRIC, "min")


def test_each_trial_is_compared_with_the_control(tmp_path: Path) -> None:
    run, runs = run_of(tmp_path), open_storage(str(tmp_path)) / "sweeps" / "s" / "runs"
    control, branch = open_storage(str(tmp_path / "control")), pairs.pair_of(run, 10, 2, {})[0]
    evaluated(control, 12, [False, True])
    for name, right in (("trial_00000", [True, True]), ("trial_00001", [False, True])):
        evaluated(runs / name, 12, right)
        evaluated(runs / name, 11, [True, True])  # before the last step
    for name in ("trial_00000", "trial_00001", "trial_00002"):  # the last one failed before it was evaluated
        for file in ("run.json", "config.yaml"):
            (runs / name / file).write_text("{}")
    (runs / "notes" / "mine").write_text("")  # no run
    first, second, third = branched_sweep.trials_text(runs, control, branch).split("\n\ntrial_")
    assert first.startswith("trial_00000 beside the control\n\n") and "+0.5 ± 6.4" in first
    assert second.startswith("00001 beside the control\n\n") and "+0 ± 0" in second
    assert third == "00002 beside the control\n\nnothing kept"


def test_a_space_varies_what_can_change_within_a_run(tmp_path: Path) -> None:
    file = tmp_path / "space.py"
    file.write_text("def space():\n    return {'train.actor_lr': 1e-4}\n")
    branched_sweep.check_space(str(file), {})
    file.write_text("def space():\n    return {'algorithm.advantage': 'grpo'}\n")
    with pytest.raises(ConfigError, match=r"--space .*: algorithm.advantage cannot change within a run"):
        branched_sweep.check_space(str(file), {})
