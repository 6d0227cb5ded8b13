"""What a sweep is made of, and its trials: handed to Ray Tune, recorded before they start, found again on a resume.

The record is all that a resume needs: Tune begins afresh with the same settings in the same order, and what a trial has
reported is told to schedulers and searches again. Drawing settings is search.py's; running them is sweep.py's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from ray.tune.experiment import Experiment, Trial
from ray.tune.experiment.config_parser import _create_trial_from_spec, _make_parser
from ray.tune.search import Searcher
from ray.tune.search.search_algorithm import SearchAlgorithm

from rlx.config.sections import DEFAULT_METRIC
from rlx.sweeps.records import TrialRecord, TrialRecords
from rlx.sweeps.space import Space, complete_settings


class TrialSource(SearchAlgorithm):
    """Gives Tune the trials of a sweep: settings in the order of the search, each with all seeds."""

    def __init__(
        self,
        search: Searcher,
        space: Space,
        records: TrialRecords,
        *,
        known: Mapping[str, TrialRecord] | None = None,
        count: int,
        seeds: Sequence[int],
        limit: int | None,
        replays: bool = False,
        take_turns: bool = False,
    ) -> None:
        """
        Args:
            space: what the search draws from.
            known: the records of trials that were there before, by name, if they are not as they were written.
            count: settings to try.
            seeds: of the runs of each setting; none if the seed is not for the sweep to set.
            limit: most trials at once, beside what the cluster has room for.
            replays: whether Tune is to have those that are over already once more.
            take_turns: whether a trial may be paused, and go on in the process of another.
        """
        self._search, self._space, self._records = search, space, records
        self._seeds: list[int | None] = [*seeds] or [None]
        self._count, self._limit, self._replays, self._take_turns = count, limit, replays, take_turns
        self._known = records.all() if known is None else known
        self._settings: dict[str, Any] = {}  # of the newest trial, without its seed
        self._given: list[Trial] = []
        self._number = 0
        self._values: dict[int, list[float | None]] = {}  # what the trials of each setting came to
        self._finished = False

    @property
    def total_samples(self) -> int:
        return len(self._given)

    def add_configurations(self, experiments: Any) -> None:
        self._experiment: Experiment = experiments[0] if isinstance(experiments, list) else experiments

    def next_trial(self) -> Trial | None:
        """The next trial that is to run; None if there is none now."""
        live = sum(trial.status in (Trial.PENDING, Trial.RUNNING) for trial in self._given)
        if self._finished or (self._limit and live >= self._limit):
            return None
        while (settings := self._next_settings()) is not None:
            number, self._number = self._number, self._number + 1
            name = f"trial_{number:05d}"
            record = self._known.get(name)
            if record and record.is_over and (not self._replays or record.state == "failed"):
                failed = record.state == "failed" or not record.reports
                self._tell(number, None if failed else record.reports[-1][1])
                continue
            if record is None:
                self._records.write(name, record := TrialRecord(settings=settings))
            self._given.append(self._trial(f"{number:05d}", record.settings))
            return self._given[-1]
        return None

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        pass

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        self._tell(int(trial_id), None if error else (result or {}).get(DEFAULT_METRIC))

    def is_finished(self) -> bool:
        """Whether no trial is to come; when it is, Tune ends each process whose trial pauses."""
        return self._finished and not (self._take_turns and any(not trial.is_finished() for trial in self._given))

    def set_finished(self) -> None:
        self._finished = True

    def save_to_dir(self, dirpath: str, session_str: str) -> None:
        pass  # the records are all there is

    def has_checkpoint(self, dirpath: str) -> bool:
        return False

    def _next_settings(self) -> dict[str, Any] | None:
        """Of the trial whose turn it is; None if there is none, or the search waits for results."""
        which, turn = divmod(self._number, len(self._seeds))
        if turn == 0:
            suggested = self._search.suggest(str(which)) if which < self._count else Searcher.FINISHED
            if suggested == Searcher.FINISHED:
                self._finished = True
            if suggested is None or self._finished:
                return None
            self._settings = complete_settings(self._space, suggested)
        seed = self._seeds[turn]
        return self._settings | ({} if seed is None else {"seed": seed})

    def _tell(self, number: int, value: float | None) -> None:
        """Tells the search what a setting came to, the mean over its seeds, once all of them are over."""
        which = number // len(self._seeds)
        values = self._values.setdefault(which, [])
        values.append(value)
        if len(values) == len(self._seeds):
            known = [each for each in values if each is not None]
            result = {DEFAULT_METRIC: sum(known) / len(known)} if known else None
            self._search.on_trial_complete(str(which), result, error=not known)

    def _trial(self, trial_id: str, settings: dict[str, Any]) -> Trial:
        spec = copy.deepcopy(self._experiment.spec) | {"config": dict(settings)}
        return _create_trial_from_spec(
            spec, _make_parser(), evaluated_params=settings, trial_id=trial_id, experiment_tag=trial_id
        )
