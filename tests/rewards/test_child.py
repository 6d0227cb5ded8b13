"""Calls in a child process, and many items with a limit each."""

import ctypes
import functools
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest

from rlx.rewards import child as child_module
from rlx.rewards.child import ChildError, ChildProcess, ChildTimeout, map_limited


class UnshowableError(Exception):
    def __repr__(self) -> str:
        return 1 / 0  # type: ignore[return-value]

    __str__ = __repr__


def counting(start: int) -> Any:
    """A function with a state: how often it was asked."""
    asked = [start]

    def count(what: str) -> Any:
        if what == "fail":
            raise KeyError(what)
        if what == "fail oddly":
            raise UnshowableError
        if what == "end":
            os._exit(4)
        if what == "sleep":
            time.sleep(60)
        asked[0] += 1
        return asked[0]

    return count


def starting() -> Any:
    """A function that starts a process, says which, and then hangs if it is asked to."""

    def start(what: str) -> int:
        started = subprocess.Popen(["sleep", "987"])
        if what != "return":
            Path(what).write_text(str(started.pid))
            time.sleep(60)
        return started.pid

    return start


POOLS = list[Any]()


def pooling() -> Any:
    """A function with a pool that stays until its process ends, the number of which it returns."""
    POOLS.append(multiprocessing.get_context("fork").Pool(2))
    return lambda what: POOLS[0].map(abs, [0]) and os.getpid()


def sharing() -> Any:
    """A function that leaves a file of shared memory, says which, and then hangs if it is asked to."""

    def share(what: str) -> str:
        memory = SharedMemory(create=True, size=1)
        if what != "return":
            Path(what).write_text(memory.name)
            time.sleep(60)
        return memory.name

    return share


def lingering() -> Any:
    """A function with a thread that the interpreter waits for, and a process that takes no SIGTERM."""
    threading.Thread(target=time.sleep, args=[987]).start()
    subprocess.Popen(["sh", "-c", "trap '' TERM; exec sleep 987"])
    return lambda what: os.getpid()


def holding() -> Any:
    """A function that starts a process, and holds the interpreter's lock if it is asked to."""

    def hold(what: str) -> None:
        subprocess.Popen(["sleep", "987"])
        if what != "return":
            ctypes.PyDLL(None).sleep(987)

    return hold


def waiting() -> Any:
    """A function that waits for all children of its process."""
    with suppress(ChildProcessError):
        while True:
            os.wait()
    return lambda what: what


def impossible() -> Any:
    raise ValueError("no function")


@pytest.fixture
def child() -> Iterator[ChildProcess]:
    process = ChildProcess(functools.partial(counting, 5))
    yield process
    process.close()


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_function_that_cannot_be_made_is_said_at_each_call() -> None:
    child = ChildProcess(impossible)
    for _ in range(2):
        with pytest.raises(ChildError, match=r"^raised ValueError\('no function'\) at .*test_child.py"):
            child.call("a")
    child.close()


@pytest.mark.parametrize("limit_s", [1e7, 1e12])
def test_a_limit_may_be_longer_than_any_clock_counts(child: ChildProcess, limit_s: float) -> None:
    assert child.call("a", limit_s) == 6


def test_an_error_that_cannot_be_shown_is_named(child: ChildProcess) -> None:
    with pytest.raises(ChildError, match=r"^raised UnshowableError at .*test_child.py:\d+$"):
        child.call("fail oddly")
    assert child.call("a") == 6


def is_running(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def ends(pid: int) -> bool:
    """Whether a process ends within seconds."""
    end = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not is_running(pid)


def test_what_a_function_starts_ends_with_its_process(tmp_path: Path) -> None:
    child = ChildProcess(starting)
    returned = child.call("return")
    assert is_running(returned)
    with pytest.raises(ChildTimeout):
        child.call(str(tmp_path / "pid"), 0.5)
    assert ends(returned) and ends(int((tmp_path / "pid").read_text()))
    returned = child.call("return")
    child.close()
    assert ends(returned)


def test_a_function_with_shared_memory_leaves_none(tmp_path: Path) -> None:
    child = ChildProcess(sharing)
    with pytest.raises(ChildTimeout):
        child.call(str(tmp_path / "name"), 0.5)
    returned = child.call("return")
    child.close()
    assert not [name for name in (returned, (tmp_path / "name").read_text()) if Path("/dev/shm", name).exists()]


def test_a_function_has_no_child_that_it_did_not_start() -> None:
    child = ChildProcess(waiting)
    assert child.call("done", 20.0) == "done"
    child.close()


LEAVE = """
from rlx.rewards.child import ChildProcess
from tests.rewards.test_child import {function}

print(ChildProcess({function}).call("return"), flush=True)
"""


@pytest.mark.parametrize("function", ["starting", "pooling", pytest.param("lingering", marks=pytest.mark.slow)])
def test_what_a_function_starts_ends_with_a_caller_that_closes_nothing(function: str) -> None:
    """It would hold the caller's output open: reading that would not end."""
    command = [sys.executable, "-c", LEAVE.format(function=function)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert ends(int(output))


ABANDON = """
import os, signal, threading
from rlx.rewards.child import ChildProcess
from tests.rewards.test_child import holding

there = ChildProcess(holding)
there.call("return")
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
there.call("hold", 300.0)
"""


@pytest.mark.slow  # it waits until the watching process does not wait any more
def test_a_call_that_never_returns_ends_with_what_it_started_after_its_caller_was_killed() -> None:
    """Reading the output, which all of them hold open, would not end."""
    ended = subprocess.run([sys.executable, "-c", ABANDON], stdout=subprocess.PIPE, timeout=60)
    assert ended.returncode == -signal.SIGKILL


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


@pytest.mark.slow
def test_each_item_has_its_limit_and_the_batch_has_one() -> None:
    assert map_limited(worked, [0.0, 7, 0.01, -1, 5.0, 0.3, 0.02], 1.0, 5.0) == [0, None, 0.01, None, None, 0.3, 0.02]
    assert map_limited(worked, [5.0, 0.3, 0.0], 1.0, 1.0) == [None, None, 0.0]
    assert map_limited(worked, [], 1.0, 1.0) == []
    assert map_limited(worked, [0.0, 5.0], 0.05, 1.0) == [0.0, None]


# ---------------------------------------------------------------------------------------------------------------------
# Items that are programs, as the answers are that some scorers of reasoning-gym evaluate


def executed(item: str) -> float:
    names = dict[str, Any]()
    exec("import os, signal, socket, subprocess, time\n" + item, names)
    return float(names["score"])


def outcomes(*items: str) -> list[float | None]:
    """The scores of items between two honest ones."""
    first, *scores, last = map_limited(executed, ["score = 2", *items, "score = 3"], 0.2, 0.2)
    assert (first, last) == (2, 3)
    return scores


@pytest.mark.slow
def test_an_item_reads_and_changes_no_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    attempts = ["open('{}/secret').read()", "open('{}/new', 'w')", "os.remove('{}/secret')", "os.listdir('{}')"]
    assert outcomes(*(f"{each}\nscore = 1".format(tmp_path) for each in attempts)) == [None] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


@pytest.mark.slow
def test_an_item_reaches_no_network_and_no_other_process() -> None:
    attempts = ["socket.socket()", "os.fork()", f"os.kill({os.getpid()}, 0)", "subprocess.run('true')"]
    assert outcomes(*(f"{each}\nscore = 1" for each in attempts)) == [None] * 4


def test_an_item_finds_no_other_file_open(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "open").open("w") as file:
        assert outcomes(f"score = os.write({file.fileno()}, b'x')", "score = os.write(1, b'error')") == [None, 5]
    assert (tmp_path / "open").read_text() == capfd.readouterr().out == ""


FORGE = """
for file in range(3, 4096):  # the process that runs the tests may hold many
    try:
        os.write(file, {!r})
    except OSError:
        pass
score = 1
"""


@pytest.mark.parametrize("message", [b"cos\nsystem\n(S'touch x'\ntR.", b"NaN", b"1e999", b'"1"', b"[[[", b"\xff" * 9])
def test_a_forged_score_is_a_number_or_none(message: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where what is unpickled would touch a file
    forged = FORGE.format(struct.pack("!i", len(message)) + message)
    assert map_limited(executed, ["score = 2", forged], 0.2, 0.2) == [2, None]
    assert not list(tmp_path.iterdir())


def test_a_score_without_end_is_none() -> None:
    assert map_limited(executed, ["score = 2", FORGE.format(b"\x7f" * (1 << 20))], 0.2, 0.2) == [2, None]


@pytest.mark.slow
def test_an_item_that_switches_off_its_clock_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "_SHORT_S", 0.02)
    monkeypatch.setattr(child_module, "_LATE_S", 0.5)
    off = "[signal.setitimer(clock, 0) for clock in range(3)]\n"
    items = ["score = 2", f"{off}time.sleep(99)", f"{off}while True: pass", "score = 3"]
    assert map_limited(executed, items, 0.05, 0.05) == [2, None, None, 3]


@pytest.mark.slow
def test_items_that_wait_take_from_the_time_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "_SHORT_S", 0.02)
    started = time.monotonic()
    assert map_limited(executed, ["time.sleep(99)"] * 16, 0.05, 0.05) == [None] * 16
    assert time.monotonic() - started < 11  # 16 x 0.2 s, and 0.5 s once rather than for each, which would be 11.2 s
