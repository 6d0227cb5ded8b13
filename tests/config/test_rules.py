"""Rules that few settings reach: each refuses with its line, and lets the neighbouring value through."""

from typing import Any

import pytest

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree
from rlx.config.rules import refuse_if
from rlx.config.sections.algorithm import AlgorithmConfig
from rlx.config.sections.base import flatten
from rlx.config.sections.reward import RewardConfig
from rlx.config.sections.rollout import RolloutConfig
from rlx.config.vllm_options import ENGINE_OWN, OTHER_MODEL, ROUGHER, SAMPLING_OWN, problem

GAME = {"environment": {"name": "treasure", "rewards": "turn"}}
ADAPTER = {"lora_rank": 8, "lora_sync": "adapter"}
PAIR = {"placement": "colocated"}
GPU = {"use_gpu": True}


@pytest.mark.parametrize(
    ("refused", "line", "accepted"),
    [
        (
            {"reward": {"functions": {"environment": 1.0}}},
            "reward.functions has environment, which needs environment.name",
            {"reward": {"functions": {"environment": 1.0}}, "environment": {"name": "treasure"}},
        ),
        (
            GAME | {"algorithm": {"advantage": "grpo"}},
            "environment.rewards turn: algorithm.advantage grpo gives a whole response one number; choose one of gae, ",
            GAME | {"algorithm": {"advantage": "reinforce++"}},
        ),
        (
            GAME | {"algorithm": {"reward_clip": 2.0}},
            "environment.rewards turn does not work with algorithm.reward_clip, which is for whole responses",
            {"environment": {"name": "treasure"}, "algorithm": {"reward_clip": 2.0}},
        ),
        (
            GAME
            | {"data": {"sources": [{"source": "a.jsonl"}, {"source": "b.jsonl", "reward": {"environment": 0.5}}]}},
            "environment.rewards turn: data.sources b gives environment the weight 0.5, not 1",
            GAME
            | {"data": {"sources": [{"source": "a.jsonl"}, {"source": "b.jsonl", "reward": {"environment": 1.0}}]}},
        ),
        (
            GAME | {"reward": {"functions": {"environment": 0.5}}},
            "environment.rewards turn: reward.functions gives environment the weight 0.5, not 1",
            GAME | {"reward": {"functions": {"environment": 1.0}}},
        ),
        (
            GAME | {"reward": {"functions": {"length": 1.0}, "length_target": 4}},
            "environment.rewards turn: reward.functions gives environment the weight 0, not 1",
            GAME | {"reward": {"functions": {"length": 1.0, "environment": 1.0}, "length_target": 4}},
        ),
        (
            {"scaling": {"accelerator_type": "H100"}},
            "scaling.accelerator_type H100 is a kind of GPU: it needs scaling.use_gpu",
            {"scaling": {"accelerator_type": "H100"} | GPU},
        ),
        (
            {"train": {"packing": True}, "scaling": GPU, "model": {"dtype": "float32"}},
            "train.packing: GPUs need model.dtype bfloat16 for it",
            {"train": {"packing": True}, "model": {"dtype": "float32"}},
        ),
        (
            {"parallel": {"sp": 2}, "scaling": GPU | {"num_workers": 2}, "model": {"dtype": "float32"}},
            "parallel.sp (2): GPUs need model.dtype bfloat16 for packed rows",
            {"parallel": {"sp": 2}, "scaling": {"num_workers": 2}, "model": {"dtype": "float32"}},
        ),
        (
            {"parallel": {"sp": 2}, "scaling": {"num_workers": 2}, "train": {"packing": False}},
            "parallel.sp (2) shares packed rows: it needs train.packing",
            {"parallel": {"sp": 2}, "scaling": {"num_workers": 2}},
        ),
        (
            {"parallel": {"sp": 2}, "scaling": {"num_workers": 3}, "train": {"prompts_per_step": 24}},
            "scaling.num_workers (3) must be a multiple of parallel.sp (2)",
            {"parallel": {"sp": 2}, "scaling": {"num_workers": 4}, "train": {"prompts_per_step": 24}},
        ),
        (
            {"parallel": {"sp": 2, "tp": 2}, "scaling": {"num_workers": 4}},
            "parallel.tp (2) does not work with parallel.sp (2): set only one of them",
            {"parallel": {"sp": 2, "tp": 1}, "scaling": {"num_workers": 4}},
        ),
        (
            {"train": {"optimizer": "muon"}, "model": {"lora_rank": 4}},
            "train.optimizer muon does not work with model.lora_rank: use adamw",
            {"train": {"optimizer": "adamw"}, "model": {"lora_rank": 4}},
        ),
        (
            {"model": ADAPTER, "rollout": {"transport": "gloo"}},
            "rollout.transport does nothing with model.lora_sync adapter: leave it at auto",
            {"model": ADAPTER, "rollout": {"transport": "auto"}},
        ),
        (
            {"rollout": PAIR, "scaling": GPU, "model": ADAPTER},
            "model.lora_sync adapter does not work with rollout.placement colocated: a worker and its engine share one",
            {"rollout": PAIR, "scaling": GPU, "model": {"lora_rank": 8}},
        ),
        (
            {"rollout": PAIR | {"num_chunks": 2}, "scaling": GPU},
            "rollout.num_chunks does not work with rollout.placement colocated",
            {"rollout": PAIR | {"num_chunks": 1}, "scaling": GPU},
        ),
        (
            {"rollout": {"min_tokens": 5, "max_tokens": 4}, "algorithm": {"rollout_correction": "tis"}},
            "rollout.min_tokens (5) is more than rollout.max_tokens (4)",
            {"rollout": {"min_tokens": 4, "max_tokens": 4}, "algorithm": {"rollout_correction": "tis"}},
        ),
        (
            {"rollout": {"resources_per_engine": {"GPU": 0.5}, "tensor_parallel": 2}},
            "but rollout.resources_per_engine.GPU is 0.5: set them to the same number",
            {"rollout": {"resources_per_engine": {"GPU": 0.5}, "tensor_parallel": 1}},
        ),
        (
            {"rollout": {"engine_options": {"a-b": 1}}},
            "no argument is called 'a-b'",
            {"rollout": {"engine_options": {"a_b": 1}}},
        ),
        (
            {"environment": {"name": "m:C", "params": {"url": "http://u:secret@host/"}}},
            "an address in it holds a password, token or key, which would be saved with the run",
            {"environment": {"name": "m:C", "params": {"url": "http://host/"}}},
        ),
        (
            {"reward": {"answer_pattern": "x{e}"}},
            "write \\{ for a brace that is text",
            {"reward": {"answer_pattern": "x\\{e}"}},
        ),
        ({"reward": {"functions": {}}}, "at least one reward function is needed", {}),
        ({"environment": {"repeat": 1.01}}, "less than or equal to 1", {"environment": {"repeat": 1}}),
        (
            {"environment": {"name": "treasure", "max_turns": 0}},
            "greater than 0",
            {"environment": {"name": "treasure", "max_turns": 1}},
        ),
        ({"rollout": {"presence_penalty": 2.5}}, "less than or equal to 2", {"rollout": {"presence_penalty": 0}}),
    ],
)
def test_a_rule_refuses_with_its_line_and_lets_its_neighbour_through(
    refused: dict[str, Any], line: str, accepted: dict[str, Any]
) -> None:
    from_tree(accepted)
    with pytest.raises(ConfigError) as raised:
        from_tree(refused)
    assert line in str(raised.value) and "\n" not in str(raised.value) and "secret" not in str(raised.value)


def test_an_adaptive_kl_is_refused_where_a_step_could_end_it_for_ever() -> None:
    def tree(horizon: int) -> dict[str, Any]:
        train = {"prompts_per_step": 4, "samples_per_prompt": 5, "num_minibatches": 1}
        algorithm = {"kl_coef": 0.1, "adaptive_kl_target": 0.1, "adaptive_kl_horizon": horizon}
        return {"train": train, "algorithm": algorithm}

    from_tree(tree(5))  # 20 completions, less than 5 x 5
    with pytest.raises(ConfigError, match=r"adaptive_kl_horizon \(4\) must be more than a fifth of .* \(20\)"):
        from_tree(tree(4))


def test_dapo_compares_rewards_where_an_environment_judges() -> None:
    def filter_by(**tree: Any) -> str:
        return from_tree({"algorithm": {"advantage": "dapo"}} | tree).algorithm.filter_by

    both = {"functions": {"exact_match": 0.0, "environment": 1.0}}
    assert (filter_by(), filter_by(environment="treasure")) == ("correct", "reward")
    assert filter_by(environment="treasure", reward=both) == "correct"
    given = {"advantage": "dapo", "filter_by": "correct"}
    assert filter_by(environment="treasure", algorithm=given) == "correct"
    assert filter_by(environment="treasure", algorithm={"advantage": "dapo", "filter_groups": False}) == "correct"


def test_a_name_alone_is_an_environment_and_its_score_is_the_reward() -> None:
    config = from_tree({"environment": "treasure"})
    assert config.environment.name == "treasure" and config.environment.max_turns == 8
    assert config.reward.functions == {"environment": 1.0}
    assert flatten(config)["environment.name"] == "treasure"


@pytest.mark.parametrize(
    ("given", "altering"),
    [
        ({}, []),
        ({"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}, []),
        ({"top_p": 0.99}, ["rollout.top_p"]),
        ({"top_k": 1, "min_tokens": 1}, ["rollout.top_k", "rollout.min_tokens"]),
        ({"frequency_penalty": -0.1, "repetition_penalty": 0.9}, ["frequency_penalty", "repetition_penalty"]),
        ({"sampling_options": {"repetition_detection": 1, "logit_bias": 2}}, ["rollout.sampling_options.logit_bias"]),
        ({"stop": ["a"], "temperature": 0.5}, []),  # the trainer knows the temperature
    ],
)
def test_settings_that_alter_the_distribution_are_named(given: dict[str, Any], altering: list[str]) -> None:
    expected = [f"rollout.{name.removeprefix('rollout.')}" for name in altering]
    assert RolloutConfig.model_validate(given).altering == expected


def test_every_option_that_rlx_sets_is_refused_with_the_setting_that_has_it() -> None:
    for setting, table in (("engine_options", ENGINE_OWN), ("sampling_options", SAMPLING_OWN)):
        for name, owner in table.items():
            text = problem(RolloutConfig.model_validate({setting: {"free": 1, name: 1}}), "tis")
            assert text == f"rollout.{setting}.{name} is set by {owner}"
    for name in OTHER_MODEL:
        text = problem(RolloutConfig(engine_options={name: 1}), "tis")
        assert text and text.startswith(f"rollout.engine_options.{name} makes the engines another model")
    assert not {*OTHER_MODEL} & {*ENGINE_OWN} and not {*ROUGHER} & {*ENGINE_OWN, *OTHER_MODEL}


@pytest.mark.parametrize("name", ROUGHER)
def test_options_that_make_log_probabilities_rougher_need_a_correction(name: str) -> None:
    rollout = RolloutConfig(engine_options={name: 1})
    assert problem(rollout, "tis") is problem(rollout, "mask") is None
    assert str(problem(rollout, "none")).endswith("set algorithm.rollout_correction to tis or mask")
    assert problem(RolloutConfig(engine_options={"max_num_batched_tokens": 9}), "none") is None


def test_marks_are_reported_beside_the_functions_that_make_them() -> None:
    reward = RewardConfig(functions={"judge": 1.0, "numeric": 0.0}, judge_url="http://h/", judge_model="m")
    assert reward.reported[:2] == ["judge", "numeric"] and len(set(reward.reported)) == len(reward.reported)
    other = reward.part({"numeric": 2.0}, None)
    assert (other.functions, other.answer_pattern) == ({"numeric": 2.0}, reward.answer_pattern)
    assert reward.part(None, "x+").functions == reward.functions and reward.part(None, "x+").answer_pattern == "x+"


def test_a_scale_of_judges_ascends() -> None:
    given = {"functions": {"judge": 1.0}, "judge_url": "http://h/", "judge_model": "m"}
    assert RewardConfig.model_validate(given | {"judge_scale": (0, 0.5)}).judge_scale == (0, 0.5)
    with pytest.raises(ValueError, match="lowest number must be less than the highest"):
        RewardConfig.model_validate(given | {"judge_scale": (1, 1)})


def test_the_overlong_buffer_follows_the_estimator_until_it_is_given() -> None:
    assert AlgorithmConfig(advantage="dapo", overlong_buffer=7).overlong_tokens(100) == 7
    assert AlgorithmConfig(advantage="dapo").overlong_tokens(20480) == 4096  # arXiv 2503.14476 sec. 4.1
    assert AlgorithmConfig(advantage="gae").overlong_tokens(100) == 0


def test_a_condition_that_holds_is_the_error_and_others_are_nothing() -> None:
    for nothing in (False, 0, "", (), None):
        refuse_if(nothing, "no")
    with pytest.raises(ValueError, match=r"^no$"):
        refuse_if("x", "no")
