"""Evaluations: outcomes and metrics by hand on one rank and on two; whole runs with eval.sets and without."""

import math
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from shared import OnRanks
from test_loop import STEPS, Outcome, Stopping, trained, unmeasured

from rlx.config.loading import from_tree
from rlx.config.sections.data import EvalSetConfig
from rlx.config.sections.reward import RewardConfig
from rlx.mesh import Mesh
from rlx.samples import evaluations
from rlx.samples.evaluations import EvaluationFile, Outcomes
from rlx.storage.addresses import open_storage
from rlx.tracking.metrics import meaning
from rlx.training.evaluation.evaluate import record_outcomes, unread_answers
from rlx.training.evaluation.outcomes import eval_metrics, gather_outcomes
from rlx.training.evaluation.sets import QuestionSet, set_sampling
from rlx.training.setup.rollouts import sampling_of
from rlx.types import Completion, Episode, Observation, Prompt, Sampling, ScoredCompletion

SET = EvalSetConfig(name="sums", samples=3)
# The answers to each of three questions, of which "4" is right; the number is their length.
ANSWERS: list[list[tuple[str | None, int]]] = [
    [("4", 1), ("4", 2), ("5", 3)],
    [("5", 1), ("4", 1), ("6", 1)],
    [(None, 4), (None, 4), (None, 4)],
]


def scored(row: int) -> list[ScoredCompletion]:
    prompt = Prompt(row, (7, row), f"question {row}", "4", source=row % 2)
    return [
        ScoredCompletion(
            Completion(prompt, sample, (9,) * length, (), True, version=0),
            score=length / 4,
            is_correct=answer == "4",
            scores_by_function={},
            answer=answer,
        )
        for sample, (answer, length) in enumerate(ANSWERS[row])
    ]


def asked(rank: int, ranks: int) -> tuple[Outcomes, dict[str, float]]:
    """What a rank knows of the three questions, of which it has every `ranks`-th."""
    own: Any = {"prompts": [], "samplings": [None] * 3, "score": None, "every": 1, "settings": SET}
    trainer: Any = SimpleNamespace(mesh=Mesh.of("cpu", 1), device=torch.device("cpu"))
    answers = [each for row in range(rank, 3, ranks) for each in scored(row)]
    outcomes = gather_outcomes(trainer, QuestionSet(name="sums", size=3, labels=["a", "b"], **own), answers)
    return outcomes, eval_metrics(SET, outcomes)


def error(*values: float) -> float:
    """The standard error of three questions' mean."""
    mean = sum(values) / 3
    return math.sqrt(sum((value - mean) ** 2 for value in values) / 2 / 3)


BY_HAND = {
    "avg_at_3": (2 / 3, 1 / 3, 0.0),
    "pass_at_1": (2 / 3, 1 / 3, 0.0),
    "pass_at_2": (1.0, 1 - 1 / 3, 0.0),  # of three pairs one has two wrong answers
    "pass_at_3": (1.0, 1.0, 0.0),
    "maj_at_3": (1.0, 1 / 3, 0.0),
    "reward": (2 / 4, 1 / 4, 1.0),
    "length": (2.0, 1.0, 4.0),
}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_outcomes_and_metrics_by_hand_on_any_ranks(ranks: int, on_ranks: OnRanks) -> None:
    results = on_ranks(ranks, asked)
    outcomes, metrics = results[0]
    assert all(each[1] == metrics for each in results)  # to the last bit
    expected = {f"eval/sums/{name}": sum(values) / 3 for name, values in BY_HAND.items()}
    expected |= {f"eval/sums/{name}_se": error(*values) for name, values in BY_HAND.items()}
    assert metrics == pytest.approx(expected, abs=1e-12)
    assert outcomes.right.tolist() == [[True, True, False], [False, True, False], [False] * 3]
    assert outcomes.scores.tolist() == [[0.25, 0.5, 0.75], [0.25] * 3, [1.0] * 3]
    assert outcomes.lengths.tolist() == [[1, 2, 3], [1, 1, 1], [4, 4, 4]]
    checksums = [zlib.crc32(np.array([7, row], np.int32).tobytes()) for row in range(3)]
    names = [f"{label}/{row}/{crc:08x}" for row, (label, crc) in enumerate(zip("aba", checksums, strict=True))]
    assert outcomes.questions == names


def recorded(rank: int, ranks: int) -> list[dict[str, float]]:
    """The metrics of the three questions in each evaluation, without an environment and with one; see `episode`."""
    answers = [
        replace(each, completion=replace(each.completion, episode=episode(each.completion)))
        for row in range(rank, 3, ranks)
        for each in scored(row)
    ]
    collector: Any = SimpleNamespace(keep_answers=lambda *given: None)
    found = []
    for name in PREFIXES:
        own: Any = {"prompts": [], "samplings": [None] * 3, "score": None, "every": 1, "labels": ["a", "b"]}
        questions = QuestionSet(name=name, size=3, settings=SET if name == "sums" else None, **own)
        for environment in (None, "game"):
            config = SimpleNamespace(environment=SimpleNamespace(name=environment), data=SimpleNamespace(labels=[]))
            here = {"mesh": Mesh.of("cpu", 1), "device": torch.device("cpu"), "aggregates": {}}
            trainer: Any = SimpleNamespace(config=config, step=1, **here)
            found.append(record_outcomes(trainer, collector, questions, answers))
    return found


def episode(completion: Completion) -> Episode:
    """One whose environment has failed, for two of the three answers to question 1."""
    fails = completion.prompt.id == 1 and completion.sample > 0
    return Episode(Observation(), (), failure="raised OSError" if fails else "")


PREFIXES = {"held_out": "eval", "ema": "eval/ema", "sums": "eval/sums"}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_episodes_whose_environment_failed_are_counted(ranks: int, on_ranks: OnRanks) -> None:
    results = on_ranks(ranks, recorded)
    assert all(each == results[0] for each in results)
    for prefix, plain, found in zip(PREFIXES.values(), results[0][::2], results[0][1::2], strict=True):
        name = f"{prefix}/failed_fraction"
        assert meaning(name) and name not in plain
        assert found == plain | {name: pytest.approx(2 / 9)}


def test_a_resume_knows_which_share_of_a_set_had_failed() -> None:
    config = from_tree({"eval": {"sets": [{"name": "sums"}]}}).eval
    known = {"eval/failed_fraction": 0.1, "eval/sums/failed_fraction": 0.2}
    assert config.still_measured(known | {"eval/gone/failed_fraction": 0.3}) == known


def test_one_question_has_no_standard_error() -> None:
    grid = np.array([[1.0, 0.0]])
    alone = Outcomes(("a",), np.array([0]), np.array([1]), grid > 0, grid, grid, np.array([0.5]))
    found = eval_metrics(EvalSetConfig(name="x", samples=2), alone)
    assert found["eval/x/avg_at_2"] == 0.5 and not any(name.endswith("_se") for name in found)


def test_a_set_samples_as_training_does_where_it_says_nothing() -> None:
    training = Sampling(0.8, 0.9, 20, 16, (1,), min_p=0.1, stop=("x",))
    unset = set_sampling(EvalSetConfig(name="a"), training)
    assert (unset.temperature, unset.top_p, unset.top_k, unset.min_p, unset.stop) == (0.8, 0.9, 20, 0.1, ("x",))
    scheduled = from_tree({"rollout": {"temperature": {0: 0.9, 5: 0.5}}, "train": {"steps": 10}})
    assert set_sampling(EvalSetConfig(name="a"), sampling_of(scheduled.rollout, ())).temperature == 0.9
    own = set_sampling(EvalSetConfig(name="a", temperature=0.6, top_p=0.95, top_k=-1), training)
    assert (own.temperature, own.top_p, own.top_k, own.logprobs) == (0.6, 0.95, -1, False)
    assert set_sampling(EvalSetConfig(name="a", temperature=0, samples=1), training) == training.greedy


SETS: dict[str, Any] = {
    "eval__sets": [
        {"name": "same", "samples": 3, "num_prompts": 2},
        {"name": "other", "source": "others.jsonl", "every": 3, "samples": 2, "temperature": 0.5},
    ],
    "eval__num_prompts": 3,
    "train__ema_decay": 0.9,
}


def whole_and_resumed(rank: int, ranks: int, path: str, folder: str) -> list[Outcome]:
    """A run with two sets; on one rank also one without, one that stops after two steps, and what continues it."""
    runs = [trained(path, f"{folder}/whole", **SETS)]
    if ranks == 1:
        runs.append(trained(path, f"{folder}/plain", **SETS | {"eval__sets": []}))
        runs.append(trained(path, f"{folder}/stopped", Stopping(), **SETS))
        evaluations.write_outcomes(open_storage(f"{folder}/stopped"), EvaluationFile(3, "other"), NONE)  # killed later
        runs.append(trained(path, f"{folder}/stopped", **SETS))
    return runs


NONE = Outcomes((), *(np.zeros(0, int) for _ in range(2)), *(np.zeros((0, 2)) for _ in range(3)), np.zeros(0))
Whole = tuple[list[Outcome], Path]


@pytest.mark.parametrize(
    ("texts", "accuracy", "pattern", "functions", "said"),
    [
        (["The answer is 15.", "The answer is 1."], 0.0, None, {"task": 1.0}, "1 of 2 answers"),
        (
            ["The answer is 15.", "#### 15"],
            0.0,
            "#### (.+),",
            {"numeric": 1.0},
            "reward.answer_pattern is '#### (.+),'",
        ),
        (["15", "The answer is 15."], 0.5, None, {"task": 1.0}, None),  # as many are right
        (["-15", "150", "3.15", "15.2", "15,000", "15-3"], 0.0, None, {"task": 1.0}, None),
        (["The answer is 15."], 0.0, None, {"length": 1.0}, None),  # nothing tells right from wrong
        ([], 0.0, None, {"task": 1.0}, None),
    ],
)
def test_answers_that_are_not_found_are_told_of(
    texts: list[str], accuracy: float, pattern: str | None, functions: dict[str, float], said: str | None
) -> None:
    reward = RewardConfig(
        answer_pattern=pattern, functions=functions, length_target=3 if "length" in functions else None
    )
    lines = unread_answers([{"completion": text, "answer": "15"} for text in texts], accuracy, reward)
    assert (lines == []) == (said is None)
    assert said is None or said in lines[0]


@pytest.fixture(scope="module")
def runs(on_ranks: OnRanks, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("runs")
    return on_ranks(1, whole_and_resumed, str(tiny_model), str(folder))[0], folder


def of_sets(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith(("eval/same/", "eval/other/"))}


@pytest.mark.slow
def test_training_is_to_the_last_bit_what_it_is_without_sets(runs: Whole) -> None:
    (whole, plain, *_), _ = runs
    without = [{name: row[name] for name in row.keys() - of_sets(row)} for row in whole.reporter.metrics]
    assert [unmeasured(row) for row in without] == [unmeasured(row) for row in plain.reporter.metrics]
    assert whole.reporter.samples == plain.reporter.samples
    assert any("eval/ema/accuracy" in row for row in without)


def test_each_set_has_its_own_cadence_and_all_come_first_and_last(runs: Whole) -> None:
    (whole, *_), _ = runs
    steps = {
        name: [row["step"] for row in whole.reporter.metrics if f"eval/{name}/reward" in row]
        for name in ("same", "other")
    }
    assert steps == {"same": [0, 2, STEPS], "other": [0, 3, STEPS]}
    assert [row["step"] for row in whole.reporter.metrics if "time/eval" in row] == [0, 2, 3, STEPS]
    # A report has the newest values of all sets.
    third, second = whole.reporter.reports[3], whole.reporter.metrics[2]
    assert third["eval/same/reward"] == second["eval/same/reward"]


def test_a_resumed_run_has_the_same_metrics_and_the_same_files(runs: Whole) -> None:
    (whole, _, first, second), folder = runs
    steps = {row["step"]: unmeasured(row) for row in (*first.reporter.metrics, *second.reporter.metrics)}
    assert steps == {row["step"]: unmeasured(row) for row in whole.reporter.metrics}
    files = {each: sorted(Path(folder, each, "evaluations").iterdir()) for each in ("whole", "stopped")}
    names = [path.name for path in files["whole"]]
    assert names == [path.name for path in files["stopped"]]
    assert [path.read_bytes() for path in files["whole"]] == [path.read_bytes() for path in files["stopped"]]
    assert names == sorted(
        f"step_{step:06d}-{name}.parquet"
        for name, at in {"held_out": (0, 2, 4), "ema": (0, 2, 4), "same": (0, 2, 4), "other": (0, 3, 4)}.items()
        for step in at
    )


def test_the_files_give_the_metrics_again(runs: Whole) -> None:
    (whole, *_), folder = runs
    run = open_storage(str(folder / "whole"))
    sets = {each.name: each for each in from_tree({"eval": {"sets": SETS["eval__sets"]}}).eval.sets}
    for file in evaluations.kept_evaluations(run):
        outcomes, row = evaluations.read_outcomes(run, file), whole.reporter.metrics[file.step]
        if file.name in sets:
            assert eval_metrics(sets[file.name], outcomes).items() <= row.items()
            assert outcomes.scores.shape == {"same": (2, 3), "other": (3, 2)}[file.name]
        else:
            prefix = {"held_out": "eval", "ema": "eval/ema"}[file.name]
            assert row[f"{prefix}/reward"] == pytest.approx(outcomes.scores.mean(), abs=1e-12)
            assert outcomes.sources == ("sums",) * 3


def test_the_same_questions_get_the_same_seeds_on_any_ranks(
    runs: Whole, on_ranks: OnRanks, tiny_model: Path, tmp_path: Path
) -> None:
    (whole, *_), _ = runs
    (other,) = on_ranks(2, whole_and_resumed, str(tiny_model), str(tmp_path))[0]
    found = [of_sets(row) for row in other.reporter.metrics]
    assert found == [of_sets(row) for row in whole.reporter.metrics]  # fake engines know seeds and prompts alone
    assert found[0] != found[2]  # each step draws anew
