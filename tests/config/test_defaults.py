"""Whose defaults a config gets: the settings' own, those that follow other settings, the default experiment's."""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from rlx.cli import sweep, train
from rlx.config import rules
from rlx.config.defaults import FOLLOWING, fitting_lengths, following_defaults
from rlx.config.errors import ConfigError
from rlx.config.experiment import (
    DEFAULT_EXPERIMENT,
    EXPERIMENT_FILE,
    OWN_MODELS,
    followers,
    idle_settings,
    over_experiment,
    with_experiment,
)
from rlx.config.loading import from_tree, read_yaml, with_overrides
from rlx.config.run import RunConfig, may_change
from rlx.config.sections.algorithm import ESTIMATORS
from rlx.config.sections.base import flatten
from rlx.config.sections.model import ModelConfig
from rlx.config.sections.rollout import EnvironmentConfig, RolloutConfig
from rlx.config.sections.scaling import ScalingConfig
from rlx.config.sweep import SchedulerName
from rlx.rewards.patterns import last_matches
from rlx.sweeps.space import load_space

ENGINE = "rollout.resources_per_engine"
BEFORE = read_yaml(Path(__file__).with_name("old_run.yaml"))
"""every setting of the default experiment, written out by an rlx whose own defaults they were"""


ON_GPUS = {"scaling__use_gpu": True, "scaling__num_workers": 4}


def built(**given: Any) -> RunConfig:
    return from_tree(with_overrides({}, {key.replace("__", "."): value for key, value in given.items()}))


def differing(config: RunConfig, other: dict[str, Any]) -> set[str]:
    """The settings, of those that the other config has, that differ."""
    values = flatten(config)
    return {
        f"{name}.{key}" if isinstance(section, dict) else name
        for name, section in other.items()
        for key, value in (section.items() if isinstance(section, dict) else [("", section)])
        if values[f"{name}.{key}" if key else name] != (tuple(value) if isinstance(value, list) else value)
    } - ({"algorithm.overlong_buffer"} if config.algorithm.overlong_tokens(16) == 0 else set())  # unset, 0 before


# --- of a complete config, of which other settings change


def complete(**given: Any) -> dict[str, Any]:
    """The tree that a checkpoint keeps: every setting, given or not."""
    return built(**{"model__path": "org/name", **given}).model_dump(mode="json")


def test_the_settings_that_may_follow_others_are_all_known() -> None:
    every = following_defaults(
        ModelConfig(lora_rank=1), ScalingConfig(use_gpu=True), EnvironmentConfig(name="calculator"), RolloutConfig()
    )
    assert set(every) == set(FOLLOWING)


@pytest.mark.parametrize(
    ("before", "changes", "followed"),
    [
        (
            {},
            {"algorithm.advantage": "grpo"},
            {"aggregation": "sequence_mean", "kl_placement": "loss", "kl_estimator": "k3", "whiten_advantages": False},
        ),
        (
            {"algorithm__kl_estimator": "k2", "algorithm__whiten_advantages": False, "algorithm__clip_low": 0.1},
            {"algorithm.advantage": "grpo", "algorithm.kl_placement": "reward"},
            {"aggregation": "sequence_mean"},
        ),
        ({"algorithm__advantage": "grpo"}, {"algorithm.policy_loss": "gspo"}, {"clip_low": 3e-4, "clip_high": 4e-4}),
        (
            {"algorithm__advantage": "grpo"},
            {"algorithm.advantage": "dapo"},
            {"aggregation": "token_mean", "kl_coef": 0.0, "clip_high": 0.28, "overlong_penalty": 0.5}
            | {"filter_groups": True, "filter_by": "correct"},
        ),
        (
            {"algorithm__advantage": "dapo"},
            {"algorithm.advantage": "grpo", "algorithm.filter_groups": False, "algorithm.kl_coef": 0.01},
            {"aggregation": "sequence_mean", "clip_high": 0.2, "overlong_penalty": 1.0, "filter_by": "reward"},
        ),
        ({}, {"scaling.use_gpu": True}, {"model.dtype": "bfloat16", ENGINE: {"CPU": 1, "GPU": 1}}),
        ({"scaling__use_gpu": True}, {"scaling.use_gpu": False}, {"model.dtype": "float32", ENGINE: {"CPU": 0.5}}),
        ({"scaling__use_gpu": True, "model__dtype": "float32"}, {"scaling.use_gpu": False}, {ENGINE: {"CPU": 0.5}}),
        ({"scaling__use_gpu": True}, {"scaling.num_workers": 4, "parallel.tp": 2}, {"rollout.num_engines": 4}),
        ({"scaling__use_gpu": True, "rollout__num_engines": 3}, {"scaling.num_workers": 4}, {}),
        (
            {"rollout__num_engines": 3},
            {"scaling.use_gpu": True},
            {"model.dtype": "bfloat16", ENGINE: {"CPU": 1.0, "GPU": 1.0}},
        ),
        ({"scaling__use_gpu": True, f"{ENGINE}.GPU": 0.5}, {"scaling.num_workers": 4}, {}),
        (
            {"scaling__use_gpu": True, "rollout__placement": "colocated", f"{ENGINE}.CPU": 2},
            {"scaling.num_workers": 4},
            {"rollout.num_engines": 4},
        ),
        (
            {"scaling__use_gpu": True},
            {"scaling.num_workers": 4, f"{ENGINE}.CPU": 4},
            {"rollout.num_engines": 4},
        ),
        ({}, {"model.lora_rank": 8}, {"train.actor_lr": 1e-4, "train.critic_lr": 1e-4}),
        ({"train__actor_lr": 2e-6}, {"model.lora_rank": 8}, {"train.critic_lr": 1e-4}),
        ({}, {"environment.name": "calculator"}, {"reward.functions": {"environment": 1.0}}),
        ({}, {"data.source": "questions.jsonl", "reward.functions": {"exact_match": 1.0}}, {"data.params": {}}),
        ({}, {"data.params.max_digits": 2}, {}),
        # The default experiment's are no such defaults, and lengths stay as they were.
        ({"model__path": "tiny", "model__dtype": "float32"}, {"scaling.use_gpu": True}, {ENGINE: {"CPU": 1, "GPU": 1}}),
        ({"rollout__max_tokens": 96}, {"data.max_prompt_tokens": 64, "train.steps": 2, "seed": 3}, {}),
    ],
)
def test_defaults_follow_what_changes_and_what_was_given_stays(
    before: dict[str, Any], changes: dict[str, Any], followed: dict[str, Any]
) -> None:
    expected = {key if "." in key else f"algorithm.{key}": value for key, value in followed.items()}
    tree = complete(**before)
    assert followers(tree, changes) == expected
    assert followers(tree, {}) == {}


# --- the settings' own


def test_a_model_that_people_bring_gets_the_defaults_of_the_field() -> None:
    """veRL 0.9 and OpenRLHF 0.11: 1e-6, about 1e-5, lambda 1, one epoch, several mini-batches."""
    config = built(model__path="org/name")
    assert (config.train.actor_lr, config.train.critic_lr, config.algorithm.gae_lambda) == (1e-6, 1e-5, 1.0)
    assert (config.train.ppo_epochs, config.train.num_minibatches) == (1, 4)
    assert (config.data.max_prompt_tokens, config.rollout.max_tokens) == (1024, 1024)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (1e-6, 1e-5, "float32")),
        ({"scaling__use_gpu": True}, (1e-6, 1e-5, "bfloat16")),
        ({"model__lora_rank": 8}, (1e-4, 1e-4, "float32")),
        ({"model__lora_rank": 8, "model__critic": "separate"}, (1e-4, 1e-5, "float32")),  # a critic has no adapters
        ({"model__lora_rank": 8, "train__critic_lr": 3e-5}, (1e-4, 3e-5, "float32")),
        ({"scaling__use_gpu": True, "model__dtype": "float32", "train__actor_lr": 2e-6}, (2e-6, 1e-5, "float32")),
    ],
)
def test_defaults_follow_adapters_and_gpus_and_given_values_stay(given: dict[str, Any], expected: Any) -> None:
    config = built(**given)
    assert (config.train.actor_lr, config.train.critic_lr, config.model.dtype) == expected
    saved = from_tree(config.model_dump(mode="json"))  # as a run's folder has it
    assert (saved.train.actor_lr, saved.train.critic_lr, saved.model.dtype) == expected


@pytest.mark.parametrize(
    ("given", "engines", "each"),
    [
        ({"scaling__num_workers": 4}, 1, {"CPU": 0.5}),
        ({"rollout__tensor_parallel": 2}, 1, {"CPU": 0.5}),
        (ON_GPUS | {"scaling__num_workers": 1}, 1, {"CPU": 1, "GPU": 1}),
        (ON_GPUS, 4, {"CPU": 1, "GPU": 1}),
        (ON_GPUS | {"parallel__tp": 2}, 4, {"CPU": 1, "GPU": 1}),
        (ON_GPUS | {"rollout__tensor_parallel": 2}, 2, {"CPU": 1, "GPU": 2}),
        (ON_GPUS | {"rollout__tensor_parallel": 8}, 1, {"CPU": 1, "GPU": 8}),
        (ON_GPUS | {"rollout__placement": "colocated"}, 4, {"CPU": 0.5}),
        (ON_GPUS | {"rollout__placement": "colocated", "rollout__resources_per_engine": {"CPU": 2}}, 4, {"CPU": 2}),
        (ON_GPUS | {"rollout__num_engines": 1}, 1, {"CPU": 1, "GPU": 1}),
        (ON_GPUS | {"rollout__resources_per_engine": {"GPU": 0.5}}, 4, {"GPU": 0.5}),
        (ON_GPUS | {"rollout__resources_per_engine.GPU": 0.5}, 4, {"CPU": 1, "GPU": 0.5}),
        (ON_GPUS | {"rollout__resources_per_engine.CPU": 3, "rollout__tensor_parallel": 2}, 2, {"CPU": 3, "GPU": 2}),
        ({"rollout__resources_per_engine.GPU": 1}, 1, {"CPU": 0.5, "GPU": 1}),
    ],
)
def test_engines_follow_the_gpus_of_the_workers_and_given_values_stay(
    given: dict[str, Any], engines: int, each: dict[str, float]
) -> None:
    config = built(**given)
    assert (config.rollout.num_engines, config.rollout.resources_per_engine) == (engines, each)
    saved = from_tree(config.model_dump(mode="json"))  # as a run's folder has it
    assert (saved.rollout.num_engines, saved.rollout.resources_per_engine) == (engines, each)


def test_an_entry_is_added_to_the_default_that_follows_other_settings() -> None:
    game = {"environment.name": "calculator", "reward.functions.format": 0.2}
    assert with_overrides({}, game)["reward"]["functions"] == {"environment": 1.0, "format": 0.2}
    unreadable = {"scaling.use_gpu": "perhaps", f"{ENGINE}.CPU": 2}  # `from_tree` says so
    assert with_overrides({}, unreadable)["rollout"]["resources_per_engine"] == {"CPU": 2}


def test_the_order_of_entries_does_not_change_the_default_that_they_are_added_to() -> None:
    """Workers of {CPU: 0} alone, which nothing follows, are there only between two entries."""
    worker = "scaling.resources_per_worker"
    given = {"scaling.use_gpu": True, f"{worker}.CPU": 0, f"{ENGINE}.CPU": 2, f"{worker}.GPU": 1}
    for keys in itertools.permutations(given):
        assert with_overrides({}, {key: given[key] for key in keys})["rollout"] == {
            "resources_per_engine": {"CPU": 2, "GPU": 1}
        }


def test_a_kept_run_goes_on_with_the_engines_that_it_had() -> None:
    """A run's folder has every setting, also those that nobody gave."""
    gpus = {"num_workers": 4, "use_gpu": True}
    one = {"num_engines": 1, "resources_per_engine": {"CPU": 1.0, "GPU": 1.0}}
    tree = BEFORE | {"scaling": BEFORE["scaling"] | gpus, "rollout": BEFORE["rollout"] | one}
    for each in (BEFORE, tree):
        config = from_tree(each)
        kept = each["rollout"]["resources_per_engine"]
        assert (config.rollout.num_engines, config.rollout.resources_per_engine) == (1, kept)


def test_a_default_that_follows_counts_as_not_given() -> None:
    """Else the trials of a sweep over ranks would all have the learning rate of the first rank."""
    shared = built(model__lora_rank=0, train__steps=3).model_dump(exclude_unset=True)
    assert shared == {"model": {"lora_rank": 0}, "train": {"steps": 3}}
    assert from_tree(with_overrides(shared, {"model.lora_rank": 4})).train.actor_lr == 1e-4


@pytest.mark.parametrize(
    ("given", "positions", "expected"),
    [
        ({}, None, (1024, 1024)),
        ({}, 32_768, (1024, 1024)),
        ({}, 1536, (768, 768)),
        ({}, 512, (256, 256)),
        ({"data__max_prompt_tokens": 100}, 512, (100, 412)),
        ({"data__max_prompt_tokens": 100}, 4096, (100, 1024)),
        ({"rollout__max_tokens": 500}, 512, (12, 500)),
        ({"rollout__max_tokens": 3000}, 4096, (1024, 3000)),
        ({"data__max_prompt_tokens": 600, "rollout__max_tokens": 600}, 512, (600, 600)),
        ({"data__max_prompt_tokens": 512}, 512, (512, 1)),
        ({"rollout__max_tokens": 512}, 512, (1, 512)),
    ],
)
def test_lengths_that_are_not_given_fit_the_context(given: dict[str, Any], positions: Any, expected: Any) -> None:
    config = built(**given)
    assert tuple(fitting_lengths(config.data, config.rollout, positions).values()) == expected


# --- the default experiment


def test_commands_without_options_train_as_they_did_before(capsys: pytest.CaptureFixture[str]) -> None:
    assert differing(train.new_config(None, {}), BEFORE) == {"name"}
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("the default experiment: the tiny model with its settings (arithmetic.yaml); --model.path ")
    swept = from_tree(sweep.new_tree(None, {}))
    assert differing(swept, BEFORE) == {"name", "train.steps", "eval.every"}
    assert (swept.train.steps, swept.eval.every) == (20, 5)
    assert not swept.train.shuffle_minibatches and swept.train.adam_eps == 1e-8  # there were no settings for them


def test_a_run_says_in_a_line_what_it_has_settled() -> None:
    def line(**given: Any) -> str:
        config = built(model__path="org/name", data__source="hf:a/b", data__params={}, **given)
        sections = config.model, config.data, config.rollout, config.train, config.eval
        return train.in_short(*sections, config.resolved_critic)

    settled = (
        "org/name in float32; prompts of hf:a/b, at most 1024 tokens; responses of at most 1024; learning rate 1e-06"
    )
    judged = "judged by at most 256 held-out prompts"
    assert line() == f"{settled}, critic 1e-05; {judged}"
    assert line(algorithm__advantage="grpo") == f"{settled}; {judged}"
    falling = line(train__actor_lr={0: 1e-6, 200: 1e-7}, train__critic_lr={0: 1e-5, "2e6 tokens": 0})
    assert falling == f"{settled} -> 1e-07 (after step 200), critic 1e-05 -> 0 (after 2,000,000 tokens); {judged}"


def test_given_settings_override_the_default_experiment(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("train: {steps: 7, actor_lr: 1e-3}\n")
    changed = train.new_config(str(file), {"rollout.max_tokens": 24, "model.lora_rank": 4, "scaling.use_gpu": True})
    assert differing(changed, BEFORE) == {
        "name", "train.steps", "train.actor_lr", "rollout.max_tokens", "model.lora_rank", "scaling.use_gpu", ENGINE,
    }  # fmt: skip
    assert differing(train.new_config(None, {"model.path": "tiny"}), BEFORE) == {"name"}
    assert differing(train.new_config(str(EXPERIMENT_FILE), {}), BEFORE) == {"name"}


@pytest.mark.parametrize(
    ("text", "given", "is_said"),
    [
        ("model: {path: tiny}", {}, True),
        ("train: {steps: 7}", {}, True),
        (None, {"model.path": "tiny"}, True),
        (EXPERIMENT_FILE.read_text(), {"train.steps": 7}, False),  # all of it is given
        ("model: {path: tiny-calculator}", {}, False),
        ("train: {steps: 7}", {"model.path": "org/name"}, False),
    ],
)
def test_a_command_says_that_it_takes_settings_of_the_default_experiment(
    text: str | None,
    given: dict[str, Any],
    is_said: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text or "")
    config = train.new_config(str(file) if text else None, given)
    said = f"{DEFAULT_EXPERIMENT}\n" * is_said
    assert capsys.readouterr().out == said
    assert (config.rollout.max_tokens == 16) == (config.model.path == "tiny")
    monkeypatch.setattr(sweep, "start_sweep", lambda *_: 0)
    words = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    assert sweep.main([*(["--config", str(file)] if text else []), *words]) == 0
    assert capsys.readouterr().out == said


def test_a_sweep_can_read_its_settings_from_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "start_sweep", lambda *_: 0)
    reading, writing = os.pipe()
    os.write(writing, b"model: {path: tiny-calculator}")
    os.close(writing)
    assert sweep.main(["--config", f"/dev/fd/{reading}"]) == 0
    os.close(reading)
    assert capsys.readouterr().out == ""


def test_another_model_gets_nothing_of_the_default_experiment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("model: {path: org/name}\n")
    own = built(model__path="org/name")
    for config in (
        train.new_config(None, {"model.path": "org/name"}),
        train.new_config(str(file), {}),
        from_tree(sweep.new_tree(None, {"model.path": "org/name"})),
        from_tree(sweep.new_tree(read_yaml(file), {})),
    ):
        assert config == own
    assert capsys.readouterr().out == ""


def test_a_tree_is_not_changed_and_what_is_wrong_in_it_is_still_refused() -> None:
    tree: dict[str, Any] = {"train": {"steps": 3}}
    assert with_experiment(tree)["train"] == {
        "ppo_epochs": 2, "num_minibatches": 2, "shuffle_minibatches": False, "actor_lr": 1e-4, "critic_lr": 1e-4,
        "steps": 3,
    }  # fmt: skip
    assert tree == {"train": {"steps": 3}}
    for wrong, message in (
        ({"train": 5}, "train = 5: expected a section"),
        ({"model": 5}, "model = 5: expected a section"),
        ({"model": {"path": ["tiny"]}}, "model.path = .*valid string"),
    ):
        with pytest.raises(ConfigError, match=message):
            from_tree(with_experiment(wrong))


def test_what_was_saved_before_keeps_its_settings() -> None:
    """A run's folder has all of its settings; the plan of a sweep had those that were given."""
    assert differing(from_tree(BEFORE), BEFORE) == set()
    assert differing(from_tree(over_experiment({"model": {"path": "org/name"}})), BEFORE) == {"name", "model.path"}


def test_sweeps_vary_learning_rates_that_suit_the_kind_of_model() -> None:
    def space(scheduler: SchedulerName = "none", **given: Any) -> str:
        return sweep.default_space(built(**given).model, scheduler).stem

    assert (space(), space(model__lora_rank=4)) == ("ppo_tiny", "ppo_tiny")
    assert (space(model__path="org/name"), space(model__path="org/name", model__lora_rank=4)) == ("ppo", "ppo_lora")
    assert (space("pbt"), space("pbt", model__path="org/name")) == ("pbt_tiny", "pbt")
    assert space("pbt", model__path="org/name", model__lora_rank=4) == "pbt_lora"


def test_a_sweep_takes_the_space_of_its_scheduler() -> None:
    for words, name in (([], "ppo_tiny.py"), (["--scheduler", "pbt"], "pbt_tiny.py")):
        plan = sweep.new_plan(sweep.argument_parser().parse_args(words), sweep.new_tree(None, {}), "s")
        assert Path(plan.space).name == name


@pytest.mark.parametrize("name", ["pbt", "pbt_lora", "pbt_tiny"])
def test_the_default_spaces_of_pbt_have_only_settings_that_can_have_a_schedule(name: str) -> None:
    assert all(map(may_change, load_space(str(Path(sweep.__file__).parent / "defaults" / f"{name}.py"), {})))


# --- combinations that are known to fail


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({}, False),
        ({"algorithm__gae_lambda": 0.95, "rollout__max_tokens": 44}, False),  # 0.95**44 = 0.1047
        ({"algorithm__gae_lambda": 0.95, "rollout__max_tokens": 45}, True),  # 0.95**45 = 0.0994
        ({"algorithm__gae_lambda": 0.99}, True),
        ({"algorithm__gae_lambda": 0.99, "train__critic_warmup": 5}, False),
        ({"algorithm__gae_lambda": 0.99, "model__value_head_init": "normal"}, False),
        ({"algorithm__gae_lambda": 0.99, "model__critic_path": "org/judge"}, False),
        ({"algorithm__gae_lambda": 0.99, "algorithm__advantage": "grpo"}, False),
    ],
)
def test_a_lambda_that_hides_the_score_from_first_tokens_is_warned_of(given: dict[str, Any], shown: bool) -> None:
    config = built(**given)
    lines = rules.warnings(config.algorithm, config.model, config.train, config.rollout)
    assert len(lines) == shown and not any("\n" in line for line in lines)


def test_the_warning_says_how_little_is_left_and_what_to_change() -> None:
    config = built(algorithm__gae_lambda=0.95, rollout__max_tokens=512)
    (line,) = rules.warnings(config.algorithm, config.model, config.train, config.rollout)
    assert line.startswith("algorithm.gae_lambda 0.95 with rollout.max_tokens 512: ")
    assert "get 4e-12 of its score" in line  # 0.95**512 = 3.93e-12
    assert line.endswith("set algorithm.gae_lambda to 1, or train.critic_warmup")


def idle_in(config: RunConfig) -> list[str]:
    return idle_settings(flatten(config), config.resolved_critic, config.resolved_rollout_correction)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, []),
        ({"gae_lambda": 0.9}, []),
        ({"gae_lambda": 0.9, "advantage": "grpo"}, ["gae_lambda 0.9 does nothing with algorithm.advantage grpo"]),
        ({"clip_low": 0.1}, []),
        ({"policy_loss": "sapo"}, []),
        (
            {"policy_loss": "sapo", "clip_low": 0.1, "clip_high": 0.3},
            [f"clip_{end} does nothing with algorithm.policy_loss sapo" for end in ("low 0.1", "high 0.3")],
        ),
        ({"kl_placement": "loss", "kl_coef": 0.1}, []),
        ({"kl_placement": "loss", "kl_coef": 0.0}, ["kl_placement loss does nothing with algorithm.kl_coef 0"]),
        ({"target_kl": 0.1}, []),
    ],
)
def test_settings_that_do_nothing_are_named(given: dict[str, Any], said: list[str]) -> None:
    config = built(**{f"algorithm__{key}": value for key, value in given.items()})
    assert idle_in(config) == [f"algorithm.{line}" for line in said]


@pytest.mark.parametrize("given", [{}, {"model__lora_rank": 4}, {"model__path": "org/name"}])
@pytest.mark.parametrize(("advantage", "loss"), itertools.product(ESTIMATORS, ["ppo", "gspo", "cispo", "sapo"]))
def test_a_setting_that_nobody_changed_is_not_named(given: dict[str, Any], advantage: str, loss: str) -> None:
    config = built(**given, algorithm__advantage=advantage, algorithm__policy_loss=loss)
    for tree in (config.model_dump(exclude_unset=True), config.model_dump(mode="json")):  # as a run's folder has it
        assert not idle_in(from_tree(with_experiment(tree)))


CRITICS = {
    "train__critic_lr": 0.1,
    "algorithm__value_clip": None,
    "algorithm__value_coef": 3.0,
    "model__value_head_init": "normal",
}


def test_settings_of_a_critic_do_nothing_without_one() -> None:
    assert idle_in(built(**CRITICS, algorithm__advantage="grpo")) == [
        "algorithm.value_clip unset does nothing with algorithm.advantage grpo",
        "algorithm.value_coef 3.0 does nothing with algorithm.advantage grpo",
        "train.critic_lr 0.1 does nothing with algorithm.advantage grpo",
        "model.value_head_init normal does nothing with algorithm.advantage grpo",
    ]
    assert not idle_in(built(**CRITICS, model__critic="head"))


@pytest.mark.parametrize(
    ("given", "setting", "reason"),
    [
        ({"algorithm__value_coef": 3.0}, "value_coef 3.0", "a critic with its own weights"),
        (
            {"algorithm__exact_entropy": True, "algorithm__old_logprobs": "rollout"},
            "exact_entropy True",
            "algorithm.old_logprobs rollout",
        ),
        (
            {"algorithm__rollout_correction": "tis", "algorithm__rollout_correction_low": 0.1},
            "rollout_correction_low 0.1",
            "algorithm.rollout_correction tis",
        ),
    ],
)
def test_a_setting_of_another_way_is_named(given: dict[str, Any], setting: str, reason: str) -> None:
    assert idle_in(built(**given)) == [f"algorithm.{setting} does nothing with {reason}"]


def test_schedules_count_as_what_they_become() -> None:
    assert not idle_in(built(algorithm__kl_placement="loss", algorithm__kl_coef={0: 0, 9: 0.1}))
    rising = {"algorithm__entropy_coef": {0: 0, 9: 0.1}, "algorithm__exact_entropy": True}  # which the schedule needs
    assert not idle_in(built(**rising, algorithm__old_logprobs="rollout"))


def test_a_limit_of_the_kl_does_nothing_where_each_completion_is_seen_once_in_one_step() -> None:
    once = built(algorithm__target_kl=0.1, train__ppo_epochs=1, train__num_minibatches=1)
    (line,) = idle_in(once)
    assert line == "algorithm.target_kl 0.1 does nothing with train.ppo_epochs 1 and train.num_minibatches 1"
    twice = built(algorithm__target_kl=0.1, train__ppo_epochs=1, train__num_minibatches=2)
    assert not idle_in(twice)


RECIPES = sorted(file for file in (EXPERIMENT_FILE.parents[2] / "experiments/configs").glob("*.yaml"))


@pytest.mark.parametrize("file", [file for file in RECIPES if file.stem != "sweep"], ids=lambda file: file.stem)
def test_a_recipe_is_a_config_and_is_on_the_page_of_recipes(file: Path) -> None:
    config = from_tree(with_experiment(read_yaml(file)))
    assert f"`{file.name}`" in (file.parents[2] / "docs" / "recipes.md").read_text()
    assert config.train.actor_lr <= (2e-4 if config.model.path in OWN_MODELS else 1e-5)
    assert not idle_in(config)


@pytest.mark.parametrize(
    ("recipe", "completion", "answer"),
    [
        ("qwen2.5-0.5b-gsm8k", "16 - 3 = 13, so #### $1,200.", "1,200"),
        ("qwen2.5-1.5b-gsm8k", "#### 3, no, #### -4.5", "-4.5"),
        ("qwen3-1.7b-math", r"\boxed{1} was wrong: \boxed{\frac{1}{\sqrt{2}}} is it", r"\frac{1}{\sqrt{2}}"),
        ("dapo", "First, 3.\nAnswer: $34$", "$34$"),
    ],
)
def test_a_recipe_finds_the_answer(recipe: str, completion: str, answer: str) -> None:
    (file,) = (file for file in RECIPES if file.stem == recipe)
    pattern = from_tree(with_experiment(read_yaml(file))).reward.answer_pattern
    assert last_matches(str(pattern), [completion]) == [answer]
