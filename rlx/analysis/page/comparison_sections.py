"""The sections of the page about what the runs prove: pairs, chance, questions that flipped, races, lineage.

Left out: the other sections (sections.py), and the evidence itself (rlx.analysis.comparison).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from rlx.analysis.comparison.evidence import Evidence, flips_of, gap_table, plan_table, variance_table
from rlx.analysis.comparison.pairs import PairedGap
from rlx.analysis.comparison.rungs import rung_standings
from rlx.analysis.loading import Sweep
from rlx.analysis.page import comparison_figures
from rlx.analysis.page.html import PageSection
from rlx.analysis.statistics import Group
from rlx.config.sweep import Mode

_MOST_ROWS = 20  # flipped questions


def paired(candidates: Sequence[Group], evidence: Evidence) -> list[PageSection]:
    """How far the candidates are behind the best one, and what their chance is made of."""
    gaps = [gap for gap in evidence.gaps if not math.isnan(gap.gap.half_width)]
    if not gaps:
        return []
    by_question = any(gap.is_by_question for gap in gaps)
    units = "the same seeds and the same questions" if by_question else "the same seeds"
    note = (
        f"How far each setting is behind the best one on {units}: what is hard for both is no difference between them, "
        "so most of these intervals are narrower than those of the settings by themselves. A setting that was stopped "
        "is compared where it stopped. chance: how often settings that are equal would differ as much, corrected for "
        'the number of comparisons (Holm); up to 0.05 it is "more than chance". An interval is that of one comparison, '
        "so it may leave out 0 although the difference may be chance. The best setting was chosen for its luck, too, "
        "so it seems further ahead than it is: the low ends of the intervals are lower by the difference between its "
        "mean and the mean that is expected of it over many fresh seeds."
    )
    if by_question:
        is_one_run = max(gap.seeds for gap in gaps) == 1
        of = "these runs, not of their settings," if is_one_run else "other seeds"
        note += f" The intervals speak of {of} and of other questions of the same kind."
    figure = comparison_figures.paired_gaps(gaps, _ranks(candidates))
    return [PageSection("Paired with the best", note, figure, table=gap_table(gaps)), *_chance(gaps)]


def _chance(gaps: Sequence[PairedGap]) -> list[PageSection]:
    shares, plans = variance_table(gaps), plan_table(gaps)
    if shares.empty:
        return []
    note = (
        "Which share of the variance of a setting's mean is due to its seeds, to the choice of questions, to seeds "
        "that help with other questions, and to sampling (known where several answers to a question are drawn, "
        "otherwise in seed by question). A difference of two settings has a share of questions of its own: not "
        "all questions gain alike. Each row is of the step at which its setting was compared "
        "with the best; the best is at the step of the first such comparison."
    )
    sections = [PageSection("What the chance is made of", note, table=shares)]
    if not plans.empty:
        note = (
            "The smallest difference of two settings that four of five sweeps of such a size show, judged by how the "
            "settings of this one differ; the first row is this sweep. It is said of one comparison: where many "
            "settings are compared, somewhat less is shown. Training and answers: how many times those of this sweep."
        )
        sections.append(PageSection("What more seeds or questions would show", note, table=plans))
    return sections


def flips(pair: PairedGap | None, title: str = "Flipped questions") -> list[PageSection]:
    """The questions that two candidates answer differently, with an answer of each."""
    found = flips_of(pair)
    if not found or not pair:
        return []
    first, second = pair.first.label, pair.second.label
    note = (
        f"Of {len(pair.questions)} questions, A ({first}) answers {found.better} better and B ({second}) "
        f"{found.worse}, by the mean over {pair.seeds} runs at step {pair.step}; the rest alike. The largest "
        "differences, with a kept answer of each (tracking.completions says which are kept)."
    )
    rows = [
        {"question": flip.question, "expected": flip.expected, "A": flip.first, "B": flip.second}
        | {"an answer of A": flip.answers[0], "an answer of B": flip.answers[1]}
        for flip in found.largest[:_MOST_ROWS]
    ]
    return [PageSection(title, note, table=pd.DataFrame(rows) if rows else None)]


def races(sweep: Sweep, candidates: Sequence[Group], metric: str, mode: Mode, lines: str) -> list[PageSection]:
    """How the candidates stood at each rung, and what a race has decided."""
    has_rungs = sweep.rungs or sweep.rung_by != "steps"
    standings = rung_standings(sweep, candidates, metric, mode) if has_rungs else []
    if len({standing.at for standing in standings}) < 2:
        return [PageSection("The race", "What was decided, best first.", text=lines)] if lines else []
    seeds = max(standing.seeds for standing in standings)
    note = (
        f"How far each setting was behind the best of the others at each rung, on {seeds} seeds that they share, with "
        "95 % intervals; upwards is ahead. A cross: the setting was stopped there."
    )
    if lines:
        note += " The intervals allow for the rungs before, since a race stops a setting where it seems far behind."
    title = "The race, rung by rung" if lines else "Rung by rung"
    return [PageSection(title, note, comparison_figures.race(standings, _ranks(candidates), sweep.rung_by), text=lines)]


def lineages(sweep: Sweep, metric: str) -> list[PageSection]:
    """Which trials continued from which others."""
    if not any(trial.origins for trial in sweep.trials):
        return []
    note = (
        "A line per trial, the color of each evaluation is its value. An arrow leads to a trial that continued from "
        "another one's checkpoint, with changed settings."
    )
    return [PageSection("Lineage", note, comparison_figures.lineage(sweep.trials, metric))]


def _ranks(candidates: Sequence[Group]) -> dict[Group, int]:
    """The rank of each candidate."""
    return {group: rank for rank, group in enumerate(candidates, 1)}
