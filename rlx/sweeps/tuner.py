"""Runs the plan of a sweep, or what is left of it: one Ray Tuner, each trial one run, nested in one MLflow run.

A resume uses the sweep's own records and nothing of Tune's, see `trial_source`.
Left out: the plan itself (`plans`), what happens in a trial's process (`trainable`), tables and figures (rlx.analysis).
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ray import tune

from rlx.analysis.loading import RACE_FILE
from rlx.cluster import nodes
from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, setting_at
from rlx.config.sections.base import flatten
from rlx.config.sections.data import DataConfig, EvalConfig, held_out_setting
from rlx.config.sweep import OF_THE_MACHINE
from rlx.runs import launch, preflight, relay
from rlx.runs.mailbox import end_mailbox, start_mailbox
from rlx.runs.run_folder import saved_config
from rlx.storage.filesystem import Storage
from rlx.storage.signatures import POWERFUL, Signer
from rlx.sweeps import searchers
from rlx.sweeps.callback import DriverState, SweepCallback, TrialLog, Watch
from rlx.sweeps.choices import PAUSING
from rlx.sweeps.plans import check_can_begin, create_sweep, open_record, saved_sweep, schedule_of
from rlx.sweeps.records import (
    PLAN_FILE,
    SweepPlan,
    TrialRecord,
    TrialRecords,
    TrialState,
    ending_record,
    record_of,
    refuse_existing,
    resuming,
)
from rlx.sweeps.room import NeededModel, Room, most_at_once
from rlx.sweeps.schedulers.by_name import SCHEDULERS
from rlx.sweeps.schedulers.race import Race
from rlx.sweeps.schedulers.racing import RaceScheduler
from rlx.sweeps.space import Space, check_suggestion, load_space, may_have, values_of
from rlx.sweeps.trainable import SharedInputs, attempt_number, newest_attempt, trainable
from rlx.sweeps.trial_source import TrialOptions, TrialSource
from rlx.sweeps.verdict import race_lines
from rlx.tracking.base import TrackingService
from rlx.tracking.console import SweepProgress

_LOG = logging.getLogger("rlx")
_TUNE_FOLDER = "tune"  # holds Tune's own records
_LOGGERS_OFF = "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"
_MOST_PENDING = "TUNE_MAX_PENDING_TRIALS_PG"


# ---------------------------------------------------------------------------------------------------------------------
# The run of a sweep


def run_sweep(
    plan: SweepPlan, storage: Storage, *, watch: Watch, on_begin: Callable[[], None] | None = None
) -> dict[str, TrialRecord]:
    """Runs a sweep, or its remaining trials, to the end; returns the record of each trial by name.

    The cluster must be connected.

    Args:
        on_begin: called when nothing is refused any more and the tracking services know the sweep.

    Raises:
        ConfigError: as `make_tuner`.
        KeyboardInterrupt: the sweep was interrupted; a resume continues it.
    """
    folder = storage / "sweeps" / plan.name
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # `failures` says why trials failed
    made = make_tuner(plan, storage)
    made.driver.watch, made.on_begin = watch, on_begin
    with _environment(_LOGGERS_OFF, "1"):  # nobody would read their files, and they cost 6 ms a report
        made.fit()
    with ending_record(plan, folder):
        results = _results(plan, folder, made.driver.interrupted)
        send_pending(plan.tracking, folder)
    return results


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Sets a variable by which Tune is told something, for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        os.environ |= {name: before} if before is not None else {}


def _results(plan: SweepPlan, folder: Storage, interrupted: bool) -> dict[str, TrialRecord]:
    """Returns the trials' records; raises KeyboardInterrupt if not all of them ran to their ends."""
    if interrupted:
        raise KeyboardInterrupt  # Tune takes the signal, ends its trials and returns normally
    results = TrialRecords(folder).all()
    if not _is_whole(plan, results):
        raise KeyboardInterrupt  # the signal came while no trial ran, so that no callback noticed it
    return results


def _is_whole(plan: SweepPlan, results: Mapping[str, TrialRecord]) -> bool:
    """Whether all trials of a sweep have ended."""
    return len(results) >= plan.total_trials and all(record.is_over for record in results.values())


def _keep_race(plan: SweepPlan, folder: Storage) -> None:
    """Keeps the lines of a race with the sweep's record, once all trials have ended."""
    results = TrialRecords(folder).all() if plan.scheduler == "race" else {}
    if results and _is_whole(plan, results):
        with record_of(plan.tracking, folder) as record:
            record.log_text(RACE_FILE, "\n".join(race_lines(plan, results)))


def send_pending(services: Sequence[TrackingService], folder: Storage) -> None:
    """Sends the records that the sweep and its trials could not send, until a tracking service is away."""
    for run in [folder, *(folder / "runs" / attempt for attempt in (folder / "runs").names())]:
        if not launch.send_pending(services, run, _LOG.warning):
            return


def failures(results: Mapping[str, TrialRecord]) -> list[str]:
    """Returns one line for each failed trial: its name and why it failed."""
    return [f"{name}: {record.message}" for name, record in results.items() if record.state is TrialState.FAILED]


class SweepTuner(tune.Tuner):
    """Ray's Tuner of one sweep, whose trials it runs once.

    Args:
        plan: of the sweep.
        folder: of the sweep.
        driver: of its callback.
        options: as Ray's Tuner takes them.
    """

    def __init__(self, plan: SweepPlan, folder: Storage, trainable: Any, driver: DriverState, **options: Any) -> None:
        super().__init__(trainable, **options)
        self.driver = driver
        self._plan, self._folder, self._is_used = plan, folder, False
        self.quiet = True  # `fit` prints nothing; rlx.tuner makes Tuners that show what trials do
        self.on_begin: Callable[[], None] | None = None  # see `run_sweep`
        self._held = ExitStack()
        weakref.finalize(self, self._held.close)

    def hold(self, end: Callable[[], object]) -> None:
        """Has something ended when the trials have, or nobody has the Tuner any more: its mailbox, its claim."""
        self._held.callback(end)

    def fit(self) -> tune.ResultGrid:
        """Runs the trials, and returns when all have ended. The sweep's run in the tracking services begins here.

        Raises:
            ConfigError: it was called before.
        """
        if self._is_used:
            raise ConfigError(f"a Tuner runs once: {resuming(self._plan)} makes one for what is left of the sweep")
        self._is_used = True
        most = str(max(200, self._plan.total_trials))  # `concurrency` is the limit
        with (
            self._held,
            ending_record(self._plan, self._folder),  # if the trials end, Tune's callback has done it
            _environment(_MOST_PENDING, most),
            ExitStack() as shown,
        ):
            open_record(self._plan, self._folder)
            if self.on_begin:
                self.on_begin()
            if not self.quiet:
                progress = SweepProgress(self._plan.config.train.steps, self._plan.metric)
                self.driver.watch = shown.enter_context(progress).update
            grid = super().fit()
            if not self.driver.interrupted:
                _keep_race(self._plan, self._folder)
            return grid


def make_tuner(plan: SweepPlan, storage: Storage) -> SweepTuner:
    """Returns the Tuner of a new sweep, which it keeps in its folder, or of the remaining trials of one that is kept.

    The cluster must be connected. `plans.check_sweep` has returned the plan of a new sweep, `plans.saved_sweep` or
    `plans.continued_sweep` that of a kept one.

    Raises:
        ConfigError: something of the sweep cannot be used, or another one has its name; a new one leaves nothing.
    """
    if is_new := not (storage / "sweeps" / plan.name / PLAN_FILE).exists():
        check_can_begin(plan)
    elif _of_trials(plan) != _of_trials(saved_sweep(storage, plan.name)):
        refuse_existing(storage / "sweeps" / plan.name)
    folder, space = storage / "sweeps" / plan.name, load_space(plan.space, plan.tree)
    records = TrialRecords(folder)
    known = {name: _with_newest_settings(folder, name, record) for name, record in records.all().items()}
    _check_settings(known, space, folder)
    models = models_of(plan, space)
    shared, room = replace(shared_inputs(plan, space, models), known=known), Room(plan, models)
    schedule = replace(schedule_of(plan, space, known), records=records)
    scheduler = SCHEDULERS[plan.scheduler](schedule)
    race = scheduler.race if isinstance(scheduler, RaceScheduler) else None
    source = _trial_source(plan, records, space, known, _options(plan, room, race))
    of_trials = relay.from_driver(plan.tracking, shared.tracking)
    log = TrialLog(plan.tracking, folder, records, schedule, plan.metric, of_trials)
    driver, of_trial = DriverState(room), trainable(plan, storage, shared, most_at_once(plan))
    if is_new:  # nothing is refused any more
        create_sweep(plan, storage)
    made = SweepTuner(
        plan,
        folder,
        of_trial,
        driver,
        tune_config=tune.TuneConfig(
            metric=plan.metric,
            mode=plan.mode,
            num_samples=-1,
            scheduler=scheduler,
            search_alg=source,
            reuse_actors=plan.reuse != "none",
            trial_name_creator=source.name_of,
            trial_dirname_creator=source.name_of,
        ),
        run_config=_run_config(plan, folder, SweepCallback(plan, log, driver)),
    )
    made.hold(partial(end_mailbox, shared.mailbox))
    return made


def _of_trials(plan: SweepPlan) -> tuple[SweepPlan, dict[str, Any], str]:
    """Returns all of a plan that no resume changes: itself without paths, its settings, and the code of its space."""
    settings = {key: value for key, value in flatten(plan.config).items() if key not in OF_THE_MACHINE}
    return replace(plan, space="", tree={}), settings, Path(plan.space).read_text()


def _run_config(plan: SweepPlan, folder: Storage, callback: SweepCallback) -> tune.RunConfig:
    return tune.RunConfig(
        name=_tune_folder(folder),
        storage_path=folder.path,
        storage_filesystem=folder.filesystem,
        callbacks=[callback],
        failure_config=tune.FailureConfig(max_failures=plan.config.scaling.max_failures),
        # The newest pointer alone leads somewhere for certain where `checkpoint.keep_last` deletes checkpoints.
        checkpoint_config=tune.CheckpointConfig(num_to_keep=None if _keeps_all(plan) else 1),
        verbose=0,
    )


def _keeps_all(plan: SweepPlan) -> bool:
    """Whether Tune keeps the pointers to all checkpoints of a trial, from which others may start."""
    return plan.scheduler in PAUSING or plan.config.checkpoint.keep_last is None


def _check_settings(known: Mapping[str, TrialRecord], space: Space, folder: Storage) -> None:
    """Raises ConfigError if trials have settings that the sweep does not vary: their records are not signed."""
    for name, record in known.items():
        damaged = f"{folder.path}/trials/{name}.json is damaged: the sweep does not"
        if others := set(record.settings) - {*space, "seed"}:
            raise ConfigError(f"{damaged} vary {min(others)}")
        for key in set(record.settings) & set(POWERFUL):
            if not may_have(space[key], record.settings[key]):
                raise ConfigError(f"{damaged} have {key} {record.settings[key]!r}")


def _tune_folder(folder: Storage) -> str:
    """Returns the name of the folder for Tune's own records, which a resume begins anew: tune, tune-2, ..."""
    count = sum(name.partition("-")[0] == _TUNE_FOLDER for name in folder.names())
    return f"{_TUNE_FOLDER}-{count + 1}" if count else _TUNE_FOLDER


def shared_inputs(plan: SweepPlan, space: Space, models: Sequence[NeededModel]) -> SharedInputs:
    """Returns what is made here once for all trials: the prompts and the model, unless the space varies them.

    Args:
        models: those of `models_of`, which every node gets.
    """
    copies = nodes.bring_models(models)
    common = SharedInputs(relay.reachable(plan.tracking), start_mailbox(), Signer.new(), copies=copies)
    path = None if any(key.startswith("model.") for key in space) else models[0].path
    if path and not any(key.startswith(("data.", "environment.name")) for key in space):
        return replace(common, model_path=path, tables=preflight.prompt_tables(plan.config, path))
    for setting, address in _prompts_of(plan.config.data, plan.config.eval, space):
        nodes.check_path(address, setting)
    return replace(common, model_path=path)


def _prompts_of(data: DataConfig, judged: EvalConfig, space: Space) -> Iterator[tuple[str, str]]:
    """Gives the addresses of prompts that trials may read, with the settings that name them."""
    single = {"data.source": data.source, "data.ptx_source": data.ptx_source, "eval.source": judged.source}
    for setting, default in single.items():
        yield from ((setting, str(address)) for address in values_of(space, setting, default) if address)
    for number, each in enumerate(data.sources):
        setting = data.setting_of(number)
        several = {setting: each.source, held_out_setting(setting): each.held_out}
        yield from ((name, address) for name, address in several.items() if address)
    yield from (("eval.sets", each.source) for each in judged.sets if each.source)


def models_of(plan: SweepPlan, space: Space) -> list[NeededModel]:
    """Returns the models that trials need: first the policies to start with, then critics and reward models."""
    config = plan.config
    policies = [str(path) for path in values_of(space, "model.path", config.model.path)]
    needed = [NeededModel(preflight.model_folder(path, config.storage), "model.path") for path in policies]
    defaults = {"model.critic_path": config.model.critic_path, "model.reference_path": config.model.reference_path}
    for setting, default in defaults.items():
        given = [str(path) for path in values_of(space, setting, default) if path]
        needed += [NeededModel(preflight.model_folder(path, config.storage), setting) for path in given]
    rewards = values_of(space, "reward.model", config.reward.model)
    return [*needed, *(NeededModel(str(path), "reward.model") for path in rewards if path)]


def _trial_source(
    plan: SweepPlan,
    records: TrialRecords,
    space: Space,
    known: Mapping[str, TrialRecord],
    options: TrialOptions,
) -> TrialSource:
    tried = [known[name].settings for name in sorted(known)][: plan.total_trials : plan.seeds]
    search = searchers.searcher(plan.search, space, plan.candidates, plan.config.seed, tried)
    return TrialSource(search, space, records, options, known)


def _options(plan: SweepPlan, room: Room, race: Race | None) -> TrialOptions:
    seed = plan.config.seed
    return TrialOptions(
        candidates=plan.candidates,
        seeds=[seed + i for i in range(plan.seeds)] if plan.seeds > 1 else [],
        limit=None if plan.scheduler in PAUSING else room.trials,
        pausing=plan.scheduler in PAUSING,
        metric=plan.metric,
        mode=plan.mode,
        race=race,
        # The lists of other searches are checked before the sweep begins.
        check=partial(check_suggestion, plan.space, plan.tree) if plan.search in searchers.ADAPTIVE else None,
    )


def _with_newest_settings(folder: Storage, name: str, record: TrialRecord) -> TrialRecord:
    """Returns a trial's record with the settings of its newest run: a kill may have come before they were recorded."""
    newest = folder / "runs" / newest_attempt(folder, name)
    if attempt_number(newest.name) == 1 or record.is_over:
        return record
    saved = flatten(from_tree(saved_config(newest)))
    return record.model_copy(update={"settings": {key: setting_at(saved, key) for key in record.settings}})
