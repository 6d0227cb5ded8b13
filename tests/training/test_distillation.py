"""A teacher as the reference: another model that the KL is measured to, and that a student comes near by it alone."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from shared import OnRanks
from test_loop import trained, unmeasured
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlx.config.errors import ConfigError
from rlx.models.tiny import build_tokenizer
from rlx.rollout.base import Output, Request
from rlx.rollout.fake_engine import FakeEngines
from rlx.training.setup.inputs import WeightSource

DISTILLATION: dict[str, Any] = {
    "algorithm__advantage": "reinforce++",
    "algorithm__whiten_advantages": False,
    "algorithm__gamma": 0.0,
    "algorithm__kl_coef": 1.0,
    "reward__functions": {"exact_match": 0.0},
    "reward__length_target": None,
    "data__ptx_source": None,
    "data__ptx_batch": 32,
    "algorithm__ptx_coef": 0.0,
    "train__prompts_per_step": 16,
    "train__samples_per_prompt": 8,
    "train__num_minibatches": 1,
    "train__ppo_epochs": 1,
    "train__actor_lr": 2e-3,
    "train__warmup_steps": 0,
    "eval__every": 0,
}


class DrawingEngines(FakeEngines):
    """Draws completions from the policy itself, with the weights of the newest push."""

    def __init__(self, path: str, weights: WeightSource) -> None:
        super().__init__(self.draw)
        self.lm = AutoModelForCausalLM.from_pretrained(path).eval()
        self.weights = weights

    def push(self, version: int, *, starting: bool = False, midway: bool = False) -> None:
        super().push(version, starting=starting, midway=midway)
        state = {weight.name: weight.parts[0].full_tensor() for weight in self.weights()}  # type: ignore[attr-defined]
        self.lm.load_state_dict(state, strict=False)

    @torch.no_grad()
    def draw(self, request: Request) -> Output:
        ids, said, generator = list(request.prompt), [], torch.Generator().manual_seed(request.seed)
        while len(said) < request.sampling.max_tokens:
            logprobs = self.lm(torch.tensor([ids])).logits[0, -1].log_softmax(0)
            token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
            ids.append(token)
            said.append((token, float(logprobs[token])))
            if token in request.sampling.stop_token_ids:
                break
        tokens, given = zip(*said, strict=True)
        return Output(tokens, given, tokens[-1] in request.sampling.stop_token_ids)


@pytest.fixture(scope="module")
def teacher(tiny_model: Path) -> Path:
    """Another model with the tiny one's tokenizer: its weights with some noise."""
    folder = tiny_model.with_name("teacher")
    lm, generator = AutoModelForCausalLM.from_pretrained(tiny_model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in lm.parameters():
            weight.mul_(1 + 0.5 * torch.randn(weight.shape, generator=generator))
    lm.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


def distilled(rank: int, ranks: int, path: str, teacher: str, folder: str) -> list[list[dict[str, float]]]:
    """A student's steps: to the end, and the last ones again from a checkpoint."""
    settings = DISTILLATION | {"model__reference_path": teacher, "train__steps": 6}
    engines = partial(DrawingEngines, path)
    rows = trained(path, f"{folder}/a", engines_of=engines, **settings).reporter.metrics
    start = {"checkpoint__init_from": f"{folder}/a/step_000004", "checkpoint__init_state": "all"}
    again = trained(path, f"{folder}/b", engines_of=engines, **settings, **start).reporter.metrics
    return [[unmeasured(row) for row in each] for each in (rows, again)]


@pytest.mark.slow  # half a minute
def test_a_student_comes_near_its_teacher_by_the_kl_alone(
    on_ranks: OnRanks, tiny_model: Path, teacher: Path, tmp_path: Path
) -> None:
    ((rows, again),) = on_ranks(1, distilled, str(tiny_model), str(teacher), str(tmp_path))
    kl = [row["kl/ref"] for row in rows[1:]]
    assert sum(kl[:2]) > 0.1 and sum(kl[3:]) / 3 < 0.7 * sum(kl[:2]) / 2, kl
    assert all(row["reward/mean"] == 0 for row in rows[1:])
    assert rows[4:] == again  # also from a checkpoint, the reference is the teacher


def refused(rank: int, ranks: int, path: str, other: str, folder: str) -> str:
    with pytest.raises(ConfigError) as said:
        trained(path, folder, **DISTILLATION, model__reference_path=other)
    return str(said.value)


@pytest.mark.slow
def test_a_teacher_that_numbers_tokens_differently_is_refused(
    on_ranks: OnRanks, tiny_model: Path, tmp_path: Path
) -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(tmp_path)
    (said,) = on_ranks(1, refused, str(tiny_model), str(tmp_path), str(tmp_path / "run"))
    assert said == f"model.reference_path {tmp_path}: its tokenizer is another one than that of {tiny_model}"
