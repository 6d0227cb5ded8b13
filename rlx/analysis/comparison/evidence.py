"""All that a sweep's runs prove, worked out once for the page, the terminal and MLflow. Left out: how it is shown."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from rlx.analysis.comparison import power
from rlx.analysis.comparison.crossed import Spread, crossed_mean, sampling_variance
from rlx.analysis.comparison.flips import Flip, flipped
from rlx.analysis.comparison.outcomes import evaluated_runs
from rlx.analysis.comparison.pairs import Looks, PairedGap, gaps_to_best, one_look, paired_gap, seed_table
from rlx.analysis.comparison.winner import Winner, corrected_best
from rlx.analysis.statistics import Group
from rlx.config.errors import ConfigError
from rlx.config.sweep import Mode
from rlx.tracking.services import mlflow

EVIDENCE_FILE = "evidence.json"
"""the file of an analysis with its numbers"""
_NEWEST = 10  # sweeps that are asked how settings vary


@dataclass(frozen=True, eq=False)
class Flips:
    """The questions that two settings answer differently."""

    better: int  # which the first answers better
    worse: int
    largest: Sequence[Flip]


@dataclass(frozen=True, eq=False)
class Evidence:
    """What the runs of a sweep prove about its settings."""

    gaps: Sequence[PairedGap]  # the best setting against each of the others, best first
    winner: Winner | None = None  # None without two settings that ran to the end on the same two seeds
    compared: int = 0  # settings that were compared to find the winner
    against: PairedGap | None = None  # the best settings of this sweep and of another one

    @property
    def nearest(self) -> PairedGap | None:
        """The best setting against the next."""
        return self.gaps[0] if self.gaps else None

    @property
    def rivals(self) -> Sequence[Group]:
        """The settings other than the best that may be as good, because they are not shown to be worse.

        The truly best setting is the best or among them in 95 % of sweeps at least: to leave it out, one of the others
        has to seem better by a difference that `chance` is corrected for.
        """
        return [gap.second for gap in self.gaps if not (gap.is_shown and gap.gap.value > 0)]


def weigh(
    uri: str, groups: Sequence[Group], metric: str, mode: Mode, against: Sequence[Group] = (), looks: Looks = one_look
) -> Evidence:
    """What the runs of these settings prove.

    Args:
        groups: best first; those of which a trial failed are not compared.
        against: the best settings of two sweeps, to be compared as well.
        looks: of a race, see `Sweep.looks`.
    """
    sign = 1.0 if mode == "max" else -1.0
    groups = [group for group in groups if group.is_compared]
    whole, values = seed_table(groups, metric)
    gaps = gaps_to_best(uri, groups, metric, sign, looks)
    other = between(uri, against[0], against[1], metric, mode) if against else None
    if not whole or whole[0] is not groups[0]:
        return Evidence(gaps, against=other)
    winner = corrected_best(values, sign)
    if winner.candidate:  # on the seeds that all have, another one is best
        return Evidence(gaps, against=other)
    return Evidence([replace(gap, luck=winner.luck) for gap in gaps], winner, len(whole), other)


def between(uri: str, first: Group, second: Group, metric: str, mode: Mode) -> PairedGap | None:
    """The best settings of two sweeps on the questions and seeds that they have in common, each as it was in the end.

    The chance is corrected (Bonferroni) for the settings that each was chosen from.
    """
    if not first.is_compared or not second.is_compared:
        return None
    runs = (evaluated_runs(uri, first, metric), evaluated_runs(uri, second, metric))
    pair = paired_gap((first, second), runs, 1.0 if mode == "max" else -1.0, at_ends=True)
    chosen_from = max(first.chosen_from, second.chosen_from)
    return replace(pair, chance=min(1.0, chosen_from * pair.chance)) if pair else None


def flips_of(pair: PairedGap | None) -> Flips | None:
    """The questions that a pair answers differently; None if the runs have not kept what came of each."""
    return Flips(*flipped(pair)) if pair and pair.is_by_question else None


def spread_of(gaps: Sequence[PairedGap]) -> Spread | None:
    """How far differences of settings vary by seed and question: the medians over the pairs, which settings that are
    far behind hardly move; None without two seeds and outcomes of questions."""
    known = [gap.gap.spread for gap in gaps if gap.is_by_question and gap.seeds > 1]
    return Spread(*(float(np.median(each)) for each in zip(*known, strict=True))) if known else None


def gap_table(gaps: Sequence[PairedGap]) -> pd.DataFrame:
    """One row per setting other than the best: how far the best is ahead, with the paired 95 % interval."""
    rows = [
        {"setting": gap.second.label, "behind by": gap.gap.value, "from": gap.ends[0], "to": gap.ends[1]}
        | {"chance": gap.chance, "step": gap.step, "seeds": gap.seeds}
        | {"questions": len(gap.questions) if gap.is_by_question else math.nan}
        for gap in gaps
    ]
    return pd.DataFrame(rows)


def plan_table(gaps: Sequence[PairedGap]) -> pd.DataFrame:
    """One row per number of seeds and questions: the smallest difference that it shows, and what it costs compared with
    the sweep. Empty if it is not known how differences vary."""
    spread = spread_of(gaps)
    if not spread:
        return pd.DataFrame()
    seeds, questions = max(gap.seeds for gap in gaps), max(len(gap.questions) for gap in gaps)
    names = {"shows": "can show a difference of", "training": "× training", "answers": "× answers"}  # noqa: RUF001
    return pd.DataFrame(power.options(spread, seeds, questions)).rename(columns=names)


def variance_table(gaps: Sequence[PairedGap]) -> pd.DataFrame:
    """One row per setting: which share of the chance in its mean is due to seeds, questions, and the rest; of the rest,
    sampling where several answers to a question were drawn. Empty without outcomes of questions."""
    known = [gap for gap in gaps if gap.is_by_question and gap.seeds > 1]
    rows = [_shares(gap, 1) for gap in known]
    return pd.DataFrame([_shares(known[0], 0), *rows] if known else [])


def known_spread(uri: str, experiment: str, metric: str) -> Spread | None:
    """How differences of settings varied in the newest sweep of an experiment that has told it of this metric."""
    try:
        found = mlflow.find_runs(uri, mlflow.find_experiment(uri, experiment), kind="sweep")
    except ConfigError:  # nothing was recorded yet
        return None
    for run in found[::-1][:_NEWEST]:
        path = f"analysis/{EVIDENCE_FILE}"
        if path not in mlflow.artifact_names(uri, run.id, "analysis"):
            continue
        try:
            kept = json.loads(mlflow.read_artifact(uri, run.id, path))
            if kept["metric"] == metric and kept["spread_of_differences"]:
                return Spread(**{key: float(value) for key, value in kept["spread_of_differences"].items()})
        except (ValueError, KeyError, TypeError):  # somebody else wrote it: it only tells what to expect
            continue
    return None


def as_json(evidence: Evidence, metric: str) -> str:
    """The evidence as numbers for other programs; unknown ones are null."""
    spread, winner = spread_of(evidence.gaps), evidence.winner
    rows = json.loads(gap_table(evidence.gaps).to_json(orient="records", double_precision=15))
    content = {
        "metric": metric,
        "best": evidence.gaps[0].first.settings if evidence.gaps else None,
        "behind": rows,
        "expected_on_fresh_seeds": winner and winner.fresh._asdict(),
        "seen": winner and winner.seen,
        "spread_of_differences": spread and spread._asdict(),
    }
    return json.dumps(content, indent=1)


def _samples(gap: PairedGap, side: int) -> int:
    """How many answers to each question make its value, as a share of right ones; 1 for other values."""
    run = gap.runs[0][side]
    is_share = run.judged and (run.judged.quantity == "accuracy" or run.judged.quantity.startswith("avg_at_"))
    outcomes = run.outcomes(gap.steps[side]) if is_share else None
    return outcomes.right.shape[1] if outcomes else 1


def _shares(gap: PairedGap, side: int) -> dict[str, str | float]:
    """The row of one side of a pair, at the step at which it was compared."""
    table = gap.tables[side]
    seeds, questions = table.shape
    estimate = crossed_mean(table)
    parts, sampling = estimate.spread.of_mean(seeds, questions), sampling_variance(table, _samples(gap, side))
    total = sum(parts) or math.nan
    drawn = math.nan if math.isnan(sampling) else min(parts.rest, sampling / seeds / questions)
    return {
        "setting": (gap.first, gap.second)[side].label,
        "step": gap.steps[side],
        "mean": estimate.value,
        "standard error": estimate.error,
        "seeds": parts.seed / total,
        "questions": parts.question / total,
        "seed by question": (parts.rest - (0.0 if math.isnan(drawn) else drawn)) / total,
        "sampling": drawn / total,
    }
