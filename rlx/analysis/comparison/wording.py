"""Evidence in sentences. Left out: the sentence of a sweep whose settings cannot be paired (rlx.analysis.sentences)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlx.analysis.comparison.evidence import Evidence
from rlx.analysis.comparison.pairs import PairedGap
from rlx.analysis.comparison.power import Option
from rlx.analysis.sentences import summary_sentence
from rlx.analysis.statistics import Group
from rlx.analysis.style import as_text, progress_text
from rlx.tracking.base import RunStatus

_MOST_NAMED = 3  # settings
_REASONS = _FAILED, _DIVERGED, _CUT = (  # not to compare a setting
    "a trial failed",
    "the last value of a trial is not finite",
    "trials were interrupted or wait",
)


def sweep_verdict(groups: Sequence[Group], evidence: Evidence, metric: str) -> str:
    """Which setting is first, by how much, how certain that is, and what to expect of it.

    Args:
        groups: best first.
    """
    nearest = evidence.nearest
    is_known = nearest and nearest.is_by_question and not math.isnan(nearest.gap.half_width)
    first = _paired_verdict(evidence, nearest, metric) if nearest and is_known else summary_sentence(groups, metric)
    return " ".join([first, *_luck(evidence), *_left_out(groups)])


def gap_sentence(pair: PairedGap) -> str:
    """A sentence on how far two settings differ, and whether that may be chance."""
    if math.isnan(pair.gap.half_width):
        return (
            f"{pair.first.label} and {pair.second.label} differ by {as_text(pair.gap.value)} on one seed: no interval."
        )
    verdict = "more than chance" if pair.is_shown else "which may be chance"
    compared = f"{pair.first.label} against {pair.second.label}: {interval_text(pair)}, {verdict}.{_one_run(pair)}"
    return compared + _chosen(pair.first) + _chosen(pair.second)


def _chosen(group: Group) -> str:
    """A sentence that a setting was the best of several, so some of its lead is luck; empty if it was not."""
    if group.chosen_from < 2:
        return ""
    return f" {group.label} is the best of {group.chosen_from} settings, and was lucky, too: fresh seeds tell more."


def interval_text(pair: PairedGap) -> str:
    """A difference with its interval: 0.011 (95 %: 0.006 to 0.015; paired by 3 seeds and 256 questions)."""
    low, high = pair.ends
    seeds = f"{pair.seeds} seed{'s' if pair.seeds > 1 else ''}"
    by = f"{seeds} and {len(pair.questions)} questions" if pair.is_by_question else seeds
    return f"{as_text(pair.gap.value, 2)} (95 %: {as_text(low, 2)} to {as_text(high, 2)}; paired by {by})"


def plan_lines(plans: Sequence[Option], assumed: bool, most: float = math.inf) -> list[str]:
    """What a plan can show, and what more of it would show and cost.

    Args:
        most: the largest difference that the metric can have.
    """
    plan, *others = plans
    size = f"{plan.seeds} seed{'s' if plan.seeds > 1 else ''} and {plan.questions} questions"
    source = "an assumption until a sweep has told" if assumed else "as settings of the newest sweep differ"
    if math.isinf(plan.shows):
        first = f"{size} show nothing of a setting, only of its one run ({source})"
    elif plan.shows >= most:
        first = f"{size} can show no difference in four of five sweeps ({source})"
    else:
        first = f"{size} can show a difference of {as_text(plan.shows, 2)} in four of five sweeps ({source})"
    more = "; ".join(
        f"{_size(plan, each)}: {as_text(each.shows, 2)}, {_cost(each)}"
        for each in others
        if each.seeds > 1 and each.shows < most
    )
    return [first, more] if more else [first]


def _size(plan: Option, other: Option) -> str:
    return f"{other.seeds} seeds" if other.questions == plan.questions else f"{other.questions} questions"


def _cost(option: Option) -> str:
    if option.training > 1:
        return f"{as_text(option.training, 2)} times the training"
    return f"{as_text(option.answers, 2)} times the answers"


def _paired_verdict(evidence: Evidence, nearest: PairedGap, metric: str) -> str:
    best, gap = nearest.first, interval_text(nearest)
    if one_run := _one_run(nearest):
        return f"In {metric}, the run of {best.label} is ahead of that of {nearest.second.label} by {gap}.{one_run}"
    if not evidence.rivals:
        wins = f"{best.label} wins with {metric} {as_text(best.mean)}"
        return f"{wins}: {nearest.second.label}, the next, is behind by {gap}{_where(nearest)}."
    shown = _where(nearest) + ("" if nearest.is_shown else ", which may be chance")
    names, compared = [group.label for group in evidence.rivals], len(evidence.gaps) + 1
    ahead = f"ahead of {nearest.second.label} by" if nearest.gap.value else f"level with {nearest.second.label}:"
    behind = f"{best.label} is {ahead} {gap}{shown}."
    if names == [nearest.second.label]:
        return behind
    if len(names) > _MOST_NAMED:
        return f"{behind} {len(names)} others of {compared} settings may be as good."
    return f"{behind} These may be as good: {'; '.join(names)}."


def _where(pair: PairedGap) -> str:
    """The step at which two settings were compared, if the first went further or was behind there; else empty."""
    if pair.step == max(trial.last_step for trial in pair.first.ended) and pair.gap.value >= 0:
        return ""
    behind = ": it was behind there" if pair.gap.value < 0 else ""  # the other ended earlier, or lacks a seed
    return f" where both were evaluated last, at step {pair.step}{behind}"


def _one_run(pair: PairedGap) -> str:
    """A sentence on what an interval over questions alone leaves open; empty for several seeds."""
    return " With one seed that speaks of these two runs, not of their settings; use --seeds 3." * (pair.seeds == 1)


def _left_out(groups: Sequence[Group]) -> list[str]:
    """Which settings are not compared, and why: for each the first of the reasons."""
    reasons = {group: _reason(group) for group in groups if not group.is_compared}
    found = {reason: [group for group in reasons if reasons[group] == reason] for reason in _REASONS}
    return [f"Not compared, because {reason}: {_named(found[reason], reason)}." for reason in _REASONS if found[reason]]


def _reason(group: Group) -> str:
    """Why a setting is not compared; empty if it has only to go on, or no trial of it came further than its failure."""
    was_cut = any(trial.was_cut for trial in group.trials)
    if any(trial.status == RunStatus.FAILED for trial in group.trials):
        return _FAILED if group.values or group.diverged or was_cut else ""
    return _DIVERGED if group.diverged else _CUT if was_cut else ""


def _named(groups: Sequence[Group], reason: str) -> str:
    """Settings by their names, or only how many there are; with how far they are if this is the reason."""
    if len(groups) > _MOST_NAMED:
        return f"{len(groups)} settings{_progress(groups) if reason == _CUT else ''}"
    return "; ".join(f"{group.label}{_progress([group]) if reason == _CUT else ''}" for group in groups)


def _progress(groups: Sequence[Group]) -> str:
    cut = [trial for group in groups for trial in group.trials if trial.was_cut]
    return f" ({progress_text([trial.last_step for trial in cut], cut[0].planned_steps)})"


def _luck(evidence: Evidence) -> list[str]:
    if not evidence.winner:
        return []
    seen, fresh = evidence.winner.seen, evidence.winner.fresh
    lucky = f", not {as_text(seen)}: the best of {evidence.compared} was lucky, too" if fresh.value != seen else ""
    count = len(evidence.gaps) + 1
    others = count - evidence.compared
    less = f"; {others} of {count} settings did not end on all of these seeds, so it may be less" if others > 0 else ""
    mean = f"{as_text(fresh.value)} ± {as_text(fresh.half_width, 2)}"
    return [f"Over many fresh seeds, expect a mean of {mean}{lucky}{less}."]
