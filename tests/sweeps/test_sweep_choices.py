"""What is refused in a plan of a sweep before Ray is imported."""

from pathlib import Path
from typing import Any

import pytest

from rlx.config.errors import ConfigError
from rlx.sweeps.choices import check_choices
from rlx.sweeps.records import SweepPlan

FILES = {"space.py": "def space(): ...", "broken.py": "\ndef space(:", "none.py": "x = 1", "binary.py": b"\xff"}


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"metric": "eval/acuracy"}, "--metric eval/acuracy: .*; nearest: eval/accuracy"),
        ({"metric": "eval/ema/accuracy"}, "--metric eval/ema/accuracy: it needs train.ema_decay"),
        ({"scheduler": "hyperband", "max_concurrent": 2}, "--max-concurrent: --scheduler hyperband pauses"),
        ({"scheduler": "pbt", "seeds": 2}, "--scheduler pbt changes settings by itself"),
        ({"space": "spce.py"}, "--space .*/spce.py: no such file; nearest: space.py"),
        ({"space": "broken.py"}, "--space .*/broken.py:2: not Python: invalid syntax"),
        ({"space": "binary.py"}, "--space .*/binary.py: not a Python file: "),
        ({"space": "none.py"}, r"--space .*/none.py: no function space\(\) that returns settings"),
    ],
)
def test_what_does_not_go_together_is_one_line(options: dict[str, Any], line: str, tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    check_choices(SweepPlan("s", {}, str(tmp_path / "space.py")))
    named = {"space": "space.py"} | options
    with pytest.raises(ConfigError, match=f"^{line}"):
        check_choices(SweepPlan("s", {}, str(tmp_path / named.pop("space")), **named))
