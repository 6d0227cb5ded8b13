"""Gives Ray Tune the trials of a sweep, and records each one before it starts.

On a resume Tune starts without state: it gets the same settings in the same order, and searches and schedulers get the
earlier reports of the trials again. This needs nothing but the records.
Left out: how settings are chosen (`searchers`), and running the trials (`tuner`, `trainable`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.tune.experiment import Experiment, Trial
from ray.tune.experiment.config_parser import _create_trial_from_spec, _make_parser
from ray.tune.search import Searcher
from ray.tune.search.search_algorithm import SearchAlgorithm

from rlx.config.sections import DEFAULT_METRIC
from rlx.sweeps.records import TrialRecord, TrialRecords, TrialState
from rlx.sweeps.space import Space, complete_settings


@dataclass(frozen=True)
class TrialOptions:
    """Which trials a sweep has, and how they run."""

    count: int  # settings to try
    seeds: Sequence[int] = ()  # of the runs of each setting; none: the sweep does not set the seed
    limit: int | None = None  # maximum number of trials at once, in addition to the limit of the cluster
    replays: bool = False  # give Tune again the trials that are over
    pausing: bool = False  # a trial may be paused, and continue in the process of another


class SeededSearch:
    """A search whose every setting is tried with all seeds, and is judged by the mean over them."""

    def __init__(self, search: Searcher, space: Space, options: TrialOptions) -> None:
        self._search, self._space, self._count = search, space, options.count
        self._seeds: list[int | None] = [*options.seeds] or [None]
        self._settings: dict[str, Any] = {}  # the newest, without a seed
        self._values: dict[int, list[float | None]] = {}  # by setting, the accuracy of its trials so far
        self.is_exhausted = False

    def settings_of(self, number: int) -> dict[str, Any] | None:
        """Returns the settings of a trial, to be called for one trial after another.

        None if there are no more trials (then `is_exhausted`), or if the search waits for results.
        """
        setting, turn = divmod(number, len(self._seeds))
        if turn == 0:
            suggested = self._search.suggest(str(setting)) if setting < self._count else Searcher.FINISHED
            if suggested == Searcher.FINISHED:
                self.is_exhausted = True
                return None
            if suggested is None:
                return None
            self._settings = complete_settings(self._space, suggested)
        seed = self._seeds[turn]
        return self._settings | ({} if seed is None else {"seed": seed})

    def tell(self, number: int, value: float | None) -> None:
        """Takes a trial's accuracy, None if it failed; gives the search the mean when all seeds are over."""
        setting = number // len(self._seeds)
        values = self._values.setdefault(setting, [])
        values.append(value)
        if len(values) == len(self._seeds):
            known = [each for each in values if each is not None]
            result = {DEFAULT_METRIC: sum(known) / len(known)} if known else None
            self._search.on_trial_complete(str(setting), result, error=not known)


class TrialSource(SearchAlgorithm):
    """The trials of a sweep as Tune asks for them: settings in the order of the search, each with all seeds."""

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
        self._search, self._records, self._options = SeededSearch(search, space, options), records, options
        self._known = records.all() if known is None else known
        self._trials: list[Trial] = []  # given to Tune so far
        self._next_number = 0
        self._finished = False

    @property
    def total_samples(self) -> int:
        return len(self._trials)

    def add_configurations(self, experiments: Any) -> None:
        self._experiment: Experiment = experiments[0] if isinstance(experiments, list) else experiments

    def next_trial(self) -> Trial | None:
        """Returns the next trial that is to run; None if there is none now."""
        live = sum(trial.status in (Trial.PENDING, Trial.RUNNING) for trial in self._trials)
        if self._finished or (self._options.limit and live >= self._options.limit):
            return None
        while (settings := self._search.settings_of(self._next_number)) is not None:
            number, self._next_number = self._next_number, self._next_number + 1
            name = f"trial_{number:05d}"
            record = self._known.get(name)
            if record and record.is_over and (not self._options.replays or record.state is TrialState.FAILED):
                failed = record.state is TrialState.FAILED or not record.reports
                self._search.tell(number, None if failed else record.reports[-1][1])
                continue
            if record is None:
                self._records.write(name, record := TrialRecord(settings=settings))
            self._trials.append(self._make_trial(f"{number:05d}", record.settings))
            return self._trials[-1]
        self._finished = self._search.is_exhausted
        return None

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        pass

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        self._search.tell(int(trial_id), None if error else (result or {}).get(DEFAULT_METRIC))

    def is_finished(self) -> bool:
        """Returns whether no more trial will come. When it is true, Tune ends each process whose trial pauses."""
        may_resume = self._options.pausing and any(not trial.is_finished() for trial in self._trials)
        return self._finished and not may_resume

    def set_finished(self) -> None:
        self._finished = True

    def save_to_dir(self, dirpath: str, session_str: str) -> None:
        pass  # a resume needs the records only

    def has_checkpoint(self, dirpath: str) -> bool:
        return False

    def _make_trial(self, trial_id: str, settings: dict[str, Any]) -> Trial:
        spec = copy.deepcopy(self._experiment.spec) | {"config": dict(settings)}
        return _create_trial_from_spec(
            spec, _make_parser(), evaluated_params=settings, trial_id=trial_id, experiment_tag=trial_id
        )
