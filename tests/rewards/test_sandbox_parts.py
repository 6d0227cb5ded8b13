"""The parts of the sandbox alone: the filter of system calls, what processes use, and values between both sides."""

import errno
import os
import struct
import subprocess
import sys
import time
from collections import Counter, OrderedDict, namedtuple
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from rlx.config.sections.reward import RewardConfig
from rlx.rewards.sandbox import pool, reward, seccomp, watch
from rlx.rewards.sandbox.inside.unit_tests import find_tests
from rlx.rewards.sandbox.inside.values import decode, encode
from rlx.rewards.sandbox.pool import Limits, Sandbox, SandboxError

# ---------------------------------------------------------------------------------------------------------------------
# The filter

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOWED, NOT_PERMITTED, UNKNOWN = "allowed", errno.EPERM, errno.ENOSYS
NEW_USER, NEW_NETWORK, THREAD, VM = 0x10000000, 0x40000000, 0x10000, 0x100


def filtered(steps: list[seccomp.Instruction], number: int, *arguments: int, architecture: int) -> str | int:
    """What the kernel makes of a call: the filter is executed as classic BPF says."""
    values = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=IIQ6Q", number, architecture, 0, *values)
    position, accumulator = 0, 0
    while True:
        step = steps[position]
        position += 1
        if step.code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, step.value)
        elif step.code == 0x06:
            return ALLOWED if step.value == 0x7FFF0000 else step.value & 0xFFFF
        else:
            holds = {
                0x15: accumulator == step.value,
                0x35: accumulator >= step.value,
                0x45: bool(accumulator & step.value),
            }[step.code]
            position += step.if_true if holds else step.if_false


@pytest.fixture(params=ARCHITECTURES)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=request.param))
    return str(request.param)


def number_of(name: str, machine: str) -> int | None:
    return (seccomp.NUMBERS | seccomp.ALONE)[name][list(ARCHITECTURES).index(machine)]


@pytest.mark.parametrize("alone", [False, True])
def test_every_listed_call_is_refused_and_common_ones_are_not(machine: str, alone: bool) -> None:
    steps = seccomp.program(alone)
    architecture = ARCHITECTURES[machine]
    for name in seccomp.NUMBERS:
        number = number_of(name, machine)
        assert number is not None
        assert filtered(steps, number, architecture=architecture) == NOT_PERMITTED, name
    for name in seccomp.ALONE:
        if (number := number_of(name, machine)) is not None:
            assert filtered(steps, number, architecture=architecture) == (NOT_PERMITTED if alone else ALLOWED), name
    common = {"x86_64": (0, 1, 9, 11, 39, 59, 231, 257), "aarch64": (56, 57, 63, 64, 93, 172, 215, 221, 222)}
    for number in common[machine]:  # read, write, openat, mmap, munmap, execve, getpid, exit_group and the like
        assert filtered(steps, number, architecture=architecture) == ALLOWED


def test_calls_of_another_architecture_are_refused(machine: str) -> None:
    steps = seccomp.program(alone=False)
    assert filtered(steps, 0, architecture=0x40000003) == NOT_PERMITTED  # i386
    assert filtered(steps, 0x40000000, architecture=ARCHITECTURES[machine]) == NOT_PERMITTED  # x32


def test_processes_without_namespaces_of_their_own(machine: str) -> None:
    clone, clone3 = {"x86_64": 56, "aarch64": 220}[machine], 435

    def result(alone: bool, number: int, flags: int) -> str | int:
        return filtered(seccomp.program(alone), number, flags, architecture=ARCHITECTURES[machine])

    assert result(False, clone, VM) == ALLOWED
    assert result(False, clone, VM | THREAD) == ALLOWED
    assert result(False, clone, NEW_USER) == NOT_PERMITTED
    assert result(False, clone, THREAD | NEW_NETWORK) == NOT_PERMITTED
    assert result(True, clone, VM) == NOT_PERMITTED
    assert result(True, clone, VM | THREAD) == ALLOWED
    assert result(True, clone3, 0) == result(False, clone3, 0) == UNKNOWN


def test_a_program_that_is_alone_may_only_touch_itself(machine: str) -> None:
    steps, own, other = seccomp.program(alone=True), os.getpid(), os.getppid()
    column = list(ARCHITECTURES).index(machine)

    def result(numbers: tuple[int, int], *arguments: int) -> str | int:
        return filtered(steps, numbers[column], *arguments, architecture=ARCHITECTURES[machine])

    tgkill, prlimit, fcntl, ioctl, prctl = (234, 131), (302, 261), (72, 25), (16, 29), (157, 167)
    assert [result(tgkill, each) for each in (own, other)] == [ALLOWED, NOT_PERMITTED]
    assert [result(prlimit, each) for each in (0, own, other)] == [ALLOWED, ALLOWED, NOT_PERMITTED]
    assert [result(fcntl, 3, each) for each in (1, 3, 4, 8, 15)] == [ALLOWED] * 3 + [NOT_PERMITTED] * 2
    assert [result(ioctl, 3, each) for each in (0x5401, 0x8901, 0x8902)] == [ALLOWED, NOT_PERMITTED, NOT_PERMITTED]
    assert [result(prctl, each) for each in (1, 15)] == [NOT_PERMITTED, ALLOWED]


def test_an_unknown_machine_has_no_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="riscv64"))
    with pytest.raises(OSError, match="no filter for riscv64"):
        seccomp.program(alone=True)


# ---------------------------------------------------------------------------------------------------------------------
# What processes use


def _started(code: str) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen([sys.executable, "-S", "-c", f"{code}"], stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline() == b"\n"
    return process


def test_a_process_that_computes_is_busy_and_uses_time() -> None:
    process = _started("print(flush=True)\nwhile True: pass")
    try:
        before = watch.usage([process.pid])
        deadline = time.monotonic() + 30
        while (after := watch.usage([process.pid])).cpu_s < before.cpu_s + 0.2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert after.cpu_s >= before.cpu_s + 0.2
        assert after.is_busy
        assert after.tasks == 1
    finally:
        process.kill()
        process.wait()
    assert watch.usage([process.pid]) == (0, 0, 0, False)


def test_a_process_that_sleeps_is_not_busy_unless_one_of_its_threads_is() -> None:
    sleeps = _started("import time\nprint(flush=True)\ntime.sleep(60)")
    threads = _started(
        "import threading, time\ndef loop():\n    while True: pass\n"
        "threading.Thread(target=loop, daemon=True).start()\nprint(flush=True)\nthreading.Event().wait(60)"
    )
    try:
        time.sleep(0.3)
        assert not any(watch.usage([sleeps.pid]).is_busy for _ in range(5))
        seen = [watch.usage([threads.pid]) for _ in range(5)]
        assert all(each.is_busy and each.tasks == 2 for each in seen)
        assert watch.usage([sleeps.pid, threads.pid]).tasks == 3
    finally:
        for process in (sleeps, threads):
            process.kill()
            process.wait()


def test_memory_is_that_of_all_processes() -> None:
    process = _started("x = b'x' * (64 << 20)\nprint(flush=True)\nimport time; time.sleep(60)")
    try:
        memory = watch.usage([process.pid]).memory
        assert 64 << 20 < memory < 128 << 20
        assert watch.usage([process.pid, process.pid]).memory == pytest.approx(2 * memory, rel=0.05)
        assert process.pid in watch.others() and os.getpid() not in watch.others()
    finally:
        process.kill()
        process.wait()


# ---------------------------------------------------------------------------------------------------------------------
# Values

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.text()), inner, max_size=4)
    ),
    max_leaves=12,
)


def nothing(*_: Any) -> Any:
    raise AssertionError("no reference")


@pytest.mark.slow
@drawn(value=plain | st.sets(st.integers()) | st.frozensets(st.text()) | st.complex_numbers(allow_nan=False))
def test_plain_values_arrive_as_they_were(value: Any) -> None:
    arrived = decode(encode(value, nothing), nothing)
    assert arrived == value
    assert type(arrived) is type(value)


class Level(IntEnum):
    LOW = 1


class Sly(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


@pytest.mark.parametrize(
    ("value", "arrived"),
    [
        (Level.LOW, 1),
        (Sly(7), 7),
        (Counter("aab"), {"a": 2, "b": 1}),
        (OrderedDict(a=[Sly(1)]), {"a": [1]}),
        (namedtuple("Pair", "a b")(1, 2), (1, 2)),
        (Decimal("1.50"), Decimal("1.50")),
        (Fraction(2, 6), Fraction(1, 3)),
        (bytearray(b"ab"), bytearray(b"ab")),
        (float("inf"), float("inf")),
    ],
)
def test_subclasses_arrive_as_the_plain_type(value: Any, arrived: Any) -> None:
    result = decode(encode(value, nothing), nothing)
    assert result == arrived
    assert type(result) is type(arrived)
    assert not isinstance(result, Sly)


def test_other_objects_are_referred_to() -> None:
    thing = object()
    data = encode([thing, {"a": (thing,)}], lambda value: {"object": 5})
    assert data == [{"object": 5}, {"dict": [["a", {"tuple": [{"object": 5}]}]]}]
    assert decode(data, lambda kind, content: (kind, content)) == [("object", 5), {"a": (("object", 5),)}]


@pytest.mark.parametrize("data", [{}, {"a": 1, "b": 2}, {"dict": [[[], 1]]}, {"set": [[]]}, {"bytes": "zz"}])
def test_what_is_no_value_is_an_error(data: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        decode(data, nothing)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("assert f(1)", 1),
        ("import math\nx = 1\ndef g(): assert x\nclass C: pass\n'text'", 0),
        ("check(f)\nfor i in range(3):\n    assert f(i)\nassert f(4)", 3),
        ("def test_a(): assert f(1)\ndef test_b(): assert f(2)\ndef test_c(fixture): pass", 2),
        ("try:\n    f()\nexcept ValueError:\n    pass\nwith open('x'): pass\nif f(1): raise ValueError", 3),
    ],
)
def test_what_counts_as_a_test(source: str, count: int) -> None:
    import ast

    assert len(find_tests(ast.parse(source))) == count


# ---------------------------------------------------------------------------------------------------------------------
# The pool


def test_the_limits_are_those_of_the_settings() -> None:
    config = RewardConfig(
        functions={"code": 1.0},
        code_cpu_s=1.5,
        code_idle_s=2.5,
        code_wall_s=3.5,
        code_memory_mb=4,
        code_processes=5,
        code_disk_mb=6,
        code_open_files=7,
        code_output_mb=8,
    )
    assert Limits.of(config) == Limits(1.5, 2.5, 3.5, 4 << 20, 5, 6 << 20, 7, 8 << 20)


def test_a_launcher_that_fails_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_WAIT_S", 0.0)
    failures = [SandboxError("fork: no room"), SandboxError("fork: no room")]

    def attempt() -> str:
        if failures:
            raise failures.pop()
        return "ran"

    assert pool._again(attempt) == "ran"


@pytest.mark.slow
def test_a_launcher_that_fails_each_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a score of 0: the program has not run."""
    monkeypatch.setattr(pool, "_WAIT_S", 0.0)
    monkeypatch.setattr(pool, "_START", "import sys; sys.exit('no room for a process')")
    with pytest.raises(SandboxError, match=r"^no room for a process$"):
        Sandbox("namespaces").run(pool.Program("print(1)", ("",)), Limits.of(RewardConfig()))


@pytest.mark.slow
def test_a_launcher_that_ends_within_its_walls_is_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not an error: the program may have brought it down, and must not bring down the run."""
    monkeypatch.setattr(pool, "_START", "print('{\"ready\": true}')")
    (ran,) = Sandbox("namespaces").run(pool.Program("print(1)", ("",)), Limits.of(RewardConfig()))
    assert (ran.ended, ran.is_good) == ("lost", False)


@pytest.mark.parametrize(
    ("written", "passed"),
    [
        (b"3\n101", [True, False, True]),
        (b"3\n1", [True, False, False]),
        (b"2\n1111", [True, True]),
        (b"", []),
        (b"x\n1", []),
        (b"1", [False]),
    ],
)
def test_verdicts(written: bytes, passed: list[bool]) -> None:
    assert pool._passed(written) == passed


@pytest.mark.parametrize(("workers", "parallel"), [("1", 2), ("2", 1), ("64", 1)])
def test_the_workers_of_a_machine_share_its_processors(
    monkeypatch: pytest.MonkeyPatch, workers: str, parallel: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", workers)
    assert reward._parallel() == max(2, parallel * len(os.sched_getaffinity(0)))


def test_the_library_holds_nothing_but_what_runs_inside() -> None:
    files = [path for path in Path(pool._library()).rglob("*.py")]
    assert {path.name for path in files} == {"__init__.py", "values.py", "program.py", "unit_tests.py"}
    assert {str(path.parent.relative_to(pool._library())) for path in files} == {"rlx/rewards/sandbox/inside"}
    assert all(path.stat().st_mode & 0o004 for path in files)
