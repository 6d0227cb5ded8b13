"""What a run that goes on from a checkpoint takes of it, what settings given since change, and what is said of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from shared import OnRanks
from test_loop import Outcome, Stopping, trained
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlx.types import Phase

STILL: dict[str, Any] = {"train__actor_lr": 0.0, "train__critic_lr": 0.0, "train__steps": 1}
MOVING: dict[str, Any] = {
    "algorithm__adaptive_kl_target": 0.1,
    "algorithm__adaptive_kl_horizon": 100,
    "algorithm__kl_coef": 0.02,
    "train__lr_schedule": "linear",
}


def told(outcome: Outcome) -> list[str]:
    return [each for each in outcome.reporter.messages if not isinstance(each, Phase)]


def judge_at(folder: str, path: str) -> str:
    """A sequence classifier with one label and the tokenizer of a model."""
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=0.5, generator=torch.Generator().manual_seed(5))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path).save_pretrained(folder)
    return folder


def with_weights_of(path: str, folder: str, name: str, donor: str, **changes: Any) -> Outcome:
    """One step of a run that starts from another's weights; neither changes any."""
    start = {"checkpoint__init_from": f"{folder}/{donor}/step_000001"}
    return trained(path, f"{folder}/{name}", **{**STILL, **start, **changes})


def started(rank: int, ranks: int, path: str, folder: str) -> dict[str, Outcome]:
    judge, grpo = judge_at(f"{folder}/judge", path), {"algorithm__advantage": "grpo"}
    trained(path, f"{folder}/zero", **STILL)
    trained(path, f"{folder}/judged", **STILL, model__critic_path=judge)
    trained(path, f"{folder}/alone", **STILL, **grpo)
    return {
        "kept": with_weights_of(path, folder, "kept", "zero"),
        "given": with_weights_of(path, folder, "given", "zero", model__critic_path=judge),
        "as before": with_weights_of(path, folder, "as before", "judged", model__critic_path=judge),
        "left out": with_weights_of(path, folder, "left out", "judged"),
        "new": with_weights_of(path, folder, "new", "alone", algorithm__gae_lambda=0.5),
        "new head": with_weights_of(path, folder, "new head", "zero", model__critic="head"),
        "none": with_weights_of(path, folder, "none", "zero", **grpo),
    }


@pytest.fixture(scope="module")
def starts(on_ranks: OnRanks, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return on_ranks(1, started, str(tiny_model), str(tmp_path_factory.mktemp("starts")))[0]


def test_a_critic_path_that_the_run_of_the_checkpoint_had_not_wins_over_its_critic(starts: dict[str, Outcome]) -> None:
    values = {name: outcome.reporter.metrics[-1].get("value/std") for name, outcome in starts.items()}
    assert values["kept"] == 0 and values["given"] > 0.1
    assert values["as before"] == values["left out"] == values["given"]


def test_a_critic_that_the_checkpoint_lacks_is_told_with_what_warns_of_one_that_says_0(
    starts: dict[str, Outcome], tiny_model: Path
) -> None:
    said = {name: told(outcome) for name, outcome in starts.items()}
    begins = "step_000001 has no critic of this kind: it starts from "
    assert starts["new"].reporter.metrics[-1]["value/std"] == 0
    first, second = said.pop("new")
    assert first == f"{begins}{tiny_model}"
    assert second.startswith("warning: algorithm.gae_lambda 0.5 with rollout.max_tokens 6: ")
    assert said.pop("new head") == [f"{begins}a new value head"]
    (other,) = said.pop("given")
    assert other.startswith("the critic starts from model.critic_path ") and other.endswith(", not from step_000001")
    assert not any(said.values())


def resumed(rank: int, ranks: int, path: str, folder: str) -> list[Outcome]:
    """A run that stops after two steps; what continues it with other settings, and that once more."""
    trained(path, folder, Stopping(), **MOVING)
    other = MOVING | {"algorithm__kl_coef": 0.5}
    longer = trained(path, folder, Stopping(), **other, train__steps=8)
    return [longer, trained(path, folder, Stopping(), **other, train__steps=8)]


@pytest.fixture(scope="module")
def resumes(on_ranks: OnRanks, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    return on_ranks(1, resumed, str(tiny_model), str(tmp_path_factory.mktemp("resumes")))[0]


def test_an_adaptive_coefficient_begins_again_at_a_number_that_was_given_since(resumes: list[Outcome]) -> None:
    coefs = {row["step"]: row["kl/coef"] for outcome in resumes for row in outcome.reporter.metrics}
    assert coefs.pop(2) < 0.02 and coefs[3] == 0.5
    now = 0.5
    for coef in coefs.values():  # the KL is far above its target: 1 + 0.2 * 8 completions / 100
        assert coef == pytest.approx(now)
        now *= 1.016


def test_learning_rates_that_jump_with_the_last_step_are_told_once(resumes: list[Outcome]) -> None:
    assert [told(each) for each in resumes] == [
        [
            "warning: train.steps is 8, it was 4: with train.lr_schedule linear the learning rates jump up here, to "
            "what a run of 8 steps has"
        ],
        [],
    ]
