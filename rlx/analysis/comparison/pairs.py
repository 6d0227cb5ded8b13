"""Two settings compared on what they have in common: the same questions, and the same seeds.

A question is as hard for both, and a seed gives both the same prompts and the same random numbers, so their difference
has less chance in it than either of them. Settings are compared at the last step that all runs of both have evaluated:
one that was stopped early is compared where it stopped.

Left out: reading (`outcomes`) and the statistics of a table (`crossed`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlx.analysis.comparison.crossed import CrossedMean, Table, after_looks, crossed_mean, holm
from rlx.analysis.comparison.outcomes import EvaluatedRun, evaluated_runs
from rlx.analysis.statistics import LEVEL, SEED, Group, final_value, resolution


@dataclass(frozen=True, eq=False)
class PairedGap:
    """How far two settings are from each other where both were evaluated."""

    first: Group
    second: Group
    runs: tuple[tuple[EvaluatedRun, EvaluatedRun], ...]  # a pair for each seed
    steps: tuple[int, int]  # at which each was evaluated
    questions: tuple[str, ...]  # ids; one for the mean over all of them
    tables: tuple[Table, Table]  # [seeds, questions] the values of each
    gap: CrossedMean  # how far the first is ahead
    chance: float  # of such a difference if there is none, corrected for the number of comparisons
    sign: float  # -1 where low is good
    luck: float = 0.0  # how far the first seems ahead because it was chosen, see `winner`

    @property
    def ends(self) -> tuple[float, float]:
        """Both ends of the 95 % interval; the luck, which only makes the first seem better, is off the low end."""
        low, high = self.gap.ends
        return low - self.luck, high

    @property
    def step(self) -> int:
        return self.steps[0]

    @property
    def seeds(self) -> int:
        return len(self.runs)

    @property
    def is_shown(self) -> bool:
        """Whether it is more than chance, however many settings were compared."""
        return self.chance <= 1 - LEVEL

    @property
    def is_by_question(self) -> bool:
        return len(self.questions) > 1


Looks = Callable[[int, int], int]
"""(step, seeds) -> how often settings had been compared when they were there, to stop who was shown to be behind"""


def one_look(step: int, seeds: int) -> int:
    """The one look at settings that nobody stopped for being behind."""
    return 1


def gaps_to_best(uri: str, groups: Sequence[Group], metric: str, sign: float, looks: Looks) -> list[PairedGap]:
    """How far the best setting is from each of the others; none for those that have nothing in common with it.

    Args:
        groups: best first.
        sign: -1 where low is good.
    """
    rated = [group for group in groups if group.values]
    runs = [evaluated_runs(uri, group, metric) for group in rated]
    found = [paired_gap((rated[0], rated[i]), (runs[0], runs[i]), sign) for i in range(1, len(rated))]
    gaps = [_after_looks(gap, looks) for gap in found if gap]
    chances = holm([gap.chance for gap in gaps])
    return [replace(gap, chance=chance) for gap, chance in zip(gaps, chances, strict=True)]


def paired_gap(
    groups: tuple[Group, Group],
    runs: tuple[Sequence[EvaluatedRun], Sequence[EvaluatedRun]],
    sign: float,
    *,
    at_ends: bool = False,
) -> PairedGap | None:
    """The difference of two settings.

    Args:
        sign: -1 where low is good.
        at_ends: compare what each was in the end, however many steps that took, and not at a step that both have done.

    Returns:
        None if there is no step of training that all runs have evaluated.
    """
    pairs = pair_seeds(*runs)
    steps = _last_steps(pairs, at_ends) if pairs else None
    if not steps:
        return None
    questions, tables = _tables(pairs, steps)
    gap = crossed_mean(sign * (tables[0] - tables[1]), resolution(np.stack(tables)))
    return PairedGap(*groups, tuple(pairs), steps, tuple(questions), (tables[0], tables[1]), gap, gap.chance, sign)


def _after_looks(pair: PairedGap, looks: Looks) -> PairedGap:
    gap, chance = after_looks(pair.gap, looks(pair.step, pair.seeds))
    return replace(pair, gap=gap, chance=chance)


def pair_seeds(
    first: Sequence[EvaluatedRun], second: Sequence[EvaluatedRun]
) -> list[tuple[EvaluatedRun, EvaluatedRun]]:
    """The runs of two settings side by side: those of the same seeds, or if they share none, in the order of the seeds,
    which is as right as any (runs of different seeds are independent), only less sharp."""
    by_seed = {run.seed: run for run in second}
    common = [(run, by_seed[run.seed]) for run in first if run.seed in by_seed]
    return common or list(zip(first, second, strict=False))


def seed_table(groups: Sequence[Group], metric: str) -> tuple[list[Group], Table]:
    """The settings whose runs all went to the last step on the same seeds, and their last values, [settings, seeds].

    Without two such settings or two such seeds both are empty.
    """
    rated = [group for group in groups if group.values]
    last = max((trial.last_step for group in rated for trial in group.ended), default=0)
    rows = {}
    for group in rated:
        at_end = [trial for trial in group.ended if trial.last_step == last and not trial.was_stopped]
        whole = {str(trial.settings.get(SEED)): trial for trial in at_end}
        rows[group] = {seed: final_value(trial, metric) for seed, trial in whole.items()}
    most = max((len(row) for row in rows.values()), default=0)
    full = [group for group, row in rows.items() if len(row) == most]
    seeds = sorted(set.intersection(*(set(rows[group]) for group in full))) if full else []
    if len(full) < 2 or len(seeds) < 2:
        return [], np.zeros((0, 0))
    return full, np.array([[rows[group][seed] for seed in seeds] for group in full])


def _last_steps(pairs: Sequence[tuple[EvaluatedRun, EvaluatedRun]], at_ends: bool) -> tuple[int, int] | None:
    """The last step that all runs of each side have evaluated, or all runs of both; None if there is none but 0."""
    first, second = (set.intersection(*(pair[side].steps - {0} for pair in pairs)) for side in (0, 1))
    first, second = (first, second) if at_ends else (first & second, first & second)
    return (max(first), max(second)) if first and second else None


def _tables(
    pairs: Sequence[tuple[EvaluatedRun, EvaluatedRun]], steps: tuple[int, int]
) -> tuple[list[str], list[Table]]:
    """The questions that all runs have answered, and the values of each side, [seeds, questions]; if there are not two
    such questions, the mean over all of each run's own."""
    for read in (EvaluatedRun.values, EvaluatedRun.mean):
        sides = [[read(pair[side], steps[side]) for pair in pairs] for side in (0, 1)]
        shared = set.intersection(*(set(values) for side in sides for values in side))
        questions = [question for question in sides[0][0] if question in shared]
        if len(questions) > 1:
            break
    return questions, [np.array([[values[each] for each in questions] for values in side]) for side in sides]
