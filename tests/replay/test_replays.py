"""Steps of whole runs done again: equal to the last bit, also where the run was killed; a planted fault is found.

RLX_REPLAYS sets how many random steps of each of the five runs are replayed (4).
"""

import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from my_rewards import GLITCH
from run_cases import Done, small, train
from shared import KEPT, KILLED_S, NothingLeft, Script, assert_all_end, mlflow_history

from rlx.cluster import connection
from rlx.config.errors import ConfigError
from rlx.replay import branches, comparing, inside_step, pairs, recorded
from rlx.replay.branches import Branch, Scratch
from rlx.replay.comparing import Comparison
from rlx.replay.recorded import RecordedRun
from rlx.samples import reader
from rlx.samples.columns import Kind
from rlx.samples.evaluations import kept_evaluations
from rlx.samples.reader import KeptStep
from rlx.storage.addresses import open_storage
from rlx.storage.filesystem import Storage
from rlx.tracking.services import mlflow

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
Start = Callable[..., Script]

REPLAYS = int(os.environ.get("RLX_REPLAYS", "4"))
STEPS, EVERY = 24, 4
ONE = {"scaling__num_workers": 1, "rollout__num_engines": 1}
LENGTHS = {"reward__functions": {"length": 1.0}, "reward__length_target": 4}
KINDS: dict[str, dict[str, Any]] = {
    "gae": ONE,
    "gae-2-ranks-killed": {},
    "grpo-killed": {"algorithm__advantage": "grpo", **ONE},
    "lora": {"model__lora_rank": 4, "model__lora_sync": "merged", **ONE},
    "ahead-killed": {"rollout__max_staleness": 1, **ONE},
}


def config_of(model: Path, storage: Path, name: str, **changes: Any) -> Any:
    """A run of 24 steps that learns lengths, with all of its checkpoints."""
    steps = {"train__steps": STEPS, "checkpoint__every": EVERY, "checkpoint__keep_last": None}
    reward = {} if "reward__functions" in changes else LENGTHS
    return small(model, storage, name, **reward | steps | changes)


@pytest.fixture(scope="module")
def storage(nothing_left: NothingLeft, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage")


def recorded_run(kind: str, model: Path, storage: Path, killed_after: int = 5, **settings: Any) -> RecordedRun:
    """A finished run of a kind; one whose name says so was killed after its fifth step, and resumed."""
    config = config_of(model, storage, kind, **(settings or KINDS[kind]))
    if "killed" not in kind:
        train(config)
    else:
        (storage / f"{kind}.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
        script = Script(storage / f"{kind}.txt", "ppo.py", "--config", str(storage / f"{kind}.yaml"))
        try:
            script.wait_for(f"step {killed_after}/{STEPS}")
            script.kill()
            assert_all_end(script, KILLED_S)
        finally:
            for process in script.processes():
                process.kill()
        assert train(config, resume=True).reports[0][0]["step"] in range(EVERY, STEPS, EVERY)
    return RecordedRun.read(kind, str(storage))


def done_again(branch: Branch) -> tuple[Comparison, Storage]:
    """A branch that has been run, compared with its run to the last bit; and its folder."""
    prepared = branch.prepare()
    connection.connect(prepared.config, prepared.resources)
    result = branches.run_branch(prepared, branch, processes=KEPT)
    folder = open_storage(prepared.config.storage) / "runs" / result.name
    again = recorded.metrics_of(branches.records_of(prepared), str(result.mlflow_run))
    return comparing.compare(branch, folder, recorded.logged_metrics(branch.run), again, 0.0), folder


def state_of(run: RecordedRun, storage: Path) -> tuple[Any, ...]:
    """Everything in the folder of a run with its time, and everything that MLflow has of it.

    But for what Ray Train writes there: workers that have done the run do the replays, too.
    """
    files = [file for file in sorted(Path(run.folder.path).rglob("*")) if "checkpoint_" not in str(file)]
    files = [file for file in files if file.is_file() and not file.name.startswith(".")]
    kept = [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files]
    run_id = recorded.outbox.run_id(run.folder)
    told = mlflow.get_run(mlflow.default_uri(storage), str(run_id))
    return kept, told, mlflow_history(storage, str(run_id))


@pytest.fixture
def place(storage: Path) -> Iterator[Callable[[RecordedRun], Scratch]]:
    """Places for replays, which are gone in the end, as the workers are then that have worked there."""
    opened: list[Any] = []

    def at(run: RecordedRun) -> Scratch:
        opened.append(branches.scratch(run))
        return opened[-1].__enter__()  # type: ignore[no-any-return]

    yield at
    KEPT.close()
    for context in opened:
        context.__exit__(None, None, None)
    assert (open_storage(str(storage)) / branches.REPLAYS).names() == []


@pytest.mark.parametrize("kind", KINDS)
def test_random_steps_are_equal_to_the_last_bit(
    kind: str, tiny_model: Path, storage: Path, place: Callable[[RecordedRun], Scratch]
) -> None:
    run = recorded_run(kind, tiny_model, storage)
    before, where = state_of(run, storage), place(run)
    steps = sorted(random.Random(kind).sample(range(1, STEPS + 1), min(REPLAYS, STEPS)))
    for step in steps:
        branch = where.placed(replace(branches.branch_to(run, step), attributes_gradient=True))
        comparison, folder = done_again(branch)
        assert comparison.different == () and comparison.completions == () and comparison.holds
        assert comparison.weights is (True if step % EVERY == 0 else None)
        kept = {file for file in kept_evaluations(run.folder) if file.step in branch.steps}
        assert comparison.questions == {str(file): () for file in kept}
        assert {each.step for each in comparison.metrics} == set(branch.steps)
        assert len(comparison.metrics) > 25 * (step - (step - 1) // EVERY * EVERY)
        prompts = inside_step.step_prompts(folder, step)
        assert len(prompts) == 8 and sum(each.share or 0 for each in prompts) == pytest.approx(1, abs=1e-6)
        print(f"{kind}: step {step} from {branch.origin}: {len(comparison.metrics)} metrics equal", flush=True)
    assert state_of(run, storage) == before


def test_a_control_is_the_run_and_the_other_branch_is_not(
    tiny_model: Path, storage: Path, place: Callable[[RecordedRun], Scratch]
) -> None:
    run = recorded_run("gae", tiny_model, storage) if not (storage / "runs" / "gae").exists() else None
    run = run or RecordedRun.read("gae", str(storage))
    where = place(run)
    control, changed = (
        where.placed(each)
        for each in pairs.pair_of(run, EVERY, 5, {"algorithm.clip_high": 0.01, "train.actor_lr": 0.003})
    )
    comparison, twin = done_again(control)
    assert comparison.holds and {each.step for each in comparison.metrics} == {5, 6, 7, 8, 9}
    changed = replace(changed, changes=changed.changes | {"name": "changed"})
    comparison, other = done_again(changed)
    assert comparison.first_fault == 5  # from the first step on
    rows = pairs.paired_evaluations(twin, other, EVERY)
    assert [(row.step, row.questions) for row in rows] == [(6, 12), (8, 12)]
    (row,) = pairs.paired_prompts(twin, other, changed.steps)
    assert row.questions == 40 and row.difference.value == pytest.approx(row.changed - row.control)
    assert row.better + row.worse > 0


def test_a_run_that_went_on_is_done_again_over_its_former_end(
    tiny_model: Path, storage: Path, place: Callable[[RecordedRun], Scratch]
) -> None:
    """Step 7 was evaluated only because it was the last; the checkpoint of it is deleted."""
    train(config_of(tiny_model, storage, "longer", **ONE, train__steps=7))
    train(config_of(tiny_model, storage, "longer", **ONE, train__steps=11), resume=True)
    (open_storage(str(storage)) / "runs" / "longer" / "step_000007").delete()
    run = RecordedRun.read("longer", str(storage))
    where = place(run)
    ends = {"step_000007-held_out.parquet", "step_000011-held_out.parquet"}
    comparison, _ = done_again(where.placed(branches.branch_to(run, 8)))
    assert comparison.holds and comparison.questions.keys() & ends == {"step_000007-held_out.parquet"}
    control, _ = (where.placed(each) for each in pairs.pair_of(run, EVERY, 9, {"algorithm.clip_high": 0.01}))
    comparison, folder = done_again(control)  # beyond the end of the run
    assert comparison.holds and {each.step for each in comparison.metrics} == {*range(5, 12)}
    assert comparison.questions.keys() > ends and kept_evaluations(folder)[-1].step == 13


def test_a_replay_asks_the_prompts_of_the_run_wherever_they_lie(
    tiny_model: Path, storage: Path, place: Callable[[RecordedRun], Scratch]
) -> None:
    trained_on, held_out, moved = (storage / name for name in ("train.jsonl", "held.jsonl", "here.jsonl"))
    for file, first in ((trained_on, 0), (held_out, 50)):
        rows = [{"question": f"{each} + 1 =", "answer": str(each + 1)} for each in range(first, first + 12)]
        file.write_text("\n".join(map(json.dumps, rows)))
    data = {"data__source": str(trained_on), "data__params": {}, "eval__source": str(held_out)}
    train(config_of(tiny_model, storage, "files", **ONE, **data, train__steps=4))
    run = RecordedRun.read("files", str(storage))
    where = place(run)
    moved.write_text(trained_on.read_text())
    branch = where.placed(replace(branches.branch_to(run, 1), changes={"data.source": str(moved)}))
    assert done_again(branch)[0].holds
    whatif = {"algorithm.clip_high": 0.01, "eval.every": 1}
    for file, setting, which, changes in (
        (held_out, "eval.source", "held-out prompts", whatif),
        (trained_on, "data.source", "prompts", {}),
    ):
        before = file.read_text()
        file.write_text(before.replace(" + 1", " + 2", 1))
        with pytest.raises(
            ConfigError, match=f"^{setting} {re.escape(str(file))}: its {which} are not those of run fil"
        ):
            done_again(where.placed(replace(branches.branch_to(run, 3), changes=changes)))
        file.write_text(before)


@pytest.fixture
def no_glitch() -> Iterator[None]:
    GLITCH.unlink(missing_ok=True)
    yield
    GLITCH.unlink(missing_ok=True)


def test_a_fault_in_one_score_of_one_step_is_found(
    tiny_model: Path, storage: Path, no_glitch: None, place: Callable[[RecordedRun], Scratch]
) -> None:
    """One score of step 5 was wrong, as by a bug that is gone: what was logged of step 5 cannot be had again."""
    reward = {"reward__functions": {"tests.my_rewards:glitching": 1.0}}
    sound = train(config_of(tiny_model, storage, "sound", **ONE, **reward))
    GLITCH.write_text(question_of_step(sound, 5))
    train(config_of(tiny_model, storage, "faulty", **ONE, **reward))
    GLITCH.unlink()
    run = RecordedRun.read("faulty", str(storage))
    where = place(run)
    assert done_again(where.placed(branches.branch_to(run, 4)))[0].holds
    comparison, _ = done_again(where.placed(branches.branch_to(run, 8)))
    assert comparison.first_fault == 5 and not comparison.holds
    of_step = {each.name: each for each in comparison.different if each.step == 5}
    score = of_step["reward/mean"]
    assert score.logged is not None and score.again is not None
    assert score.logged - score.again == pytest.approx(1 / 16)  # one score of sixteen
    assert comparison.weights is False


def question_of_step(run: Done, step: int) -> str:
    """A prompt that the run had in no other step."""
    folder = open_storage(run.config.storage) / "runs" / run.result.name
    by_step = {number: questions(folder, number) for number in range(1, STEPS + 1)}
    others = set().union(*(found for number, found in by_step.items() if number != step))
    return min(by_step[step] - others)


def questions(folder: Storage, step: int) -> set[str]:
    table = comparing.step_completions(folder, step)
    assert table is not None
    return set(table["question"].to_pylist())


def test_environments_are_not_asked_again_for_what_they_have_said(
    tiny_model: Path, storage: Path, place: Callable[[RecordedRun], Scratch], tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    playing = {
        "environment__name": "tests.replay.noting:Noting",
        "environment__params": {"file": str(notes)},
        "environment__max_turns": 2,
        "rollout__max_tokens": 100,
        "reward__functions": {"environment": 1.0},
    }
    run = recorded_run("episodes-killed", tiny_model, storage, 6, **ONE, **playing)
    begun = Counter(line for line in notes.read_text().splitlines() if "begins" in line)
    redone = {each.question for each in reader.completions(reader.read(run.folder, kept_step(run, 5)))}
    assert len(redone) == 8 and all(begun[repr(f"begins {question}")] == 2 for question in redone)
    begins = {}
    for asks_again in (False, True):
        where, asked = place(run), notes.read_text().count("begins")
        branch = where.placed(replace(branches.branch_to(run, 7), asks_again=asks_again))
        comparison, _ = done_again(branch)
        assert comparison.holds and comparison.completions == ()
        begins[asks_again] = notes.read_text().count("begins") - asked
    assert begins[False] == 2  # the trial before each run
    assert begins[True] >= 2 + 3 * 16  # and steps 5 to 7


def kept_step(run: RecordedRun, number: int) -> KeptStep:
    return next(each for each in reader.kept_steps(run.folder) if (each.number, each.kind) == (number, Kind.TRAINING))
