"""What TRL, veRL, OpenRLHF, Ray and earlier versions of rlx call a setting is answered with its name here."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest

import rlx
from rlx.cli import sweep
from rlx.cli.options import parse, settings_parser
from rlx.config.errors import _CALLED, OTHER_NAMES, ConfigError, called_here
from rlx.config.loading import from_tree, with_overrides
from rlx.config.run import settings
from rlx.config.sweep import SearchName
from rlx.models.folder import is_model_folder
from rlx.sweeps.choices import check_key
from rlx.sweeps.space import load_space

ROOT = Path(__file__).parents[2]
OPTIONS = {action.dest for action in sweep.argument_parser()._actions}
RENAMED = re.findall(r"^\| `([a-z_]+\.[a-z_]+)` \| `([a-z_.]+)` \|$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def refused(option: str, value: str = "1") -> str:
    with pytest.raises(ConfigError) as error:
        parse(settings_parser("a command", ""), [option, value])
    return str(error.value)


def test_every_answer_is_a_setting_or_an_option_and_nothing_is_there_twice() -> None:
    names = [name for names in _CALLED.values() for name in names.split()]
    assert sorted(names) == sorted(OTHER_NAMES)
    assert not set(names) & settings().keys()  # it would never be looked for
    for answer in _CALLED:
        here, _, note = answer.partition(" ")
        assert here in {*settings(), *OPTIONS, *get_args(SearchName)}, here
        assert not note or re.fullmatch(r"\(.+\)", note)
        for key in re.findall(r"[a-z]+\.[a-z_]+", note):
            assert key in settings()


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("clip_ratio", "algorithm.clip-low (and algorithm.clip_high)"),  # veRL
        ("clip_ratio_high", "algorithm.clip-high"),
        ("actor_rollout_ref.actor.clip_ratio_c", "algorithm.dual-clip"),
        ("rollout.n", "train.samples-per-prompt"),
        ("parallel.dp", "scaling.num-workers (FSDP over all workers that parallel.tp and parallel.sp leave)"),
        ("parallel.pp", "scaling.num-workers (with FSDP; there is no pipeline and no expert parallelism)"),
        ("parallel.ep", "scaling.num-workers (with FSDP; there is no pipeline and no expert parallelism)"),
        ("parallel.cp", "parallel.sp"),
        ("actor_rollout_ref.rollout.n", "train.samples-per-prompt"),
        ("actor_rollout_ref.rollout.top_p", "rollout.top-p"),
        ("actor_rollout_ref.rollout.val_kwargs.n", "eval.sets (samples of each)"),
        ("actor_rollout_ref.actor.optim.lr", "train.actor-lr"),
        ("critic.optim.lr", "train.critic-lr"),
        ("actor_rollout_ref.model.path", "model.path"),
        ("critic.model.path", "model.critic-path"),
        ("reward_model.model.path", "reward.model"),
        ("loss_agg_mode", "algorithm.aggregation"),
        ("kl_penalty", "algorithm.kl-estimator"),
        ("algorithm.kl_ctrl.target_kl", "algorithm.adaptive-kl-target"),
        ("adv_estimator", "algorithm.advantage"),
        ("use_kl_loss", "algorithm.kl-placement (loss or reward)"),
        ("train_batch_size", "train.prompts-per-step (prompts; train.num_minibatches splits them)"),
        ("data.train_files", "data.source"),
        ("trainer.total_epochs", "train.steps (steps, not passes over the prompts)"),
        ("trainer.experiment_name", "name"),
        ("loss_type", "algorithm.aggregation (cispo and sapo are values of algorithm.policy_loss)"),  # TRL
        ("epsilon_high", "algorithm.clip-high"),
        ("per_device_train_batch_size", "train.micro-batch-tokens (tokens, not completions)"),
        ("eps_clip", "algorithm.clip-low (and algorithm.clip_high)"),  # OpenRLHF
        ("n_samples_per_prompt", "train.samples-per-prompt"),
        ("micro_train_batch_size", "train.micro-batch-tokens (tokens, not completions)"),
        ("generate_max_len", "rollout.max-tokens"),
        ("remote_rm_url", "reward.url"),
        ("entropy_coeff", "algorithm.entropy-coef"),  # RLlib
        ("num_to_keep", "checkpoint.keep-last"),  # Ray Train
        ("data.eval-prompts", "eval.num-prompts"),
        ("stop_strings", "rollout.stop"),
    ],
)
def test_a_name_of_another_library_is_translated(name: str, here: str) -> None:
    assert refused(f"--{name}") == f"unknown option --{name.replace('_', '-')}; here it is --{here}"


def test_how_a_deviation_is_left_out_is_said() -> None:
    said = "; here it is --algorithm.advantage (grpo divides by the deviation of a prompt's rewards, dr_grpo does not)"
    assert refused("--scale_rewards", "none") == f"unknown option --scale-rewards{said}"


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("actor_rollout_ref.rollout.n=4", "; here it is --train.samples-per-prompt"),
        ("+algorithm.adv_estimator=grpo", "; here it is --algorithm.advantage"),
        ("train.steps=4", "; here it is --train.steps 4"),
        ("zzz=4", ""),
    ],
)
def test_an_option_as_verl_takes_it_is_translated(word: str, hint: str) -> None:
    assert refused(word) == f"unexpected argument '{word}'{hint}"


def test_files_and_search_spaces_say_so_too() -> None:
    said = r"^config: unknown setting rollout\.n; here it is train\.samples_per_prompt$"
    with pytest.raises(ConfigError, match=said):
        from_tree({"rollout": {"n": 4}})
    with pytest.raises(ConfigError, match=r"^--space s\.py: unknown setting lr; here it is train\.actor_lr$"):
        check_key("lr", "s.py")


@pytest.mark.parametrize(("word", "here"), [("direction", "mode"), ("pruner", "scheduler"), ("sampler", "search")])
def test_words_of_optuna_are_translated(word: str, here: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^unknown option --{word}; here it is --{here}$"):
        parse(sweep.argument_parser(), [f"--{word}", "x"])
    options: dict[str, Any] = {word: "x"}
    with pytest.raises(ConfigError, match=rf"^no option '{word}'; here it is {here}$"):
        rlx.tuner(rlx.load_config(overrides={"storage": str(tmp_path)}), **options)


@pytest.mark.parametrize("rest", ["", "/", "/tree/main"])
def test_the_page_of_a_model_is_answered_with_its_name(rest: str) -> None:
    with pytest.raises(ConfigError, match=r"^model\.path https:.*: no such folder; the name on the hub is org/model$"):
        is_model_folder(f"https://huggingface.co/org/model{rest}", "model.path")


def test_a_space_in_a_variable_is_answered_with_a_function(tmp_path: Path) -> None:
    (file := tmp_path / "s.py").write_text("space = {'train.actor_lr': 1e-4}\n")
    with pytest.raises(ConfigError, match=r": space is a dict, expected a function that returns it: def space\(\)"):
        load_space(str(file), {})


def test_an_option_is_named_where_there_is_one() -> None:
    assert called_here("num_samples", ["trials"]) == ("trials", "")
    assert called_here("num_samples", settings()) == ("", "")


@pytest.mark.parametrize("word", ["stop_string", "rollout.n", "clip-ratio"])
def test_help_about_another_name_shows_the_setting(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings_parser("a command", "").parse_args(["--help", word])
    here, _ = called_here(word, settings())
    assert f"--{here.replace('_', '-')} " in capsys.readouterr().out


@pytest.mark.parametrize(("old", "new"), RENAMED)
def test_a_renamed_setting_is_refused_with_its_new_name(old: str, new: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_tree(with_overrides({}, {old: 1}))
    assert str(error.value) == f"config: unknown setting {old}; here it is {new}"


def test_the_changelog_lists_them() -> None:
    assert len(RENAMED) == 27 and ("algorithm.kl_in", "algorithm.kl_placement") in RENAMED
