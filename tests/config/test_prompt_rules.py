"""The rules between sources of prompts, their rewards and columns, the curriculum and the sets of evaluations."""

from typing import Any

import pytest

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree

FILE = {"source": "prompts.jsonl"}
OTHER = {"source": "other.jsonl"}


def tree(**sections: Any) -> dict[str, Any]:
    """Settings of a run that asks for right answers to stored questions."""
    return {"reward": {"functions": {"numeric": 1.0, "length": 0.0}, "length_target": 4}} | sections


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"source": "a.csv", "params": {}, "sources": [FILE, OTHER]}, "data.source does nothing with data.sources"),
        (
            {"sources": [FILE, {"source": "old/prompts.jsonl"}]},
            "data.sources: two are called prompts: give each a",
        ),
        ({"sources": [FILE | {"reward": {"numerics": 1}}]}, "data.sources prompts: reward.functions has no 'numerics'"),
        ({"sources": [FILE | {"reward": {"numeric": 0}}]}, "data.sources prompts: at least one reward function must"),
        (
            {"sources": [OTHER, FILE | {"answer_column": "question"}]},
            "data.sources prompts: data.prompt_column and data.answer_column are both",
        ),
        (
            {"sources": [FILE, {"source": "reasoning_gym:chain_sum", "held_out": "h.jsonl"}]},
            "data.sources chain_sum: eval.source, or held_out of a source, is for prompt files",
        ),
        (
            {"sources": [FILE, {"source": "reasoning_gym:chain_sum", "expected_pattern": "x"}]},
            "data.sources chain_sum: data.expected_pattern: reasoning_gym:DATASET has answers that need none",
        ),
        (
            {"params": {"x": 1}, "sources": [FILE, {"source": "reasoning_gym:chain_sum", "params": {}}]},
            "data.params does nothing: no reasoning_gym:DATASET of data.sources is without params of its own: set",
        ),
        (
            FILE | {"params": {}, "expected_pattern": "#### ("},
            "data.expected_pattern = '#### (': not a regular expression",
        ),
    ],
)
def test_sources_that_contradict_something_are_refused(data: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        from_tree(tree(data=data))
    assert line in str(refused.value) and "\n" not in str(refused.value)


def test_rewards_of_sources_alone_are_enough() -> None:
    sources = [FILE | {"reward": {"numeric": 1.0}}, {"source": "reasoning_gym:chain_sum", "reward": {"numeric": 2.0}}]
    config = from_tree(tree(data={"sources": sources}, reward={"functions": {"numeric": 0.0}}))
    assert [part.functions["numeric"] for part in config.reward_parts] == [1.0, 2.0]


JUDGE = {"functions": {"judge": 1.0}, "judge_url": "http://h/v1", "judge_model": "m"}
LENGTH = {"functions": {"numeric": 1.0, "length": 0.5}, "length_target": 4}
NUMERIC = FILE | {"reward": {"numeric": 1.0}}


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        (
            {"reward": LENGTH, "data": {"sources": [NUMERIC, OTHER | {"reward": {"numeric": 2.0}}]}},
            "reward.functions has length, which scores nothing: every one of data.sources has a reward of its own",
        ),
        ({"reward": LENGTH, "data": {"sources": [NUMERIC, OTHER]}}, None),
        (
            {"reward": LENGTH, "data": {"sources": [NUMERIC]}, "eval": {"sets": [{"name": "a"}]}},
            "reward.functions has length, which scores nothing",
        ),
        ({"reward": LENGTH, "data": {"sources": [NUMERIC]}, "eval": {"sets": [OTHER | {"name": "a"}]}}, None),
        (
            {
                "reward": LENGTH,
                "data": {"sources": [NUMERIC]},
                "eval": {"sets": [{"name": "a", "reward": {"length": 1}}]},
            },
            None,
        ),
        (
            {"reward": JUDGE | {"judge_mode": "rank"}, "train": {"samples_per_prompt": 1}},
            "reward.judge_mode rank compares the completions of a prompt, and train.samples_per_prompt is 1: set it to",
        ),
        ({"reward": JUDGE | {"judge_mode": "rank"}, "train": {"samples_per_prompt": 2}}, None),
        ({"reward": JUDGE, "train": {"samples_per_prompt": 1}}, None),
        (
            {
                "reward": JUDGE | {"judge_mode": "rank"},
                "train": {"samples_per_prompt": 1},
                "algorithm": {"advantage": "remax"},  # it is compared with the greedy answer
            },
            None,
        ),
        ({"reward": {"judge_mode": "rank"}}, "reward.judge_mode does nothing without reward.judge_url"),
        ({"reward": {"judge_scale": [0, 1]}}, "reward.judge_scale does nothing without reward.judge_url"),
        ({"reward": {"code_score": "share"}}, "reward.code_score does nothing without code in reward.functions"),
        ({"reward": {"code_cpu_s": 1}}, "reward.code_cpu_s does nothing without code in reward.functions"),
        ({"reward": {"code_score": "share", "functions": {"code": 1}}}, None),
        ({"reward": {"on_timeout": "zero"}}, "reward.on_timeout does nothing without judge or a function of your own"),
        ({"reward": {"on_timeout": "zero", "functions": {"my_rewards:short": 1}}}, None),
        ({"reward": JUDGE | {"on_timeout": "zero"}}, None),
    ],
)
def test_settings_of_rewards_that_do_nothing_are_refused(sections: dict[str, Any], line: str | None) -> None:
    if line is None:
        from_tree(sections)
        return
    with pytest.raises(ConfigError) as refused:
        from_tree(sections)
    assert line in str(refused.value)


def test_programs_are_not_looked_for_with_the_pattern_of_other_sources() -> None:
    functions = {"numeric": 1.0, "code": 0.0}
    coded = {"source": "programs.jsonl", "reward": {"code": 1.0}}
    own = {"source": "own.jsonl", "reward": {"code": 1.0}, "answer_pattern": "(?s)<py>(.*)</py>"}
    tree = {
        "reward": {"functions": functions, "answer_pattern": r"-?\d+"},
        "data": {"sources": [NUMERIC, coded, own]},
        "eval": {"sets": [coded | {"name": "a"}, {"name": "b", "source": "b.jsonl"}]},
    }
    config = from_tree(tree)
    assert [part.answer_pattern for part in config.reward_parts] == [r"-?\d+", None, "(?s)<py>(.*)</py>"]
    sets = config.eval.own_parts(config.data, config.reward)
    assert [reward.answer_pattern for _, reward in sets.values()] == [None, r"-?\d+"]
    single = from_tree({"reward": {"functions": {"code": 1.0}, "answer_pattern": "x"}})
    assert [part.answer_pattern for part in single.reward_parts] == ["x"]  # it is for the programs


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"rollout": {"max_staleness": 1}}, "data.curriculum does not work with rollout.max_staleness"),
        (
            {"algorithm": {"advantage": "grpo", "filter_groups": True}},
            "data.curriculum does not work with algorithm.filter_groups",
        ),
        ({"reward": {"functions": {"length": 1.0}, "length_target": 4}}, "data.curriculum measures right answers"),
    ],
)
def test_a_curriculum_is_refused_where_difficulty_is_unknown(more: dict[str, Any], line: str) -> None:
    data = FILE | {"params": {}, "curriculum": "difficulty"}
    from_tree(tree(data=data))
    with pytest.raises(ConfigError, match=line.replace(".", r"\.")):
        from_tree(tree(data=data, **{key: value for key, value in more.items() if key != "reward"}) | more)


def test_prompts_are_not_filtered_by_right_answers_that_no_reward_judges() -> None:
    length = {"length": 1.0}

    def dapo(functions: dict[str, float], reward: dict[str, float] | None = None, **given: Any) -> dict[str, Any]:
        sources = [OTHER | ({"reward": reward} if reward else {}), {"source": "reasoning_gym:chain_sum"}]
        rewards = {"functions": functions, "length_target": 4}
        return tree(data={"sources": sources}, reward=rewards, algorithm={"advantage": "dapo"} | given)

    said = r"^config: algorithm\.filter_by correct, the default of dapo, measures right answers: name one of task, .*, "
    for wrong in (dapo(length), dapo(length | {"task": 1.0}, length)):
        with pytest.raises(ConfigError, match=rf"{said}or set algorithm\.filter_by to reward$"):
            from_tree(wrong)
    for right in (
        dapo(length | {"task": 0.0}),
        dapo(length, filter_by="reward"),
        dapo(length, filter_groups=False, filter_by="correct"),
        dapo(length, advantage="grpo", filter_groups=True),
    ):
        from_tree(right)


@pytest.mark.parametrize(
    ("each", "line"),
    [
        ({"num_prompts": 300}, "without a source it has the eval.num_prompts (256) held-out prompts"),
        ({"source": "test.jsonl", "reward": {"numerics": 1}}, "reward.functions has no 'numerics'; nearest: numeric"),
        ({"source": "test.jsonl", "reward": {"length": 0}}, "at least one reward function must have a weight"),
        ({"source": "test.jsonl", "answer_column": "question"}, "data.prompt_column and data.answer_column are both"),
    ],
)
def test_a_set_that_contradicts_something_is_refused_with_its_name(each: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        from_tree(tree(data=FILE | {"params": {}}, eval={"sets": [{"name": "held"} | each]}))
    assert "eval.sets held: " in str(refused.value) and line in str(refused.value)


def test_each_source_finds_its_own_expected_answers() -> None:
    sources = [FILE | {"expected_pattern": "#### (.+)"}, OTHER]
    config = from_tree(tree(data={"sources": sources, "expected_pattern": r"\d+"}))
    assert [part.expected_pattern for part in config.data.parts] == ["#### (.+)", r"\d+"]
