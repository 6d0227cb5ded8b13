"""Two drivers start at the same moment on one storage: nothing is there twice, nothing is lost.

RLX_ATTACKS sets how often (20). The attacks are those of two processes that stay (`driver`); two scripts that end with
their runs, each on a cluster of its own, attack once. Claims alone are in tests/storage/test_claims.py.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import s3
from shared import LIKE_TINY, Script, mlflow_history

from rlx.storage.addresses import open_storage
from rlx.storage.filesystem import Storage
from rlx.sweeps.records import TrialRecords
from rlx.tracking import outbox
from rlx.tracking.services import mlflow

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
ATTACKS = int(os.environ.get("RLX_ATTACKS", "20"))
Start = Callable[..., Script]
Answers = list[tuple[int, str]]
"""exit codes and what was printed, by code"""
_HEAD_START_S = 0.2  # for an order to arrive


class Pair:
    """Two drivers that get their orders at the same moment."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._orders = folder, itertools.count()
        command = [sys.executable, str(Path(__file__).with_name("driver.py"))]
        with (folder / "log").open("w") as log:
            self._processes = [
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
                for _ in range(2)
            ]
        assert [self._answer(process) for process in self._processes] == ["ready"] * 2

    def both(self, command: str, words: list[str]) -> Answers:
        """Both do a command of rlx, beginning at the same moment."""
        at, number = time.monotonic() + _HEAD_START_S, next(self._orders)
        outputs = [self._folder / f"{number}-{which}.txt" for which in range(2)]
        for process, output in zip(self._processes, outputs, strict=True):
            assert process.stdin
            print(
                json.dumps({"command": command, "words": words, "output": str(output), "at": at}),
                file=process.stdin,
                flush=True,
            )
        codes = [int(self._answer(process)) for process in self._processes]
        return sorted(zip(codes, [output.read_text() for output in outputs], strict=True))

    def close(self) -> None:
        for process in self._processes:
            process.communicate()  # the end of its orders

    def _answer(self, process: "subprocess.Popen[str]") -> str:
        assert process.stdout
        answer = process.stdout.readline()
        assert answer, (self._folder / "log").read_text()
        return answer.strip()


@pytest.fixture(scope="module")
def pair(s3_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("drivers"))
    yield pair
    pair.close()


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], str]:
    """A fresh storage for each attack."""
    if request.param == "folder":
        return lambda attack: str(tmp_path / str(attack))
    request.getfixturevalue("bucket")
    return lambda attack: f"s3://{s3.BUCKET}/two/{tmp_path.name}/{attack}"


@pytest.fixture
def records(tmp_path: Path, empty_database: Path) -> Callable[[int], Path]:
    """A folder for MLflow's database for each attack; every fourth finds one with MLflow's tables there."""

    def folder(attack: int) -> Path:
        made = tmp_path / f"records-{attack}"
        made.mkdir()
        if attack % 4 == 3:
            shutil.copy(empty_database, made)
        return made

    return folder


def words(storage: str, records: Path, model: Path, *more: str) -> list[str]:
    """Two steps of the tiny model, on one rank and one engine."""
    small = {
        "storage": storage, "tracking.uri": mlflow.default_uri(records), "model.path": model, "train.steps": 2,
        "train.prompts-per-step": 4, "rollout.max-tokens": 8, "rollout.kv-cache-mib": 16, "eval.every": 0,
        "scaling.num-workers": 1, "rollout.num-engines": 1,
    }  # fmt: skip
    return [*[text for key, value in small.items() for text in (f"--{key}", str(value))], *LIKE_TINY, *more]


def scripts(script: Start, name: str, arguments: list[str]) -> Answers:
    """Starts a script twice at once."""
    pair = [script(name, *arguments) for _ in range(2)]
    return sorted((each.process.wait(), each.output.read_text()) for each in pair)


def assert_steps(records: Path, run: Storage, steps: int = 2) -> None:
    """A run has all of its steps, each once, and is claimed no more."""
    history = mlflow_history(records, outbox.run_id(run))
    assert {step: len(values) for step, values in history["reward/mean"].items()} == dict.fromkeys(
        range(1, steps + 1), 1
    )
    assert run.names().count(f"step_{steps:06d}") == 1
    assert_free(run)


def assert_free(folder: Storage) -> None:
    assert not [each for each in folder.names() if each.startswith(("owner", "now-"))]


def assert_refused(answers: Answers, what: str) -> None:
    """One of two did it; the other said in one line that it is another's."""
    (first, _), (second, refusal) = answers
    assert (first, second) == (0, 1), answers
    assert refusal.startswith(f"error: {what} is ") and refusal.count("\n") == 1


def assert_resumed_once(answers: Answers) -> None:
    """One of two did the third step; the other was refused, or came when it was done."""
    if [code for code, _ in answers] == [0, 0]:
        late = [text for _, text in answers if text.startswith("run same is finished: 3 steps")]
        assert len(late) == 1, answers
    else:
        assert_refused(answers, "run 'same'")


def trained_runs(records: Path) -> list[str]:
    """The names of MLflow's runs of training, in alphabetical order."""
    client = mlflow.client(mlflow.default_uri(records))
    experiments = [each.experiment_id for each in client.search_experiments()]
    return sorted(run.info.run_name for run in client.search_runs(experiments))


def test_one_of_two_has_the_name_of_a_run(
    pair: Pair, place: Callable[[int], str], records: Callable[[int], Path], tiny_model: Path
) -> None:
    for attack in range(ATTACKS):
        at, storage = records(attack), place(attack)
        start = words(storage, at, tiny_model, "--name", "same")
        assert_refused(pair.both("train", start), "run 'same'")
        run = open_storage(storage) / "runs" / "same"
        assert_steps(at, run)
        go_on = ["--resume", "same", "--storage", storage, "--train.steps", "3"]
        assert_resumed_once(pair.both("train", go_on))
        assert_steps(at, run, 3)
        assert trained_runs(at) == ["same"]


def test_two_without_a_name_are_two_runs(
    pair: Pair, place: Callable[[int], str], records: Callable[[int], Path], tiny_model: Path
) -> None:
    for attack in range(ATTACKS):
        at, storage = records(attack), place(attack)
        answers = pair.both("train", words(storage, at, tiny_model))
        assert [code for code, _ in answers] == [0, 0], answers
        assert_two(at, storage)


def assert_two(records: Path, storage: str) -> None:
    runs = open_storage(storage) / "runs"
    assert runs.names() == trained_runs(records) == ["ppo-1", "ppo-2"]
    for run in runs.names():
        assert_steps(records, runs / run)


def test_one_of_two_has_the_name_of_a_sweep(
    pair: Pair, place: Callable[[int], str], records: Callable[[int], Path], tiny_model: Path
) -> None:
    for attack in range(ATTACKS):
        at, storage = records(attack), place(attack)
        start = words(storage, at, tiny_model, "--name", "same", "--trials", "1")
        assert_refused(pair.both("sweep", start), "sweep 'same'")
        assert_one_trial(at, storage)


def assert_one_trial(records: Path, storage: str) -> None:
    sweep = open_storage(storage) / "sweeps" / "same"
    (trial,) = TrialRecords(sweep).all()
    assert_steps(records, sweep / "runs" / trial)
    assert_free(sweep)
    assert trained_runs(records) == ["same", f"same.{trial}"]


@pytest.mark.parametrize("name", ["ppo.py", "ppo_sweep.py"])
def test_two_scripts_at_once_are_as_one(name: str, script: Start, tiny_model: Path, tmp_path: Path) -> None:
    """Each with imports, cluster, engine and worker of its own, and one database that neither has made."""
    storage = str(tmp_path / "storage")
    if name == "ppo.py":
        answers = scripts(script, name, words(storage, tmp_path, tiny_model))
        assert [code for code, _ in answers] == [0, 0], answers
        assert_two(tmp_path, storage)
    else:
        answers = scripts(script, name, words(storage, tmp_path, tiny_model, "--name", "same", "--trials", "1"))
        assert_refused(answers, "sweep 'same'")
        assert_one_trial(tmp_path, storage)
