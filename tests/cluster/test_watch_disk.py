"""When a disk has no room for objects of Ray, and what is said when Ray dies; test_full_disk has real disks."""

import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlx.cluster import watch

GIB = 1 << 30


@pytest.mark.parametrize(
    ("total", "free", "lacks"),
    [
        (100 * GIB, 5 * GIB + (1 << 20), False),
        (100 * GIB, 5 * GIB - (1 << 20), True),  # Ray's threshold is 95 % of the disk
        (GIB, 101 << 20, False),  # 5 % would be 51 MiB, what Ray writes at once is more
        (GIB, 99 << 20, True),
    ],
)
def test_ray_needs_a_share_of_the_disk_and_what_it_writes_at_once(
    total: int, free: int, lacks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=total, free=free))
    assert watch.lacks_room_for_objects(tmp_path) is lacks


def test_a_folder_that_is_gone_is_not_full(tmp_path: Path) -> None:
    assert not watch.lacks_room_for_objects(tmp_path / "gone")
    assert watch.lack_of_room(tmp_path / "gone") == ""


def test_a_storage_that_fails_or_hangs_keeps_nobody_from_what_is_to_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_ANSWER_S", 0.1)
    never = threading.Event()

    def fails() -> str:
        raise OSError("no route to host")

    def hangs() -> str:
        never.wait()
        return ""

    assert watch._in_time(lambda: "start it again") == "start it again"
    for storage in (fails, hangs):
        assert watch._in_time(storage) == "the storage does not answer; --resume goes on with what has begun"
    never.set()
