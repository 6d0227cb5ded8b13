"""Calls in a child process, and many items with a limit each."""

import functools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rlx.rewards.child import ChildError, ChildProcess, ChildTimeout, map_limited


def counting(start: int) -> Any:
    """A function with a state: how often it was asked."""
    asked = [start]

    def count(what: str) -> Any:
        if what == "fail":
            raise KeyError(what)
        if what == "end":
            os._exit(4)
        if what == "sleep":
            time.sleep(60)
        asked[0] += 1
        return asked[0]

    return count


def impossible() -> Any:
    raise ValueError("no function")


@pytest.fixture
def child() -> Iterator[ChildProcess]:
    process = ChildProcess(functools.partial(counting, 5))
    yield process
    process.close()


def test_a_child_keeps_its_state_until_it_ends(child: ChildProcess) -> None:
    assert [child.call("a"), child.call("b")] == [6, 7]
    with pytest.raises(ChildError, match=r"^raised KeyError\('fail'\) at .*test_child.py:\d+$"):
        child.call("fail")
    assert child.call("c") == 8
    with pytest.raises(ChildError, match=r"^ended its process \(exit code 4\)$"):
        child.call("end")
    assert child.call("d") == 6
    with pytest.raises(ChildTimeout, match=r"^took longer than 1.5 s$"):
        child.call("sleep", 1.5)
    assert child.call("e") == 6


def test_a_function_that_cannot_be_made_is_said_at_each_call() -> None:
    child = ChildProcess(impossible)
    for _ in range(2):
        with pytest.raises(ChildError, match=r"^raised ValueError\('no function'\) at .*test_child.py"):
            child.call("a")
    child.close()


ABANDON = """
import functools, os, threading, time
from rlx.rewards import child
from tests.rewards.test_child import counting

child._MARGIN_S = 1.0
there = child.ChildProcess(functools.partial(counting, 5))
there.call("a")
threading.Thread(target=lambda: (time.sleep(1), os._exit(0))).start()
print(there._process.pid, flush=True)
there.call("sleep", {limit})
"""


def test_a_call_that_never_returns_ends_after_its_caller_was_killed() -> None:
    command = [sys.executable, "-c", ABANDON.format(limit=5.0)]
    pid = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    os.kill(pid, 0)  # it is there
    end = time.monotonic() + 40
    with suppress(FileNotFoundError):
        while ") Z" not in Path(f"/proc/{pid}/stat").read_text() and time.monotonic() < end:
            time.sleep(0.2)
    assert time.monotonic() < end


def worked(item: float) -> float:
    """Computes for so many seconds; for a negative number it ends the process, for 7 it raises."""
    if item < 0:
        os._exit(0)
    if item == 7:
        raise ValueError
    end = time.process_time() + item
    while time.process_time() < end:
        pass
    return item


def test_each_item_has_its_limit_and_the_batch_has_one() -> None:
    assert map_limited(worked, [0.0, 7, 0.01, -1, 5.0, 0.3, 0.02], 1.0, 5.0) == [0, None, 0.01, None, None, 0.3, 0.02]
    assert map_limited(worked, [5.0, 0.3, 0.0], 1.0, 1.0) == [None, None, 0.0]
    assert map_limited(worked, [], 1.0, 1.0) == []
    assert map_limited(worked, [0.0, 5.0], 0.05, 1.0) == [0.0, None]
