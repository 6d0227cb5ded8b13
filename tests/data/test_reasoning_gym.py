"""Generated questions and the scorers of their datasets."""

import inspect
import time
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree
from rlx.config.sections.data import DEFAULT_SOURCE, DataConfig, EvalConfig
from rlx.data.reasoning_gym import generated_questions, known_params
from rlx.data.sources import (
    answer_checker,
    check_new_prompts,
    check_source,
    find_source,
    sample_questions,
    set_rows,
    training_and_held_out_rows,
)
from rlx.types import GivenAnswer

SUMS = DataConfig(params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})


def result(question: str) -> int:
    """The value of "... problem: 4 + 1 - 7 =", worked out term by term."""
    first, *rest = question.rpartition(":")[2].rstrip("=").split()
    total = int(first)
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        total += int(term) if sign == "+" else -int(term)
    return total


def test_questions_have_right_answers_and_come_once() -> None:
    rows = list(generated_questions(SUMS, seed=0, size=300))
    assert [int(row["answer"]) for row in rows] == [result(row["question"]) for row in rows]
    questions = [row["question"] for row in rows]
    assert len(set(questions)) == len(questions)
    entries = [row["entry"] for row in rows]
    assert entries == sorted(set(entries)) and entries[0] >= 0 and entries[-1] < 300
    assert len(rows) < 300  # 10 x 10 pairs of digits and two signs: some were drawn twice


def test_an_entry_depends_on_its_seed_alone() -> None:
    wide = DataConfig(params={"min_terms": 4, "max_terms": 4, "min_digits": 4, "max_digits": 4})
    first = {row["entry"]: row["question"] for row in generated_questions(wide, seed=100, size=20)}
    shifted = {row["entry"]: row["question"] for row in generated_questions(wide, seed=105, size=10)}
    assert len(first) == 20
    assert shifted == {i: first[i + 5] for i in range(10)}


def test_the_default_sets_share_no_seed() -> None:
    training, held_out = DataConfig(), EvalConfig()
    assert training.seed + training.num_prompts <= held_out.seed


@pytest.mark.slow
def test_the_datasets_own_scorer_judges() -> None:
    rows = list(generated_questions(SUMS, seed=7, size=5))
    check = answer_checker(SUMS, seed=7, size=5)
    assert check([GivenAnswer(row["answer"], "", row["entry"]) for row in rows]) == [1.0] * 5
    assert max(check([GivenAnswer(str(int(row["answer"]) + 1), row["answer"], row["entry"]) for row in rows])) < 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain_sum", "countdown", "time_intervals"])
def test_a_scorer_gives_garbage_no_full_score_and_never_raises(name: str) -> None:
    garbage = ("", "seven", "nan", "((((", "\x00", "7" * 5000, "__import__('os')")
    check = answer_checker(DataConfig(source=f"reasoning_gym:{name}"), seed=0, size=2)
    scores = check([GivenAnswer(text, "", 1) for text in garbage])
    assert len(scores) == len(garbage) and all(0.0 <= score < 1.0 for score in scores)


def test_an_entry_that_is_not_there_is_an_error_and_no_wrong_answer() -> None:
    with pytest.raises(RuntimeError, match=r"^reasoning_gym:chain_sum: its scorer raised TypeError"):
        answer_checker(SUMS, seed=7, size=5)([GivenAnswer("1", "1", None)])


@pytest.mark.slow
def test_a_hostile_answer_costs_neither_the_others_nor_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scorer of countdown computes what the policy has written."""
    source = DataConfig(source="reasoning_gym:countdown")
    row = next(generated_questions(source, seed=0, size=1))
    check = answer_checker(source, seed=0, size=1)
    hostile = ["9**9**9**9", "(" * 5000, "10**10**8 + 1", "x" * 100_000, "factorial(10**9)"]
    started = time.monotonic()
    scores = check([GivenAnswer(text, "", 0) for text in [*hostile, row["answer"]]])
    assert scores[-1] == 1.0 and max(scores[:-1]) < 1.0
    assert time.monotonic() - started < 60  # without limits it never ends


def test_prompt_files_are_scored_by_exact_match() -> None:
    check = answer_checker(DataConfig(source="prompts.csv"), seed=0, size=1)
    assert check([GivenAnswer(" Paris\n", "Paris", None), GivenAnswer("paris", "Paris", None)]) == [1.0, 0.0]
    assert not find_source("prompts.csv").is_generated
    assert find_source("reasoning_gym:chain_sum").is_generated


def test_no_training_question_is_held_out() -> None:
    training, held_out = training_and_held_out_rows(SUMS, EvalConfig(num_prompts=50))
    assert isinstance(training, list) and isinstance(held_out, list)
    assert held_out == list(generated_questions(SUMS, EvalConfig().seed, 50))
    asked = {row["question"] for row in held_out}
    expected = [row for row in generated_questions(SUMS, SUMS.seed, SUMS.num_prompts) if row["question"] not in asked]
    assert training == expected and training


def test_questions_to_try_a_model_on_need_no_file() -> None:
    of_file = list(sample_questions(DataConfig(source="not_here.csv"), seed=5, size=3))
    assert of_file == list(generated_questions(DataConfig(), seed=5, size=3))
    assert list(sample_questions(SUMS, seed=5, size=3)) == list(generated_questions(SUMS, seed=5, size=3))


def test_only_the_training_source_may_be_generated() -> None:
    check_source("reasoning_gym:chain_sum", SUMS, "data.source")
    with pytest.raises(ConfigError, match=r"^eval\.source reasoning_gym:chain_sum: expected a prompt file; only"):
        check_source("reasoning_gym:chain_sum", SUMS, "eval.source")


@pytest.mark.slow
def test_every_dataset_and_no_other_passes_the_quick_check() -> None:
    for name in DATASETS:
        check_source(f"reasoning_gym:{name}", DataConfig(params={}), "data.source")
    with pytest.raises(ConfigError, match=r"no dataset 'leg_count'; nearest: leg_counting$"):
        check_source("reasoning_gym:leg_count", DataConfig(params={}), "data.source")
    with pytest.raises(ConfigError, match=r"^eval\.sets legs: reasoning-gym has no dataset 'leg_count'"):
        check_source("reasoning_gym:leg_count", DataConfig(params={}), "eval.sets legs")


def test_a_set_has_the_questions_of_its_own_seeds() -> None:
    rows = set_rows(SUMS, EvalConfig(num_prompts=5, seed=123), "sums")
    assert rows == list(generated_questions(SUMS, 123, 5))


def test_the_quick_check_knows_the_parameters_of_every_dataset() -> None:
    unseen = []
    for name, (_, config) in DATASETS.items():
        known = known_params(Path(inspect.getfile(config)).read_text())
        unseen += [] if known else [name]
        assert not known or known == [field.name for field in fields(config) if field.name not in ("seed", "size")]
    assert set(unseen) <= {"composite", "list_functions"}  # the second has none
    assert known_params("x = 1") == []
    with pytest.raises(ConfigError, match=r"^data\.params\.max_digit: chain_sum has no such parameter; nearest: max_d"):
        check_source("reasoning_gym:chain_sum", DataConfig(params={"max_digit": 3}), "data.source")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DataConfig(source="reasoning_gym:chain_sums"), "no dataset 'chain_sums'; nearest: chain_sum"),
        (
            DataConfig(params={"max_digit": 3}),
            "data.params.max_digit: chain_sum has no such parameter; nearest: max_dig",
        ),
        (DataConfig(params={"seed": 3}), "data.params.seed: chain_sum has no such parameter"),
        (DataConfig(params={"min_terms": 5, "max_terms": 2}), "chain_sum refuses them: max_terms must be >= min_terms"),
        (DataConfig(params={"min_terms": "x"}), "chain_sum refuses them: "),
    ],
)
def test_a_bad_dataset_or_parameter_is_one_line(config: DataConfig, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        list(generated_questions(config, seed=0, size=1))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("most", "is_told"), [(30, True), (100_000, False)])
def test_a_task_with_few_questions_is_told_of(most: int, is_told: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Of gcds of numbers up to 30 half of the questions are held out; nearly all that are left have the answer 1."""
    data = DataConfig(source="reasoning_gym:gcd", params={"max_value": most})
    training, _ = training_and_held_out_rows(data, EvalConfig(num_prompts=1000))
    share = sum(row["answer"] == "1" for row in training) / len(training)
    assert (share > 0.8) == is_told
    assert ("56% of its training questions are also held out" in caplog.text) == is_told


@pytest.mark.parametrize(
    ("data", "source", "seed", "said"),
    [
        (
            {"sources": [{"source": DEFAULT_SOURCE, "seed": 5000}]},
            DEFAULT_SOURCE,
            6000,
            r"6000\) .* data\.sources\.0\.source \(5000\): its",
        ),
        (
            {"sources": [{"source": DEFAULT_SOURCE, "num_prompts": 20_000}]},
            DEFAULT_SOURCE,
            10_000,
            r"10000\) .* that of data\.sources\.0",
        ),
        (
            {"sources": [{"source": "hf:p"}, {"source": DEFAULT_SOURCE}]},
            DEFAULT_SOURCE,
            3,
            r"that of data\.sources\.1\.source \(0\)",
        ),
        (
            {},
            DEFAULT_SOURCE,
            4095,
            r"^eval\.sets a: its seed \(4095\) is too close to that of data\.source \(0\): its questions",
        ),
        ({}, DEFAULT_SOURCE, 4096, None),
        ({}, "reasoning_gym:leg_counting", 0, None),
        ({"source": "hf:p"}, DEFAULT_SOURCE, 0, None),
        ({"source": "hf:p"}, "hf:p", None, None),
        ({"sources": [{"source": DEFAULT_SOURCE, "seed": 5000}]}, DEFAULT_SOURCE, 0, None),
    ],
)
def test_the_seeds_of_a_set_are_none_of_its_datasets_training_prompts(
    data: dict[str, Any], source: str, seed: int | None, said: str | None
) -> None:
    config = from_tree({"data": data, "eval": {"sets": [{"name": "a", "source": source, "seed": seed}]}})
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        check_new_prompts(config.data, config.eval)
