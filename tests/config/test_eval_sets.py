"""eval.sets: what follows from their settings, and what is refused."""

import re
from typing import Any

import pytest

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree
from rlx.config.run import RunConfig
from rlx.tracking.metrics import check_known, evaluated, meaning


def config(*sets: dict[str, Any], **evaluation: Any) -> RunConfig:
    return from_tree({"eval": {"sets": list(sets), **evaluation}, "data": {"answer_column": "solution"}})


def test_unset_settings_are_those_of_eval_data_and_reward() -> None:
    own = {"name": "aime", "source": "aime.jsonl", "every": 50, "num_prompts": 30, "answer_pattern": "x"}
    made = config({"name": "held"}, own, every=20)
    held, aime = made.eval.sets
    assert (made.eval.of(held).every, made.eval.of(held).num_prompts, held.samples) == (20, 256, 4)
    assert (made.eval.of(aime).every, made.eval.of(aime).num_prompts) == (50, 30)
    data = aime.prompts(made.data)
    assert (data.source, data.params, data.answer_column) == ("aime.jsonl", {}, "solution")
    part, reward = made.eval.own_parts(made.data, made.reward)["eval.sets aime"]
    assert part == data and reward.answer_pattern == "x" and reward.functions == made.reward.functions
    read = {"expected_pattern": "#### (.+)", "prompt_template": "{a}{b}", "source": "gsm8k.jsonl", "system_prompt": "S"}
    sums = {"name": "s", "source": "reasoning_gym:chain_sum"}
    made_of_file = from_tree({"data": read, "eval": {"sets": [sums]}})
    data = made_of_file.eval.sets[0].prompts(made_of_file.data)
    assert (data.expected_pattern, data.prompt_template, data.system_prompt) == (None, None, "S")
    cadences = {name: made.eval.every_of(name) for name in ("eval/aime/reward", "eval/held/avg_at_4", "eval/reward")}
    assert cadences == {"eval/aime/reward": 50, "eval/held/avg_at_4": 20, "eval/reward": 20}


@pytest.mark.parametrize(
    ("samples", "counts"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12])]
)
def test_k_doubles_up_to_the_number_of_samples(samples: int, counts: list[int]) -> None:
    (each,) = config({"name": "a", "samples": samples}).eval.sets
    voted = [f"maj_at_{samples}"] * (samples > 1)
    names = [f"avg_at_{samples}", *(f"pass_at_{k}" for k in counts), *voted, "reward", "length"]
    assert (each.counts, each.metrics) == (counts, [f"eval/a/{name}" for name in names])


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        ([{"name": "a"}, {"name": "a"}], "two are called a: give each a name of its own"),
        ([{"name": "ema"}], "the name ema has another meaning in metrics"),
        ([{"name": "a b"}], "should match pattern"),
        ([{"source": "a.jsonl"}], "is missing"),
        ([{"name": "a", "temperature": 0}], "at temperature 0 all samples are alike: set samples to 1"),
        ([{"name": "a", "answer_column": "x"}], "answer_column does nothing without a source of its own"),
        ([{"name": "a", "num_prompts": 257}], r"without a source it has the eval.num_prompts \(256\) held-out prompts"),
        ([{"name": "a", "sampels": 2}], "unknown setting eval.sets.0.sampels; nearest: eval.sets.0.samples$"),
        ([{"name": "a", "reward": {"numeric": 1}}], "eval.sets a: reward.functions has no 'numeric'"),
        ([{"name": "a", "source": "b.jsonl", "params": {"x": 1}}], "eval.sets a: data.params are for reasoning_gym"),
    ],
)
def test_what_does_nothing_or_contradicts_is_refused(sets: list[dict[str, Any]], line: str) -> None:
    with pytest.raises(ConfigError, match=line) as caught:
        config(*sets)
    assert "\n" not in str(caught.value)


def test_every_metric_has_a_meaning_and_a_name_that_mlflow_takes() -> None:
    made = config({"name": "a.b-c_1", "samples": 6})
    names = evaluated(made.eval, made.data, averaged=True)
    assert {"eval/accuracy", "eval/ema/length", "eval/a.b-c_1/pass_at_6", "eval/a.b-c_1/maj_at_6"} <= set(names)
    for name in (*names, "eval/a.b-c_1/pass_at_4_se", "eval/a.b-c_1/reward_se"):
        assert meaning(name) and re.fullmatch(r"[/\w.\- ]+", name)  # as mlflow.utils.validation has it
    assert meaning("eval/a/best_at_4") is None and meaning("eval/a/b/avg_at_4") is None


def test_the_best_checkpoint_is_by_a_metric_that_there_is() -> None:
    made = from_tree({"checkpoint": {"best_by": "eval/a/pass@4"}, "eval": {"sets": [{"name": "a"}]}})
    assert made.checkpoint.best_by == "eval/a/pass_at_4"
    names = evaluated(made.eval, made.data, averaged=False)
    for name in ("eval/a/pass_at_4", "reward/mean", "kl/ref", "reward/my_module:score"):
        check_known(name, names)
    with pytest.raises(ConfigError, match=r"^checkpoint.best_by eval/a/pass_at_8: .*; nearest: eval/a/pass_at_4$"):
        check_known("eval/a/pass_at_8", names)
    with pytest.raises(ConfigError, match=r"^checkpoint.best_by rewrd/mean: .*; nearest: reward/mean$"):
        check_known("rewrd/mean", names)
    with pytest.raises(ConfigError, match=r"^checkpoint.best_by eval/ema/accuracy: "):
        check_known("eval/ema/accuracy", names)
