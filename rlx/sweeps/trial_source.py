"""Gives Ray Tune the trials of a sweep, and records each one before it starts.

On a resume Tune starts without state: it gets the trials that are not over, in the same order, and searches get the
values of those that are. This needs nothing but the records.
Left out: how candidates are chosen (`searchers`), running the trials (`tuner`, `trainable`), and what schedulers are
told again (`schedulers`).
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.search import Searcher

from rlx.config.errors import ConfigError
from rlx.config.sweep import DEFAULT_METRIC, Mode
from rlx.sweeps.records import TrialRecord, TrialRecords, TrialState, place_of, trial_name, trial_number
from rlx.sweeps.schedulers.race import Race
from rlx.sweeps.space import MODE, Space, complete_settings

_LOG = logging.getLogger("rlx")
_MOST_REFUSED = 100  # suggestions for one candidate: a search may suggest nothing else for ever


@dataclass(frozen=True)
class TrialOptions:
    """Which trials a sweep has, and how they run."""

    candidates: int  # to try
    seeds: Sequence[int] = ()  # of the runs of each candidate; none: the sweep does not set the seed
    limit: Callable[[int], int] | None = None  # (trials not over) -> how many may run at once; None: Tune decides
    pausing: bool = False  # a trial may be paused, and continue in the process of another
    metric: str = DEFAULT_METRIC  # by which trials are compared
    mode: Mode = MODE
    race: Race | None = None  # adds seeds to candidates, and hears of trials that failed
    check: Callable[[Mapping[str, Any]], object] | None = None  # raises ConfigError for settings that cannot work


class SeededSearch:
    """A search whose every candidate is tried with all seeds, and is judged by the mean over them."""

    def __init__(self, search: Searcher, space: Space, options: TrialOptions) -> None:
        self._search, self._space, self._count, self._check = search, space, options.candidates, options.check
        self._seeds: list[int | None] = [*options.seeds] or [None]
        self._settings: dict[int, dict[str, Any]] = {}  # by candidate, without a seed
        self._values: dict[int, list[float | None]] = {}  # by candidate, the values of its trials so far
        self._ids, self._asked = dict[int, str](), itertools.count()  # by candidate, its id in the search
        self._lowest: float | None = None  # of the values that the search was told
        self._has_refused = self.is_exhausted = False

    def settings_of(self, number: int, is_new: bool = True) -> dict[str, Any] | None:
        """Returns the settings of a trial, to be called for one trial after another.

        Args:
            is_new: the trial has no settings yet, so that the search may be asked for others.

        None if there are no more trials (then `is_exhausted`), or if the search waits for results.
        """
        candidate, seed_index = divmod(number, len(self._seeds))
        if seed_index == 0:
            suggested = self._suggested(candidate, is_new) if candidate < self._count else Searcher.FINISHED
            if not isinstance(suggested, dict):
                self.is_exhausted = suggested == Searcher.FINISHED
                return None
            self._settings[candidate] = suggested
        seed = self._seeds[seed_index]
        return self._settings[candidate] | ({} if seed is None else {"seed": seed})

    def _suggested(self, candidate: int, is_new: bool) -> dict[str, Any] | str | None:
        """Returns the settings that the search suggests; None if it waits, FINISHED if it has no more.

        Settings that cannot work cost no trial: the search is told the lowest value so far. (It learns nothing of
        failures.) After `_MOST_REFUSED` of them in a row the next suggestion is used as it is.
        """
        refused = 0
        while True:
            self._ids[candidate] = str(next(self._asked))
            suggested = self._search.suggest(self._ids[candidate])
            if not isinstance(suggested, dict):
                return suggested
            settings = complete_settings(self._space, suggested)
            if not is_new or refused == _MOST_REFUSED or self._works(settings):
                return settings
            refused += 1
            self._end(candidate, self._lowest)

    def _works(self, settings: Mapping[str, Any]) -> bool:
        try:
            if self._check:
                self._check(settings)
        except ConfigError as error:
            if not self._has_refused:
                _LOG.warning("suggestions that cannot work are passed over; the first: %s", error)
            self._has_refused = True
            return False
        return True

    def with_added_seed(self, number: int) -> dict[str, Any]:
        """Returns the settings of a trial that a race has added: a candidate of before with its next seed."""
        candidate, seed_index = place_of(number, self._count, len(self._seeds))
        return self._settings[candidate] | {"seed": (self._seeds[0] or 0) + seed_index}

    def tell(self, number: int, value: float | None) -> None:
        """Takes a trial's value, None if it failed; gives the search the mean when all seeds are over.

        A value that is not finite counts as none. The search hears nothing of seeds that were added later.
        """
        candidate, seed_index = place_of(number, self._count, len(self._seeds))
        if seed_index >= len(self._seeds):
            return
        values = self._values.setdefault(candidate, [])
        values.append(value)
        if len(values) == len(self._seeds):
            known = [each for each in values if each is not None and math.isfinite(each)]
            mean = sum(known) / len(known) if known else None
            self._end(candidate, mean)
            if mean is not None:
                self._lowest = mean if self._lowest is None else min(self._lowest, mean)

    def _end(self, candidate: int, value: float | None) -> None:
        """Tells the search the value of what it has suggested, None if it failed."""
        result = None if value is None else {DEFAULT_METRIC: value}
        self._search.on_trial_complete(self._ids[candidate], result, error=value is None)


class TrialSource(Searcher):
    """The trials of a sweep as Tune asks for them: candidates in the order of the search, each with all seeds."""

    def __init__(
        self,
        search: Searcher,
        space: Space,
        records: TrialRecords,
        options: TrialOptions,
        known: Mapping[str, TrialRecord] | None = None,
    ) -> None:
        """
        Args:
            space: the domains of the search.
            known: records of the trials before a resume, by name; None: those in `records`.
        """
        super().__init__(options.metric, options.mode)
        self._sign = 1.0 if options.mode == MODE else -1.0
        self._seeded, self._records, self._options = SeededSearch(search, space, options), records, options
        self._known = dict(records.all() if known is None else known)
        self._numbers: dict[str, int] = {}  # by Tune's id of each trial that it was given
        self._live: set[str] = set()  # ids of those that are not over
        self._next_number = 0

    def name_of(self, trial: Trial) -> str:
        """Returns trial_00003 and the like: a trial's number in the sweep, whenever and wherever it runs."""
        return trial_name(self._numbers[trial.trial_id])

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """Returns the settings of the next trial that is to run; None if there is none now."""
        if self._options.limit and len(self._live) >= self._options.limit(self._open):
            return None
        while (settings := self._seeded.settings_of(self._next_number, self._is_new)) is not None:
            number, self._next_number = self._next_number, self._next_number + 1
            record = self._known.get(trial_name(number))
            if record and record.is_over:
                failed = record.state is TrialState.FAILED or not record.reports
                self._seeded.tell(number, None if failed else self._sign * record.reports[-1][1])
                continue
            return self._give(trial_id, number, settings)
        if self._seeded.is_exhausted and (added := self._added()):
            return self._give(trial_id, added[0], self._seeded.with_added_seed(added[0]))
        return Searcher.FINISHED if self._has_ended() else None

    @property
    def _is_new(self) -> bool:
        """Whether the next trial was not there before a resume."""
        return trial_name(self._next_number) not in self._known

    def _give(self, trial_id: str, number: int, settings: dict[str, Any]) -> dict[str, Any]:
        """Returns the settings of a trial as they are recorded; records a new one."""
        record = self._known.get(trial_name(number))
        if record is None:
            self._records.write(trial_name(number), record := TrialRecord(settings=settings))
        self._numbers[trial_id] = number
        self._live.add(trial_id)
        return dict(record.settings)

    def _added(self) -> list[int]:
        """The numbers of trials with added seeds that are to run or to go on, and were not given yet."""
        if not self._options.race:
            return []
        open_ones = {trial_number(name) for name, record in self._known.items() if not record.is_over}
        due = open_ones.union(self._options.race.added()).difference(self._numbers.values())
        return sorted(number for number in due if number >= self._next_number)

    @property
    def _open(self) -> int:
        """How many trials are not over, those that are still to come included."""
        return len(self._live) + self._options.candidates * max(1, len(self._options.seeds)) - self._next_number

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        self._live.discard(trial_id)
        if error and self._options.race:
            self._options.race.end(self._numbers[trial_id])
        value = None if error else (result or {}).get(self._options.metric)
        self._seeded.tell(self._numbers[trial_id], None if value is None else self._sign * value)

    def save(self, checkpoint_path: str) -> None:
        """Nothing: a resume needs the records only."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing, as `save`."""

    def _has_ended(self) -> bool:
        """Whether no more trial will come. When it is true, Tune ends each process whose trial pauses."""
        return self._seeded.is_exhausted and not (self._options.pausing and self._live)
