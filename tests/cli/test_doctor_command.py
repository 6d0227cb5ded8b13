"""What the doctor prints of its checks; tests/runs has the checks."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlx.cli import doctor
from rlx.cluster import connection
from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree
from rlx.config.run import RunConfig
from rlx.runs import launch, preflight
from rlx.runs.doctor import Verdict

SOUND = Verdict("largest difference", 0.000123456, "at most 0.001", True)
ILL = Verdict("gradient norm of the critic", 0.0, "finite, not 0", False)


@pytest.mark.parametrize(
    ("verdicts", "lines", "code"),
    [
        (
            [SOUND, SOUND],
            ["passed  largest difference: 0.000123 (at most 0.001)"] * 2 + ["all 2 checks passed"],
            0,
        ),
        (
            [SOUND, ILL],
            [
                "passed  largest difference: 0.000123 (at most 0.001)",
                "FAILED  gradient norm of the critic: 0 (finite, not 0)",
                "1 of 2 checks failed",
            ],
            1,
        ),
    ],
)
def test_each_check_is_a_line_and_one_that_failed_is_the_exit_code(
    verdicts: list[Verdict], lines: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    connected = list[Any]()
    monkeypatch.setattr(preflight, "prepare", lambda config, notify: SimpleNamespace(resources="plan"))
    monkeypatch.setattr(connection, "connect", lambda config, plan, notify: connected.append(plan))
    monkeypatch.setattr(launch, "examine", lambda prepared, notify: verdicts)
    assert doctor.check(RunConfig()) == code
    assert capsys.readouterr().out.splitlines()[-len(lines) :] == lines
    assert connected == ["plan"]


def test_prompts_that_a_new_run_refuses_are_refused(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"question": "1+1", "answer": "2"}))
    with pytest.raises(ConfigError, match=r"it has files of several splits"):
        doctor.check(from_tree({"data": {"source": str(tmp_path)}}))


def test_a_checkpoint_that_a_new_run_refuses_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not complete"):
        doctor.check(from_tree({"checkpoint": {"init_from": f"{tmp_path}/checkpoint_000003"}}))
