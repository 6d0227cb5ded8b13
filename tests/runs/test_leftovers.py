"""What earlier clusters and engines have left is deleted after a day; nothing else is."""

import os
import tempfile
import time
from pathlib import Path

import pytest

from rlx.cluster import leftovers

GONE, ALIVE = 2**22 + 1, os.getpid()
DAY_S = 24 * 3600


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "ray").mkdir()
    return tmp_path


def session(folder: Path, pid: int, age_s: float) -> Path:
    made = folder / "ray" / f"session_2026-11-23_04-45-45_522267_{pid}"
    (made / "logs").mkdir(parents=True)
    (made / "logs" / "raylet.out").write_text("x")
    os.utime(made, (time.time() - age_s,) * 2)
    return made


def file(path: Path, age_s: float) -> Path:
    path.write_text("x")
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_only_old_leftovers_of_processes_that_are_gone_are_deleted(temporary: Path) -> None:
    deleted = [session(temporary, GONE, 2 * DAY_S), file(temporary / f"vllm_dist_{'0a' * 16}", 2 * DAY_S)]
    kept = [
        session(temporary, ALIVE, 2 * DAY_S),
        session(temporary, GONE + 1, DAY_S / 2),
        file(temporary / f"vllm_dist_{'0b' * 16}", 60),
        file(temporary / "vllm_dist_of_mine", 2 * DAY_S),
        file(temporary / "ray" / "session_latest", 2 * DAY_S),
    ]
    target = session(temporary, GONE + 2, DAY_S / 2)
    link = temporary / "ray" / f"session_2026-11-23_04-45-45_522267_{GONE + 3}"
    link.symlink_to(target)
    leftovers.clear_leftovers()
    assert not any(path.exists() for path in deleted)
    assert all(path.exists() for path in [*kept, target, link])


def test_what_a_killed_process_of_rlx_left_is_deleted(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        "rlx-sandbox-ab_cd012",
        f"rlx-library-{GONE}-abcdefgh",
        f"rlx-library-{ALIVE}-abcdefgh",
        "rlx-mine-abcdefgh",
    ]
    (temporary / "shm").mkdir()
    monkeypatch.setattr(leftovers, "_SHARED_MEMORY", temporary / "shm")
    made = [temporary / name for name in names] + [temporary / "shm" / "rlx-adapter-abcdefgh"]
    for path in made:
        path.mkdir()
        (path / "x").write_text("x")
        os.utime(path, (time.time() - 2 * DAY_S,) * 2)
    leftovers.clear_leftovers()
    assert [path for path in made if path.exists()] == made[2:4]


def test_a_folder_that_is_not_there_is_no_error(temporary: Path) -> None:
    (temporary / "ray").rmdir()
    leftovers.clear_leftovers()
