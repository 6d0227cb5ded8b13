"""Does a race keep its promises? python bench/racing.py [--sweeps 1000] [--seeds 3] [--max-seeds 8]

Made-up sweeps through rlx's real schedulers, without training and without Ray's processes: trials report numbers that
were drawn, in any order, a few at a time. A row of the table is a kind of sweep:

    dropped best   how often the setting that is truly the best was out in the end; at most alpha
    one left       how often one setting alone was left; where several are equally good, at most alpha (of any of them)
    covered        how often the 95 % interval of a setting's distance to the best of the others holds the true one
    stated         the same for the settings that are out, whose intervals the race states
    steps          trial-steps, of those of all settings with `--seeds` seeds, and with `--max-seeds`

A second table is of sweeps without a race, all of whose settings run to the end on `--seeds` seeds, and of what the
analysis says of them (rlx.analysis.comparison), question by question: as many questions as `--questions`, each with a
difficulty of its own, one answer each:

    paired         how often the 95 % interval of the difference of two settings, drawn beforehand, holds the true one
    to the best    the same for the settings that are compared with the one that seems best, whose luck is off the low
                   ends of the intervals
    winner named   how often one setting is said to win; in brackets how often it is not the truly best one, or that is
                   neither the one that seems best nor among those that may be as good
    best mean      mean error of the best mean, as what a fresh run of the winner gives
    corrected      the same of the corrected best, and how often its interval holds the true value
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from rlx.analysis.comparison.crossed import crossed_mean, holm
from rlx.analysis.comparison.winner import corrected_best
from rlx.sweeps.records import place_of, trial_name
from rlx.sweeps.schedulers.race import Race
from rlx.sweeps.schedulers.racing import RaceScheduler
from rlx.sweeps.schedulers.schedule import TIME, Schedule

METRIC = "eval/accuracy"


# ---------------------------------------------------------------------------------------------------------------------
# Tune without processes


@dataclass(eq=False)
class Played:
    """A trial as schedulers see it."""

    number: int
    values: Mapping[int, float]  # what it reports, by step
    status: str = Trial.PENDING
    last_result: dict[str, Any] = field(default_factory=lambda: {TIME: 0})
    is_saving = False

    @property
    def trial_id(self) -> str:
        return trial_name(self.number)

    def __str__(self) -> str:
        return self.trial_id


class Tune:
    """Calls a scheduler as Tune's controller does, for trials whose reports are known."""

    def __init__(
        self,
        scheduler: TrialScheduler,
        values_of: Callable[[int], Mapping[int, float]],
        pick: Callable[[Sequence[Played]], Played],
    ) -> None:
        """
        Args:
            values_of: what a trial reports, by its number.
            pick: which of the running trials reports next.
        """
        self.scheduler, self.values_of, self.pick = scheduler, values_of, pick
        self.trials: list[Played] = []
        self.steps = 0  # done by all trials
        scheduler.set_search_properties(METRIC, "max")

    def run(self, numbers: Sequence[int], slots: int, reports: float = np.inf) -> None:
        """Runs trials to the end, or until so many reports have come; a race's further ones follow."""
        self._add(numbers)
        while reports > 0:
            self._add(self._more())
            while self._count(Trial.RUNNING) < slots and (chosen := self.scheduler.choose_trial_to_run(self)):
                chosen.status = Trial.RUNNING
            running = [trial for trial in self.trials if trial.status == Trial.RUNNING]
            if not running:
                return
            self._report(self.pick(running))
            reports -= 1

    def get_trials(self) -> list[Played]:
        return self.trials

    def stop_trial(self, trial: Played) -> None:
        self.scheduler.on_trial_remove(self, trial)
        trial.status = Trial.TERMINATED

    def _more(self) -> Iterator[int]:
        race = getattr(self.scheduler, "race", None)
        known = {trial.number for trial in self.trials}
        return (number for number in (race.added() if race else []) if number not in known)

    def _add(self, numbers: Sequence[int] | Iterator[int]) -> None:
        for number in numbers:
            self.trials.append(Played(number, self.values_of(number)))
            self.scheduler.on_trial_add(self, self.trials[-1])

    def _count(self, status: str) -> int:
        return sum(trial.status == status for trial in self.trials)

    def _report(self, trial: Played) -> None:
        before = trial.last_result[TIME]
        step = min(each for each in trial.values if each > before)
        result = {TIME: step, METRIC: trial.values[step]}
        self.steps += step - before
        action = TrialScheduler.STOP
        if step < max(trial.values):  # of the last one Tune asks nothing
            action = self.scheduler.on_trial_result(self, trial, result)
        trial.last_result = result
        if action == TrialScheduler.STOP:
            self.scheduler.on_trial_complete(self, trial, result)
        trial.status = {"STOP": Trial.TERMINATED, "PAUSE": Trial.PAUSED}.get(action, Trial.RUNNING)


# ---------------------------------------------------------------------------------------------------------------------
# Sweeps that are made up


@dataclass(frozen=True)
class Kind:
    """Sweeps of one kind: each run ends at its setting's mean, up to chance."""

    name: str
    means: Sequence[float]
    spreads: Sequence[float]  # standard deviations of runs with other seeds
    of_seeds: float = 0.0  # standard deviation of what a seed adds to all settings
    collapse: float = 0.0  # the share of runs that lose 0.3
    late: bool = False  # the best is behind at first

    def curve(self, setting: int, step: int, steps: int) -> float:
        """The true mean of a setting at a step: it comes from 0.4, half of what is missing in a quarter of the time."""
        done = 1 - 0.5 ** (4 * step / steps)
        if self.late and setting == 0:
            done = done * step / steps
        return 0.4 + (self.means[setting] - 0.4) * done / (1 - 0.5**4) - 0.3 * self.collapse


SWEEP_OF_LOG = (
    (0.870, 0.833, 0.821, 0.788, 0.751, 0.745, 0.684, 0.569, 0.461, 0.373, 0.368, 0.228),
    (0.010, 0.012, 0.023, 0.035, 0.044, 0.045, 0.035, 0.017, 0.126, 0.062, 0.071, 0.081),
)
"""means and standard deviations over seeds of the sweep of 12 settings in experiments/LOG.md, 2026-11-21"""
EQUAL, TYPICAL = (0.8,) * 12, (0.015,) * 12
KINDS = [
    Kind("one clearly best", (0.84, *EQUAL[1:]), TYPICAL),
    Kind("four tied, eight behind", (*(0.84,) * 4, *np.linspace(0.80, 0.66, 8)), TYPICAL),
    Kind("all identical", EQUAL, TYPICAL),
    Kind("two identical", EQUAL[:2], TYPICAL[:2]),
    Kind("as in the log, bad ones vary more", *SWEEP_OF_LOG),
    Kind("the best varies most", (0.801, *EQUAL[1:]), (0.06, *(0.01,) * 11)),
    Kind("the best varies least", (0.801, *EQUAL[1:]), (0.005, *(0.04,) * 11)),
    Kind("seeds matter more than settings", (0.81, *EQUAL[1:]), (0.005,) * 12, of_seeds=0.05),
    Kind("a tenth of the runs collapse", EQUAL, TYPICAL, collapse=0.1),
    Kind("the best learns late", (0.84, *EQUAL[1:]), TYPICAL, late=True),
]


@dataclass
class Counts:
    """Of all sweeps of a kind."""

    dropped_best: int = 0
    alone: int = 0
    covered: list[bool] = field(default_factory=list)  # of each setting's interval
    stated: list[bool] = field(default_factory=list)  # of those that are out
    steps: int = 0


def draw(kind: Kind, schedule: Schedule, rng: np.random.RandomState) -> NDArray[np.float64]:
    """What runs report at each rung, [settings, seeds, rungs]: shares of 512 right answers. Half of the chance in a
    run stays with it from rung to rung."""
    rungs = [*schedule.rungs, schedule.steps]
    shape = (schedule.candidates, schedule.max_seeds)
    lasting, passing = rng.standard_normal((*shape, 1)), rng.standard_normal((*shape, len(rungs)))
    chance = np.array(kind.spreads)[:, None, None] * (lasting + passing) / np.sqrt(2)
    chance = chance + kind.of_seeds * rng.standard_normal((1, schedule.max_seeds, 1))
    fallen = 0.3 * (kind.collapse - (rng.uniform(size=(*shape, 1)) < kind.collapse))
    true = [[kind.curve(setting, step, schedule.steps) for step in rungs] for setting in range(schedule.candidates)]
    return np.asarray(np.round((np.array(true)[:, None, :] + fallen + chance) * 512) / 512)


def race(kind: Kind, schedule: Schedule, rng: np.random.RandomState) -> tuple[Race, int]:
    """Runs a made-up sweep; returns its race and the steps that its trials did."""
    values, rungs = draw(kind, schedule, rng), [*schedule.rungs, schedule.steps]

    def values_of(number: int) -> dict[int, float]:
        return dict(zip(rungs, values[place_of(number, schedule.candidates, schedule.seeds)].tolist(), strict=True))

    scheduler = RaceScheduler(schedule)
    tune = Tune(scheduler, values_of, lambda running: running[rng.randint(len(running))])
    tune.run(range(schedule.candidates * schedule.seeds), slots=5)
    return scheduler.race, tune.steps


def count(kind: Kind, schedule: Schedule, sweeps: int) -> Counts:
    counts, best = Counts(), int(np.argmax(kind.means))
    for seed in range(sweeps):
        result, steps = race(kind, schedule, np.random.RandomState(seed))
        counts.dropped_best += best not in result.live
        counts.alone += len(result.live) == 1
        counts.steps += steps
        for setting, standing in result.standings.items():
            ends = [kind.curve(each, standing.look.step, schedule.steps) for each in (standing.leader, setting)]
            low, high = standing.deficit.ends
            counts.covered.append(low <= ends[0] - ends[1] <= high)
            counts.stated += counts.covered[-1:] if standing.is_out else []
    return counts


# ---------------------------------------------------------------------------------------------------------------------
# What is said of a sweep afterwards


@dataclass
class Sayings:
    """Of all sweeps of a kind."""

    paired: list[bool] = field(default_factory=list)  # whether intervals of differences hold the true one
    to_best: list[bool] = field(default_factory=list)
    named: int = 0
    wrong: int = 0  # another than the best is named, or the best is left out
    seen: list[float] = field(default_factory=list)  # errors of the best mean
    fresh: list[float] = field(default_factory=list)  # errors of the corrected one
    held: list[bool] = field(default_factory=list)


def judge(kind: Kind, seeds: int, questions: int, sweeps: int) -> Sayings:
    """Makes up sweeps and asks the analysis about them.

    A run's chance to answer a question is that of the setting, with the run's luck and the question's difficulty; each
    setting finds other questions hard, too. The true value of a setting is its mean over all seeds and questions.
    """
    sayings, means, best = Sayings(), np.array(kind.means), int(np.argmax(kind.means))
    for seed in range(sweeps):
        rng = np.random.RandomState(seed)
        lasting = np.array(kind.spreads)[:, None] * rng.standard_normal((len(means), seeds))
        runs = means[:, None] + lasting + kind.of_seeds * rng.standard_normal((1, seeds))
        hard = 0.1 * rng.uniform(-1, 1, questions) + 0.05 * rng.uniform(-1, 1, (len(means), questions))
        right = rng.uniform(size=(len(means), seeds, questions)) < runs[:, :, None] + hard[:, None, :]
        _listen(sayings, right.astype(float), means, best)
    return sayings


def _listen(sayings: Sayings, right: NDArray[np.float64], means: NDArray[np.float64], best: int) -> None:
    """Adds what the analysis says of a sweep, [settings, seeds, questions]."""
    values = right.mean(axis=2)
    winner = corrected_best(values, 1.0)
    top = winner.candidate
    gaps = {other: crossed_mean(right[top] - right[other]) for other in range(len(means)) if other != top}
    chances = dict(zip(gaps, holm([gap.chance for gap in gaps.values()]), strict=True))
    true = {i: means[top] - means[i] for i in gaps}
    sayings.to_best += [gap.ends[0] - winner.luck <= true[i] <= gap.ends[1] for i, gap in gaps.items()]
    pair = crossed_mean(right[0] - right[1])
    sayings.paired.append(abs(pair.value - (means[0] - means[1])) <= pair.half_width)
    is_named = all(chance <= 0.05 for chance in chances.values())
    sayings.named += is_named
    sayings.wrong += (top != best and chances[best] <= 0.05) or (is_named and np.sum(means == means[best]) > 1)
    sayings.seen.append(winner.seen - means[top])
    sayings.fresh.append(winner.fresh.value - means[top])
    sayings.held.append(abs(sayings.fresh[-1]) <= winner.fresh.half_width)


def said(kind: Kind, args: argparse.Namespace) -> str:
    sayings = judge(kind, args.seeds, args.questions, args.sweeps)
    named = f"{sayings.named / args.sweeps:.3f} ({sayings.wrong / args.sweeps:.3f})"
    errors = f"{np.mean(sayings.seen):+.4f} | {np.mean(sayings.fresh):+.4f}, {np.mean(sayings.held):.3f}"
    return f"| {kind.name} | {np.mean(sayings.paired):.3f} | {np.mean(sayings.to_best):.3f} | {named} | {errors} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweeps", type=int, default=1000, help="of each kind")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-seeds", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=0.05)
    parser.add_argument("--questions", type=int, default=256, help="of an evaluation, in the second table")
    parser.add_argument("--only", default="", help="kinds with this word in their names")
    args = parser.parse_args()
    print(f"{args.sweeps} sweeps of a kind, 20 steps, an evaluation each 5, alpha {args.alpha:g}, 5 trials at once\n")
    print(
        f"| settings | dropped best | one left | covered | stated | steps of {args.seeds} seeds | of {args.max_seeds} |"
    )
    print("|---|---|---|---|---|---|---|")
    for kind in KINDS:
        if args.only in kind.name:
            print(row(kind, args), flush=True)
    print(f"\nWithout a race, {args.seeds} seeds, {args.questions} questions\n")
    print("| settings | paired | to the best | winner named (wrong) | best mean | corrected, held |")
    print("|---|---|---|---|---|---|")
    for kind in KINDS:
        if args.only in kind.name and not kind.late and not kind.collapse:
            print(said(kind, args), flush=True)


def row(kind: Kind, args: argparse.Namespace) -> str:
    settings = len(kind.means)
    schedule = Schedule(
        20, 5, {}, candidates=settings, seeds=args.seeds, max_seeds=args.max_seeds, alpha=args.alpha, mode="max"
    )
    counts = count(kind, schedule, args.sweeps)
    full = schedule.steps * settings * args.sweeps
    stated = f"{np.mean(counts.stated):.3f} of {len(counts.stated)}" if counts.stated else "-"
    shares = f"{counts.steps / (full * args.seeds):.2f} | {counts.steps / (full * args.max_seeds):.2f}"
    dropped, alone = counts.dropped_best / args.sweeps, counts.alone / args.sweeps
    return f"| {kind.name} | {dropped:.3f} | {alone:.3f} | {np.mean(counts.covered):.3f} | {stated} | {shares} |"


if __name__ == "__main__":
    main()
