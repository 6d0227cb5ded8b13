"""Trees, YAML, dotted keys and the command line: what is accepted, and the one line that explains a refusal."""

import argparse
import math
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, get_args

import numpy
import pytest
import yaml

import rlx
import rlx.config
from rlx.algorithms.advantages import ADVANTAGES
from rlx.cli.options import add_settings, parse, settings_parser
from rlx.config.errors import ConfigError, nearest
from rlx.config.experiment import over_experiment
from rlx.config.loading import from_tree, parse_yaml, read_yaml, setting_at, with_overrides
from rlx.config.run import RunConfig, is_setting, setting_keys
from rlx.config.sections.algorithm import ESTIMATORS, GROUPED, AdvantageName
from rlx.config.sections.base import flatten

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
        ({"train": {"learning_rate": 3}}, "unknown setting train.learning_rate; here it is train.actor_lr"),
        ({"algorithm": {"advantage": "GRPO"}}, "algorithm.advantage = 'GRPO': expected 'gae', 'grpo', "),
        (
            {"reward": {"url": "http://h", "url_key_env": "hf_abcdefghijklmnopqrstuvwx"}},
            "reward.url_key_env: expected the name of an env",
        ),
        ({"trian": {"steps": 3}}, "unknown setting trian; nearest: train"),
        ({"actor_lr": 1}, "unknown setting actor_lr; nearest: train.actor_lr"),
        ({"xyzzy": 1}, "unknown setting xyzzy"),
        ({"train": 5}, "train = 5: expected a section of settings, such as train.steps"),
        ({"train": {"steps": 0}}, "train.steps = 0: input should be greater than 0"),
        ({"rollout": {"max_num_seqs": -1}}, "rollout.max_num_seqs = -1: input should be greater than 0"),
        (
            {"algorithm": {"kl_estimator": "k5"}},
            "algorithm.kl_estimator = 'k5': expected 'k1', 'k2', 'k3', 'abs', 'k1+'",
        ),
        ({"model": {"offload": ["policy"]}}, "model.offload.0 = 'policy': expected 'critic' or 'reference'"),
        (
            {"reward": {"timeout_s": 1e10}},
            "reward.timeout_s = 10000000000.0: input should be less than or equal to 1000000000",
        ),
        ({"algorithm": {"dual_clip": 1}}, "algorithm.dual_clip = 1: input should be greater than 1"),
        ({"train": {"actor_lr": float("inf")}}, "train.actor_lr = inf: input should be a finite number"),
        ({"train": {"adam_betas": [0.9, 1]}}, "train.adam_betas.1 = 1: input should be less than 1"),
        ({"data": {"params": 5}}, "data.params = 5: expected entries, such as data.params.NAME 1"),
        ({"scaling": {"resources_per_worker": {"CPU": -1}}}, "scaling.resources_per_worker.CPU = -1: input should be"),
        (
            {"rollout": {"resources_per_engine": {"gpu": 1}}},
            "rollout.resources_per_engine = {'gpu': 1}: no resource of Ray is called gpu; nearest: GPU",
        ),
        (
            {"scaling": {"resources_per_worker": {"CPU": 0}}},
            "scaling.resources_per_worker = {'CPU': 0}: at least one resource must be more than 0",
        ),
        ({"reward": {"answer_pattern": "("}}, "reward.answer_pattern = '(': not a regular expression: missing )"),
        (
            {"name": "..a b/c "},
            "name = '..a b/c ': a name has only letters (A-Z, a-z), digits, . _ - and begins",
        ),
        ({"name": "a" * 129}, f"name = '{'a' * 129}': string should have at most 128 characters"),
        ({1: 2}, "1 = 1: keys should be strings"),
        (
            {"reward": {"functions": {"numeric:1": None}}},
            "reward.functions.numeric:1 = None: a space is missing after numeric:",
        ),
        ({"reward": {"functions": {"a.b:f": None}}}, "reward.functions.a.b:f = None: input should be a valid number"),
        ({"seed": True}, "seed = True: expected a number, not true or false"),
        ({"train": {"steps": True}}, "train.steps = True: expected a number, not true or false"),
        ({"train": {"ema_decay": False}}, "train.ema_decay = False: expected a number, not true or false"),
        ({"train": {"adam_betas": [True, 0.9]}}, "train.adam_betas = [True, 0.9]: expected a number, not true"),
        ({"reward": {"functions": {"task": True}}}, "reward.functions = {'task': True}: expected a number, not true"),
        (
            {"eval": {"sets": [{"name": "a", "source": "arithmetic", "samples": True}]}},
            "eval.sets.0.samples = True: expected a number, not true or false",
        ),
    ],
)
def test_a_bad_value_is_refused_in_one_line_with_its_key_and_what_is_allowed(
    tree: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        from_tree(tree, "run.yaml")
    assert str(refused.value).startswith(f"run.yaml: {message}")
    assert "\n" not in str(refused.value)


def test_a_name_that_no_folder_can_have_is_answered_with_the_nearest() -> None:
    for name, end in (("a b", "; nearest: a-b"), ("..a b/c ", "; nearest: a-b-c"), ("ü", "; nearest: run")):
        with pytest.raises(ConfigError, match=f"{end}$"):
            from_tree({"name": name})


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
            {"train": {"prompts_per_step": 6}, "scaling": {"num_workers": 4}, "parallel": {"sp": 2}},
            r"\(6\) must be a multiple of scaling.num_workers / parallel.sp x train.num_minibatches \(2 x 2\)",
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
        (
            {"data": {"source": "a.csv", "params": {}, "sources": [{"source": "b.csv"}]}},
            "data.source does nothing with",
        ),
        (
            {"data": {"sources": [{"source": "b.csv"}, {"source": "c/b.jsonl"}]}},
            "two are called b: give each",
        ),
        (
            {"data": {"sources": [{"source": "b.csv"}]}, "eval": {"source": "a.csv"}},
            "name held_out of each",
        ),
        (
            {"data": {"sources": [{"source": "b.csv", "reward": {"numeric": 1}}]}},
            "b: reward.functions has no 'num",
        ),
        (
            {"data": {"sources": [{"source": "b.csv", "reward": {"task": 0}}]}},
            "b: at least one reward function",
        ),
        ({"data": {"sources": [{"source": "b.csv", "params": {"x": 1}}]}}, "data.params are for reasoning_gym:DATASET"),
        ({"data": {"sources": [{"source": "b.csv", "wieght": 1}]}}, "data.sources.0.wieght"),
        (
            {"data": {"sources": [{"soruce": "b.csv"}]}},
            "unknown setting data.sources.0.soruce; nearest: data.sources.0.source",
        ),
        ({"data": {"sources": [{"source": "b.csv", "weight": 0}]}}, "data.sources.0.weight = 0"),
        (
            {"data": {"sources": [{"source:b.csv": None}]}},
            "unknown setting data.sources.0.source:b.csv: YAML wants a space after source:",
        ),
        ({"data": {"sources": [{"source": "b.csv", "prompt_template": "{"}]}}, "data.sources.0.prompt_template"),
        (
            {"tracking": {"backends": []}},
            r"tracking.backends = \[\]: expected at least one of mlflow, tensorboard, wandb$",
        ),
        ({"tracking": {"backends": "mlflow"}}, "tracking.backends = 'mlflow': expected a list, such as "),
        ({"train": {"adam_betas": [0.9, 0.9, 0.9]}}, "train.adam_betas = .*: expected at most 2 values, found 3$"),
        ({"rollout": {"top_p": 0.9}}, "set algorithm.rollout_correction to tis or mask"),
        (
            {"rollout": {"min_p": 0.1, "min_tokens": 2}},
            "rollout.min_tokens: engines then draw from another",
        ),
        ({"rollout": {"repetition_penalty": 1.1}}, "rollout.repetition_penalty: engines then draw from another"),
        ({"rollout": {"bad_words": ["a"]}}, "rollout.bad_words: engines then draw from another distribution"),
        ({"rollout": {"sampling_options": {"logit_bias": {1: 2}}}}, "sampling_options.logit_bias: engines then draw"),
        ({"rollout": {"sampling_options": {"n": 2}}}, "sampling_options.n is set by train.samples_per_prompt"),
        ({"rollout": {"engine_options": {"dtype": "half"}}}, "engine_options.dtype is set by model.dtype"),
        (
            {"rollout": {"engine_options": {"quantization": "fp8"}}},
            "makes the engines another model than",
        ),
        ({"rollout": {"engine_options": {"kv_cache_dtype": "fp8"}}}, "set algorithm.rollout_correction to tis or mask"),
        ({"rollout": {"stop": [""]}}, "rollout.stop.0 = ''"),
        ({"rollout": {"min_tokens": 17}}, "rollout.min_tokens \\(17\\) is more than rollout.max_tokens \\(16\\)"),
        ({"rollout": {"top_k": 5}}, "set algorithm.rollout_correction to tis or mask"),
        ({"data": {"source": "a.csv", "params": {"x": 1}}}, "data.params are for reasoning_gym:DATASET"),
        ({"data": {"source": "a.csv", "prompt_column": "answer"}}, "are both 'answer'"),
        ({"eval": {"source": "a.csv"}}, "eval.source, or held_out of a source, is for prompt files"),
        ({"eval": {"seed": 4095}}, r"eval.seed \(4095\) is too close to data.seed \(0\)"),
        ({"eval": {"seed": 0}, "data": {"seed": 255}}, "too close"),
        ({"model": {"critic": "none"}}, "advantage gae needs a critic"),
        ({"model": {"critic": "head"}, "algorithm": {"advantage": "rloo"}}, "rloo does not use a critic"),
        *[
            (
                {"train": {"samples_per_prompt": 1}, "algorithm": {"advantage": name}},
                "samples_per_prompt is 1, at least 2",
            )
            for name in ("grpo", "dapo", "dr_grpo", "rloo", "opo", "reinforce++_baseline")
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
        (
            {"algorithm": {"policy_loss": "cispo", "dual_clip": 3}},
            "dual_clip is for clipped losses such as ppo: leave it",
        ),
        ({"algorithm": {"policy_loss": "sapo", "dual_clip": 3}}, "leave it unset with sapo"),
        ({"algorithm": {"sapo_temperature_neg": 2}}, "sapo_temperature_neg does nothing without .*policy_loss sapo"),
        ({"algorithm": {"clip_cov_ratio": 0.1}}, "clip_cov_ratio does nothing without algorithm.policy_loss clip_cov"),
        (
            {"algorithm": {"policy_loss": "clip_cov", "clip_cov_low": 5}},
            "clip_cov_low must be less than algorithm.clip_cov_high",
        ),
        ({"algorithm": {"top_entropy_quantile": 0.2}}, "needs the entropy before the update: set .*exact_entropy"),
        (
            {"algorithm": {"top_entropy_quantile": 0.2, "exact_entropy": True, "old_logprobs": "rollout"}},
            "leave algorithm.old_logprobs at recomputed",
        ),
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
        (
            {"model": {"critic_path": "x", "critic": "head"}},
            "critic_path is for a critic with its own weights: model.critic is head",
        ),
        (
            {"model": {"critic_path": "x"}, "algorithm": {"advantage": "grpo"}},
            "critic_path is for a critic with its own weights: model.critic is none",
        ),
        (
            {"model": {"reference_path": "x"}, "algorithm": {"kl_coef": 0}},
            "reference_path is for a reference with its own weights: model.reference is none",
        ),
        (
            {"model": {"reference_path": "x", "lora_rank": 4, "reference": "lora_off"}},
            "reference_path is for a reference with its own weights: model.reference is lora_off",
        ),
        (
            {"model": {"reference_path": "x", "reference_weights": "model"}, "checkpoint": {"init_from": "y"}},
            "reference_weights does nothing with model.reference_path",
        ),
        (
            {"reward": {"functions": {"task": 0}}},
            "at least one must have a weight other than 0, unless model.reference",
        ),
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
        ({"data": {"curriculum_period": 3}}, "data.curriculum_period does nothing without data.curriculum"),
        ({"data": {"curriculum": "difficulty", "curriculum_range": [0.9, 0.1]}}, "the smaller share comes first"),
        (
            {"data": {"curriculum": "difficulty"}, "rollout": {"max_staleness": 1}},
            "data.curriculum does not work with rollout.max_staleness",
        ),
        (
            {"data": {"curriculum": "difficulty"}, "algorithm": {"advantage": "grpo", "filter_groups": True}},
            "data.curriculum does not work with algorithm.filter_groups",
        ),
        (
            {"data": {"curriculum": "difficulty"}, "reward": {"functions": {"length": 1}, "length_target": 3}},
            "data.curriculum measures right answers: name one of task, exact_match",
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
        ({"algorithm": {"filter_by": "correct"}}, "filter_by does nothing without algorithm.filter_groups"),
        (
            {"algorithm": {"filter_groups": True}},
            r"learn nothing from completions with equal rewards \(grpo, dapo, dr_grpo, .*: algorithm.advantage is gae",
        ),
        ({"train": {"critic_warmup": 40}}, r"critic_warmup \(40\) leaves no step of train.steps \(40\) for the policy"),
        (
            {"reward": {"functions": {"url": 1}, "url": "http://u:s@h/"}},
            "^config: reward.url: contains a user, password, token or key",
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
        from_tree(over_experiment(tree))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--data.sources", "[{source: q.jsonl"], "data.sources = '[{source: q.jsonl': a bracket is not closed"),
        (["--data.params", "{max_terms: 3"], "data.params = '{max_terms: 3': a bracket is not closed"),
        (["--data.params", "{a: 1, a: 2}"], "data.params = '{a: 1, a: 2}': not valid YAML: line 1: a is there twice"),
        (["--algorithm.kl-coef", "{0: 0.1, 200: 0"], "algorithm.kl_coef = '{0: 0.1, 200: 0': a bracket is not closed"),
        (["--algorithm.kl-coef", "{0: 0.1, 200: 0}"], None),
        (["--reward.answer-pattern", "[a"], "reward.answer_pattern = '[a': not a regular expression"),
    ],
)
def test_a_list_or_mapping_that_is_not_one_is_refused_with_what_is_wrong(
    option: list[str], message: str | None
) -> None:
    _, given = parse(settings_parser("a command", ""), option)
    if message is None:
        from_tree(with_overrides({}, given))
        return
    with pytest.raises(ConfigError) as refused:
        from_tree(with_overrides({}, given))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "tree",
    [
        {"train": {"prompts_per_step": 8}, "scaling": {"num_workers": 2}},
        {"train": {"prompts_per_step": 2}, "scaling": {"num_workers": 2}, "parallel": {"tp": 2}},
        {"rollout": {"top_p": 0.9}, "algorithm": {"rollout_correction": "tis"}},
        {"rollout": {"bad_words": ["a"], "min_p": 0.1}, "algorithm": {"rollout_correction": "mask"}},
        {"rollout": {"stop": ["</answer>"], "sampling_options": {"repetition_detection": {"max_pattern_size": 4}}}},
        {"rollout": {"engine_options": {"kv_cache_dtype": "fp8"}}, "algorithm": {"rollout_correction": "tis"}},
        {"rollout": {"engine_options": {"max_num_batched_tokens": 4096}}},
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
    from_tree(over_experiment(tree))


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
        ({"advantage": "grpo", "policy_loss": "cispo"}, (False, "loss", "k3", "token_mean", 1.0, 4.0)),
        ({"advantage": "dapo", "policy_loss": "sapo"}, (False, "loss", "k3", "sequence_mean", 0.2, 0.28)),
        ({"policy_loss": "cispo", "aggregation": "constant"}, (True, "reward", "k1", "constant", 1.0, 4.0)),
        ({"advantage": "dapo"}, (False, "loss", "k3", "token_mean", 0.2, 0.28)),
        ({"advantage": "dapo", "policy_loss": "gspo"}, (False, "loss", "k3", "sequence_mean", 3e-4, 4e-4)),
    ],
)
def test_unset_settings_follow_the_estimator_and_the_loss(chosen: dict[str, Any], published: tuple[Any, ...]) -> None:
    settings = from_tree({"algorithm": chosen}).algorithm
    defaults = (settings.whiten_advantages, settings.kl_placement, settings.kl_estimator, settings.aggregation)
    assert (*defaults, settings.clip_low, settings.clip_high) == published


def test_dapo_is_the_combination_of_its_paper() -> None:
    dapo = from_tree({"algorithm": {"advantage": "dapo"}, "rollout": {"max_tokens": 20480}})
    chosen = dapo.algorithm
    assert (chosen.kl_coef, chosen.filter_groups, chosen.filter_by) == (0.0, True, "correct")
    assert (chosen.overlong_tokens(20480), chosen.overlong_penalty) == (4096, 0.5)
    assert from_tree({"algorithm": {"advantage": "dapo", "overlong_buffer": 0}}).algorithm.overlong_tokens(20480) == 0
    plain = from_tree({"algorithm": {"advantage": "dapo", "filter_groups": False}}).algorithm
    assert not plain.filter_groups
    grpo = from_tree({"algorithm": {"advantage": "grpo"}}).algorithm
    assert grpo.overlong_penalty == 1
    assert (grpo.kl_coef, grpo.filter_groups, grpo.filter_by, grpo.overlong_tokens(20480)) == (
        0.005,
        False,
        "reward",
        0,
    )


@pytest.mark.parametrize("name", ["dapo", "dr_grpo", "opo"])
def test_what_is_published_without_a_kl_loads_no_reference(name: str) -> None:
    config = from_tree({"algorithm": {"advantage": name}})
    assert (config.algorithm.kl_coef, config.resolved_reference) == (0.0, "none")
    measured = from_tree({"algorithm": {"advantage": name}, "model": {"reference": "copy"}})
    assert measured.resolved_reference == "copy"
    assert from_tree({"algorithm": {"advantage": name, "kl_coef": 0.01}}).resolved_reference == "copy"


def test_every_estimator_in_the_table_has_a_formula() -> None:
    assert tuple(ESTIMATORS) == tuple(ADVANTAGES) == get_args(AdvantageName)


def test_an_estimator_declares_what_it_needs() -> None:
    def needing(what: str) -> set[str]:
        return {name for name, estimator in ESTIMATORS.items() if getattr(estimator, f"needs_{what}")}

    assert needing("critic") == {"gae"}
    assert needing("groups") == {"grpo", "dapo", "dr_grpo", "rloo", "opo", "reinforce++_baseline"} == set(GROUPED)
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


def test_a_path_may_be_given_as_a_path() -> None:
    overrides = {"model.path": Path("models/mine"), "data.source": Path("prompts.jsonl")}
    config = from_tree(with_overrides({}, overrides))
    assert (config.model.path, config.data.source) == (str(Path("models/mine")), "prompts.jsonl")


def test_an_entry_is_set_in_the_default_of_its_source() -> None:
    entry = {"data.params.max_digits": 3}
    assert with_overrides({}, entry) == {"data": {"params": PARAMS | {"max_digits": 3}}}
    other = {"data.source": "reasoning_gym:spell_backward"}
    assert with_overrides({}, entry | other)["data"]["params"] == {"max_digits": 3}
    assert with_overrides({"data": {"source": "reasoning_gym:products"}}, entry)["data"]["params"] == {"max_digits": 3}
    assert RunConfig().data.params == PARAMS  # the default itself is untouched
    assert with_overrides({}, {"data.params.a.b": 1})["data"]["params"]["a"] == {"b": 1}
    rewards = with_overrides({}, {"reward.functions.my.module:right": 1.0})
    assert from_tree(rewards).reward.functions["my.module:right"] == 1.0
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


def test_numbers_in_yaml_are_those_of_yaml_1_2() -> None:
    text = "[010, 1:30, 0x10, 1_000, -3, 1.5, 1.0e-3, .inf, 1e3, 0]"
    assert parse_yaml(text) == ["010", "1:30", 16, 1000, -3, 1.5, 0.001, math.inf, "1e3", 0]
    assert from_tree(parse_yaml("train: {steps: 010, prompts_per_step: 8}")).train.steps == 10


def test_a_key_that_is_there_twice_is_refused() -> None:
    """Without a word, a section that is there twice would lose its first settings."""
    with pytest.raises(ValueError, match=r"line 3: train is there twice$"):
        parse_yaml("train: {steps: 3}\nseed: 1\ntrain: {prompts_per_step: 8}\n")
    merged = "a: &a {x: 1}\nb: {<<: *a, x: 2}\n"
    assert parse_yaml(merged)["b"] == {"x": 2}


def test_an_equals_sign_is_a_text_as_others_are() -> None:
    assert parse_yaml("{=: 3, +: =}") == {"=": 3, "+": "="}


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"train": {"stepz": 3}}, "unknown setting train.stepz; nearest: train.steps"),
        ({"train": {"lr": 3}}, "unknown setting train.lr; here it is train.actor_lr"),
        ({"train": {"steps": 0}}, "train.steps = 0: input should be greater than 0"),
        ({"data": {"sources": [{"source": "b.csv", "wieght": 1}]}}, "unknown setting data.sources.0.wieght; nearest: "),
        ({"algorithm": {"kl_coef": 0.1}, "model": {"reference": "none"}}, "model.reference none leaves no "),
    ],
)
def test_python_and_yaml_refuse_settings_with_the_same_line(tree: dict[str, Any], said: str) -> None:
    """Also as a ValueError."""
    lines = []
    for make in (lambda: RunConfig(**tree), lambda: from_tree(tree, "RunConfig")):
        with pytest.raises(ValueError, match=rf"^RunConfig: {said}.*$") as refused:
            make()
        assert type(refused.value) is ConfigError
        lines.append(str(refused.value))
    assert lines[0] == lines[1] and "\n" not in lines[0]


def test_nearest_is_empty_when_no_choice_is_similar() -> None:
    assert nearest("stepz", ["steps", "seed"]) == "; nearest: steps"
    assert nearest("qqq", ["steps", "seed"]) == ""
    assert nearest("nosuch", ["http", "uc"]) == nearest("nope", ["done"]) == ""  # half of the letters are too few


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
    file.write_text(
        "train: {actor_lr: 1e-3}\ndata:\n  params: {p: 1e-3, word: e3, max_terms: 4, ends: [1e-3, {deep: .5e2}]}\n"
        "environment: {name: guess_number, params: {cost: 1e-2}}\nrollout: {engine_options: {swap_space: 1.e-2}}\n"
    )
    config = from_tree(read_yaml(file))
    assert config.train.actor_lr == 0.001
    assert config.data.params == {"p": 0.001, "word": "e3", "max_terms": 4, "ends": [0.001, {"deep": 50.0}]}
    assert (config.environment.params, config.rollout.engine_options) == ({"cost": 0.01}, {"swap_space": 0.01})


def test_a_date_is_text_at_the_start_as_after_a_resume() -> None:
    assert parse_yaml("[2024-01-01, 2024-01-01 10:00:00]") == ["2024-01-01", "2024-01-01 10:00:00"]


def test_a_path_may_begin_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = configured("--model.path", "~/own", "--data.source", "~/p/*.jsonl", "--eval.source", "~/test.csv")
    assert (config.model.path, config.data.source, config.eval.source) == (
        "/home/me/own",
        "/home/me/p/*.jsonl",
        "/home/me/test.csv",
    )


@pytest.mark.parametrize(
    "tree",
    [
        {"data": {"source": "p.jsonl"}},
        {"data": {"source": "hf:a/b"}, "eval": {"source": "./p.jsonl"}},
        {"data": {"source": "*.jsonl"}},
        {"data": {"sources": [{"source": "x.csv"}, {"source": "p.jsonl"}]}},
        {"model": {"path": "./mine"}},
    ],
)
def test_a_path_that_was_meant_to_begin_beside_the_config_is_told_where_it_begins(
    tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs" / "mine").mkdir(parents=True)
    (tmp_path / "configs" / "p.jsonl").touch()
    file = tmp_path / "configs" / "run.yaml"
    file.write_text(yaml.safe_dump(tree))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        rlx.load_config(file)
    assert re.fullmatch(
        rf"{file}: \S+( \d)? \S+ is not in the working folder, {tmp_path}, where relative paths begin, but beside the "
        rf"config: {tmp_path}/configs/(p\.jsonl|\*\.jsonl|mine)",
        str(refused.value),
    )
    monkeypatch.chdir(tmp_path / "configs")
    rlx.load_config(file)


def test_a_path_that_leads_somewhere_or_is_not_of_the_file_is_not_looked_for_beside_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a glob, ** is any number of folders, also none."""
    for name in ("data/a/b/x.jsonl", "data/y.csv", "configs/data/a/z.jsonl", "configs/data/a/z.csv", "configs/p.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    file = tmp_path / "configs" / "run.yaml"
    monkeypatch.chdir(tmp_path)
    for source in ("data/**/*.jsonl", "data/**/*.csv"):
        file.write_text(yaml.safe_dump({"data": {"source": source}}))
        assert rlx.load_config(file).data.source == source
    file.write_text("train: {steps: 3}")
    assert rlx.load_config(file, {"data.source": "p.jsonl"}).data.source == "p.jsonl"
    assert rlx.load_config(file, {"data.sources": [{"source": "p.jsonl"}]}).data.sources[0].source == "p.jsonl"
    file.write_text("data: {source: '**/z.jsonl'}")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with pytest.raises(ConfigError, match="but beside the config"):
        rlx.load_config(file)


def test_a_name_on_the_hub_and_what_is_nowhere_are_not_looked_for_beside_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs" / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    file = tmp_path / "configs" / "run.yaml"
    file.write_text("model: {path: Qwen/Qwen3-0.6B}\ndata: {source: gone.jsonl}\n")
    monkeypatch.chdir(tmp_path)
    assert rlx.load_config(file).data.source == "gone.jsonl"


BOMB = "\n".join(["a0: &a0 [1]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10))]).encode()
"""a few lines that stand for a billion values"""


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
        (BOMB, "not a config: it has more than 100,000 values"),
        (b"a: &a [*a]\n", "not valid YAML: line 1, column 4: found unconstructable recursive node"),
        (b"&a {train: *a}\n", "not valid YAML: line 1, column 1: found unconstructable recursive node"),
        (b"algorithm: {kl_coef: {0: 0.1,\n 0.0: 0.2}}\n", "not valid YAML: line 2: 0.0 is there twice, as 0 before"),
        (b"a: " + b"[" * 300 + b"]" * 300, "nested too deeply"),
        (b"a: {=: 1, =: 2}", "not valid YAML: line 1: = is there twice"),
        (b"{1: a, '1': b}\n", "not valid YAML: line 1: 1 is there twice"),
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


ADAPTERS = ["--model.lora-rank", "8", "--model.lora-targets"]


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
        (["--train.adam-betas", " [0.8, 0.9]"], "train.adam_betas", (0.8, 0.9)),
        (["--rollout.stop", "a, b"], "rollout.stop", ("a", "b")),
        *((["--rollout.stop", mark], "rollout.stop", (mark,)) for mark in ("#", ":", ",", '"', "- x", "1", "no", "\n")),
        *(
            (["--rollout.stop", text], "rollout.stop", (text,))
            for text in ("\nQ", " Q", "a\n", "[", "[a]b", '"a":', ",a")
        ),
        *((["--rollout.stop", text], "rollout.stop", ("A", "B")) for text in ("A,B,", 'A, "B"', ' "A","B"')),
        (["--rollout.stop", "User:,Assistant:"], "rollout.stop", ("User:", "Assistant:")),
        (["--rollout.stop", "1, #"], "rollout.stop", ("1", "#")),
        (["--rollout.stop", '["[END]", "a, b"]'], "rollout.stop", ("[END]", "a, b")),
        (["--rollout.stop", '"\\n", "a, b"'], "rollout.stop", ("\n", "a, b")),
        ([*ADAPTERS, "[q_proj, v_proj]"], "model.lora_targets", ("q_proj", "v_proj")),
        ([*ADAPTERS, "q_proj , v_proj,o_proj"], "model.lora_targets", ("q_proj", "v_proj", "o_proj")),
        (["--rollout.stop", ""], "rollout.stop", ()),
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


@pytest.mark.parametrize("text", [",mlflow", "mlflow, #"])
def test_a_list_that_cannot_be_read_is_shown_as_it_was_typed(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        configured("--tracking.backends", text)
    assert str(refused.value).endswith(f"tracking.backends = '{text}': expected a list, such as [a, b]")


@pytest.mark.parametrize(
    "key",
    [
        *("train.steps", "scaling.use_gpu", "data.params", "model.critic", "algorithm.kl_coef", "name", "storage"),
        *("model.path", "model.critic_path", "tracking.uri", "data.source", "environment.name", "reward.judge_model"),
        "checkpoint.best_by",
    ],
)
def test_an_empty_value_is_no_value(key: str) -> None:
    """As of a shell's variable that is not set; lists and free texts may be empty."""
    option = f"--{key.replace('_', '-')}"
    with pytest.raises(ConfigError, match=f"^{option}: expected a value, found an empty one$"):
        configured(option, "")
    assert configured("--data.system-prompt", "", "--model.lora-targets", "").data.system_prompt == ""


@pytest.mark.parametrize("key", ["storage", "model.path", "data.source", "data.prompt_column", "tracking.experiment"])
def test_an_empty_value_in_a_file_is_refused_where_one_is_needed(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^config: {key} = '': expected a value, found an empty one$"):
        from_tree(with_overrides({}, {key: ""}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("algorithm.value_clip", ""),
        ("checkpoint.keep_last", ""),
        ("train.packing", ""),
        ("seed", numpy.array([1, 2])),
    ],
)
def test_an_empty_value_switches_nothing_off_that_is_on_and_an_array_is_none(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^config: {key} = .*: (input should be a valid|expected a whole number)"):
        from_tree(with_overrides({}, {key: value}))


@pytest.mark.parametrize(
    "key", ["name", "tracking.uri", "checkpoint.init_from", "checkpoint.best_by", "environment.name", "reward.url"]
)
def test_an_empty_value_in_a_file_leaves_an_optional_setting_unset(key: str) -> None:
    """Earlier versions kept some with their runs, and took them for unset."""
    config = from_tree(with_overrides({}, {key: "", "data.system_prompt": "", "reward.answer_pattern": ""}))
    assert flatten(config)[key] is None and config.data.system_prompt == config.reward.answer_pattern == ""


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
        "--algorithm.kl-estimator {k1,k2,k3,abs,k1+,k2+,k3+,abs+}",
        "--scaling.use-gpu BOOL",
    ],
)
def test_help_shows_the_type_of_an_option(shown: str) -> None:
    assert f"  {shown}" in parser().format_help()


def test_help_shows_meaning_and_default() -> None:
    shown = " ".join(parser().format_help().split())
    meaning = "passes over a step's completions; the default is veRL's and OpenRLHF's"
    assert f"--train.ppo-epochs INT {meaning} (default: {RunConfig().train.ppo_epochs})" in shown


def test_stale_completions_are_corrected_unless_configured_otherwise() -> None:
    def correction(**rollout: Any) -> str:
        return from_tree({"rollout": rollout}).resolved_rollout_correction

    assert (correction(), correction(max_staleness=1)) == ("none", "tis")
    for algorithm in ({"rollout_correction": "none"}, {"old_logprobs": "rollout"}):
        assert (
            from_tree({"rollout": {"max_staleness": 1}, "algorithm": algorithm}).resolved_rollout_correction == "none"
        )


def test_generated_sources_without_params_take_those_of_the_section() -> None:
    sums, words = {"source": "reasoning_gym:chain_sum"}, {"source": "reasoning_gym:spell_backward"}
    own, stored = sums | {"name": "own", "params": {"max_terms": 9}}, {"source": "b.csv"}

    def params(*sources: dict[str, Any], **data: Any) -> list[dict[str, Any]]:
        config = from_tree({"data": {"sources": list(sources)} | data})
        again = from_tree(config.model_dump(mode="json"))  # as a resume and --config read it
        assert again.data.parts == config.data.parts and again.data.params == config.data.params
        return [part.params for part in config.data.parts]

    given = {"min_terms": 6, "max_terms": 6}
    assert params(sums, own, stored, params=given) == [given, {"max_terms": 9}, {}]
    assert params(words, stored, params={"max_word_len": 4}) == [{"max_word_len": 4}, {}]
    # Without any, each has the default of its own address.
    assert params(sums, words, own, stored) == params(sums, words, own, stored, params={})
    assert params(sums, words) == [PARAMS, {}]
    assert params(sums, words, params=PARAMS) == [PARAMS, {}]  # as configs of earlier versions have it
    entry = with_overrides({"data": {"sources": [words]}}, {"data.params.max_word_len": 4})
    assert from_tree(entry).data.parts[0].params == {"max_word_len": 4}


def test_sources_take_what_they_do_not_say_from_the_section() -> None:
    given = [
        {"source": "hf:openai/gsm8k/main@train", "weight": 2, "answer_column": "solution"},
        {"source": "reasoning_gym:chain_sum", "num_prompts": 9, "reward": {"task": 2.0}, "answer_pattern": "x"},
        {"source": "s3://bucket/more/of.it.jsonl", "system_prompt": "Add.", "held_out": "h.csv"},
    ]
    tree = {"data": {"sources": given, "system_prompt": "Be brief.", "seed": 5}, "eval": {"num_prompts": 8}}
    config = from_tree(tree)
    first, second, third = config.data.parts
    assert config.data.labels == ["gsm8k", "chain_sum", "of"]
    assert (first.source, first.answer_column, first.params) == (given[0]["source"], "solution", {})
    assert first.system_prompt == second.system_prompt == "Be brief."
    assert (second.num_prompts, second.seed, second.params["max_terms"]) == (9, 5, 3)
    assert third.system_prompt == "Add." and not third.sources
    assert [each.functions for each in config.reward_parts] == [{"task": 1.0}, {"task": 2.0}, {"task": 1.0}]
    assert [each.answer_pattern for each in config.reward_parts] == [None, "x", None]
    held_out = [config.eval.part(config.data, number) for number in range(3)]
    assert [(each.num_prompts, each.source) for each in held_out] == [(3, None), (3, None), (2, "h.csv")]
    assert from_tree(config.model_dump(mode="json")) == config
    alone = from_tree({})
    assert alone.data.parts == [alone.data] and alone.reward_parts == [alone.reward] and alone.data.labels == []


def test_a_key_leads_to_a_setting_or_to_an_entry_of_one() -> None:
    functions = {"numeric": 1.0, "package.module:name": 0.5}
    flat = flatten(from_tree({"reward": {"functions": functions}, "data": {"params": {"max_digits": 2}}}))
    assert setting_at(flat, "train.actor_lr") == flat["train.actor_lr"]
    assert setting_at(flat, "reward.functions") == functions
    assert setting_at(flat, "reward.functions.package.module:name") == 0.5
    assert setting_at(flat, "data.params.max_digits") == 2
    for key in ("reward.functions.format", "data.params.x.y", "data.params.max_digits.x", "train.zzz", "zzz"):
        assert setting_at(flat, key) is None


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_cannot_be_used_is_refused(seed: int) -> None:
    with pytest.raises(ConfigError, match="config: seed = "):
        from_tree({"seed": seed})


def test_an_experiment_has_a_name_that_mlflow_takes() -> None:
    assert from_tree({"tracking": {"experiment": "x" * 500}})
    with pytest.raises(ConfigError, match=r"^config: tracking\.experiment = 'xx.*: string .* at most 500 characters$"):
        from_tree({"tracking": {"experiment": "x" * 501}})
