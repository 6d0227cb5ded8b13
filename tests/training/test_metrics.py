"""The metrics of a step by hand: the same four completions on one rank and on two."""

import math
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from shared import OnRanks
from torch import Tensor

from rlx.algorithms.adaptive import AdaptiveKL, RunningScores
from rlx.config import loading
from rlx.mesh import Mesh
from rlx.tracking.metrics import meaning
from rlx.training import loop, metrics
from rlx.training.aggregation import Excess, over_ranks
from rlx.training.collector import Selection
from rlx.training.experience import Experience, LogprobBatch
from rlx.training.stats import LossStats, Sums, UpdateStats
from rlx.types import Completion, Episode, FailureKind, Observation, Prompt, ScoredCompletion, Turn

LENGTHS = (1, 2, 2, 3)
SCORES = (0.0, 1.0, 0.5, 0.5)
OF_SECOND = Prompt(9, (7, 8), "question", "answer", source=1)


def scored() -> list[ScoredCompletion]:
    """Two completions of each of two prompts; the first prompt's are a step older, the last was cut."""
    rows = []
    for i, (length, score) in enumerate(zip(LENGTHS, SCORES, strict=True)):
        prompt = Prompt(i // 2, (7, 8), "question", "answer")
        completion = Completion(prompt, i % 2, (5,) * length, (-1.0,) * length, finished=i < 3, version=2 + i // 2)
        rows.append(ScoredCompletion(completion, score, score == 1.0, {"length": -score}))
    return rows


def experience(rows: slice) -> Experience:
    """What the models say of these completions: grids of 0 but for a few tokens."""
    mask = torch.tensor([[float(t < length) for t in range(3)] for length in LENGTHS])

    def grid(*values: float) -> Tensor:
        """`[4, 3]` with the first values at the eight response tokens, in order, and 9 where there is no token."""
        result = torch.full((4, 3), 9.0)
        result[mask.bool()] = torch.tensor([*values, *[0.0] * (8 - len(values))])
        return result

    columns = {
        "ids": torch.full((4, 5), 5),
        "prompt_lengths": torch.full((4,), 2),
        "mask": mask,
        "rollout_logprobs": grid(math.log(2)),  # the first token's ratio of trainer to engine is 1 / 2
        "row": torch.arange(4),
        "groups": torch.tensor([0, 0, 1, 1]),
        "samples": torch.tensor([0, 1, 0, 1]),
        "scores": torch.tensor(SCORES),
        "greedy_scores": torch.zeros(4),
        "trained": torch.ones(4),
        "counted": torch.ones(4),
        "logprobs": grid(),
        "ref_logprobs": grid(),
        "values": grid(0, 1, 2, 3),
        "entropy": grid(0.5, 1.5),
        "advantages": grid(4, -2),
        "returns": grid(0, 1, 2, 3, 4),
        "chosen": mask,
        "newest_logprobs": grid(),
        "home": torch.arange(4),
    }
    batch = Experience(**columns)
    return batch if rows == slice(0, 4) else batch.rows(rows)


def trainer_of(mesh: Mesh, **more: Any) -> Any:
    """What metrics are computed from, but for the models; `more`: further sections of the config."""
    algorithm = {"kl_coef": 0.1, "adaptive_kl_target": 0.5, "adaptive_kl_horizon": 100, "rollout_correction": "tis"}
    train = {"prompts_per_step": 2, "samples_per_prompt": 2, "num_minibatches": 1, "ppo_epochs": 2}
    reward = {"functions": {"length": 1.0}, "length_target": 3}
    return SimpleNamespace(
        config=loading.from_tree({"algorithm": algorithm, "train": train, "reward": reward} | more),
        mesh=mesh,
        device=torch.device("cpu"),
        models={"policy": SimpleNamespace(optimizer=SimpleNamespace(param_groups=[{"lr": 0.25}]))},
        critic=object(),
        kl=AdaptiveKL(0.1, 0.5, 100.0),
        reward_stats=RunningScores(),
        aggregates={},
        step=4,
        tokens=100,
        seconds=50.0,
    )


def summarized(rank: int, ranks: int) -> tuple[dict[str, float], dict[str, float], int, float]:
    """A step's and an evaluation's metrics, the count of tokens and the coefficient of the KL after the step."""
    trainer, share = trainer_of(Mesh.of("cpu", 1)), 4 // ranks
    own = slice(rank * share, (rank + 1) * share)
    batch = experience(own)
    selection = Selection(share // 2, 2, trainer.mesh, filtered=False, greedy=False)
    selection.add(scored()[own])
    selection.seconds, selection.scoring_seconds = 1.0 + rank, 0.5 + rank
    tokens = batch.mask.sum()
    losses = LossStats(
        {
            "policy/loss": 0.5 * tokens,
            "policy/clip_fraction": 0.25 * tokens,
            "policy/clip_low_fraction": 0.05 * tokens,
            "policy/clip_high_fraction": 0.2 * tokens,
            "policy/dual_clip_fraction": 0.5 * tokens,
            "policy/approx_kl": 0.5 * tokens,
            "policy/ratio": 2 * tokens,
            "value/loss": tokens,
            "value/clip_fraction": torch.zeros(()),
        },
        2 * tokens,
    )  # of two optimizer steps; what ranks have shares of grows with their tokens
    norms: Sums = {name: torch.tensor(6.0) for name in ("policy", "critic")}
    stats = UpdateStats(losses, grad_norms=norms, passes=2, optimizer_steps=2, positions=batch.ids.numel())
    kl_sums: Sums = {"kl/ref": 0.25 * tokens, "kl/penalty": -0.5 * tokens}
    seconds = {"time/rollout": 4.0, "time/update": 2.0, "time/step": 8.0}
    found, counts = metrics.summarize(trainer, selection, batch, stats, kl_sums, seconds)  # type: ignore[arg-type]
    found |= loop.advance(trainer, counts)  # type: ignore[arg-type]
    assert found.pop("memory/peak_gib") > 0
    evaluated = metrics.mean_over_ranks(
        trainer, scored()[rank :: ranks + 1], "eval"
    )  # 0 and 2 of one rank; 0, 3 and 1 of two
    return found, evaluated, trainer.tokens, trainer.kl.coef


BY_HAND = {
    "time/rollout": 4.0,
    "time/update": 2.0,
    "time/step": 8.0,
    "time/total": 58.0,
    "reward/mean": 0.5,
    "reward/std": math.sqrt((0.25 + 0.25) / 4),
    "reward/length": -0.5,
    "task/accuracy": 0.25,
    "response/truncated_fraction": 0.25,
    "response/length_mean": 2.0,
    "response/length_min": 1.0,
    "response/length_max": 3.0,
    "advantage/mean": 2 / 8,
    "advantage/std": math.sqrt((16 + 4) / 8 - (2 / 8) ** 2),
    "value/mean": 6 / 8,
    "value/std": math.sqrt(14 / 8 - (6 / 8) ** 2),
    "return/mean": 10 / 8,
    "return/std": math.sqrt(30 / 8 - (10 / 8) ** 2),
    "staleness/mean": 0.5,
    "groups/varied_fraction": 0.5,
    "policy/entropy": 2.0 / 8,
    "policy/lr": 0.25,
    "policy/clip_fraction": 0.125,
    "policy/clip_low_fraction": 0.025,
    "policy/clip_high_fraction": 0.1,
    "policy/dual_clip_fraction": 0.25,
    "policy/approx_kl": 0.25,
    "policy/ratio": 1.0,
    "policy/loss": 2.0,  # 0.5 * 8 tokens in 2 passes
    "policy/grad_norm": 3.0,
    "policy/updates": 2.0,
    "kl/ref": 0.25,
    "kl/penalty": -0.5,
    "reward/minus_kl": (0 + 1 + 0.5 + 0.5 + 0.1 * 0.5 * 8) / 4,
    "kl/coef": 0.1,
    "value/loss": 4.0,
    "value/clip_fraction": 0.0,
    "value/grad_norm": 3.0,
    # Returns 0 1 2 3 4 0 0 0: squares 30, sum 10. Residuals: one 4, the rest 0.
    "value/explained_variance": 1 - (16 - 4 * 4 / 8) / (30 - 10 * 10 / 8),
    "mismatch/kl": (0.5 - 1 + math.log(2)) / 8,
    "mismatch/max_abs": math.log(2),
    "mismatch/weight_max": 1.0,
    "mismatch/clipped_fraction": 0.0,
    "mismatch/effective_fraction": 7.5**2 / (8 * 7.25),
    "tokens/rollout_per_s": 8 / 4,
    "tokens/update_per_s": (8 + 8) * 2 / 2,  # prompts and responses, twice
    "tokens/total": 108.0,
}


def of_episodes(rank: int, ranks: int) -> dict[str, float]:
    """Those of episodes of which all but one have failed, each in another way."""
    rows = []
    for row, kind in zip([*scored(), scored()[0], scored()[0]], [*get_args(FailureKind), "raised", None], strict=True):
        begun = Observation(retries=3 if kind is None else 0)
        episode = Episode(begun, (Turn(0, 1, 3, Observation(retries=1)),), failure=kind or "", kind=kind)
        rows.append(replace(row, completion=replace(row.completion, episode=episode)))
    trainer, here = trainer_of(Mesh.of("cpu", 1)), slice(rank * 6 // ranks, 6)
    selection = Selection(3 // ranks, 2, trainer.mesh, filtered=False, greedy=False)
    selection.add(rows[here][: 6 // ranks])
    return over_ranks(trainer, metrics._of_episodes(trainer, selection))


@pytest.mark.parametrize("ranks", [1, 2])
def test_failures_of_environments_by_kind(ranks: int, on_ranks: OnRanks) -> None:
    found, *others = on_ranks(ranks, of_episodes)
    assert others == [found] * (ranks - 1)
    kinds = {f"episode/{kind}_fraction": found[f"episode/{kind}_fraction"] for kind in get_args(FailureKind)}
    assert list(kinds.values()) == pytest.approx([1 / 6, 2 / 6, 1 / 6, 1 / 6])
    assert sum(kinds.values()) == pytest.approx(found["episode/failed_fraction"]) == pytest.approx(5 / 6)
    assert found["episode/retries"] == pytest.approx((6 + 3) / 6)
    assert all(map(meaning, found))


def of_cut_episodes(rank: int, ranks: int) -> float:
    """The share without room: one is cut, one over, one cut at its last turn, one has failed, one's turn filled it."""
    row, trainer = scored()[0], trainer_of(Mesh.of("cpu", 1))

    def played(turns: int, finished: bool = False, failure: str = "") -> ScoredCompletion:
        said = tuple(Turn(number, number + 1, 3, Observation()) for number in range(turns))
        episode = Episode(Observation(), said, failure=failure)
        return replace(row, completion=replace(row.completion, finished=finished, episode=episode))

    selection = Selection(2, 2, trainer.mesh, filtered=False, greedy=False)
    most, full = trainer.config.environment.max_turns, played(1)
    filled = replace(full.completion, token_ids=tuple(range(trainer.config.rollout.max_tokens)))
    selection.add([played(1), played(1, finished=True), played(most), played(1, failure="raised")])
    selection.add([replace(full, completion=filled)] * 4)
    return over_ranks(trainer, metrics._of_episodes(trainer, selection))["episode/no_room_fraction"]


def test_episodes_that_are_cut_before_their_last_turn_had_no_room_for_it(on_ranks: OnRanks) -> None:
    assert on_ranks(1, of_cut_episodes) == [1 / 8]


def warmed_up(rank: int, ranks: int) -> dict[str, float]:
    """Those of a step that trains on all completions."""
    selection = Selection(2, 2, Mesh.of("cpu", 1), filtered=False, greedy=False)
    selection.add(scored())
    return of_critic_alone(selection)


def filtered(rank: int, ranks: int) -> dict[str, float]:
    """Those of a step that trains on one of three groups; the second and the third are of another source."""
    selection, rows = Selection(1, 2, Mesh.of("cpu", 1), filtered=True, greedy=False), scored()
    second = [replace(row, completion=replace(row.completion, prompt=OF_SECOND)) for row in rows[2:]]
    selection.add([*rows[:2], *second, *second])
    selection.take()
    return of_critic_alone(selection, data={"sources": [{"source": "a.jsonl"}, {"source": "b.jsonl"}]})


def failed(rank: int, ranks: int) -> dict[str, float]:
    """Those of a step whose losses have no token: all episodes have failed."""
    selection = Selection(2, 2, Mesh.of("cpu", 1), filtered=False, greedy=False)
    selection.add(scored())
    whole = experience(slice(0, 4))
    return of_critic_alone(selection, replace(whole, trained=torch.zeros(4)))


def partly_failed(rank: int, ranks: int, failed: list[int]) -> dict[str, float]:
    """Those of a step of which some episodes have failed; the policy is a nat from the reference at each token."""
    played = Episode(Observation(), (Turn(0, 1, 3, Observation()),), failure="no luck", kind="raised")
    rows, whole = scored(), experience(slice(0, 4))
    for i in failed:
        rows[i] = replace(rows[i], completion=replace(rows[i].completion, episode=played))
    selection = Selection(2, 2, Mesh.of("cpu", 1), filtered=False, greedy=False)
    selection.add(rows)
    counted = torch.tensor([float(i not in failed) for i in range(4)])
    batch = replace(whole, counted=counted, trained=counted, ref_logprobs=whole.logprobs - whole.mask)
    before = LogprobBatch(**{each.name: getattr(batch, each.name) for each in fields(LogprobBatch)})
    _, kl_sums = loop.compute_advantages(trainer_of(Mesh.of("cpu", 1)), before)
    return of_critic_alone(selection, batch, kl_sums)


def of_critic_alone(
    selection: Selection, batch: Experience | None = None, kl_sums: Sums | None = None, **more: Any
) -> dict[str, float]:
    """The metrics of a step in which the critic alone has learned."""
    batch = batch or experience(slice(0, 4))
    tokens = 2 * float(batch.loss_mask.sum())
    losses = LossStats({"value/loss": tokens / 2, "value/clip_fraction": 0.0}, tokens)
    stats = UpdateStats(losses, grad_norms={"critic": 6.0}, passes=2, optimizer_steps=2, positions=20)
    kl_sums = kl_sums or {"kl/ref": 0.0, "kl/penalty": 0.0}
    seconds = {"time/rollout": 4.0, "time/update": 2.0, "time/step": 8.0}
    trainer = trainer_of(Mesh.of("cpu", 1), **more)
    found, counts = metrics.summarize(trainer, selection, batch, stats, kl_sums, seconds)  # type: ignore[arg-type]
    assert counts.kl is None
    return found


def test_nothing_is_said_of_a_policy_that_does_not_learn(on_ranks: OnRanks) -> None:
    (found,) = on_ranks(1, warmed_up)
    assert {name for name in found if name.startswith("policy/")} == {"policy/entropy"}
    assert found["value/grad_norm"] == 3.0 and found["kl/coef"] == 0.1


def test_what_a_step_trained_on_without_a_token_is_left_out(on_ranks: OnRanks) -> None:
    (found,), (whole,) = on_ranks(1, failed), on_ranks(1, warmed_up)
    of_tokens = {f"{name}/{kind}" for name in ("advantage", "value", "return") for kind in ("mean", "std")}
    assert set(whole) - set(found) == of_tokens | {"value/clip_fraction", "value/explained_variance"}
    assert not any(map(math.isnan, found.values()))


def test_what_judges_the_policy_leaves_out_episodes_whose_environment_failed(on_ranks: OnRanks) -> None:
    (found,) = on_ranks(1, partly_failed, [0])  # the first scored 0 with one token
    expected = {
        "reward/mean": 2 / 3,
        "reward/std": math.sqrt((1 + 0.25 + 0.25) / 3 - (2 / 3) ** 2),
        "reward/length": -2 / 3,
        "task/accuracy": 1 / 3,
        "policy/entropy": 1.5 / 7,
        "kl/ref": math.exp(-1),  # k3 of a ratio of e
        "reward/minus_kl": (2 - 0.1 * 7 * found["kl/penalty"]) / 3,
        "response/length_mean": 2.0,  # what the step's work was is of all
        "staleness/mean": 0.5,
        "episode/failed_fraction": 1.0,  # of those that are episodes
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    (nothing,) = on_ranks(1, partly_failed, [0, 1, 2, 3])
    assert not {"reward/mean", "task/accuracy", "policy/entropy", "kl/ref", "reward/minus_kl"} & set(nothing)
    assert all(map(math.isfinite, nothing.values()))


def test_shares_of_sources_are_those_of_what_is_trained_on(on_ranks: OnRanks) -> None:
    (found,) = on_ranks(1, filtered)
    shares = {name: value for name, value in found.items() if name.startswith("source/")}
    trained, generated = {"source/fraction/a": 1.0, "source/fraction/b": 0.0}, {"source/generated/a": 1 / 3}
    assert shares == pytest.approx(trained | generated | {"source/generated/b": 2 / 3})
    assert found["reward/mean/b"] == 0.5  # of all that was generated, as reward/mean is
    assert all(meaning(name) for name in shares)


def test_what_an_environment_says_is_no_padding() -> None:
    batch = experience(slice(0, 4))
    batch = replace(batch, mask=torch.tensor([[1.0, 0.0, 1.0]] * 4))
    config = SimpleNamespace(train=SimpleNamespace(num_minibatches=1))
    trainer: Any = SimpleNamespace(config=config, device=torch.device("cpu"))
    stats: Any = SimpleNamespace(positions=20, optimizer_steps=1)
    found = metrics._of_tokens(trainer, batch, stats)
    assert float(found["trained"][1]) == 20.0
    assert found["tokens/padding_fraction"] == (Excess, 20, 20)


def test_padding_is_known_once_all_ranks_are_summed() -> None:
    """Rows are dealt over ranks: one of them may compute more positions than its own completions have tokens."""
    dealt, padded = Excess(), Excess()
    for positions, tokens in ((200, 344), (200, 56)):
        dealt.update(positions, tokens)
    for positions, tokens in ((200, 300), (300, 100)):
        padded.update(positions, tokens)
    assert (float(dealt.compute()), float(padded.compute())) == (0.0, pytest.approx(0.2))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_steps_metrics_by_hand(ranks: int, on_ranks: OnRanks) -> None:
    results = on_ranks(ranks, summarized)
    found, evaluated, tokens, coef = results[0]
    # Rank 0 of two cuts its batch to its longest completion: 2 * 4 + 2 * 5 positions instead of 4 * 5.
    padding = {1: 1 - 16 / 20, 2: 1 - 16 / 18}
    seconds = {"time/generation": float(ranks), "time/scoring": ranks - 0.5}
    expected = BY_HAND | {"tokens/padding_fraction": padding[ranks]} | seconds
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-7)
    assert tokens == 108
    assert coef == pytest.approx(0.1 * (1 - 0.2 * 4 / 100))  # 4 completions; the KL is half the target
    accuracy, reward, length = {1: (0.0, 0.25, 1.5), 2: (1 / 3, 0.5, 2.0)}[ranks]
    assert evaluated == pytest.approx({"eval/accuracy": accuracy, "eval/reward": reward, "eval/length": length})
    numbers = [{**row[0], **row[1]} for row in results]
    assert all(row == numbers[0] for row in numbers)  # to the last bit
