"""Files of what came of each question: on a folder and on S3, after kills, and damaged."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from shared import Where

from rlx.config.errors import ConfigError
from rlx.samples.evaluations import (
    EVALUATIONS,
    EvaluationFile,
    Outcomes,
    OutcomeWriter,
    kept_evaluations,
    read_outcomes,
    write_outcomes,
)
from rlx.samples.writer import discard_after
from rlx.storage.addresses import open_storage
from rlx.storage.filesystem import Storage, StorageError

OUTCOMES = Outcomes(
    sources=("gsm8k", "sums"),
    rows=np.array([0, 7]),
    checksums=np.array([1, 2**32 - 1], np.uint32),
    right=np.array([[True, False, True], [False] * 3]),
    scores=np.array([[1.0, -0.25, 0.1], [0.0] * 3]),
    lengths=np.array([[4, 5, 6], [16] * 3], np.int32),
    majority=np.array([1.0, 0.0]),
)


@pytest.fixture
def run(where: Where, monkeypatch: pytest.MonkeyPatch) -> Storage:
    for name, value in where[1].items():
        monkeypatch.setenv(name, value)
    return open_storage(where[0])


def test_outcomes_are_read_as_they_were_written(run: Storage) -> None:
    assert kept_evaluations(run) == []
    files = [EvaluationFile(20, "held_out"), EvaluationFile(20, "aime-24"), EvaluationFile(0, "held_out")]
    for file in files:
        write_outcomes(run, file, OUTCOMES)
    assert kept_evaluations(run) == sorted(files)
    found = read_outcomes(run, files[1])
    for column in dataclasses.fields(Outcomes):
        pair = getattr(found, column.name), getattr(OUTCOMES, column.name)
        assert np.array_equal(*pair) and np.array(pair[0]).dtype == np.array(pair[1]).dtype
    assert found.questions == ["gsm8k/0/00000001", "sums/7/ffffffff"]


def test_a_resume_deletes_what_a_killed_run_left_of_later_steps(tmp_path: Path) -> None:
    run = open_storage(str(tmp_path))
    for step in (2, 4, 1_000_000):
        write_outcomes(run, EvaluationFile(step, "a"), OUTCOMES)
    Path(tmp_path, EVALUATIONS, "step_000002-a.parquet.17.part").touch()
    said: list[str] = []
    discard_after(run, 2, said.append)
    assert (run / EVALUATIONS).names() == ["step_000002-a.parquet"] and said == []


def test_many_questions_take_a_few_kib(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    right = draws.random((256, 4)) < 0.5
    checksums, lengths = draws.integers(0, 2**32, 256).astype(np.uint32), draws.integers(2, 17, (256, 4))
    outcomes = Outcomes(("gsm8k",) * 256, np.arange(256), checksums, right, right * 1.0, lengths, right.mean(1))
    write_outcomes(open_storage(str(tmp_path)), EvaluationFile(1, "a"), outcomes)
    (path,) = Path(tmp_path, EVALUATIONS).iterdir()
    assert path.stat().st_size < 6 * 1024


def test_a_storage_that_takes_nothing_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise StorageError("writing x failed 6 times: no space")

    monkeypatch.setattr("rlx.samples.evaluations.retry", refuse)
    said: list[str] = []
    OutcomeWriter(open_storage(str(tmp_path)), said.append).keep(EvaluationFile(3, "a"), OUTCOMES)
    assert said == ["outcomes of the evaluation a of step 3 are not kept: writing x failed 6 times: no space"]


@pytest.mark.parametrize("spoil", ["cut", "no column", "another type", "fewer samples"])
def test_a_damaged_file_is_named_in_one_line(spoil: str, tmp_path: Path) -> None:
    run, file = open_storage(str(tmp_path)), EvaluationFile(1, "a")
    write_outcomes(run, file, OUTCOMES)
    path = Path(tmp_path, EVALUATIONS, str(file))
    table = pq.read_table(path)
    columns: dict[str, Any] = {"another type": ["a", "b"], "fewer samples": [[True], [False] * 3]}
    if spoil == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    else:
        kept = table.drop_columns(["right"])
        pq.write_table(kept.append_column("right", [columns[spoil]]) if spoil in columns else kept, path)
    with pytest.raises(ConfigError) as caught:
        read_outcomes(run, file)
    assert str(caught.value).startswith(f"{path} is damaged, or another version of rlx wrote it: ")
    assert "\n" not in str(caught.value)
