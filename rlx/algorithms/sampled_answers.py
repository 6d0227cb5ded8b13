"""What several sampled answers to one question say of the policy: pass@k, the vote of the majority, standard errors.

The functions take one question's numbers, or one number of each question; no tensors, so counts are exact at any size.
Left out: which answers are right (rlx.rewards), and over which questions means are taken (rlx.training.evaluation).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The chance that at least one of k answers is right, without bias: 1 - C(n - c, k) / C(n, k).

    It is the share of right ones among all choices of k from the n answers. Source: Chen et al. 2021 (arXiv
    2107.03374), eq. 1.

    Args:
        samples: n, the answers that were drawn.
        right: c, how many of them are right.
        k: at most n.
    """
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def majority(answers: Sequence[str | None], right: Sequence[bool]) -> float:
    """The chance that the most frequent answer is right, where a draw decides between equally frequent ones.

    So with a tie between a right answer and two wrong ones it is 1/3, whatever the order of the samples. Answers are
    the same if their texts are; None, a completion without an answer, is no vote. Without votes it is 0. Source:
    self-consistency, Wang et al. 2022 (arXiv 2203.11171).

    Args:
        answers: of the samples.
        right: whether each is right; of a text that was judged both ways, the share of right ones counts.
    """
    given = [(answer, is_right) for answer, is_right in zip(answers, right, strict=True) if answer is not None]
    votes = Counter(answer for answer, _ in given)
    most = max(votes.values(), default=0)
    chosen = [is_right for answer, is_right in given if votes[answer] == most]
    return sum(chosen) / len(chosen) if chosen else 0.0


def standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean of one value for each question: s / sqrt(N), s with N - 1; NaN for one question.

    The values of a question's samples depend on one another, so each question counts once, with their mean: this is the
    standard error clustered by question. Source: Miller
    2024 (arXiv 2411.00640).
    """
    count = len(values)
    if count < 2:
        return math.nan
    mean = math.fsum(values) / count
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count * (count - 1)))
