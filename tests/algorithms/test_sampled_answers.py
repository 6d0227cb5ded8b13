"""pass@k, votes and standard errors: by hand, and against what the definitions say of all choices of samples."""

import itertools
import math
import random
import statistics

import pytest

from rlx.algorithms.sampled_answers import majority, pass_at_k, standard_error


@pytest.mark.parametrize(
    ("samples", "right", "k", "expected"),
    [(4, 1, 1, 1 / 4), (4, 1, 2, 1 / 2), (4, 1, 4, 1.0), (4, 0, 4, 0.0), (5, 2, 2, 1 - 3 / 10), (8, 8, 1, 1.0)],
)
def test_pass_at_k_by_hand(samples: int, right: int, k: int, expected: float) -> None:
    assert pass_at_k(samples, right, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_is_the_share_of_choices_with_a_right_answer() -> None:
    for samples in range(1, 8):
        for right, k in itertools.product(range(samples + 1), range(1, samples + 1)):
            answers = [True] * right + [False] * (samples - right)
            choices = [any(choice) for choice in itertools.combinations(answers, k)]
            assert pass_at_k(samples, right, k) == pytest.approx(sum(choices) / len(choices), abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_pass_at_k_has_no_bias_where_one_minus_the_power_has(k: int) -> None:
    """Over all numbers of right answers among 4, by their binomial chances at p = 0.3."""
    chances = [math.comb(4, right) * 0.3**right * 0.7 ** (4 - right) for right in range(5)]
    unbiased = sum(chance * pass_at_k(4, right, k) for right, chance in enumerate(chances))
    assert unbiased == pytest.approx(1 - 0.7**k, abs=1e-12)
    # veRL's best@k: k draws with replacement from the 4.
    replaced = sum(chance * (1 - (1 - right / 4) ** k) for right, chance in enumerate(chances))
    assert replaced == pytest.approx(unbiased) if k == 1 else replaced < unbiased - 0.01


def test_counts_are_exact_at_any_size() -> None:
    assert pass_at_k(4096, 1, 1024) == 0.25
    # The product that Chen et al. print, which rounds in each factor.
    product = 1 - math.prod(1 - 512 / i for i in range(2000 - 3 + 1, 2001))
    assert pass_at_k(2000, 3, 512) == pytest.approx(product, rel=1e-12)


@pytest.mark.parametrize(
    ("answers", "right", "expected"),
    [
        (["4", "4", "5"], [True, True, False], 1.0),
        (["5", "4", "5"], [False, True, False], 0.0),
        (["4", "5", "6"], [True, False, False], 1 / 3),  # all are equally frequent
        (["6", "4", "4", "5", "5"], [False, True, True, False, False], 1 / 2),
        ([None, None, None, "4"], [False, False, False, True], 1.0),  # no answer is no vote
        ([None, None], [False, False], 0.0),
        (["", "", "4"], [False, False, True], 0.0),  # an empty answer is one
        (["4", "4", "4.0"], [True, False, True], 1 / 2),  # judged both ways
        (["4"], [True], 1.0),
    ],
)
def test_the_most_frequent_answer_counts(answers: list[str | None], right: list[bool], expected: float) -> None:
    assert majority(answers, right) == pytest.approx(expected, abs=1e-15)
    order = list(range(len(answers)))
    random.Random(0).shuffle(order)
    assert majority([answers[i] for i in order], [right[i] for i in order]) == majority(answers, right)


def test_the_standard_error_by_hand() -> None:
    # Means of 1/2, 1 and 0: deviations 0, 1/2, 1/2.
    assert standard_error([0.5, 1.0, 0.0]) == pytest.approx(math.sqrt(0.5 / (3 * 2)), abs=1e-15)
    values = [random.Random(i).random() for i in range(50)]
    assert standard_error(values) == pytest.approx(statistics.stdev(values) / math.sqrt(50), rel=1e-12)
    assert standard_error([0.1, 0.1]) == 0.0 and math.isnan(standard_error([1.0]))


def test_the_standard_error_is_the_spread_of_repeated_evaluations() -> None:
    """Questions of different difficulty, 4 answers each: clustered by question it is right, with all answers as if
    they were independent it is too small."""
    draw = random.Random(5)
    means, clustered, naive = [], [], []
    for _ in range(600):
        chances = [draw.betavariate(0.5, 0.5) for _ in range(40)]
        right = [[draw.random() < chance for _ in range(4)] for chance in chances]
        means.append(statistics.fmean(statistics.fmean(row) for row in right))
        clustered.append(standard_error([statistics.fmean(row) for row in right]))
        naive.append(standard_error([float(each) for row in right for each in row]))
    spread = statistics.stdev(means)
    assert statistics.fmean(clustered) == pytest.approx(spread, rel=0.1)
    assert statistics.fmean(naive) < 0.75 * spread
