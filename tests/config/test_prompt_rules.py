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
