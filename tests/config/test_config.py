"""Trees, YAML, dotted keys and the command line: what is accepted, and the one line that explains a refusal."""

import argparse
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

import rlx.config
from rlx.algorithms.advantages import ADVANTAGES
from rlx.cli.options import add_settings, parse
from rlx.config.algorithm import ESTIMATORS, GROUPED, AdvantageName
from rlx.config.errors import ConfigError, nearest
from rlx.config.loading import from_tree, read_yaml, with_overrides
from rlx.config.run import RunConfig, is_setting, setting_keys
from rlx.config.sections import flatten

PARAMS = dict(RunConfig().data.params)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(allow_abbrev=False)
    result.add_argument("--config")
    add_settings(result)
    return result


def given(*argv: str) -> dict[str, Any]:
    return parse(parser(), argv)[1]


def configured(*argv: str) -> RunConfig:
    return from_tree(with_overrides({}, given(*argv)))


def test_the_package_re_exports_these_names_and_no_others() -> None:
    names = {"ConfigError", "RunConfig", "flatten", "from_tree", "read_yaml", "with_overrides"}
    assert set(rlx.config.__all__) == names and all(hasattr(rlx.config, name) for name in names)


def test_the_example_of_the_package_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    example = textwrap.dedent(str(rlx.config.__doc__).partition("Example:\n")[2])
    exec(example, {})
    shown = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 2}
    assert capsys.readouterr().out == f"12 True {shown}\n"


def test_importing_needs_neither_torch_nor_ray() -> None:
    loaded = "import sys, rlx.config; print(sorted({'torch', 'ray', 'transformers', 'mlflow'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", loaded], text=True).strip() == "[]"


def test_every_setting_has_a_meaning_and_the_defaults_are_a_complete_config() -> None:
    config = RunConfig()
    assert from_tree({}) == config
    assert set(setting_keys()) == set(flatten(config))
    assert "None (default" not in " ".join(parser().format_help().split())
    assert set(config.data.params) == {"min_terms", "max_terms", "min_digits", "max_digits"}


# --- trees


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"train": {"step": 3}}, "unknown setting train.step; nearest: train.steps"),
        ({"trian": {"steps": 3}}, "unknown setting trian; nearest: train"),
        ({"actor_lr": 1}, "unknown setting actor_lr; nearest: train.actor_lr"),
        ({"xyzzy": 1}, "unknown setting xyzzy"),
        ({"train": 5}, "train = 5: expected a section of settings, such as train.steps"),
        ({"train": {"steps": 0}}, "train.steps = 0: input should be greater than 0"),
        ({"rollout": {"max_num_seqs": -1}}, "rollout.max_num_seqs = -1: input should be greater than 0"),
        (
            {"algorithm": {"kl_estimator": "k5"}},
            "algorithm.kl_estimator = 'k5': input should be 'k1', 'k2', 'k3', 'abs', 'k1+'",
        ),
        ({"model": {"offload": ["policy"]}}, "model.offload.0 = 'policy': input should be 'critic' or 'reference'"),
        ({"algorithm": {"dual_clip": 1}}, "algorithm.dual_clip = 1: input should be greater than 1"),
        ({"train": {"actor_lr": float("inf")}}, "train.actor_lr = inf: input should be a finite number"),
        ({"train": {"adam_betas": [0.9, 1]}}, "train.adam_betas.1 = 1: input should be less than 1"),
        ({"data": {"params": 5}}, "data.params = 5: input should be a valid dictionary"),
        ({"scaling": {"resources_per_worker": {"CPU": -1}}}, "scaling.resources_per_worker.CPU = -1: input should be"),
        (
            {"scaling": {"resources_per_worker": {"CPU": 0}}},
            "scaling.resources_per_worker = {'CPU': 0}: at least one resource must be more than 0",
        ),
        ({"reward": {"answer_pattern": "("}}, "reward.answer_pattern = '(': not a regular expression: missing )"),
        ({"name": "a/b"}, "name = 'a/b': string should match pattern"),
        ({"name": "a" * 129}, f"name = '{'a' * 129}': string should have at most 128 characters"),
        ({1: 2}, "1 = 1: keys should be strings"),
    ],
)
def test_a_bad_value_is_refused_in_one_line_with_its_key_and_what_is_allowed(
    tree: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        from_tree(tree, "run.yaml")
    assert str(refused.value).startswith(f"run.yaml: {message}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"train": {"prompts_per_step": 6}, "scaling": {"num_workers": 2}},
            r"\(6\) must be a multiple of .* \(2 x 2\)",
        ),
        ({"parallel": {"tp": 2}}, r"scaling.num_workers \(1\) must be a multiple of parallel.tp \(2\)"),
        (
            {"train": {"prompts_per_step": 6}, "scaling": {"num_workers": 4}, "parallel": {"tp": 2}},
            r"\(6\) must be a multiple of scaling.num_workers / parallel.tp x train.num_minibatches \(2 x 2\)",
        ),
        (
            {"parallel": {"tp": 2}, "scaling": {"num_workers": 2}, "model": {"lora_rank": 4}},
            r"parallel.tp \(2\) does not work with model.lora_rank",
        ),
        (
            {"algorithm": {"old_logprobs": "rollout", "rollout_correction": "tis"}},
            "set it to none, or algorithm.old_logprobs to",
        ),
        ({"algorithm": {"old_logprobs": "rollout"}, "model": {"critic": "head"}}, "model.critic head, .* to separate"),
        (
            {"algorithm": {"old_logprobs": "rollout"}, "rollout": {"top_k": 5}},
            "leave algorithm.old_logprobs at recomputed",
        ),
        ({"rollout": {"top_p": 0.9}}, "set algorithm.rollout_correction to tis or mask"),
        ({"rollout": {"top_k": 5}}, "set algorithm.rollout_correction to tis or mask"),
        ({"data": {"source": "a.csv", "params": {"x": 1}}}, "data.params are for reasoning_gym:DATASET"),
        ({"data": {"source": "a.csv", "prompt_column": "answer"}}, "are both 'answer'"),
        ({"eval": {"source": "a.csv"}}, "eval.source is for prompt files"),
        ({"eval": {"seed": 4095}}, r"eval.seed \(4095\) is too close to data.seed \(0\)"),
        ({"eval": {"seed": 0}, "data": {"seed": 255}}, "too close"),
        ({"model": {"critic": "none"}}, "advantage gae needs a critic"),
        ({"model": {"critic": "head"}, "algorithm": {"advantage": "rloo"}}, "rloo does not use a critic"),
        *[
            (
                {"train": {"samples_per_prompt": 1}, "algorithm": {"advantage": name}},
                "samples_per_prompt is 1, at least 2",
            )
            for name in ("grpo", "dr_grpo", "rloo", "opo", "reinforce++_baseline")
        ],
        (
            {"train": {"samples_per_prompt": 1}, "algorithm": {"filter_groups": True}},
            "filter_groups compares",
        ),
        (
            {"train": {"critic_warmup": 2}, "model": {"critic": "head"}},
            "critic_warmup needs a critic with its own weights",
        ),
        ({"train": {"critic_warmup": 2}, "algorithm": {"advantage": "remax"}}, "critic_warmup needs a critic"),
        (
            {"algorithm": {"kl_placement": "loss", "kl_estimator": "k1"}},
            r"gradient that is zero on average: choose k1\+",
        ),
        ({"algorithm": {"kl_estimator": "k3+"}}, r"k3\+ corrects the gradient, and a reward has none: choose k3$"),
        ({"algorithm": {"policy_loss": "cispo", "dual_clip": 3}}, "dual_clip is for the clipped losses ppo and gspo"),
        ({"algorithm": {"overlong_buffer": 17}}, r"overlong_buffer \(17\) is longer than rollout.max_tokens \(16\)"),
        ({"algorithm": {"ptx_coef": 0.1}}, "ptx_coef and data.ptx_source need each other"),
        ({"data": {"ptx_source": "a.csv"}}, "ptx_coef and data.ptx_source need each other"),
        (
            {
                "data": {"ptx_source": "a.csv", "ptx_batch": 3},
                "algorithm": {"ptx_coef": 1},
                "scaling": {"num_workers": 2},
            },
            r"ptx_batch \(3\) must be a multiple",
        ),
        ({"model": {"reference": "none"}}, "no model to measure the KL to: set algorithm.kl_coef to 0"),
        ({"model": {"reference": "lora_off"}}, "lora_off needs adapters to switch off: set model.lora_rank"),
        ({"model": {"lora_sync": "adapter"}}, "lora_sync adapter needs adapters: set model.lora_rank"),
        ({"model": {"lora_rank": 600, "lora_sync": "adapter"}}, "adapters of rank 512 or less"),
        (
            {
                "model": {"lora_rank": 8, "lora_sync": "adapter"},
                "rollout": {"resources_per_engine": {"CPU": 1, "GPU": 0.5}},
            },
            "set model.dtype to bfloat16",
        ),
        (
            {"rollout": {"tensor_parallel": 2, "resources_per_engine": {"GPU": 1}}},
            r"tensor_parallel \(2\) is .* but rollout.resources_per_engine.GPU is 1: set them to the same number",
        ),
        ({"rollout": {"resources_per_engine": {"GPU": 4}}}, r"tensor_parallel \(1\) is .*GPU is 4"),
        ({"rollout": {"max_staleness": 2}}, "max_staleness 2 gains nothing over 1 without rollout.partial_rollouts"),
        (
            {"rollout": {"partial_rollouts": True}},
            "rollout.partial_rollouts does nothing without rollout.max_staleness",
        ),
        (
            {"rollout": {"max_staleness": 1, "partial_rollouts": True}, "train": {"ema_decay": 0.9}},
            "partial_rollouts does not work with train.ema_decay",
        ),
        ({"rollout": {"num_chunks": 65}}, r"rollout.num_chunks \(65\): a worker has only 64 prompts per step"),
        (
            {"rollout": {"num_chunks": 2, "max_staleness": 1}},
            "rollout.num_chunks does nothing with rollout.max_staleness",
        ),
        ({"rollout": {"placement": "colocated"}}, "needs scaling.use_gpu, and as many rollout.num_engines"),
        (
            {"rollout": {"placement": "colocated", "num_engines": 2}, "scaling": {"use_gpu": True}},
            r"as many rollout.num_engines \(2\) as scaling.num_workers \(1\)",
        ),
        (
            {"rollout": {"placement": "colocated", "max_staleness": 1}, "scaling": {"use_gpu": True}},
            "rollout.max_staleness does not work with rollout.placement colocated",
        ),
        (
            {"rollout": {"placement": "colocated", "resources_per_engine": {"GPU": 1}}, "scaling": {"use_gpu": True}},
            "rollout.resources_per_engine.GPU does not work with rollout.placement colocated",
        ),
        ({"model": {"lora_alpha": 3}}, "model.lora_alpha does nothing without model.lora_rank"),
        ({"model": {"lora_targets": ["q_proj"]}}, "model.lora_targets does nothing without model.lora_rank"),
        ({"model": {"offload": ["critic"]}}, "model.offload does nothing without scaling.use_gpu"),
        (
            {"model": {"offload": ["critic"], "critic": "head"}, "scaling": {"use_gpu": True}},
            "model.offload critic needs a critic with its own weights: model.critic is head",
        ),
        (
            {"model": {"offload": ["reference"], "lora_rank": 4}, "scaling": {"use_gpu": True}},
            "model.offload reference needs a reference with its own weights: model.reference is lora_off",
        ),
        (
            {"algorithm": {"kl_coef": 0, "adaptive_kl_target": 0.1}},
            "adaptive_kl_target does nothing without algorithm.kl_coef",
        ),
        (
            {"algorithm": {"rollout_correction_high": 3}},
            "rollout_correction_high does nothing without algorithm.rollout_correction",
        ),
        ({"algorithm": {"overlong_penalty": 3}}, "overlong_penalty does nothing without algorithm.overlong_buffer"),
        (
            {"algorithm": {"filter_groups": True}},
            r"learn nothing from completions with equal rewards \(grpo, dr_grpo, .*: algorithm.advantage is gae",
        ),
        ({"train": {"critic_warmup": 40}}, r"critic_warmup \(40\) leaves no step of train.steps \(40\) for the policy"),
        (
            {"reward": {"functions": {"url": 1}, "url": "http://u:s@h/"}},
            "^config: reward.url contains a user, password or key",
        ),
        ({"reward": {"functions": {"format": 1}}}, "format, which needs reward.format_pattern"),
        ({"reward": {"functions": {"model": 1}}}, "model, which needs reward.model"),
        ({"reward": {"url": "http://x"}}, "reward.url is set, but reward.functions gives url no weight"),
        ({"reward": {"functions": {"task": 0}}}, "a weight other than 0"),
        ({"reward": {"functions": {"nummeric": 1}}}, "no reward function 'nummeric': .*nearest: numeric"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_tree(tree)


@pytest.mark.parametrize(
    "tree",
    [
        {"train": {"prompts_per_step": 8}, "scaling": {"num_workers": 2}},
        {"train": {"prompts_per_step": 2}, "scaling": {"num_workers": 2}, "parallel": {"tp": 2}},
        {"rollout": {"top_p": 0.9}, "algorithm": {"rollout_correction": "tis"}},
        {"data": {"source": "a.csv"}, "eval": {"source": "b.csv", "seed": 0}},
        {"eval": {"seed": 4096}},
        {"eval": {"seed": 0}, "data": {"seed": 256}},
        {"train": {"samples_per_prompt": 1}, "algorithm": {"advantage": "remax"}},
        {"train": {"samples_per_prompt": 1}, "algorithm": {"advantage": "reinforce++"}},
        {"model": {"reference": "none"}, "algorithm": {"kl_coef": 0}},
        {"model": {"lora_rank": 512, "lora_sync": "adapter", "lora_alpha": 3, "lora_targets": ["q_proj"]}},
        {"train": {"critic_warmup": 39}},
        {"model": {"offload": ["reference", "critic"]}, "scaling": {"use_gpu": True}},
        {"algorithm": {"advantage": "rloo", "filter_groups": True, "filter_rounds": 3}},
        {"algorithm": {"overlong_buffer": 16}},
        {"algorithm": {"kl_placement": "loss", "kl_estimator": "k1+"}},
        {"reward": {"functions": {"task": 1, "mine.rewards:f_1": -2}}},
    ],
)
def test_settings_at_the_limit_of_a_rule_are_accepted(tree: dict[str, Any]) -> None:
    from_tree(tree)


@pytest.mark.parametrize(
    ("chosen", "published"),
    [
        ({"advantage": "gae"}, (True, "reward", "k1", "token_mean", 0.2, 0.2)),
        ({"advantage": "grpo"}, (False, "loss", "k3", "sequence_mean", 0.2, 0.2)),
        ({"advantage": "dr_grpo", "kl_estimator": "k2"}, (False, "loss", "k2", "constant", 0.2, 0.2)),
        ({"advantage": "rloo", "aggregation": "token_mean"}, (False, "reward", "k1", "token_mean", 0.2, 0.2)),
        (
            {"advantage": "reinforce++_baseline", "whiten_advantages": False},
            (False, "loss", "k2", "token_mean", 0.2, 0.2),
        ),
        ({"kl_placement": "loss"}, (True, "loss", "k3", "token_mean", 0.2, 0.2)),
        ({"policy_loss": "gspo", "clip_high": 0.1}, (True, "reward", "k1", "sequence_mean", 3e-4, 0.1)),
        ({"advantage": "dr_grpo", "policy_loss": "cispo"}, (False, "loss", "k3", "constant", 1.0, 4.0)),
    ],
)
def test_unset_settings_follow_the_estimator_and_the_loss(chosen: dict[str, Any], published: tuple[Any, ...]) -> None:
    settings = from_tree({"algorithm": chosen}).algorithm
    defaults = (settings.whiten_advantages, settings.kl_placement, settings.kl_estimator, settings.aggregation)
    assert (*defaults, settings.clip_low, settings.clip_high) == published


def test_every_estimator_in_the_table_has_a_formula() -> None:
    assert tuple(ESTIMATORS) == tuple(ADVANTAGES) == get_args(AdvantageName)


def test_an_estimator_declares_what_it_needs() -> None:
    def needing(what: str) -> set[str]:
        return {name for name, estimator in ESTIMATORS.items() if getattr(estimator, f"needs_{what}")}

    assert needing("critic") == {"gae"}
    assert needing("groups") == {"grpo", "dr_grpo", "rloo", "opo", "reinforce++_baseline"} == set(GROUPED)
    assert needing("greedy") == {"remax"}
    assert from_tree({"algorithm": {"advantage": "remax"}}).algorithm.estimator is ESTIMATORS["remax"]


def test_auto_critic_and_reference_follow_the_estimator_and_the_adapters() -> None:
    plain, grouped = RunConfig(), from_tree({"algorithm": {"advantage": "grpo"}})
    assert (plain.resolved_critic, plain.resolved_reference, grouped.resolved_critic) == ("separate", "copy", "none")
    assert from_tree({"model": {"lora_rank": 4}}).resolved_reference == "lora_off"
    assert from_tree({"model": {"lora_rank": 4, "reference": "copy"}}).resolved_reference == "copy"
    assert from_tree({"model": {"critic": "head"}}).resolved_critic == "head"
    assert from_tree({"model": {"lora_rank": 4}}).resolved_critic == "head"
    assert from_tree({"model": {"lora_rank": 4, "critic": "separate"}}).resolved_critic == "separate"


@pytest.mark.parametrize(
    ("section", "address"),
    [
        ("reward", "http://h/score?token=SENTINEL"),
        ("reward", "http://SENTINEL@h/"),
        ("reward", "http://h/score#access_key=SENTINEL"),
        ("tracking", "postgresql://h/db?password=SENTINEL"),
        ("tracking", "mysql://u@h/db?passwd=SENTINEL"),
        ("tracking", "mysql://u%3ASENTINEL@h/db"),
        ("tracking", "postgresql://u:SENTI/SENTINEL@h/db"),
        ("tracking", "postgresql://u:#SENTINEL@h/db"),
        ("tracking", "postgresql://u:?SENTINEL@h/db"),
        ("tracking", "https://h/?sig=SENTINEL"),
        ("tracking", "https://h/?sv=2&X-Amz-Signature=SENTINEL"),
        ("tracking", "https://h/?accessToken=SENTINEL"),
        ("tracking", "https://h/?auth=SENTINEL"),
        ("tracking", "http://SENTINEL@h/"),
        ("tracking", "https://h/?api_key=SENTINEL"),
    ],
)
def test_an_address_with_a_secret_is_refused_and_never_shown(section: str, address: str) -> None:
    functions = {"functions": {"url": 1}, "url": address}
    with pytest.raises(ConfigError, match="would be saved with the run") as refused:
        from_tree({"reward": functions} if section == "reward" else {"tracking": {"uri": address}})
    assert "SENTINEL" not in str(refused.value)


@pytest.mark.parametrize(
    "uri",
    [
        "postgresql://me@h/db?sslkey=/home/me/key.pem",
        "sqlite:///a@b/c.db",
        "http://h:5000",
        "http://h:5000/a@b",
        "http://h/?max_tokens=5",
    ],
)
def test_a_user_name_and_a_path_are_no_secret(uri: str) -> None:
    assert from_tree({"tracking": {"uri": uri}}).tracking.uri == uri


def test_an_address_with_a_password_is_never_shown() -> None:
    for functions in ({"url": 1}, {"url": 1, "format": 1}):
        with pytest.raises(ConfigError) as refused:
            from_tree({"reward": {"functions": functions, "url": "http://user:secret@host/"}})
        assert "secret" not in str(refused.value)


def test_the_default_parameters_belong_to_the_default_source() -> None:
    assert from_tree({"data": {"source": "reasoning_gym:chain_sum"}}).data.params == PARAMS
    assert from_tree({"data": {"source": "reasoning_gym:spell_backward"}}).data.params == {}
    assert from_tree({"data": {"params": {"max_terms": 5}}}).data.params == {"max_terms": 5}


# --- dotted keys


def test_overrides_reach_into_a_copy() -> None:
    tree = {"train": {"steps": 1, "ppo_epochs": 2}, "data": {"params": {"a": 1}}}
    merged = with_overrides(tree, {"train.steps": 5, "algorithm.gae_lambda": 0.5, "data.params.b": 2, "name": "x"})
    assert merged == {
        "train": {"steps": 5, "ppo_epochs": 2},
        "algorithm": {"gae_lambda": 0.5},
        "data": {"params": {"a": 1, "b": 2}},
        "name": "x",
    }
    assert tree == {"train": {"steps": 1, "ppo_epochs": 2}, "data": {"params": {"a": 1}}}


def test_an_entry_is_set_in_the_default_of_its_source() -> None:
    entry = {"data.params.max_digits": 3}
    assert with_overrides({}, entry) == {"data": {"params": PARAMS | {"max_digits": 3}}}
    other = {"data.source": "reasoning_gym:spell_backward"}
    assert with_overrides({}, entry | other)["data"]["params"] == {"max_digits": 3}
    assert with_overrides({"data": {"source": "reasoning_gym:products"}}, entry)["data"]["params"] == {"max_digits": 3}
    assert RunConfig().data.params == PARAMS  # the default itself is untouched
    gpu = with_overrides({}, {"rollout.resources_per_engine.GPU": 1})
    assert gpu == {"rollout": {"resources_per_engine": {"CPU": 0.5, "GPU": 1}}}


def test_a_whole_dict_replaces_the_value_and_entries_go_into_it() -> None:
    whole = {"GPU": 2.0}
    merged = with_overrides({}, {"scaling.resources_per_worker.CPU": 3, "scaling.resources_per_worker": whole})
    assert merged == {"scaling": {"resources_per_worker": {"GPU": 2.0, "CPU": 3}}}
    assert whole == {"GPU": 2.0}


@pytest.mark.parametrize("tree", [{"train": 5}, {"train": None}])
def test_a_key_through_a_single_value_is_refused(tree: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"train\.steps: train is (5|None), which has no entries"):
        with_overrides(tree, {"train.steps": 3})


def test_settings_and_entries_of_dicts_are_known() -> None:
    assert is_setting("train.steps") and is_setting("data.params") and is_setting("data.params.max_digits")
    assert not is_setting("train") and not is_setting("train.steps.x") and not is_setting("data.paramsx")


def test_flatten_gives_every_setting_its_dotted_key_and_keeps_dicts_whole() -> None:
    flat = flatten(from_tree({"train": {"steps": 7, "adam_betas": [0.5, 0.6]}, "name": "x"}))
    assert flat["train.steps"] == 7
    assert flat["name"] == "x"
    assert flat["data.params"] == PARAMS
    assert flat["train.adam_betas"] == (0.5, 0.6)
    assert "train" not in flat


def test_nearest_is_empty_when_no_choice_is_similar() -> None:
    assert nearest("stepz", ["steps", "seed"]) == "; nearest: steps"
    assert nearest("qqq", ["steps", "seed"]) == ""


# --- YAML


def test_yaml_survives_a_round_trip_of_the_resolved_config(tmp_path: Path) -> None:
    config = configured(
        "--name", "1e3", "--data.system-prompt", "1e-3", "--data.params.p", "1e-5", "--train.actor-lr", "1e-6"
    )
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    assert from_tree(read_yaml(file)) == config
    assert (config.name, config.data.system_prompt, config.data.params["p"]) == ("1e3", "1e-3", 1e-5)


def test_exponents_that_yaml_reads_as_text_are_numbers(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("train: {actor_lr: 1e-3}\ndata:\n  params: {p: 1e-3, word: e3, max_terms: 4}\n")
    config = from_tree(read_yaml(file))
    assert config.train.actor_lr == 0.001
    assert config.data.params == {"p": 0.001, "word": "e3", "max_terms": 4}


def test_an_empty_yaml_file_is_an_empty_tree(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert read_yaml(tmp_path / "empty.yaml") == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory"),
        (b"- 1\n", "expected a mapping of settings, found list"),
        (b"a: [1\n", "not valid YAML: "),
        (b"\xff\xfe\x00", "not a text file"),
    ],
)
def test_an_unusable_yaml_file_is_one_line(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "run.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        read_yaml(file)
    assert str(refused.value).startswith(f"{file}: {message}")
    assert "\n" not in str(refused.value)


# --- the command line


def test_parse_separates_settings_from_the_options_of_the_command() -> None:
    args, settings = parse(parser(), ["--config", "a.yaml", "--train.steps", "3", "--algorithm.kl_coef=1e-3"])
    assert args.config == "a.yaml"
    assert settings == {"train.steps": 3, "algorithm.kl_coef": "1e-3"}
    assert from_tree(with_overrides({}, settings)).algorithm.kl_coef == 0.001


@pytest.mark.parametrize(
    ("argv", "key", "value"),
    [
        (["--name", "12"], "name", "12"),
        (["--data.system-prompt", "none"], "data.system_prompt", None),
        (["--algorithm.rollout-correction", "none"], "algorithm.rollout_correction", "none"),
        (["--checkpoint.keep-last", "none"], "checkpoint.keep_last", None),
        (["--checkpoint.keep-last", "3"], "checkpoint.keep_last", 3),
        (["--algorithm.adaptive-kl-target", "0.1"], "algorithm.adaptive_kl_target", 0.1),
        (["--scaling.use_gpu", "true"], "scaling.use_gpu", True),
        (["--train.adam-betas", "0.9,0.95"], "train.adam_betas", (0.9, 0.95)),
        (["--train.adam_betas", "[0.8, 0.9]"], "train.adam_betas", (0.8, 0.9)),
        (["--data.params", "{max_terms: 2}"], "data.params", {"max_terms": 2}),
        (["--data.params.max_digits", "3"], "data.params", PARAMS | {"max_digits": 3}),
        (["--data.params.max-digits=3"], "data.params", PARAMS | {"max_digits": 3}),
        (["--rollout.resources-per-engine.GPU", "1"], "rollout.resources_per_engine", {"CPU": 0.5, "GPU": 1.0}),
        (["--rollout.resources_per_engine", "{GPU: 1}"], "rollout.resources_per_engine", {"GPU": 1.0}),
        (["--rollout.top-k", "-1"], "rollout.top_k", -1),
    ],
)
def test_option_texts_become_values(argv: list[str], key: str, value: Any) -> None:
    assert flatten(configured(*argv))[key] == value


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--train.step", "3"], "unknown option --train.step; nearest: --train.steps"),
        (["--train.step=3"], "unknown option --train.step; nearest: --train.steps"),
        (["--confg", "x"], "unknown option --confg; nearest: --config"),
        (["--data.parms.max_terms", "3"], "unknown option --data.parms.max-terms; nearest: --data.params"),
        (["--train.steps.x", "3"], "unknown option --train.steps.x; nearest: --train.steps"),
        (["--data.params.x"], "--data.params.x: expected a value"),
        (["--data.params.x", "--train.steps", "3"], "--data.params.x: expected a value"),
        (["3"], "unexpected argument '3'"),
    ],
)
def test_a_mistyped_option_is_refused_with_the_nearest(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        given(*argv)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    "shown",
    [
        "--algorithm.adaptive-kl-target FLOAT",
        "--checkpoint.keep-last INT",
        "--name STR",
        "--reward.answer-pattern STR",
        "--train.adam-betas FLOAT,FLOAT",
        "--data.params DICT",
        "--rollout.resources-per-engine DICT",
        "--algorithm.kl-estimator {k1,k2,k3,abs,k1+,k3+,abs+}",
        "--scaling.use-gpu BOOL",
    ],
)
def test_help_shows_the_type_of_an_option(shown: str) -> None:
    assert f"  {shown}" in parser().format_help()


def test_help_shows_meaning_and_default() -> None:
    shown = " ".join(parser().format_help().split())
    assert f"--train.ppo-epochs INT passes over a step's completions (default: {RunConfig().train.ppo_epochs})" in shown


def test_stale_completions_are_corrected_unless_configured_otherwise() -> None:
    def correction(**rollout: Any) -> str:
        return from_tree({"rollout": rollout}).resolved_rollout_correction

    assert (correction(), correction(max_staleness=1)) == ("none", "tis")
    for algorithm in ({"rollout_correction": "none"}, {"old_logprobs": "rollout"}):
        assert (
            from_tree({"rollout": {"max_staleness": 1}, "algorithm": algorithm}).resolved_rollout_correction == "none"
        )
