"""An update does not depend on how completions are cut into micro-batches or dealt over ranks; its parts by hand."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch
from batches import scored_batch
from shared import OnRanks
from test_policy import PAD
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlx.algorithms.adaptive import AdaptiveKL, RunningScores
from rlx.config import loading
from rlx.config.experiment import over_experiment
from rlx.data import prompts, stream
from rlx.mesh import Mesh
from rlx.models import fsdp, logprobs
from rlx.models.loading import load_policy
from rlx.samples.evaluations import AVERAGED, HELD_OUT, Outcomes
from rlx.storage.checkpoint_files import ModelAndOptimizer
from rlx.training import experience, loop, metrics, trainer, update
from rlx.training.collector import Selection
from rlx.training.evaluation.evaluate import evaluate
from rlx.training.evaluation.sets import QuestionSet
from rlx.training.experience import Experience
from rlx.training.setup import models
from rlx.training.stats import UpdateStats
from rlx.types import Completion, Prompt, ScoredCompletion

# --- one global batch, cut up


def completions() -> list[Completion]:
    """Two samples of each of 8 prompts, of many lengths."""
    generator = torch.Generator().manual_seed(3)

    def tokens(low: int, high: int) -> tuple[int, ...]:
        count = int(torch.randint(low, high, (), generator=generator))
        return tuple(torch.randint(6, 90, (count,), generator=generator).tolist())

    prompts = [Prompt(i, tokens(2, 9), "question", "answer") for i in range(8)]
    drawn = [(prompt, k, tokens(1, 12)) for prompt in prompts for k in range(2)]
    return [Completion(prompt, k, ids, (-2.0,) * len(ids), True, 0) for prompt, k, ids in drawn]


ALONE = {"model.reference": "none", "algorithm.kl_coef": 0.0}
# Every estimator, loss, aggregation, place of the KL, kind and level of importance, role and optional loss.
WAYS: list[dict[str, Any]] = [
    {"algorithm.rollout_correction": "tis", "algorithm.whiten_advantages": False},
    {"algorithm.rollout_correction": "tis", "model.critic": "head", "algorithm.entropy_coef": 0.1},
    {"algorithm.advantage": "grpo", "algorithm.rollout_correction": "mask", "algorithm.kl_estimator": "k1+"},
    # With gspo's own clip, 3e-4, rounding may decide whether a response is clipped.
    {
        "algorithm.advantage": "grpo",
        "algorithm.policy_loss": "gspo",
        "algorithm.clip_low": 0.1,
        "algorithm.clip_high": 0.1,
    },
    {"algorithm.advantage": "dr_grpo", "algorithm.policy_loss": "cispo", "model.lora_rank": 4},
    {"algorithm.advantage": "rloo", "algorithm.aggregation": "sequence_mean", "algorithm.normalize_rewards": True},
    {
        "algorithm.advantage": "reinforce++",
        "algorithm.rollout_correction": "tis",
        "algorithm.rollout_correction_level": "sequence",
    },
    {
        "algorithm.advantage": "reinforce++_baseline",
        "train.gradient_checkpointing": True,
        "train.checkpointed_layers": 0.5,
        "train.ema_decay": 0.5,
    },
    {"algorithm.advantage": "remax", "algorithm.dual_clip": 1.5, **ALONE},
    {
        "algorithm.advantage": "rloo",
        "algorithm.rollout_correction": "mask",
        "algorithm.rollout_correction_level": "sequence",
        **ALONE,
    },
    {
        "algorithm.advantage": "grpo",
        "algorithm.entropy_coef": 0.1,
        "train.ppo_epochs": 2,
        "model.lora_rank": 4,
        **ALONE,
    },
    {
        "model.lora_rank": 4,
        "algorithm.kl_placement": "loss",
        "algorithm.kl_estimator": "abs+",
        "algorithm.reward_clip": 1.5,
    },
    {"algorithm.ptx_coef": 0.5, "data.ptx_source": "x.csv", "data.ptx_batch": 8, "algorithm.target_kl": 1e-9},
    {
        "algorithm.advantage": "grpo",
        "algorithm.policy_loss": "sapo",
        "algorithm.top_entropy_quantile": 0.4,
        "algorithm.exact_entropy": True,
    },
    {
        "algorithm.advantage": "grpo",
        "algorithm.policy_loss": "clip_cov",
        "algorithm.clip_cov_ratio": 0.1,
        "algorithm.clip_cov_low": 0.0,
        "train.ppo_epochs": 2,
        **ALONE,
    },
]


PACKED = {0, 1, 4, 7, 10, 12}
"""the ways with a critic and a value head, adapters, checkpointing, late log-probabilities, and supervised rows"""
FEW = (0, 4, 10, 12)
"""those of them that differ most"""

ANSWERS = pa.table(
    {
        "question": [f"question {i}" for i in range(12)],
        "answer": [str(7**i) for i in range(12)],
        "token_ids": [list(range(6, 8 + i)) for i in range(12)],
    }
)


def trainer_of(path: str, way: dict[str, Any], micro_batch_tokens: int, device: str = "cpu") -> trainer.Trainer:
    """What a rank trains with. Plain gradient descent shows the gradients; Adam would hide their scale."""
    tree = {
        "train": {"ppo_epochs": 1, "num_minibatches": 2, "warmup_steps": 0, "micro_batch_tokens": micro_batch_tokens},
        "algorithm": {"kl_coef": 0.1},
        "rollout": {"temperature": 0.7},
    }
    config = loading.from_tree(loading.with_overrides(over_experiment(tree), way))
    mesh = Mesh.of(device, config.parallel.tp, config.parallel.sp)
    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":  # of a GPU that is in the settings alone
            patch.setattr(models, "spare_numbers", lambda scaling: 2**40)
        made = models.build_models(config, path, mesh.mesh)
    parts = {
        name: ModelAndOptimizer(m.model, torch.optim.SGD(m.model.parameters())) for name, m in made.trained.items()
    }
    answers = None
    if config.data.ptx_source:
        rows = stream.PromptStream(stream.TableRows(ANSWERS), 0, mesh.dp_rank, mesh.dp_size)
        tokenizer = prompts.load_tokenizer(path)
        end = (tokenizer.eos_token_id,)
        answers = trainer.SupervisedRows(rows, tokenizer, end, config.rollout.max_tokens, config.data.ptx_batch)
    return trainer.Trainer(
        config=config,
        mesh=mesh,
        device=torch.device(device),
        models=parts,
        reference=made.reference,
        base_lrs={name: [0.1] for name in parts},
        kl=AdaptiveKL(config.algorithm.kl_coef, None, 1.0),
        reward_stats=RunningScores(),
        ema=trainer.initial_ema(config.train, parts["policy"].model),
        supervised=answers,
        kept_unsharded=made.kept_unsharded,
    )


def flat(stats: UpdateStats) -> dict[str, Any]:
    """The numbers of an update by one name each."""
    norms = {f"grad_norm/{name}": norm for name, norm in stats.grad_norms.items()}
    first = {f"first/{name}": total for name, total in stats.first.sums.items()}
    counts = {"passes": stats.passes, "updates": stats.optimizer_steps, "positions": stats.positions}
    return {**stats.losses.sums, **first, **norms, **counts, "updated": stats.losses.tokens}


def updated(
    rank: int, ranks: int, path: str, way: dict[str, Any], micro_batch_tokens: int, device: str = "cpu"
) -> dict[str, Tensor]:
    """This rank's prompts through steps 4 to 7 of the loop, twice: summed statistics, and all weights after it."""
    run = trainer_of(path, way, micro_batch_tokens, device)
    replicas = run.mesh.dp_size
    run.base_lrs = {name: [0.03] for name in run.base_lrs}  # larger steps show rounding in the second
    own = [c for c in completions() if c.prompt.id % replicas == run.mesh.dp_rank]
    judged = [ScoredCompletion(c, float(c.prompt.id % 3 + c.sample), True, {}, greedy_score=0.5) for c in own]
    start = scored_batch(judged, PAD).to(run.device)
    for _ in range(2):  # in the second round the policy is no longer the reference
        wave = torch.sin(start.groups[:, None] + torch.arange(start.mask.shape[1], device=device))
        said = loop.compute_logprobs(run, start, all_rows=True).logprobs
        batch = replace(start, rollout_logprobs=said + 0.3 * wave * start.mask)
        batch = loop.compute_logprobs(run, batch)
        batch, kl_sums = loop.compute_advantages(run, batch)
        batch, stats = update.update(run, batch)
        sums = run.sum_over_ranks(flat(stats) | kl_sums | {"entropy": (batch.entropy * batch.mask).sum()})
    state = {f"{n}.{k}": p for n, t in run.models.items() for k, p in t.model.named_parameters()}
    state |= {f"average.{name}": p for name, p in run.ema.items()}
    result = {name: p.full_tensor().detach().cpu() for name, p in state.items()}
    assert ("ptx/loss" in sums) == (run.supervised is not None)
    everywhere = ("grad_norm/", "updates", "passes")  # what each rank knows of the whole
    shares = {name: value / replicas if name.startswith(everywhere) else value for name, value in sums.items()}
    del shares["positions"]  # padding does depend on how rows are cut
    return result | {name: torch.tensor(value) for name, value in shares.items()}


def refuse(*_: object) -> None:
    raise AssertionError("the policy was asked")


def by_engines(rank: int, ranks: int, path: str) -> tuple[Experience, Experience, dict[str, float]]:
    """What the policy says of completions; the old log-probabilities if engines said something else; a step on that."""
    ways = ({}, {"algorithm.old_logprobs": "rollout", **ALONE})
    runs = [trainer_of(path, way | {"train.num_minibatches": 1}, 60) for way in ways]
    start = scored_batch([ScoredCompletion(c, float(c.sample), True, {}) for c in completions()], PAD)
    own = loop.compute_logprobs(runs[0], start)
    runs[1].policy.forward = refuse
    theirs = loop.compute_logprobs(runs[1], replace(start, rollout_logprobs=own.logprobs - 0.1 * own.mask))
    del runs[1].policy.forward
    return (
        own,
        theirs,
        runs[1].sum_over_ranks(flat(update.update(runs[1], loop.compute_advantages(runs[1], theirs)[0])[1])),
    )


@pytest.mark.slow
def test_the_engines_logprobs_can_be_the_old_ones(on_ranks: OnRanks, tiny_model: Path) -> None:
    own, theirs, sums = on_ranks(1, by_engines, str(tiny_model))[0]
    torch.testing.assert_close(theirs.logprobs, own.logprobs - 0.1 * own.mask)
    torch.testing.assert_close(theirs.entropy, -theirs.logprobs)
    assert sums["policy/ratio"] / sums["updated"] == pytest.approx(math.exp(0.1), abs=1e-5)
    gap = math.exp(0.1) - 1 - 0.1  # k3: r - 1 - log r
    assert sums["first/policy/approx_kl"] / sums["updated"] == pytest.approx(gap, abs=1e-5)


def late_or_not(rank: int, ranks: int, path: str, way: dict[str, Any], late: bool) -> tuple[Experience, dict[str, Any]]:
    """The same completions through steps 4 to 7 of the loop: the batch after them; weights and statistics."""
    run = trainer_of(path, way, 60)
    assert run.defers_logprobs == late
    own = [c for c in completions() if c.prompt.id % ranks == rank]
    judged = [ScoredCompletion(c, float(c.prompt.id % 3 + c.sample), True, {"task": 0.0}) for c in own]
    start = scored_batch(judged, PAD)
    said = loop.compute_logprobs(run, start, all_rows=True).logprobs
    start = replace(start, rollout_logprobs=said - 0.3 * torch.sin(torch.arange(said.shape[1])) * start.mask)
    forward = run.policy.forward
    if late and run.config.train.num_minibatches == 1:
        run.policy.forward = refuse
    batch = loop.compute_logprobs(run, start)
    run.policy.forward = forward
    first, *others = experience.minibatches(batch, run.config.train.num_minibatches)
    assert bool(first.logprobs.any()) != late
    assert all(other.logprobs.any() for other in others)
    batch, kl_sums = loop.compute_advantages(run, batch)
    batch, stats = update.update(run, batch)
    sums: dict[str, Any] = run.sum_over_ranks(flat(stats))
    selection = Selection(len(judged), run.config.train.samples_per_prompt, run.mesh, filtered=False, greedy=False)
    selection.add(judged)
    selection.seconds = 1.0
    seconds = {"time/rollout": 1.0, "time/update": 1.0, "time/step": 2.0}
    sums |= metrics.summarize(run, selection, batch, stats, kl_sums, seconds)[0]
    del sums["memory/peak_gib"]
    return batch, sums | {name: p.full_tensor().detach() for name, p in run.policy.named_parameters()}


def both(rank: int, ranks: int, path: str, way: dict[str, Any]) -> list[tuple[Experience, dict[str, Any]]]:
    with pytest.MonkeyPatch.context() as patch:
        late = late_or_not(rank, ranks, path, way, True)
        patch.setattr(trainer.Trainer, "defers_logprobs", False)
        return [late_or_not(rank, ranks, path, way, False), late]


@pytest.mark.slow
@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("importance", ["none", "tis"])
def test_the_first_pass_of_an_update_gives_old_logprobs_as_one_before_it(
    on_ranks: OnRanks, tiny_model: Path, minibatches: int, importance: str
) -> None:
    way = {"train.num_minibatches": minibatches, "train.ppo_epochs": 2, "algorithm.rollout_correction": importance}
    (before, expected), (late, found) = on_ranks(
        2, both, str(tiny_model), way | {"algorithm.advantage": "grpo", **ALONE}
    )[0]
    # Both ranks have trained on them; rank 0 has its own again, in their order.
    assert late.groups.tolist() == [group for group in range(0, 8, 2) for _ in range(2)]
    torch.testing.assert_close(late.newest_logprobs, before.newest_logprobs, atol=1e-5, rtol=0, equal_nan=True)
    assert torch.equal(late.newest_logprobs.isnan() & (late.mask == 1), torch.zeros_like(late.mask).bool())
    assert ((late.newest_logprobs - late.logprobs)[late.mask == 1].abs() > 1e-3).any()  # of the second epoch
    torch.testing.assert_close(late.logprobs, before.logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(late.ref_logprobs, before.ref_logprobs, atol=1e-5, rtol=0)
    first = len(late.scores) // minibatches
    torch.testing.assert_close(late.entropy[:first], -late.logprobs[:first])
    torch.testing.assert_close(late.entropy[first:], before.entropy[first:])
    assert expected["updates"] == 2 * 2 * minibatches  # on two ranks
    if minibatches == 1:  # nothing has an exact one
        del found["policy/entropy"], expected["policy/entropy"]
    torch.testing.assert_close(found, expected, atol=3e-6, rtol=1e-5)


def scores_late(rank: int, ranks: int, path: str) -> list[bool]:
    grpo = {"algorithm.advantage": "grpo", **ALONE}
    others = ({"algorithm.advantage": "gae"}, {"model.reference": "copy"}, {"rollout.num_chunks": 2})
    ways = (grpo, *(grpo | other for other in others), grpo | {"algorithm.old_logprobs": "rollout"})
    return [trainer_of(path, way, 60).defers_logprobs for way in ways]


def test_nothing_is_scored_late_that_is_asked_for_before(on_ranks: OnRanks, tiny_model: Path) -> None:
    assert on_ranks(1, scores_late, str(tiny_model))[0] == [True, False, False, False, False]


def each_way(rank: int, ranks: int, path: str, numbers: Sequence[int]) -> list[dict[str, Tensor]]:
    """In each way, all of a mini-batch at once and then a few completions, and of these a few tokens, at a time.

    In some ways these completions are packed.
    """
    results = []
    for number in numbers:
        for tokens, logprobs.CHUNK, fsdp.UNIT in ((100_000, 2**26, 2**27), (45, 700, 1)):
            packing = tokens == 45 and number in PACKED
            results.append(updated(rank, ranks, path, WAYS[number] | {"train.packing": packing}, tokens))
    return results


@pytest.fixture(scope="module")
def on_one_rank(on_ranks: OnRanks, tiny_model: Path) -> list[dict[str, Tensor]]:
    return on_ranks(1, each_way, str(tiny_model), range(len(WAYS)))[0]


@pytest.mark.parametrize("number", range(len(WAYS)), ids=[" ".join(map(str, way.values())) for way in WAYS])
def test_an_update_does_not_depend_on_micro_batches(
    number: int, on_one_rank: list[dict[str, Tensor]], tiny_model: Path
) -> None:
    whole, cut = on_one_rank[2 * number : 2 * number + 2]
    torch.testing.assert_close(cut, whole, atol=3e-6, rtol=1e-5)
    before = dict(load_policy(str(tiny_model), head="zero").named_parameters())
    for name, after in whole.items():  # nothing was equal only because nothing moved
        start = before.get(name.removeprefix("policy.").replace(".base_layer", ""), torch.zeros(()))
        frozen = WAYS[number].get("model.lora_rank", 0) > 0 and "lora_" not in name and "value_head" not in name
        if name.startswith("policy.") and frozen:
            assert torch.equal(after, start), name
        elif name.startswith("policy."):
            assert (after - start).abs().max() > 1e-5, name


@pytest.mark.parametrize(
    ("numbers", "ranks"),
    [(FEW, 2), *(pytest.param(range(len(WAYS)), ranks, marks=pytest.mark.slow) for ranks in (2, 4))],
    ids=["2", "all-2", "all-4"],
)
def test_an_update_does_not_depend_on_the_number_of_ranks(
    numbers: Sequence[int], ranks: int, on_ranks: OnRanks, on_one_rank: list[dict[str, Tensor]], tiny_model: Path
) -> None:
    expectations = [(WAYS[n], on_one_rank[2 * n + cut]) for n in numbers for cut in (0, 1)]
    for rank, results in enumerate(on_ranks(ranks, each_way, str(tiny_model), numbers)):
        for (way, expected), found in zip(expectations, results, strict=True):
            where = f"rank {rank}, {way}"
            torch.testing.assert_close(found, expected, atol=3e-6, rtol=1e-5, msg=lambda m, w=where: f"{w}: {m}")


def reduced_each_pass(rank: int, ranks: int, path: str) -> list[tuple[list[bool], dict[str, Tensor]]]:
    """Whether a first micro-batch leaves gradients in shards, and the weights after both, without and with."""
    found = []
    for run in (trainer_of(path, {"train.num_minibatches": 1}, 60) for _ in range(2)):
        run.reduced_each_pass = frozenset({"policy", "critic"} if found else ())
        run.kept_unsharded = frozenset()  # so that parameters are shards between passes
        own = [c for c in completions() if c.prompt.id % ranks == rank]
        start = scored_batch([ScoredCompletion(c, float(c.prompt.id + c.sample), True, {}) for c in own], PAD)
        batch, _ = loop.compute_advantages(run, loop.compute_logprobs(run, start))
        (micros,), (size,) = run.micro_batches([batch]), update.denominators(run, [batch])
        assert len(micros) > 1
        run.set_gradient_sync(last=False)
        update.backward(run, micros[0], size)
        reduced = [p.grad is not None for t in run.models.values() for p in t.model.parameters()]
        update.accumulate(run, micros[1:], size, 0)
        update.optimizer_step(run, 0)
        weights = {f"{n} {k}": p for n, t in run.models.items() for k, p in t.model.named_parameters()}
        found.append((reduced, {name: p.full_tensor().detach() for name, p in weights.items()}))
    return found


@pytest.mark.slow
def test_gradients_that_a_rank_never_has_in_full_are_the_same(on_ranks: OnRanks, tiny_model: Path) -> None:
    for (whole, expected), (reduced, weights) in on_ranks(2, reduced_each_pass, str(tiny_model)):
        assert not any(whole)
        assert all(reduced)
        torch.testing.assert_close(weights, expected, atol=3e-6, rtol=1e-5)


def test_gradients_are_reduced_in_each_pass_where_they_would_fill_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = (ModelAndOptimizer(torch.nn.Linear(10, size, bias=False), None) for size in (10, 11))
    monkeypatch.setattr(models, "spare_numbers", lambda scaling: 100)
    alone = {"use_gpu": True}
    two = alone | {"num_workers": 2}
    for scaling, expected in ((two, {"large"}), (alone, set()), ({"num_workers": 2}, set())):
        config = loading.from_tree({"scaling": scaling})
        assert models.reduced_each_pass(config.scaling, 1, {"small": small, "large": large}) == expected


def test_weights_stay_gathered_where_they_are_a_small_part_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = (torch.nn.Linear(10, size, bias=False) for size in (20, 21))
    monkeypatch.setattr(models, "spare_numbers", lambda scaling: 200)  # in float32, so 400 in bfloat16
    two, both = {"use_gpu": True, "num_workers": 2}, {"policy", "reference"}
    for scaling, reference, expected in (
        (two, small, both),
        (two, large, set[str]()),  # 410 numbers together
        (two | {"num_workers": 1}, large, both),
        ({}, large, both),
    ):
        config = loading.from_tree({"scaling": scaling, "model": {"dtype": "bfloat16"}})
        modules = {"policy": small, "reference": reference}
        assert models.kept_unsharded(config.scaling, 1, config.model, modules) == expected
    config = loading.from_tree({"scaling": two, "model": {"dtype": "bfloat16", "offload": ["critic"]}})
    assert models.kept_unsharded(config.scaling, 1, config.model, {"policy": small, "critic": large}) == {"policy"}


def kept(rank: int, ranks: int, path: str) -> list[tuple[list[bool], dict[str, Tensor]]]:
    """Whether weights are whole between two micro-batches, and the weights after both, without and with keeping."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for keeps in (False, True):
            names = frozenset({"policy", "critic", "reference"} if keeps else ())
            patch.setattr(models, "kept_unsharded", lambda *_, names=names: names)
            run = trainer_of(path, {"train.num_minibatches": 1}, 60)
            own = [c for c in completions() if c.prompt.id % ranks == rank]
            start = scored_batch([ScoredCompletion(c, float(c.prompt.id), True, {}) for c in own], PAD)
            batch, _ = loop.compute_advantages(run, loop.compute_logprobs(run, start))
            (micros,), (size,) = run.micro_batches([batch]), update.denominators(run, [batch])
            run.set_gradient_sync(last=False)
            update.backward(run, micros[0], size)
            whole = [not isinstance(p, DTensor) for t in run.models.values() for p in t.model.parameters()]
            update.accumulate(run, micros[1:], size, 0)
            after = [isinstance(p, DTensor) for t in run.models.values() for p in t.model.parameters()]
            assert all(after)  # the last backward pass has freed them
            update.optimizer_step(run, 0)
            weights = {f"{n} {k}": p for n, t in run.models.items() for k, p in t.model.named_parameters()}
            found.append((whole, {name: p.full_tensor().detach() for name, p in weights.items()}))
    return found


@pytest.mark.slow
def test_weights_that_stay_gathered_learn_the_same(on_ranks: OnRanks, tiny_model: Path) -> None:
    for (freed, expected), (stayed, weights) in on_ranks(2, kept, str(tiny_model)):
        assert not any(freed) and all(stayed)
        torch.testing.assert_close(weights, expected, atol=0, rtol=0)


OFFLOAD: dict[str, Any] = {"model.offload": ["critic", "reference"], "scaling.use_gpu": True}


def offloaded(rank: int, ranks: int, path: str) -> list[dict[str, Tensor]]:
    return [updated(rank, ranks, path, way, 60) for way in ({}, OFFLOAD)]


@pytest.mark.slow
def test_shards_in_host_memory_change_nothing(on_ranks: OnRanks, tiny_model: Path) -> None:
    for plain, other in on_ranks(2, offloaded, str(tiny_model)):
        torch.testing.assert_close(other, plain, atol=0, rtol=0)


# --- single parts of an update, on one rank


class Pushes:
    """In the place of a collector: keeps a weight as it is at each push and at each evaluation of one question."""

    def __init__(self, weight: Any, rank: int, ranks: int) -> None:
        self.weight, self.pushed, self.evaluated = weight, list[Tensor](), list[Tensor]()
        first = completions()[0]
        self.completion = replace(first, prompt=replace(first.prompt, id=rank))
        one: Any = None  # how it is sampled and scored
        self.evaluations = [QuestionSet(HELD_OUT, [self.completion.prompt], ranks, [one], one, 0, ["sums"])]
        self.outcomes = dict[str, list[bool]]()

    def push_weights(self, step: int) -> None:
        self.pushed.append(self.weight.full_tensor().detach().clone())

    def answers(self, sets: Sequence[QuestionSet], step: int) -> Iterator[tuple[QuestionSet, list[ScoredCompletion]]]:
        for each in sets:
            self.evaluated.append(self.weight.full_tensor().detach().clone())
            yield each, [ScoredCompletion(self.completion, 1.0, True, {})]

    def keep_answers(self, step: int, name: str, scored: list[ScoredCompletion], outcomes: Outcomes) -> None:
        self.outcomes[name] = outcomes.right.ravel().tolist()


def averages(rank: int, ranks: int, path: str) -> dict[str, Tensor]:
    """One weight before an optimizer step and after it, its average, and what engines get meanwhile and afterwards."""
    run = trainer_of(path, {"train.ema_decay": 0.75}, 100_000)
    weight = dict(run.policy.named_parameters())["lm.model.norm.weight"]
    found = {"before": weight.full_tensor().detach().clone()}
    weight.grad = torch.ones_like(weight)
    for trained in run.models.values():
        for parameter in trained.model.parameters():
            parameter.grad = torch.ones_like(parameter)
    update.optimizer_step(run, 0)
    collector = Pushes(weight, rank, ranks)
    evaluated, _ = evaluate(run, collector, all_sets=True)  # type: ignore[arg-type]
    assert {"eval/reward", "eval/ema/reward"} <= set(evaluated)
    assert collector.outcomes == dict.fromkeys((HELD_OUT, AVERAGED), [True] * ranks)
    found |= {"after": weight.full_tensor().detach(), "average": run.ema["lm.model.norm.weight"].full_tensor()}
    return found | {"meanwhile": collector.evaluated[1], "pushed": torch.stack(collector.pushed)}


@pytest.mark.slow
def test_the_average_of_the_weights_by_hand(on_ranks: OnRanks, tiny_model: Path) -> None:
    found = on_ranks(2, averages, str(tiny_model))[0]
    expected = 0.75 * found["before"] + 0.25 * found["after"]
    assert (found["after"] - found["before"]).abs().min() > 1e-6
    torch.testing.assert_close(found["average"], expected, atol=1e-7, rtol=0)
    torch.testing.assert_close(found["meanwhile"], expected, atol=1e-7, rtol=0)
    torch.testing.assert_close(found["pushed"], torch.stack([expected, found["after"]]), atol=1e-7, rtol=0)


def stepped(rank: int, ranks: int, path: str) -> list[list[float]]:
    """The learning rates of policy and critic in optimizer steps around the end of the critic's warm-up."""
    way = {"train.critic_warmup": 2, "train.warmup_steps": 2, "train.steps": 4, "train.lr_schedule": "linear"}
    run = trainer_of(path, way, 100_000)
    rates = []
    for run.step, number in ((1, 1), (2, 0), (2, 1), (3, 0), (3, 1)):
        for trained in run.models.values():
            for parameter in trained.model.parameters():
                parameter.grad = torch.full_like(parameter, 1e-3)
        update.optimizer_step(run, number)
        rates.append([run.models[name].optimizer.param_groups[0]["lr"] for name in ("policy", "critic")])
    return rates


@pytest.mark.slow
def test_learning_rates_follow_the_schedule_of_each_model(on_ranks: OnRanks, tiny_model: Path) -> None:
    (rates,) = on_ranks(1, stepped, str(tiny_model))
    policy, critic = zip(*rates, strict=True)
    assert policy[0] == pytest.approx(1e-3)  # SGD's own: the policy has not stepped
    assert policy[1:] == pytest.approx([0.05, 0.1, 0.1, 0.05])  # 4 optimizer steps, 2 of them warm-up
    assert critic == pytest.approx([0.1 * (1 - place / 6) for place in (1, 2, 3, 4, 5)])  # 8, and 2 of warm-up


def spoilt(rank: int, ranks: int, path: str) -> list[str]:
    """What updates say whose advantages, or returns, are no numbers."""
    said = []
    stopping = {"algorithm.target_kl": 1.0, "train.ppo_epochs": 3}
    for way, column in (({}, "advantages"), (stopping, "advantages"), ({}, "returns")):
        run = trainer_of(path, way, 60)
        batch = loop.compute_logprobs(
            run, scored_batch([ScoredCompletion(c, 1.0, True, {}) for c in completions()], PAD)
        )
        batch = loop.compute_advantages(run, batch)[0]
        try:
            update.update(run, replace(batch, **{column: math.nan * getattr(batch, column)}))
        except FloatingPointError as error:
            said.append(str(error))
    return said


def test_a_gradient_that_is_not_finite_ends_the_run(on_ranks: OnRanks, tiny_model: Path) -> None:
    (said,) = on_ranks(1, spoilt, str(tiny_model))
    words = "step 1: a gradient norm of the {} is not finite; its weights are unusable, and neither sent nor saved"
    models = ("policy", "policy", "critic")
    assert [line.partition("; a lower")[0] for line in said] == [words.format(name) for name in models]


def ruined(rank: int, ranks: int, path: str) -> list[str]:
    """What updates say that ruin a model's weights by large steps along finite gradients, or begin with ruined ones."""
    said = []
    for name, rate in (("policy", 1e30), ("critic", 1e30), ("policy", 1e16), ("policy", None), ("critic", None)):
        run = trainer_of(path, {"algorithm.target_kl": 1.0, "train.num_minibatches": 1, "train.ppo_epochs": 2}, 60)
        if rate is None:
            next(run.models[name].model.parameters()).data.fill_(math.nan)
        else:
            run.base_lrs[name] = [rate]
        batch = scored_batch([ScoredCompletion(c, float(c.sample), True, {}) for c in completions()], PAD)
        batch = loop.compute_advantages(run, loop.compute_logprobs(run, batch))[0]
        with pytest.raises(FloatingPointError) as error:
            update.update(run, batch)
        said.append(str(error.value).partition(" not finite; ")[0])
    return said


def test_weights_that_are_not_finite_or_give_nothing_finite_end_the_run(on_ranks: OnRanks, tiny_model: Path) -> None:
    (said,) = on_ranks(1, ruined, str(tiny_model))
    assert said == [
        "step 1: the norm of the weights of the policy is",
        "step 1: the norm of the weights of the critic is",
        "step 1: the KL of the policy is",
        *["step 1: the log-probabilities or values of the weights before it are"] * 2,
    ]


LEFT_OUT: dict[str, Any] = {"train.num_minibatches": 1, "algorithm.kl_placement": "loss", "algorithm.entropy_coef": 0.1}


def without_cut(rank: int, ranks: int, path: str) -> list[dict[str, Tensor]]:
    """Weights after an update on all completions, on those that were finished, and on none of them; and before."""
    found = []
    for way in ("marked", "removed", "none", "start"):
        run = trainer_of(path, LEFT_OUT, 60)
        judged = [ScoredCompletion(c, float(c.prompt.id % 3 + c.sample), True, {}) for c in completions()]
        batch = loop.compute_logprobs(run, scored_batch(judged, PAD))
        kept = (torch.arange(16) % 3 > 0).float()
        batch, _ = loop.compute_advantages(run, replace(batch, trained=kept if way != "none" else 0 * kept))
        batch = batch.rows(kept.bool()) if way == "removed" else batch
        if way != "start":
            _, stats = update.update(run, batch)
            assert int(stats.losses.tokens) == int(batch.loss_mask.sum())
        found.append({f"{n} {k}": p for n, t in run.models.items() for k, p in t.model.named_parameters()})
    return [{name: p.full_tensor().detach() for name, p in weights.items()} for weights in found]


def after_an_empty_step(rank: int, ranks: int, path: str) -> list[Any]:
    """Weights after a step of AdamW, and after another one whose losses leave all out; and how often it stepped."""
    run, found = trainer_of(path, LEFT_OUT, 60), list[Any]()
    models = {name: replace(m, optimizer=torch.optim.AdamW(m.model.parameters())) for name, m in run.models.items()}
    run = replace(run, models=models)
    judged = [ScoredCompletion(c, float(c.prompt.id % 3 + c.sample), True, {}) for c in completions()]
    for trained in (torch.ones(16), torch.zeros(16)):
        batch = loop.compute_logprobs(run, replace(scored_batch(judged, PAD), trained=trained))
        _, stats = update.update(run, loop.compute_advantages(run, batch)[0])
        weights = [p.full_tensor().clone() for m in run.models.values() for p in m.model.parameters()]
        found += [(weights, stats.optimizer_steps)]
    return found


def test_a_step_that_trains_on_nothing_has_no_momentum(on_ranks: OnRanks, tiny_model: Path) -> None:
    (weights, steps), (after, none) = on_ranks(1, after_an_empty_step, str(tiny_model))[0]
    assert (steps, none) == (1, 0)
    torch.testing.assert_close(after, weights, atol=0, rtol=0)


@pytest.mark.slow
def test_completions_that_the_losses_leave_out_move_nothing(on_ranks: OnRanks, tiny_model: Path) -> None:
    marked, removed, none, start = on_ranks(1, without_cut, str(tiny_model))[0]
    torch.testing.assert_close(marked, removed, atol=3e-6, rtol=1e-5)
    torch.testing.assert_close(none, start, atol=0, rtol=0)
    moved = {name for name, weight in marked.items() if (weight - start[name]).abs().max() > 1e-5}
    assert any(name.startswith("policy") for name in moved) and any(name.startswith("critic") for name in moved)


def advantages(rank: int, ranks: int, path: str) -> dict[str, Tensor]:
    """Of two prompts with two responses each, two tokens long, with the KL in the reward."""
    found = {}
    for kind in ("rloo", "grpo", "reinforce++", "remax"):
        way = {"algorithm.advantage": kind, "algorithm.kl_placement": "reward", "algorithm.kl_estimator": "k1"}
        run = trainer_of(path, way | {"algorithm.whiten_advantages": False}, 100_000)
        prompts = [Prompt(i, (7, 8), "question", "answer") for i in range(2)]
        rows = [Completion(prompts[i // 2], i % 2, (9, 10), (-1.0, -1.0), True, 0) for i in range(4)]
        scores = (1.0, 0.0, 2.0, 2.0)
        judged = [ScoredCompletion(*pair, True, {}, greedy_score=0.5) for pair in zip(rows, scores, strict=True)]
        kl = torch.tensor([[1.0, 0.0], [0.0, 0.0], [2.0, 3.0], [2.0, 3.0]])  # kl_coef is 0.1
        zero = torch.zeros(4, 2)
        columns = {"logprobs": kl, "ref_logprobs": zero, "values": zero, "entropy": zero}
        batch = scored_batch(judged, PAD).with_logprobs(columns)
        found[kind] = loop.compute_advantages(run, batch)[0].advantages
    return found


@pytest.mark.slow
def test_the_kl_in_the_reward_is_compared_within_groups(on_ranks: OnRanks, tiny_model: Path) -> None:
    (found,) = on_ranks(1, advantages, str(tiny_model))
    # Rewards less the KL: 0.9 and 0; 1.5 and 1.5. Two alike responses say nothing.
    torch.testing.assert_close(found["rloo"], torch.tensor([[0.9, 0.9], [-0.9, -0.9], [0.0, 0.0], [0.0, 0.0]]))
    half = 0.5**0.5  # 0.45 / std of (0.9, 0)
    expected = torch.tensor([[half, half], [-half, -half], [0.0, 0.0], [0.0, 0.0]])
    torch.testing.assert_close(found["grpo"], expected, atol=1e-5, rtol=0)
    # Token by token: what follows of the KL is taken off.
    torch.testing.assert_close(found["reinforce++"], torch.tensor([[0.9, 1.0], [0.0, 0.0], [1.5, 1.7], [1.5, 1.7]]))
    torch.testing.assert_close(found["remax"], torch.tensor([[0.4, 0.5], [-0.5, -0.5], [1.0, 1.2], [1.0, 1.2]]))


CHOOSING: dict[str, Any] = {
    "algorithm.policy_loss": "clip_cov",
    "algorithm.clip_cov_ratio": 0.1,
    "algorithm.clip_cov_low": 0.5,
    "algorithm.top_entropy_quantile": 0.4,
    "algorithm.exact_entropy": True,
}
ROWS, TOKENS = 20, 10
Choice = tuple[Tensor, Tensor, list[Tensor]]


def columns(kind: int) -> Tensor:
    """Numbers for all tokens, `[ROWS, TOKENS]`, all different."""
    return torch.rand(ROWS, TOKENS, generator=torch.Generator().manual_seed(kind))


def chosen(rank: int, ranks: int) -> Choice:
    """Which completions a rank has; the tokens kept by entropy; those kept by covariance of three passes."""
    config, mesh = loading.from_tree(loading.with_overrides({}, CHOOSING)), Mesh.of("cpu", 1)
    run: Any = SimpleNamespace(config=config, mesh=mesh)
    run.sum_over_ranks = lambda sums: {k: float(mesh.all_reduce_sum(v.double())) for k, v in sums.items()}
    own = [Completion(Prompt(i // 2, (7,), "", ""), i % 2, (9,) * TOKENS, (), True, 0) for i in range(ROWS)][
        rank::ranks
    ]
    logprobs, entropy, advantages, zero = (columns(i)[rank::ranks] for i in range(4))
    grids = {"logprobs": -5 * logprobs, "ref_logprobs": zero, "values": zero, "entropy": entropy}
    start = scored_batch([ScoredCompletion(each, 0.0, True, {}) for each in own], PAD)
    batch = start.with_logprobs(grids).with_advantages(4 * advantages - 2, zero)
    passes = [update.without_high_covariance(run, batch, (0, 5, epoch)).chosen for epoch in (0, 1, 0)]
    return torch.arange(ROWS)[rank::ranks], update.with_uncertain_tokens(run, batch).chosen, passes


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_tokens_of_the_policy_loss_are_those_of_the_papers_on_any_ranks(ranks: int, on_ranks: OnRanks) -> None:
    uncertain, passes = torch.zeros(ROWS, TOKENS), torch.zeros(3, ROWS, TOKENS)
    for rows, certain, kept in on_ranks(ranks, chosen):
        uncertain[rows], passes[:, rows] = certain, torch.stack(kept)
    # As TRL keeps them: no less than the quantile 0.6 of all.
    assert torch.equal(uncertain.bool(), columns(1) >= torch.quantile(columns(1), 0.6))
    logprobs, advantages = -5 * columns(0), 4 * columns(2) - 2
    covariance = (logprobs - logprobs.mean()) * (advantages - advantages.mean())
    inside = (covariance >= 0.5) & (covariance <= 5)
    assert inside.sum() > 25
    left_out = passes == 0
    assert left_out.sum((1, 2)).tolist() == [20, 20, 20]  # a tenth of all
    assert not (left_out & ~inside).any()
    assert torch.equal(passes[0], passes[2]) and not torch.equal(passes[0], passes[1])
    picked = left_out[0].nonzero().sum(0).tolist()
    assert picked == PICKED  # the same on any number of ranks


PICKED = [210, 65]


# --- whose gradient it is


def shares_and_update(rank: int, ranks: int, path: str, way: dict[str, Any]) -> tuple[Any, ...]:
    """Shares of the prompts in the gradient and, from a fresh start, by autograd; the weights after an update."""
    results = []
    for by_rlx in (True, False):
        run = trainer_of(path, way, 64)
        own = [c for c in completions() if c.prompt.id % ranks == rank]
        judged = [ScoredCompletion(c, float(c.prompt.id % 3 + c.sample), True, {}) for c in own]
        batch = loop.compute_logprobs(run, scored_batch(judged, PAD))
        batch, _ = loop.compute_advantages(run, batch)
        shares = update.gradient_shares(run, batch) if by_rlx else by_autograd(run, batch, path)
        update.update(run, batch)
        results.append((shares, {name: p.full_tensor().detach() for name, p in run.policy.named_parameters()}))
    return tuple(results)


def by_autograd(run: trainer.Trainer, batch: Experience, path: str) -> dict[int, float]:
    """The same by torch.autograd, of a policy that is not sharded; on one rank."""
    if run.mesh.world_size > 1:
        return {}
    policy = load_policy(path, head=None)
    weights, size = list(policy.parameters()), update.denominators(run, [batch])[0].policy
    inputs = batch.response_tokens()
    output = policy(inputs, run.config.rollout.temperature, False)
    batch = replace(batch, logprobs=output.logprobs.detach(), inputs=inputs)

    def gradient(part: Experience) -> list[Tensor]:
        loss, _ = update.policy_losses(run, output, part, size)
        return list(torch.autograd.grad(loss, weights, retain_graph=True))

    whole, shares = gradient(batch), {}
    square = sum(float((each * each).sum()) for each in whole)
    for prompt in dict.fromkeys(batch.groups.tolist()):
        part = gradient(replace(batch, trained=batch.trained * (batch.groups == prompt)))
        shares[prompt] = sum(float((a * b).sum()) for a, b in zip(part, whole, strict=True)) / square
    return shares


SHARED: list[dict[str, Any]] = [{}, {"algorithm.advantage": "grpo", "algorithm.kl_placement": "loss"}]


@pytest.mark.parametrize("way", [*SHARED[:1], pytest.param(SHARED[1], marks=pytest.mark.slow)], ids=["gae", "grpo"])
def test_the_shares_of_prompts_in_the_gradient(way: dict[str, Any], on_ranks: OnRanks, tiny_model: Path) -> None:
    """They are those of autograd, add up to 1, are the same on two ranks, and change nothing of the update."""
    ((opened, plain),) = on_ranks(1, shares_and_update, str(tiny_model), way)
    assert sorted(opened[0]) == list(range(8)) and len(set(opened[0].values())) == 8
    assert opened[0] == pytest.approx(plain[0], abs=1e-5) and sum(opened[0].values()) == pytest.approx(1, abs=1e-6)
    for name, weight in plain[1].items():
        assert torch.equal(opened[1][name], weight), name
    for each in on_ranks(2, shares_and_update, str(tiny_model), way):
        assert each[0][0] == pytest.approx(opened[0], abs=1e-5)
