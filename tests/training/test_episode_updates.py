"""Updates on episodes with the environment's tokens in between: by hand, packed, cut up, and on several ranks."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import scored_batch
from shared import OnRanks
from test_update import flat, trainer_of
from torch import Tensor

from rlx.algorithms.adaptive import RunningScores
from rlx.algorithms.advantages import AdvantageInputs, AdvantageSettings, estimate_advantages, gae, token_rewards
from rlx.config.loading import from_tree
from rlx.models import loading, packing
from rlx.models.loading import load_policy
from rlx.models.policy import ResponseTokens, Sequences, sequence_lengths
from rlx.training import experience, loop, update
from rlx.types import Completion, Episode, Observation, Prompt, ScoredCompletion, Turn

PAD = 0


def episode(prompt: Prompt, sample: int, parts: list[tuple[int, int]], seed: int, breaks: bool = False) -> Completion:
    """An episode of turns (tokens drawn, tokens of the answer to them); with `breaks` a new context after the first."""
    generator = torch.Generator().manual_seed(seed)
    turns, ids, contexts = [], [], []
    for number, (drawn, answered) in enumerate(parts):
        start = len(ids)
        ids += torch.randint(6, 90, (drawn,), generator=generator).tolist()
        observation = Observation(({"role": "user", "content": "x"},), reward=0.25 * (number + 1))
        turns.append(Turn(start, len(ids), 0, observation, len(contexts)))
        if answered:
            contexts += [len(ids)] if breaks and number == 0 else []
            ids += torch.randint(6, 90, (answered,), generator=generator).tolist()
    score = sum(turn.observation.reward for turn in turns)
    told = Episode(Observation(), tuple(turns), tuple(contexts), score)
    logprobs = tuple(-2.0 if drawn else 0.0 for drawn in Completion(prompt, 0, tuple(ids), (), True, 0, told).drawn)
    return Completion(prompt, sample, tuple(ids), logprobs, True, 0, told)


def episodes(breaks: bool) -> list[Completion]:
    """Two episodes of each of 8 prompts; of some prompts the first messages differ in their last token."""
    generator = torch.Generator().manual_seed(4)
    rows = []
    for number in range(8):
        ids = tuple(torch.randint(6, 90, (2 + number % 4,), generator=generator).tolist())
        for sample in range(2):
            prompt = Prompt(number, ids if number % 3 or not sample else (*ids[:-1], 7), "question", "answer")
            sizes = torch.randint(1, 5, (4,), generator=generator).tolist()
            parts = [(sizes[0], sizes[1]), (sizes[2], 0)] if sample else [(sizes[0], sizes[1]), (1, sizes[2]), (2, 0)]
            rows.append(episode(prompt, sample, parts, 10 * number + sample, breaks and number % 2 == 0))
    return rows


# --- by hand


def test_advantages_of_two_turns_with_a_tools_answer_between() -> None:
    """Tokens: drawn, drawn, tool, tool, drawn. The critic's values at the tool's tokens are never read."""
    mask = torch.tensor([[1.0, 1, 0, 0, 1]])
    values = torch.tensor([[0.5, 0.2, 9.0, -9.0, 0.4]])
    rewards = torch.tensor([[0.0, 1.0, 0, 0, 2.0]])
    gamma, lam = 0.9, 0.8
    # From the end: d4 = 2 - 0.4; d1 = 1 + 0.9 * 0.4 - 0.2; d0 = 0.9 * 0.2 - 0.5.
    a4 = 1.6
    a1 = 1.16 + 0.72 * a4
    a0 = -0.32 + 0.72 * a1
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    torch.testing.assert_close(advantages, torch.tensor([[a0, a1, 0, 0, a4]]), atol=1e-6, rtol=0)
    torch.testing.assert_close(returns, torch.tensor([[a0 + 0.5, a1 + 0.2, 0, 0, a4 + 0.4]]), atol=1e-6, rtol=0)


def test_rewards_of_turns_reach_the_tokens_before_them_alone() -> None:
    mask, zero = torch.tensor([[1.0, 1, 0, 1, 0]]), torch.zeros(1, 5)
    turn_rewards = torch.tensor([[0.0, 1.0, 0, 0.5, 0]])
    score, counted = torch.tensor([2.0]), torch.ones(1)
    inputs = AdvantageInputs(score, zero, zero, mask, torch.zeros(1).long(), 0 * score, counted, turn_rewards)
    given = token_rewards(inputs.scores, zero, mask, 0.0, turn_rewards)
    assert given.tolist() == [[0, 1, 0, 1, 0]]  # the score's other half is a reward function's, at the end
    advantages, _ = estimate_advantages("reinforce++", inputs, AdvantageSettings(0.0, 1.0, 1.0))
    assert advantages.tolist() == [[2, 2, 0, 1, 0]]
    at_end = replace(inputs, turn_rewards=None)
    advantages, _ = estimate_advantages("reinforce++", at_end, AdvantageSettings(0.0, 1.0, 1.0))
    assert advantages.tolist() == [[2, 2, 0, 2, 0]]
    groups = replace(inputs, scores=torch.tensor([2.0, 1.0]), mask=mask.expand(2, 5), groups=torch.tensor([3, 3]))
    groups = replace(groups, kl=torch.zeros(2, 5), values=torch.zeros(2, 5), turn_rewards=turn_rewards.expand(2, 5))
    advantages, _ = estimate_advantages("dr_grpo", groups, AdvantageSettings(0.0, 1.0, 1.0))
    assert advantages.tolist() == [[0.5, 0.5, 0, 0.5, 0], [-0.5, -0.5, 0, -0.5, 0]]


def test_a_batch_of_episodes_by_hand() -> None:
    prompt = Prompt(3, (11, 12), "q", "a")
    one = replace(episode(prompt, 0, [(2, 1), (1, 0)], 0), token_ids=(21, 22, 31, 23))
    two = replace(episode(prompt, 1, [(1, 3), (1, 0)], 0, breaks=True), token_ids=(24, 41, 42, 43, 25))
    failed = replace(two, episode=replace(two.episode, failure="died"))  # type: ignore[type-var]
    batch = scored_batch([ScoredCompletion(each, 1.0, True, {}) for each in (one, two, failed)], PAD)
    assert batch.mask.tolist() == [[1, 1, 0, 1, 0], [1, 0, 0, 0, 1], [1, 0, 0, 0, 1]]
    assert batch.turn_rewards is not None and batch.contexts is not None
    assert batch.turn_rewards[:2].tolist() == [[0, 0.25, 0, 0.5, 0], [0.25, 0, 0, 0, 0.5]]
    assert batch.contexts[:2].tolist() == [[0, 0, 0, 0, 0], [0, 1, 1, 1, 1]]
    assert batch.trained.tolist() == batch.counted.tolist() == [1, 1, 0]
    cut = [ScoredCompletion(replace(each, finished=False), 1.0, True, {}) for each in (one, failed)]
    masked = scored_batch(cut, PAD, mask_truncated=True)
    assert (masked.trained.tolist(), masked.counted.tolist()) == ([0, 0], [1, 0])  # of both, one is compared
    assert batch.prompt_numbers.tolist() == [0, 0, 0]
    assert batch.response_lengths.tolist() == [4, 5, 5]
    tokens = batch.response_tokens()
    # The second context of each later episode is read alone: 41 42 43, then 25.
    assert tokens.ids.tolist() == [
        [11, 12, 21, 22, 31, 23],
        [11, 12, 24, 0, 0, 0],
        [41, 42, 43, 25, 0, 0],
        [11, 12, 24, 0, 0, 0],
        [41, 42, 43, 25, 0, 0],
    ]
    assert tokens.targets.tolist() == [21, 22, 23, 24, 25, 24, 25]
    assert tokens.before.tolist() == [1, 2, 4, 7, 14, 19, 26]
    assert torch.stack(tokens.token_index).T.tolist() == [[0, 0], [0, 1], [0, 3], [1, 0], [1, 4], [2, 0], [2, 4]]


def test_the_group_of_an_episode_whose_environment_failed_is_compared_without_it() -> None:
    """Scores 1 and 3, less their mean 2; with the third, which failed at 8, the mean would be 4."""
    one = episode(Prompt(3, (11, 12), "q", "a"), 0, [(2, 0)], 0)
    failed = replace(one, episode=replace(one.episode, failure="died"))  # type: ignore[type-var]
    scored = [ScoredCompletion(each, score, True, {}) for each, score in ((one, 1.0), (one, 3.0), (failed, 8.0))]
    batch = scored_batch(scored, PAD)
    names = ("logprobs", "ref_logprobs", "values", "entropy")
    trainer: Any = SimpleNamespace(
        config=from_tree({"algorithm": {"advantage": "dr_grpo"}}), kl=SimpleNamespace(coef=0)
    )
    columns = batch.with_logprobs({name: torch.zeros_like(batch.mask) for name in names})
    advantages = loop.compute_advantages(trainer, columns)[0].advantages
    assert advantages.tolist() == [[-1, -1], [1, 1], [0, 0]]


def test_running_moments_leave_out_episodes_whose_environment_failed() -> None:
    """Scores 1 and 3 count, with mean 2 and variance 2; the third is normalized as they are."""
    mesh = SimpleNamespace(all_reduce_sum=lambda total: total)
    config = from_tree({"algorithm": {"normalize_rewards": True}})
    trainer: Any = SimpleNamespace(config=config, mesh=mesh, reward_stats=RunningScores())
    columns = {"scores": [1.0, 3.0, 8.0], "greedy_scores": [0.0, 0.0, 0.0], "counted": [1.0, 1.0, 0.0]}
    batch: Any = SimpleNamespace(**{name: torch.tensor(values) for name, values in columns.items()})
    scores, _ = loop.normalize_rewards(trainer, batch)
    assert trainer.reward_stats.state_dict() == {"count": 2, "total": 4, "squares": 10}
    assert scores.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5, 6 * 0.5**0.5])


# --- against models


@torch.no_grad()
def test_a_new_context_is_scored_as_if_nothing_had_been_before(tiny_model: Path) -> None:
    judged = [ScoredCompletion(each, 1.0, True, {}) for each in episodes(breaks=True)]
    batch = scored_batch(judged, PAD)
    policy = load_policy(str(tiny_model), head=None)
    padded = policy(batch.response_tokens(), 1.0).logprobs
    packing.enable(loading.transformer(policy))
    packed = policy(batch.response_tokens(packed=True), 1.0).logprobs
    for row, each in enumerate(judged):
        ids, told = each.completion.token_ids, each.completion.episode
        assert told
        for turn in told.turns:
            begin = told.contexts[turn.context - 1] if turn.context else 0
            read = ids[begin : turn.start] if turn.context else each.completion.prompt.token_ids + ids[: turn.start]
            own = torch.tensor([read + ids[turn.start : turn.stop]])
            alone = ResponseTokens.of(own, torch.tensor([len(read)]), torch.ones(1, turn.stop - turn.start))
            expected = policy(alone, 1.0).logprobs[0]
            torch.testing.assert_close(padded[row, turn.start : turn.stop], expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(packed[row, turn.start : turn.stop], expected, atol=1e-5, rtol=1e-5)
    assert not padded[batch.mask == 0].any()


def test_sequences_of_episodes_without_a_break_are_those_of_responses() -> None:
    batch = scored_batch([ScoredCompletion(each, 1.0, True, {}) for each in episodes(False)], PAD)
    assert batch.contexts is not None
    cut = Sequences.of(batch.ids, batch.prompt_lengths, batch.mask, batch.contexts, batch.prompt_numbers)
    plain, own = batch.response_tokens(), cut.response_tokens(batch.mask, packed=False)
    assert torch.equal(plain.targets, own.targets) and torch.equal(plain.ids, own.ids)
    assert batch.prompt_numbers.tolist() == [0, 1, 2, 2, 3, 3, 4, 5, 6, 6, 7, 7, 8, 9, 10, 10]


def test_padded_contexts_of_episodes_stay_within_the_budget() -> None:
    prompt = Prompt(0, (7, 8), "question", "answer")
    long = [episode(prompt, sample, [(30, 2), (1, 0)], sample, breaks=True) for sample in range(4)]
    short = [episode(prompt, sample, [(1, 2), (9, 0)], sample, breaks=sample == 4) for sample in (4, 5)]
    scored = [ScoredCompletion(each, 1.0, True, {}) for each in (*long, *short)]
    batch = scored_batch(scored, PAD)
    assert batch.contexts is not None
    lengths = sequence_lengths(batch.prompt_lengths, batch.mask, batch.contexts)
    assert lengths.tolist() == [[32, 3]] * 4 + [[3, 11], [14, 0]]
    count = experience.micro_batch_count(batch, 128)
    parts = experience.micro_batches(batch, count)
    assert count == 3 and [part.positions for part in parts] == [128, 128, 42]
    assert sum(len(part.scores) for part in parts) == 6


WAYS: list[dict[str, Any]] = [
    {"environment.name": "calculator", "environment.rewards": "turn", "algorithm.rollout_correction": "tis"},
    {"environment.name": "calculator", "algorithm.advantage": "grpo", "algorithm.policy_loss": "gspo"}
    | {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.1},
    {"environment.name": "calculator", "algorithm.advantage": "dr_grpo", "train.ppo_epochs": 2}
    | {"model.reference": "none", "algorithm.kl_coef": 0.0, "algorithm.rollout_correction": "mask"}
    | {"algorithm.rollout_correction_level": "sequence"},
]


def each_way(rank: int, ranks: int, path: str) -> list[dict[str, Tensor]]:
    """In each way all of a mini-batch at once, and a few completions at a time, also packed; half have two contexts."""
    results = []
    for way in WAYS:
        for tokens, packed in ((100_000, False), (45, False), (45, True)):
            results.append(updated(path, way | {"train.packing": packed}, tokens))
    return results


def updated(path: str, way: dict[str, Any], micro_batch_tokens: int) -> dict[str, Tensor]:
    """This rank's episodes through steps 4 to 7 of the loop: summed statistics, and all weights after it."""
    run = trainer_of(path, way, micro_batch_tokens)
    replicas = run.mesh.dp_size
    # A second pass measures weights that differ by rounding, the more the larger the step before it.
    lr = 0.01 if run.config.train.ppo_epochs > 1 else 0.03
    run.base_lrs = {name: [lr] for name in run.base_lrs}
    own = [each for each in episodes(breaks=True) if each.prompt.id % replicas == run.mesh.dp_rank]
    judged = [ScoredCompletion(each, each.episode.score + each.prompt.id % 3, True, {}) for each in own if each.episode]
    start = scored_batch(judged, PAD)
    wave = torch.sin(start.groups[:, None] + torch.arange(start.mask.shape[1]))
    said = loop.compute_logprobs(run, start, all_rows=True).logprobs
    batch = replace(start, rollout_logprobs=said + 0.3 * wave * start.mask)
    batch = loop.compute_logprobs(run, batch)
    batch, kl_sums = loop.compute_advantages(run, batch)
    assert not batch.advantages[batch.mask == 0].any()
    batch, stats = update.update(run, batch)
    sums = run.sum_over_ranks(flat(stats) | kl_sums | {"advantages": (batch.advantages * batch.home[:, None]).sum()})
    state = {f"{n}.{k}": p for n, t in run.models.items() for k, p in t.model.named_parameters()}
    result = {name: p.full_tensor().detach() for name, p in state.items()}
    everywhere = ("grad_norm/", "updates", "passes")  # what each rank knows of the whole
    shares = {name: value / replicas if name.startswith(everywhere) else value for name, value in sums.items()}
    for name in ("positions", "advantages"):  # padding, and the numbers of rows, depend on how rows are cut
        del shares[name]
    return result | {name: torch.tensor(value) for name, value in shares.items()}


@pytest.fixture(scope="module")
def on_one_rank(on_ranks: OnRanks, tiny_model: Path) -> list[dict[str, Tensor]]:
    return on_ranks(1, each_way, str(tiny_model))[0]


@pytest.mark.slow
def test_an_update_on_episodes_does_not_depend_on_micro_batches(on_one_rank: list[dict[str, Tensor]]) -> None:
    for first in range(0, len(on_one_rank), 3):
        whole, *cut = on_one_rank[first : first + 3]
        for each in cut:
            torch.testing.assert_close(each, whole, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_an_update_on_episodes_does_not_depend_on_the_number_of_ranks(
    ranks: int, on_ranks: OnRanks, on_one_rank: list[dict[str, Tensor]], tiny_model: Path
) -> None:
    for results in on_ranks(ranks, each_way, str(tiny_model)):
        for number, (found, expected) in enumerate(zip(results, on_one_rank, strict=True)):
            assert found.keys() == expected.keys()
            for name, value in found.items():
                torch.testing.assert_close(
                    value, expected[name], atol=3e-6, rtol=1e-5, msg=lambda m, n=f"way {number}, {name}": f"{n}: {m}"
                )
