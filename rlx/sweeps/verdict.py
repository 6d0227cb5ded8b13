"""What a race has shown, in sentences. Left out: the comparisons themselves (rlx.sweeps.schedulers.race).

One thing is guaranteed: the best candidate of a rung is out in at most alpha of all races. That one is better than
another is not: among equal candidates some seem behind by chance, and most of their intervals leave out the true 0.
Tried and left: to mark the lines that hold all at once (alpha shared by the candidates, too). In simulated races at
most 3 % have a false line among these (instead of 35 %), but only 1 to 16 % of the lines of candidates that are behind
are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rlx.analysis.style import as_text, settings_labels
from rlx.sweeps.plans import schedule_of
from rlx.sweeps.records import SweepPlan, TrialRecord, TrialState, number_of, place_of, trial_name, trial_number
from rlx.sweeps.schedulers.race import Race, Standing


def race_lines(plan: SweepPlan, records: Mapping[str, TrialRecord]) -> list[str]:
    """Returns the result of a race, best candidates first; nothing for another sweep.

    Args:
        records: of all trials, by name.
    """
    if plan.scheduler != "race":
        return []
    race = Race(schedule_of(plan, {}, records))
    names = [trial_name(number_of(candidate, 0, plan.candidates, plan.seeds)) for candidate in range(plan.candidates)]
    labels = settings_labels([{k: v for k, v in records[name].settings.items() if k != "seed"} for name in names])
    out = sorted((each for each in race.standings.items() if each[1].is_out), key=_last_first)
    lost = [i for i in range(plan.candidates) if i not in race.live and i not in dict(out)]
    behind = [_behind(labels, candidate, standing) for candidate, standing in out]
    if out:
        share = f"at most {100 * plan.alpha:.3g} % of races"
        behind.append(f"the best setting of a rung is out in {share}; a single line is less sure than that")
    return [
        *_left(race, labels, _failures(plan, records)),
        *behind,
        *(f"{labels[i]}: out, a trial of it ended early" for i in lost),
    ]


def _last_first(each: tuple[int, Standing]) -> tuple[int, int, float]:
    standing = each[1]
    return -standing.look.seeds, -standing.look.step, standing.deficit.value


def _failures(plan: SweepPlan, records: Mapping[str, TrialRecord]) -> Counter[int]:
    """How many trials of each candidate failed."""
    failed = [trial_number(name) for name, record in records.items() if record.state is TrialState.FAILED]
    return Counter(place_of(number, plan.candidates, plan.seeds)[0] for number in failed)


def _left(race: Race, labels: list[str], failures: Counter[int]) -> list[str]:
    """Names the candidates that are left, best first, and how many of their trials failed since they were compared."""
    live = [candidate for candidate in race.live if candidate in race.standings]
    since = "".join(
        f"; {labels[candidate]} has lost {count} trial{'s' * (count > 1)} since"
        for candidate in race.live
        if (count := failures[candidate])
    )
    if not live and len(race.live) > 1:
        return ["no setting could be compared: every one lost a trial before its first comparison"]
    if not live:
        return [f"{labels[candidate]} is left, the only one that could be compared{since}" for candidate in race.live]
    live.sort(key=lambda candidate: race.standings[candidate].deficit.value)
    best = race.standings[live[0]]
    if len(live) == 1:
        verb = "is left" if since else "wins"
        where = f"at step {best.look.step}, where it was compared last"
        return [f"{labels[live[0]]} {verb} with {as_text(best.mean)} {where}{since}"]
    named = f"{', '.join(labels[candidate] for candidate in live[:-1])} and {labels[live[-1]]}"
    return [f"{named} tied: after {best.look.seeds} seeds none is shown to be behind{since}"]


def _behind(labels: list[str], candidate: int, standing: Standing) -> str:
    value, (low, high) = standing.deficit.value, standing.deficit.ends
    interval = f"95 %: {as_text(low, 2)} to {as_text(high, 2)}"
    when = f"{standing.look.seeds} seeds, step {standing.look.step}"
    return f"{labels[candidate]} is out: behind {labels[standing.leader]} by {as_text(value, 2)} ({interval}; {when})"
