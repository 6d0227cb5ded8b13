"""Completions as tensors, and how they are cut into mini-batches and micro-batches."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from batches import scored_batch
from torch import Tensor

from rlx.algorithms.dealing import balance_groups, balance_lengths, choose_minibatches, deal
from rlx.mesh import Mesh
from rlx.training.collector import Selection
from rlx.training.experience import (
    Experience,
    LogprobBatch,
    RolloutBatch,
    concat,
    micro_batch_count,
    micro_batches,
    minibatches,
)
from rlx.types import Completion, Prompt, ScoredCompletion

PAD = 9


def completion(prompt: Sequence[int], response: Sequence[int], number: int = 0) -> Completion:
    return Completion(
        prompt=Prompt(number, tuple(prompt), f"question {number}", "answer"),
        sample=0,
        token_ids=tuple(response),
        logprobs=tuple(-float(token) for token in response),
        finished=True,
        version=0,
    )


def numbered(lengths: Sequence[tuple[int, int]]) -> RolloutBatch:
    """One completion per (prompt length, response length); all tokens of the i-th are i + 1, its score is i."""
    rows = [completion([i + 1] * p, [i + 1] * r, i) for i, (p, r) in enumerate(lengths)]
    return scored_batch([judged(row, float(i)) for i, row in enumerate(rows)], PAD)


def judged(row: Completion, score: float = 0.0, greedy_score: float = 0.0) -> ScoredCompletion:
    return ScoredCompletion(row, score, score >= 1, {}, greedy_score)


def scores(parts: Sequence[RolloutBatch]) -> list[list[float]]:
    return [part.scores.tolist() for part in parts]


def test_log_probabilities_that_the_engine_did_not_report_are_nan() -> None:
    silent = replace(completion([1, 2, 3], [4, 5]), logprobs=())
    batch = scored_batch([judged(silent), judged(completion([5], [6, 7, 8]))], PAD)
    assert batch.rollout_logprobs.isnan().tolist() == [[True, True, False], [False, False, False]]
    assert batch.rollout_logprobs[0, 2] == 0  # padding
    assert batch.rollout_logprobs[1].tolist() == [-6, -7, -8]


def test_completions_are_padded_on_the_right() -> None:
    batch = scored_batch([judged(completion([1, 2, 3], [4]), 0.5), judged(completion([5], [6, 7, 8]), -1.0)], PAD)
    assert batch.ids.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert batch.ids.dtype == torch.int64
    assert batch.prompt_lengths.tolist() == [3, 1]
    assert batch.mask.tolist() == [[1, 0, 0], [1, 1, 1]]
    assert batch.rollout_logprobs.tolist() == [[-4, 0, 0], [-6, -7, -8]]
    assert batch.scores.tolist() == [0.5, -1.0]
    assert batch.scores.dtype == torch.float32
    shorter = scored_batch([judged(completion([1], [2])), judged(completion([3, 4], [5, 6]))], PAD)
    assert shorter.ids.tolist() == [[1, 2, PAD, PAD], [3, 4, 5, 6]]


def test_the_losses_leave_out_what_was_cut_only_if_asked_to() -> None:
    rows = [judged(completion([1], [2])), judged(replace(completion([3, 4], [5, 6]), finished=False))]
    assert scored_batch(rows, PAD).trained.tolist() == [1, 1]
    batch = scored_batch(rows, PAD, mask_truncated=True)
    assert batch.trained.tolist() == [1, 0]
    assert (batch.mask.tolist(), batch.loss_mask.tolist()) == ([[1, 0], [1, 1]], [[1, 0], [0, 0]])


def test_prompts_make_groups() -> None:
    rows = [judged(completion([1], [2], number), greedy_score=number / 2) for number in (7, 7, 3)]
    batch = scored_batch(rows, PAD)
    assert batch.groups.tolist() == [7, 7, 3]
    assert batch.greedy_scores.tolist() == [3.5, 3.5, 1.5]
    assert batch.rows(slice(1, 3)).groups.tolist() == [7, 3]


# --- which groups a step trains on


def group(number: int, *scores: float) -> list[ScoredCompletion]:
    return [judged(completion([1], [2, 3], number), score) for score in scores]


def numbers(rows: Sequence[ScoredCompletion]) -> list[int]:
    return [row.completion.prompt.id for row in rows]


def test_without_filter_all_groups_are_trained_on(alone: Mesh) -> None:
    selection = Selection(wanted=2, samples=2, mesh=alone, filtered=False, greedy=False)
    assert selection.count_missing() == 2
    selection.add([*group(1, 0, 0), *group(2, 0, 1)])
    assert (selection.count_missing(), selection.varied, selection.tokens) == (0, 1, 8)
    assert numbers(selection.take()) == [1, 1, 2, 2]


@pytest.mark.parametrize("greedy", [False, True])
def test_what_may_be_trained_on_is_known_before_the_scores(greedy: bool, alone: Mesh) -> None:
    selection = Selection(wanted=3, samples=2, mesh=alone, filtered=False, greedy=greedy)
    parts = [[*group(1, 0, 0, *[1] * greedy), *group(2, 0, 1, *[0] * greedy)], group(3, 0, 0, *[1] * greedy)]
    choosable = [each for part in parts for each in selection.choosable([row.completion for row in part])]
    for part in parts:
        selection.add(part)
    assert [each.prompt.id for each in choosable] == [1, 1, 2, 2, 3, 3]
    assert choosable == [row.completion for row in selection.take()]


def test_groups_of_equal_scores_are_left_out_and_others_drawn(alone: Mesh) -> None:
    selection = Selection(wanted=2, samples=2, mesh=alone, filtered=True, greedy=False)
    selection.add([*group(1, 1, 1), *group(2, 0, 1)])
    assert selection.count_missing() == 1
    selection.add([*group(3, 0.5, 0), *group(4, 1, 0)])
    assert (selection.count_missing(), selection.varied) == (0, 3)
    assert numbers(selection.take()) == [2, 2, 3, 3]  # group 4 is one too many
    assert numbers(selection.candidates) == [1, 1, 2, 2, 3, 3, 4, 4]


def test_groups_can_be_left_out_by_right_answers_whatever_their_scores(alone: Mesh) -> None:
    """A length penalty makes scores vary; DAPO's eq. 11 counts right answers."""
    right, wrong = [replace(row, is_correct=True) for row in group(1, 1, 0.5)], group(2, 0, -0.5)
    mixed = [row for row in group(3, 1, 0)]
    by_score = Selection(wanted=3, samples=2, mesh=alone, filtered=True, greedy=False)
    by_score.add([*right, *wrong, *mixed])
    assert (by_score.count_missing(), by_score.varied) == (0, 3)
    selection = Selection(wanted=3, samples=2, mesh=alone, filtered=True, greedy=False, by_correct=True)
    selection.add([*right, *wrong, *mixed])
    assert (selection.count_missing(), selection.varied) == (2, 3)
    assert numbers(selection.take()) == [3, 3, 1, 1, 2, 2]


def test_what_was_left_out_fills_a_step_up(alone: Mesh) -> None:
    selection = Selection(wanted=2, samples=2, mesh=alone, filtered=True, greedy=False)
    selection.add([*group(1, 1, 1), *group(2, 0, 1), *group(3, 0, 0)])
    assert numbers(selection.take()) == [2, 2, 1, 1]


def test_the_greedy_completion_is_kept_as_a_score_alone(alone: Mesh) -> None:
    selection = Selection(wanted=2, samples=2, mesh=alone, filtered=True, greedy=True)
    selection.add([*group(1, 0, 1, 0.25), *group(2, 1, 1, 0)])
    assert [row.greedy_score for row in selection.candidates] == [0.25, 0.25, 0, 0]
    assert [row.score for row in selection.candidates] == [0, 1, 1, 1]
    assert (selection.count_missing(), selection.tokens) == (1, 12)  # of six completions


def test_parts_joined_are_the_whole() -> None:
    lengths = [(5, 1), (1, 3), (2, 2), (1, 6)]
    whole, parts = numbered(lengths), [numbered(lengths[:3]).rows(slice(1, 3)), numbered(lengths).rows(slice(3, 4))]
    together = concat(parts)
    assert together.ids.tolist() == [[2, 2, 2, 2, 0, 0, 0], [3, 3, 3, 3, 0, 0, 0], [4] * 7]
    for name in ("prompt_lengths", "mask", "rollout_logprobs", "scores", "groups"):
        assert getattr(together, name).tolist() == getattr(whole.rows(slice(1, 4)), name).tolist()
    assert together.row.tolist() == [0, 1, 2]
    assert concat(parts[:1]) is parts[0]


def test_rows_are_cut_to_the_longest_prompt_with_response_and_the_longest_response() -> None:
    batch = numbered([(5, 1), (1, 3), (2, 2), (1, 6)])
    assert (batch.ids.shape, batch.mask.shape) == ((4, 7), (4, 6))
    part = batch.rows(slice(1, 3))
    assert part.ids.tolist() == [[2, 2, 2, 2], [3, 3, 3, 3]]
    assert part.mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert part.rollout_logprobs.tolist() == [[-2, -2, -2], [-3, -3, 0]]
    assert part.prompt_lengths.tolist() == [1, 2]
    assert part.scores.tolist() == [1, 2]
    first = batch.rows(slice(1))
    assert (first.ids.tolist(), first.mask.tolist()) == ([[1] * 6], [[1]])


def test_rows_cut_every_grid_and_keep_what_follows_a_gap_in_the_mask() -> None:
    grid = torch.arange(8.0).reshape(2, 4)
    gap = torch.tensor([[1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    columns = {"logprobs": grid + 1, "ref_logprobs": grid, "values": grid, "entropy": grid}
    batch = replace(numbered([(2, 4), (3, 4)]), mask=gap).with_logprobs(columns).with_advantages(-grid, grid)
    assert isinstance(batch, Experience)
    part = batch.rows(slice(2))
    assert part.mask.tolist() == [[1, 0, 1], [1, 0, 0]]
    assert part.ids.shape == (2, 5)
    grids: list[tuple[Tensor, list[list[float]]]] = [
        (part.values, [[0, 1, 2], [4, 5, 6]]),
        (part.advantages, [[0, -1, -2], [-4, -5, -6]]),
        (part.logprobs, [[1, 2, 3], [5, 6, 7]]),
    ]
    for cut, expected in grids:
        assert cut.tolist() == expected


def test_other_logprobs_replace_those_before_and_leave_out_what_followed_from_them() -> None:
    """The doctor computes the log-probabilities of the same completions twice."""
    batch = numbered([(2, 4), (3, 4)])
    grids = {name: torch.zeros_like(batch.mask) for name in ("logprobs", "ref_logprobs", "values", "entropy")}
    experience = batch.with_logprobs(grids).with_advantages(batch.mask, batch.mask)
    again = experience.with_logprobs(grids | {"logprobs": batch.mask})
    assert type(again) is LogprobBatch
    assert again.logprobs.equal(batch.mask) and again.ids.equal(batch.ids)


def test_minibatches_are_equal_runs() -> None:
    parts = minibatches(numbered([(1, 1)] * 6), 3)
    assert scores(parts) == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ValueError, match="6 completions do not make 4 equal mini-batches"):
        minibatches(numbered([(1, 1)] * 6), 4)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_minibatch_holds_the_same_prompts_on_any_number_of_ranks(ranks: int) -> None:
    everything = numbered([(1, 1)] * 8)
    shares = [numbered([(1, 1)] * (8 // ranks)) for _ in range(ranks)]
    shares = [replace(share, scores=everything.scores[rank::ranks]) for rank, share in enumerate(shares)]
    by_rank = [scores(minibatches(share, 2)) for share in shares]
    joined = [sorted(itertools.chain(*parts)) for parts in zip(*by_rank, strict=True)]
    assert joined == [[0, 1, 2, 3], [4, 5, 6, 7]]


def packed(lengths: Sequence[int], count: int) -> list[list[float]]:
    """The lengths of the completions in each micro-batch."""
    return scores(micro_batches(of_lengths(lengths), count))


def of_lengths(lengths: Sequence[int]) -> RolloutBatch:
    """Completions of so many tokens, prompt included, which are their scores too; prompts are of 1 and 2 in turn."""
    batch = numbered([(1 + i % 2, length - 1 - i % 2) for i, length in enumerate(lengths)])
    return replace(batch, scores=torch.tensor(lengths, dtype=torch.float32))


@pytest.mark.parametrize(
    ("lengths", "budget", "count"),
    [
        ([4] * 6, 24, 1),
        ([4] * 6, 23, 2),
        ([4] * 6, 8, 3),
        ([4] * 6, 7, 6),
        ([4] * 6, 1, 6),
        ([4] * 7, 8, 4),
        ([4], 100, 1),
        ([3, 9, 3, 3], 9, 2),  # the long one alone
        ([3, 9, 3, 3], 8, 3),  # and it may be too long
        ([9, 3, 9, 3], 18, 2),
    ],
)
def test_as_few_micro_batches_as_the_token_budget_allows(lengths: list[int], budget: int, count: int) -> None:
    assert micro_batch_count(of_lengths(lengths), budget) == count


def test_no_other_cut_makes_fewer_or_smaller_micro_batches() -> None:
    """Against every way to put seven completions into micro-batches."""
    lengths = [7, 3, 9, 4, 4, 8, 3]

    def partitions(rows: list[int]) -> Iterator[list[list[int]]]:
        if not rows:
            yield []
            return
        for size in range(len(rows)):
            for rest in itertools.combinations(rows[1:], size):
                for others in partitions([row for row in rows[1:] if row not in rest]):
                    yield [[rows[0], *rest], *others]

    largest: dict[int, int] = {}  # of the best way to make so many
    for parts in partitions(list(range(len(lengths)))):
        most = max(len(part) * max(lengths[i] for i in part) for part in parts)
        largest[len(parts)] = min(most, largest.get(len(parts), most))
    batch = of_lengths(lengths)
    for count, best in largest.items():
        parts = micro_batches(batch, count)
        assert len(parts) == count
        assert max(part.ids.numel() for part in parts) == min(largest[c] for c in largest if c <= count)
        assert micro_batch_count(batch, best) <= count


@pytest.mark.parametrize("budget", [9, 10, 14, 20, 27, 1000])
def test_micro_batches_hold_every_row_once_within_the_budget_the_longest_first(budget: int) -> None:
    lengths = [(1, 2), (4, 5), (2, 2), (1, 1), (3, 1), (2, 7), (1, 4)]
    batch = numbered(lengths)
    parts = micro_batches(batch, micro_batch_count(batch, budget))
    order = [int(i) for part in parts for i in part.row]
    assert order == [1, 5, 6, 2, 4, 0, 3]  # those of a length as they were
    assert all(part.ids.numel() <= budget for part in parts)
    kept = [(int(p), int(m.sum())) for part in parts for p, m in zip(part.prompt_lengths, part.mask, strict=True)]
    assert kept == [lengths[i] for i in order]
    for part in parts:
        assert part.ids.shape[1] == max(p + r for p, r in (lengths[int(i)] for i in part.scores))
        assert (part.ids == part.scores[:, None] + 1).sum(1).tolist() == [sum(lengths[int(i)]) for i in part.row]


def test_ranks_can_agree_on_more_micro_batches_than_one_needs() -> None:
    assert packed([5, 5, 5, 5, 5], 2) == [[5, 5, 5], [5, 5]]
    assert packed([5, 5, 5, 5, 5], 4) == [[5, 5], [5], [5], [5]]
    assert packed([3, 5, 4, 6, 7], 5) == [[7], [6], [5], [4], [3]]
    assert packed([12, 3, 3, 3, 3], 2) == [[12], [3, 3, 3, 3]]
    with pytest.raises(ValueError, match="5 completions do not fill 6 micro-batches"):
        packed([5] * 5, 6)


def grouped(*groups: Sequence[int]) -> RolloutBatch:
    """Completions to a prompt of 10 tokens for each group, with responses of these lengths."""
    sizes = [(10, length) for lengths in groups for length in lengths]
    names = [number for number, lengths in enumerate(groups) for _ in lengths]
    return replace(numbered(sizes), groups=torch.tensor(names))


@pytest.mark.parametrize(
    ("budget", "cut"),
    [
        (1000, [[0, 1, 2, 3, 4, 5]]),
        (33, [[0, 1, 2], [3, 4, 5]]),  # 10 + 3 + 5 + 2; 10 + 8 + 10 + 1 + 4
        (20, [[0, 1, 2], [3], [4, 5]]),
        (19, [[0], [1, 2], [3], [4, 5]]),  # with [0, 1] and [2] the second would not be smaller than the third
        (1, [[0], [1], [2], [3], [4], [5]]),
    ],
)
def test_packed_micro_batches_keep_the_order_and_count_a_prompt_once(budget: int, cut: list[list[int]]) -> None:
    batch = grouped([3, 5, 2], [8], [1, 4])
    assert micro_batch_count(batch, budget, packed=True) == len(cut)
    parts = micro_batches(batch, len(cut), packed=True)
    assert scores(parts) == cut
    for part in parts:
        assert part.inputs is not None and part.inputs.packing is not None
        tokens = [(int(row), int(length)) for row, length in zip(part.scores, part.mask.sum(1), strict=True)]
        prompts = 10 * len(set(part.groups.tolist()))
        assert part.positions == prompts + sum(length - 1 for _, length in tokens)  # the last one is no input
        # All tokens of a completion are its number plus one; the group's first gives the prompt.
        for row, length in tokens:
            first = next(other for other, _ in tokens if batch.groups[other] == batch.groups[row])
            given = int((part.inputs.packing.ids == row + 1).sum())
            assert given == length - 1 + (10 if row == first else 0)
        assert part.rows(slice(0, 1)).inputs is None  # it is of all completions of a micro-batch


def test_micro_batches_as_they_were_count_padding() -> None:
    assert [part.positions for part in micro_batches(grouped([3, 5], [8]), 2)] == [18, 30]


@pytest.mark.parametrize("packed", [False, True])
def test_a_micro_batch_goes_to_a_device_with_all_that_the_models_take(packed: bool) -> None:
    part = micro_batches(grouped([3, 5], [8]), 1, packed)[0]
    there = part.to(torch.device("meta"))
    assert {column.device.type for column in there.columns.values()} == {"meta"}
    assert part.inputs is not None and there.inputs is not None
    expected, moved = tensors(part.inputs), tensors(there.inputs)
    assert {each.device.type for each in moved} == {"meta"}
    assert [each.shape for each in moved] == [each.shape for each in expected]
    assert len(moved) == (11 if packed else 5)
    assert torch.equal(flat(part.to(torch.device("cpu"))), flat(part))


def tensors(value: object) -> list[Tensor]:
    """All tensors in tuples, however deep."""
    if isinstance(value, Tensor):
        return [value]
    return [each for part in value for each in tensors(part)] if isinstance(value, tuple) else []


def flat(part: RolloutBatch) -> Tensor:
    return torch.cat([each.flatten() for each in tensors(part.inputs)])


# --- replicas


def test_completions_are_dealt_the_longest_first_to_and_fro() -> None:
    assert dealt([[5, 4, 3], [2, 6, 1]]) == [[1, 1, 0], [0, 0, 1]]
    assert dealt([[5, 1], [1, 7]], [[0, 1], [0, 1]]) == [[0, 1], [1, 0]]  # each mini-batch by itself
    assert dealt([[5, 1], [1, 7]], [[0, 1], [1, 0]]) == [[1, 0], [1, 0]]  # 7 and 5; 1 and 1
    assert dealt([[9], [9], [9]]) == [[0], [1], [2]]  # equally long: none travels


def dealt(lengths: list[list[int]], chosen: list[list[int]] | None = None) -> list[list[int]]:
    rows = torch.tensor(lengths)
    return balance_lengths(rows, torch.zeros_like(rows) if chosen is None else torch.tensor(chosen)).tolist()


def test_groups_that_share_their_prompt_stay_together_where_that_is_less_to_compute() -> None:
    # Two replicas, one mini-batch, two groups of two. Whole groups: 10 + 3 and 10 + 7 tokens, so 17 for the busiest.
    # The longest first, to and fro: 4 and 1, 3 and 2, each from both groups, so 2 x 10 + 5 for both.
    responses, groups = torch.tensor([[4, 3], [2, 1]]), torch.tensor([[7, 7], [5, 5]])
    prompts, chosen = torch.full_like(groups, 10), torch.zeros_like(groups)
    assert deal(prompts, responses, groups, chosen, True).tolist() == [[0, 0], [1, 1]]
    assert deal(prompts, responses, groups, chosen, False).tolist() == [[0, 1], [1, 0]]
    # With prompts of one token: 1 + 7 for the busiest with whole groups, and 2 + 5 with single completions.
    assert deal(prompts // 10, responses, groups, chosen, True).tolist() == [[0, 1], [1, 0]]


def test_groups_are_dealt_the_longest_first_in_each_mini_batch() -> None:
    responses = torch.tensor([[9, 9, 5, 5], [2, 2, 8, 8]])
    groups = torch.tensor([[0, 0, 1, 1], [2, 2, 3, 3]])
    chosen = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1]])
    owners = balance_groups(responses, groups, chosen)
    assert owners is not None
    assert owners.tolist() == [[0, 0, 1, 1], [1, 1, 0, 0]]  # 18 and 4; 16 and 10


@pytest.mark.parametrize(
    ("groups", "chosen"),
    [
        ([[0, 0, 0], [1, 1, 2]], [[0, 0, 0], [0, 0, 0]]),  # of different sizes
        ([[0, 0, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]]),  # one group, two replicas
        ([[0, 0, 1, 1], [2, 2, 3, 3]], [[0, 0, 0, 1], [0, 1, 1, 1]]),  # cut by mini-batches
    ],
)
def test_groups_that_cannot_be_dealt_evenly_are_dealt_by_completions(
    groups: list[list[int]], chosen: list[list[int]]
) -> None:
    of, part = torch.tensor(groups), torch.tensor(chosen)
    responses, prompts = torch.arange(1, of.numel() + 1).view_as(of), torch.full_like(of, 100)
    assert balance_groups(responses, of, part) is None
    assert torch.equal(deal(prompts, responses, of, part, True), balance_lengths(prompts + responses, part))


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_packed_completions_are_dealt_such_that_no_prompt_is_computed_twice(replicas: int) -> None:
    """64 groups of 8 for each replica: single completions would have up to 1.4 times the tokens."""
    generator = torch.Generator().manual_seed(replicas)
    responses = torch.randint(32, 257, (replicas, 512), generator=generator)
    groups = torch.arange(replicas * 512).view_as(responses) // 8
    prompts = 50 + groups % 7
    chosen = choose_minibatches(groups, 2, None)
    owners = deal(prompts, responses, groups, chosen, True)
    least = (responses.sum() + prompts.sum() / 8) / replicas
    loads = []
    for replica in range(replicas):
        own = owners == replica
        assert int((own & (chosen == 0)).sum()) == int((own & (chosen == 1)).sum()) == 256
        loads.append(int(responses[own].sum() + sum(50 + group % 7 for group in set(groups[own].tolist()))))
    assert max(loads) < 1.01 * least


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_later_passes_deal_the_same_prompts_to_mini_batches_on_any_number_of_replicas(replicas: int) -> None:
    def by_minibatch(epoch: int, replicas: int) -> list[set[int]]:
        prompts = torch.arange(30, 46)  # of the step; each replica has every n-th one, with two completions
        groups = torch.stack([prompts[rank::replicas].repeat_interleave(2) for rank in range(replicas)])
        chosen = choose_minibatches(groups, 4, (7, 3, epoch))
        assert chosen.flatten().bincount().tolist() == [8] * 4
        found = [set(groups[chosen == m].tolist()) for m in range(4)]
        assert [len(part) for part in found] == [4] * 4  # whole prompts
        return found

    assert by_minibatch(1, replicas) == by_minibatch(1, 1)
    assert by_minibatch(1, replicas) != by_minibatch(2, replicas)


def test_the_first_pass_keeps_the_order() -> None:
    groups = torch.tensor([[4, 4, 1, 1], [3, 3, 2, 2]])
    assert choose_minibatches(groups, 2, None).tolist() == [[0, 0, 1, 1]] * 2


def waiting(lengths: Sequence[Tensor], budget: int) -> float:
    """The positions of each micro-batch's largest on any replica, by those of the mean replica."""
    batches = [numbered([(1, length - 1) for length in own.tolist()]) for own in lengths]
    count = max(micro_batch_count(batch, budget) for batch in batches)
    sizes = torch.tensor([[float(micro.ids.numel()) for micro in micro_batches(batch, count)] for batch in batches])
    return float(sizes.amax(0).sum() / sizes.sum(1).mean())


@pytest.mark.parametrize(("replicas", "before", "after"), [(2, 1.08, 1.06), (4, 1.15, 1.08), (8, 1.18, 1.08)])
def test_replicas_whose_completions_are_dealt_wait_less_for_each_other(
    replicas: int, before: float, after: float
) -> None:
    """64 completions each of log-normal lengths, 100 tokens in the median, sigma 0.8, five times."""
    generator = torch.Generator().manual_seed(0)
    own, now = 0.0, 0.0
    for _ in range(5):
        drawn = (100 * (0.8 * torch.randn(replicas, 64, generator=generator)).exp()).long().clamp(4, 1000)
        owners = balance_lengths(drawn, torch.zeros_like(drawn))
        own += waiting(list(drawn), 4096) / 5
        now += waiting([drawn[owners == i] for i in range(replicas)], 4096) / 5
    print(f"{replicas} replicas: {own:.3f} as drawn, {now:.3f} dealt")
    assert own > before
    assert now < after


@pytest.mark.parametrize(("replicas", "count"), [(2, 1), (3, 2), (8, 4)])
def test_dealt_completions_are_of_like_lengths(replicas: int, count: int) -> None:
    lengths = torch.randint(10, 500, (replicas, 16 * count), generator=torch.Generator().manual_seed(replicas))
    owners = balance_lengths(lengths, choose_minibatches(lengths, count, None))
    for part, owner in zip(lengths.chunk(count, 1), owners.chunk(count, 1), strict=True):
        shares = torch.stack([part[owner == i].sort().values for i in range(replicas)])  # as many each, or it raises
        assert (shares.amax(0)[:-1] <= shares.amin(0)[1:]).all()  # the i-th of any is no longer than the next of any
        assert shares.sum(1).max() - shares.sum(1).min() < part.sum(1).max() - part.sum(1).min()
