"""A sweep that is interrupted and resumed decides what one in one go does, in whatever order trials start again."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from racing import METRIC, Played, Tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler
from shared import LIKE_TINY, Script

from rlx.config.errors import ConfigError
from rlx.config.sweep import PROGRESS, RungUnit, SchedulerName
from rlx.storage.addresses import open_storage
from rlx.storage.filesystem import Storage
from rlx.sweeps.callback import TrialLog
from rlx.sweeps.records import TOLD_FILE, TrialRecord, TrialRecords, TrialState, trial_name
from rlx.sweeps.schedulers.by_name import SCHEDULERS
from rlx.sweeps.schedulers.schedule import TIME, Schedule

STEPS, EVERY = 16, 2
AFTER_ALL = 1e9


class Driven(Played):
    """A trial with what its record needs besides."""

    config: Mapping[str, Any] = {}


class Made:
    """A made-up sweep: what its trials report, and which of those that run reports next."""

    def __init__(self, candidates: int, seeds: int, unit: RungUnit, seed: int = 0) -> None:
        self.candidates, self.seeds, self.unit, rng = candidates, seeds, unit, random.Random(seed)
        numbers, steps = range(candidates * seeds), range(EVERY, STEPS + 1, EVERY)
        self.values = {number: {step: rng.random() for step in steps} for number in numbers}
        self.tokens = {number: {step: step * (20.0 + 0.7 * number) for step in steps} for number in numbers}
        self.turns = {(number, step): rng.random() for number in numbers for step in steps}  # who reports first


class Session(Tune):
    """A sweep from its start or from an interruption to the next one: all but Tune's processes and training."""

    def __init__(self, name: SchedulerName, made: Made, folder: Storage, again: random.Random | None = None) -> None:
        """
        Args:
            again: the order in which trials are started again.
        """
        self.made, self.records, self.again = made, TrialRecords(folder), again or random.Random(0)
        self.known = self.records.all()
        self.schedule = Schedule(
            STEPS,
            EVERY,
            {},
            known=self.known,
            records=self.records,
            candidates=made.candidates,
            seeds=made.seeds,
            rung_by=made.unit,
        )
        self.log = TrialLog([], folder, self.records, self.schedule, METRIC)
        super().__init__(SCHEDULERS[name](self.schedule), self.made.values.__getitem__, self.next_one)

    def play(self, reports: float = AFTER_ALL) -> None:
        """Plays until all trials have ended, or so many reports have come since the ones that are repeated."""
        self.repeated = {name: record.step for name, record in self.known.items() if not record.is_over}
        live = [number for number in self.made.values if not self.is_over(trial_name(number))]
        self.run(live, slots=99, reports=sum(step > 0 for step in self.repeated.values()) + reports)
        self.log.flush()

    def is_over(self, name: str) -> bool:
        return name in self.known and self.known[name].is_over

    def next_one(self, running: Sequence[Played]) -> Played:
        """The trials that go on report again first, in an order of their own."""
        if again := [trial for trial in running if self.repeated.get(str(trial))]:
            return self.again.choice(again)
        return min(running, key=lambda trial: self.made.turns[trial.number, self.next_step(trial)])

    def next_step(self, trial: Played) -> int:
        return self.repeated.get(str(trial)) or int(trial.last_result[TIME]) + EVERY

    def stop_trial(self, trial: Played) -> None:
        super().stop_trial(trial)
        self.log.end_trial(trial, TrialState.STOPPED)

    def _add(self, numbers: Any) -> None:
        for number in numbers:
            trial = Driven(number, self.made.values[number])
            self.trials.append(trial)
            if str(trial) not in self.known:
                self.records.write(str(trial), TrialRecord(settings={}))
            self.scheduler.on_trial_add(self, trial)

    def _report(self, trial: Played) -> None:
        step = self.next_step(trial)
        is_new = not self.repeated.pop(str(trial), 0)
        progress = self.made.tokens[trial.number][step] if self.made.unit == "tokens" else step
        result = {PROGRESS[self.made.unit]: progress, TIME: step, METRIC: trial.values[step]}
        action = TrialScheduler.STOP
        if step < STEPS:  # of the last one Tune asks nothing
            action = self.scheduler.on_trial_result(self, trial, result)
        trial.last_result = result
        if is_new:
            self.log.add_report(trial, {**result, "time/eval": 0.1})
        if action == TrialScheduler.STOP:
            self.scheduler.on_trial_complete(self, trial, result)
            self.log.end_trial(trial, TrialState.FINISHED if step == STEPS else TrialState.STOPPED)
        trial.status = {"STOP": Trial.TERMINATED, "PAUSE": Trial.PAUSED}.get(action, Trial.RUNNING)


def in_one_go(name: SchedulerName, made: Made, folder: Path) -> dict[str, TrialRecord]:
    session = Session(name, made, open_storage(str(folder)))
    session.play()
    return session.records.all()


def interrupted(name: SchedulerName, made: Made, folder: Path, seed: int = 0) -> dict[str, TrialRecord]:
    """With interruptions after some reports each."""
    storage, rng = open_storage(str(folder)), random.Random(seed)
    while True:
        session = Session(name, made, storage, rng)
        if all(session.is_over(trial_name(number)) for number in made.values):
            return session.records.all()
        session.play(rng.randint(1, 12))


def ends(records: Mapping[str, TrialRecord], made: Made) -> list[int]:
    """The step at which each setting has ended: seeds that are ahead of the others see its end later."""
    steps = [records[trial_name(number)].step for number in made.values]
    return [min(steps[i : i + made.seeds]) for i in range(0, len(steps), made.seeds)]


@pytest.mark.parametrize("seeds", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "unit"),
    [("asha", "steps"), ("asha", "tokens"), ("median", "steps"), ("median", "tokens"), ("hyperband", "steps")],
)
def test_interruptions_change_no_decision(name: SchedulerName, seeds: int, unit: RungUnit, tmp_path: Path) -> None:
    stopped = 0
    for seed in range(3):
        made = Made(17, seeds, unit, seed)
        whole = in_one_go(name, made, tmp_path / f"whole-{seed}")
        parts = interrupted(name, made, tmp_path / f"parts-{seed}", seed)
        assert ends(parts, made) == ends(whole, made)
        assert seeds > 1 or parts == whole
        stopped += sum(end < STEPS for end in ends(whole, made))
    assert stopped


@pytest.mark.slow
@pytest.mark.parametrize("name", ["asha", "median"])
def test_whoever_was_let_go_on_is_not_stopped_on_a_resume(name: SchedulerName, tmp_path: Path) -> None:
    """The first setting reports each step before the others, so it is compared with nobody; it is the best later."""
    made = Made(4, 1, "steps")
    made.values[0] = {step: 0.1 if step < 8 else 0.9 for step in made.values[0]}
    made.values |= {number: dict.fromkeys(made.values[0], 0.5) for number in (1, 2, 3)}
    made.turns = {(number, step): step + number / 100 for number, step in made.turns}
    whole = in_one_go(name, made, tmp_path / "whole")
    assert whole["trial_00000"].state is TrialState.FINISHED
    for seed in range(4):
        assert interrupted(name, made, tmp_path / str(seed), seed) == whole


def test_a_sweep_of_before_its_calls_were_noted_goes_on(tmp_path: Path) -> None:
    made, folder = Made(9, 1, "tokens"), open_storage(str(tmp_path))
    Session("asha", made, folder).play(12)
    (folder / TOLD_FILE).delete()
    Session("asha", made, folder).play(3)
    calls = TrialRecords(folder).calls()
    assert [what for what, _, _ in calls[:9]] == ["add"] * 9
    Session("asha", made, folder).play()
    assert all(record.is_over for record in TrialRecords(folder).all().values())
    assert TrialRecords(folder).calls()[: len(calls)] == calls


@pytest.mark.parametrize("content", ["{", '["jump", "trial_00000", {}]', '["add", "trial_00000"]', "\udcff"])
def test_calls_that_cannot_be_read_are_damaged(content: str, tmp_path: Path) -> None:
    (tmp_path / TOLD_FILE).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"told.jsonl is damaged: it is not what rlx wrote"):
        TrialRecords(open_storage(str(tmp_path))).calls()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("options", "moment"),
    [
        (("--scheduler", "asha", "--rung-by", "tokens", "--trials", "3", "--max-concurrent", "1"), "trial_00002"),
        (("--scheduler", "hyperband", "--trials", "7"), "trial_00005"),
    ],
)
def test_a_sweep_that_was_killed_has_the_records_of_one_in_one_go(
    options: Sequence[str], moment: str, tiny_model: Path, tmp_path: Path, script: Any
) -> None:
    """To the byte: with asha one trial runs at a time, with hyperband each waits for the others, so order is given."""
    small = {
        "model.path": tiny_model, "train.steps": 8, "train.prompts-per-step": 4, "rollout.max-tokens": 8,
        "eval.every": 2, "eval.num_prompts": 12, "checkpoint.every": 2,
    }  # fmt: skip
    (tmp_path / "space.py").write_text(
        "from ray import tune\n\ndef space():\n    return {'train.actor_lr': tune.loguniform(1e-5, 1e-2)}\n"
    )
    words = [*LIKE_TINY, "--space", str(tmp_path / "space.py"), "--name", "s", *options]
    words += [text for key, value in small.items() for text in (f"--{key}", str(value))]

    def of(storage: str) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in (tmp_path / storage / "sweeps" / "s" / "trials").iterdir()}

    whole: Script = script("ppo_sweep.py", "--storage", str(tmp_path / "whole"), *words)
    assert whole.process.wait(800) == 0, whole.output.read_text()
    killed: Script = script("ppo_sweep.py", "--storage", str(tmp_path / "killed"), *words)
    killed.wait_for(f"{moment} running  step 4/8")
    killed.kill()
    again: Script = script("ppo_sweep.py", "--storage", str(tmp_path / "killed"), "--resume")
    assert again.process.wait(800) == 0, again.output.read_text()
    assert of("killed") == of("whole")
    states = [record.state for record in TrialRecords(open_storage(str(tmp_path / "whole/sweeps/s"))).all().values()]
    assert {TrialState.FINISHED, TrialState.STOPPED} == set(states)
