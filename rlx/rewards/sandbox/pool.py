"""Starts launchers, several at once, and reads what became of their programs; finds out which walls this machine has.

The walls, from strong to weak: `namespaces` (with Landlock where the kernel has it), `landlock` with a filter of
system calls, and `limits`, which leaves files readable and writable. Each is tried by a program that attempts what it
must not do. Left out: what a program should have written, and how that is scored.
"""

from __future__ import annotations

import compileall
import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from rlx.config.errors import ConfigError
from rlx.config.sections.reward import RewardConfig

STRICT, WEAK = ("namespaces", "landlock"), ("limits",)
_ROOT = Path(__file__).parents[3]  # the folder that holds rlx
_START = f"import sys; sys.path.append({str(_ROOT)!r}); from rlx.rewards.sandbox import launcher; launcher.main()"
_MARGIN_S, _GRACE_S = 30.0, 0.2
_ATTEMPTS, _WAIT_S = 3, 0.5
_MIB = 1 << 20
_PLACE, _ADDRESS = re.compile(r'File "program\.py", line (\d+)'), re.compile(r"0x[0-9a-f]{6,}", re.IGNORECASE)
_LIBRARY_LOCK = threading.Lock()
_WAITING = 4  # a program may wait so many times longer for its tests than for nothing


class SandboxError(RuntimeError):
    """A launcher could not put up the walls; no program was run."""


@dataclass(frozen=True)
class Limits:
    """What one test of a program may use."""

    cpu_s: float  # of all its processes
    idle_s: float  # in which none of them computes
    wall_s: float
    memory: int  # bytes
    processes: int
    disk: int  # bytes
    open_files: int
    output: int  # bytes

    @classmethod
    def of(cls, config: RewardConfig) -> Self:
        """The limits of a config."""
        return cls(
            cpu_s=config.code_cpu_s,
            idle_s=config.code_idle_s,
            wall_s=config.code_wall_s,
            memory=config.code_memory_mb * _MIB,
            processes=config.code_processes,
            disk=config.code_disk_mb * _MIB,
            open_files=config.code_open_files,
            output=config.code_output_mb * _MIB,
        )


class Program(NamedTuple):
    """A program and the standard input of each of its tests."""

    source: str
    inputs: tuple[str, ...]
    keeps_errors: bool = False  # whether somebody wants to know what it says on standard error


@dataclass(frozen=True)
class Ran:
    """What became of a program in one test."""

    ended: str  # "exit"; the limit that ended it, as a field of Limits is named without its unit; or "lost"
    code: int  # exit status; minus a signal
    output: bytes
    seconds: float  # of computing, and of idling up to a limit
    errors: str = ""  # the last 1,000 characters of standard error, if kept; the program's folder is "." there

    @property
    def is_good(self) -> bool:
        """Whether the program ended by itself and without an error."""
        return self.ended == "exit" and self.code == 0

    @property
    def error(self) -> str:
        """The last line of what a program that failed has said of it, and the program's line if Python tells it.

        Addresses are replaced and files of Python left out, so that most errors are the same when it runs again; a name
        of a temporary file is not.
        """
        said = [line for line in self.errors.splitlines() if line.strip()]
        places = _PLACE.findall(self.errors)
        where = f" (line {places[-1]})" if places else ""
        return _ADDRESS.sub("0x...", said[-1].strip()) + where if said else ""


_LOST = Ran("lost", -1, b"", 0.0)
GoesOn = Callable[[Sequence[Ran]], bool]


@dataclass(frozen=True)
class Verdicts:
    """What became of a program's unit tests."""

    passed: list[bool]  # one per test; none where the tests are no Python
    limit: str | None  # that ended the program or the tests
    seconds: float


@dataclass(frozen=True)
class Sandbox:
    """Runs programs within walls of one kind."""

    kind: str

    @classmethod
    def open(cls, strict: bool) -> Sandbox:
        """The strongest sandbox of this machine.

        Args:
            strict: accept only one that shuts files and networks.

        Raises:
            ConfigError: this machine has none.
        """
        return _strongest(strict)

    def run(self, program: Program, limits: Limits, goes_on: GoesOn = lambda ran: True) -> list[Ran]:
        """Runs a program once for each input, and not again once it took too long.

        Args:
            goes_on: called after each test with what became of the program in all tests so far; whether to go on.

        Raises:
            SandboxError: the walls cannot be put up.
        """
        return _again(lambda: self._run(program, limits, goes_on))

    def _run(self, program: Program, limits: Limits, goes_on: GoesOn = lambda ran: True) -> list[Ran]:
        deadline = len(program.inputs) * limits.wall_s + _MARGIN_S
        with self._launched(program, limits) as launcher:
            return _read(launcher, deadline, goes_on)

    def run_tests(self, source: str, tests: str, limits: Limits) -> Verdicts:
        """Runs unit tests, in a sandbox of their own, on what a program defines.

        Raises:
            SandboxError: the walls cannot be put up.
        """
        return _again(lambda: self._run_tests(source, tests, limits))

    def _run_tests(self, source: str, tests: str, limits: Limits) -> Verdicts:
        waiting = replace(limits, idle_s=min(limits.wall_s, _WAITING * limits.idle_s))
        patient = replace(limits, idle_s=limits.wall_s)
        ends = socket.socketpair()
        try:
            with (
                self._launched(Program(source, ("",)), waiting, "program", ends[0]) as program,
                self._launched(Program(tests, ("",)), patient, "unit_tests", ends[1]) as tester,
            ):
                for end in ends:
                    end.close()
                verdict = _read(tester, limits.wall_s + _MARGIN_S)[0]
                ran = _read(program, _GRACE_S)
        finally:
            for end in ends:
                end.close()
        limit = next((each.ended for each in (*ran, verdict) if each.ended not in ("exit", "lost")), None)
        return Verdicts(_passed(verdict.output), limit, sum(each.seconds for each in ran))

    @contextmanager
    def _launched(
        self, program: Program, limits: Limits, role: str = "", end: socket.socket | None = None
    ) -> Iterator[_Launcher]:
        number = end.fileno() if end else -1
        with tempfile.TemporaryDirectory(prefix="rlx-sandbox-") as folder:
            work = Path(folder) / "work"
            work.mkdir()
            job = {
                "kind": self.kind,
                "source": _clean(program.source),
                "inputs": [_clean(text) for text in program.inputs],
                "keeps_errors": program.keeps_errors,
                "folder": str(work),
                "library": _library(),
                "role": role,
                "socket": number,
                **asdict(limits),
            }
            with _Launcher(job, [number] if end else []) as launcher:
                yield launcher
            subprocess.run(["rm", "-rf", "--", str(work)], check=False)  # also what is nested too deeply for Python


def _library() -> str:
    """The folder of the copy of what runs within the walls; it is removed when this process ends."""
    with _LIBRARY_LOCK:  # of two copies that are made at once, one would be removed while it is in use
        return _copied().name


@functools.cache
def _copied() -> tempfile.TemporaryDirectory[str]:
    """A folder with a copy of what runs within the walls, and nothing else of this machine."""
    folder = tempfile.TemporaryDirectory(prefix=f"rlx-library-{os.getpid()}-")
    target = Path(folder.name) / Path(__file__).parent.relative_to(_ROOT) / "inside"
    shutil.copytree(Path(__file__).parent / "inside", target, ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(target, quiet=2)
    subprocess.run(["chmod", "-R", "a+rX", folder.name], check=True)
    return folder


def _clean(text: str) -> str:
    """The text without halves of characters, which no file can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _again(attempt: Callable[[], Any]) -> Any:
    """The result of a few attempts: a machine may have no room for a process for a moment."""
    for left in reversed(range(_ATTEMPTS)):
        try:
            return attempt()
        except SandboxError:
            if not left:
                raise
            time.sleep(_WAIT_S)


def _passed(verdicts: bytes) -> list[bool]:
    """What `inside.unit_tests` reported; tests without a verdict have not passed."""
    count, _, results = verdicts.decode("ascii", "replace").partition("\n")
    number = int(count) if count.isdigit() else 0
    return [each == "1" for each in results.ljust(number, "0")[:number]]


class _Launcher:
    """The process of one launcher. Leaving it ends it, and whatever it has started."""

    def __init__(self, job: dict[str, Any], files: Sequence[int]) -> None:
        self._errors = os.memfd_create("errors")
        task = os.memfd_create("job")
        with open(task, "w", encoding="utf-8", closefd=False) as file:
            json.dump(job, file)
        os.lseek(task, 0, os.SEEK_SET)
        python = os.path.realpath(sys.executable)
        try:
            self.process = subprocess.Popen(
                [python, "-P", "-s", "-S", "-c", _START, str(task)],
                stdin=subprocess.PIPE,  # nothing is written: the launcher ends when it is closed
                stdout=subprocess.PIPE,
                stderr=self._errors,
                pass_fds=[task, *files],
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
                start_new_session=True,
            )
        except OSError as error:
            os.close(self._errors)
            raise SandboxError(str(error)) from None
        finally:
            os.close(task)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_GRACE_S)
        self.kill()
        self.process.wait()
        os.close(self._errors)

    def kill(self) -> None:
        """Ends the launcher at once; its program ends with it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def lines(self, seconds: float) -> Iterator[dict[str, Any]]:
        """What the launcher writes, line for line, until it ends, or is ended after so many seconds."""
        assert self.process.stdout
        timer = threading.Timer(seconds, self.kill)
        timer.start()
        try:
            yield from (json.loads(line) for line in self.process.stdout if line.endswith(b"\n"))
        finally:
            timer.cancel()

    @property
    def error(self) -> str:
        """The last line of what went wrong in the launcher."""
        lines = os.pread(self._errors, 1 << 16, 0).decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it ended"


def _read(launcher: _Launcher, seconds: float, goes_on: GoesOn = lambda ran: True) -> list[Ran]:
    """What a launcher reports of its program, test for test.

    Raises:
        SandboxError: the walls cannot be put up.
    """
    ran, is_ready = list[Ran](), False
    for line in launcher.lines(seconds):
        if failed := line.get("failed"):
            raise SandboxError(failed)
        if is_ready:
            ran.append(_ran(line))
            if not goes_on(ran):
                break
        is_ready = True  # the first line says so
    if not is_ready:
        raise SandboxError(launcher.error)
    return ran or [_LOST]  # whatever ended a launcher within its walls is no excuse


def _ran(line: dict[str, Any]) -> Ran:
    seconds = line["cpu_s"] + (line["idle_s"] if line["ended"] != "exit" else 0.0)
    return Ran(line["ended"], line["code"], line["output"].encode("latin-1"), seconds, line["errors"])


# ---------------------------------------------------------------------------------------------------------------------
# Which walls this machine has

_PROBE = """
import json, socket
port, folder = json.loads(input())
def read(): open(f"{folder}/secret").read()
def write(): open(f"{folder}/new", "w").close()
def connect(): socket.create_connection(("127.0.0.1", port), 1).close()
def attempt(what):
    try:
        what()
    except Exception:
        return False
    return True
print(json.dumps([what.__name__ for what in (read, write, connect) if attempt(what)]))
"""
_PROBE_LIMITS = Limits(10.0, 10.0, 30.0, 1 << 30, 16, _MIB, 64, _MIB)


def leaks(kind: str) -> list[str]:
    """What a program can do in this kind of sandbox on this machine, of: read, write, connect.

    Raises:
        SandboxError: this machine has no such sandbox.
    """
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        (Path(folder) / "secret").write_text("secret")
        for path, mode in ((Path(folder), 0o777), (Path(folder) / "secret", 0o644)):
            path.chmod(mode)
        given = json.dumps([server.getsockname()[1], folder])
        (ran,) = Sandbox(kind)._run(Program(_PROBE, (given,)), _PROBE_LIMITS)
    if not ran.is_good:
        raise SandboxError(f"Python does not start in it ({ran.ended} {ran.code})")
    return list(json.loads(ran.output))


@functools.cache
def _strongest(strict: bool) -> Sandbox:
    reasons = []
    for kind in STRICT if strict else (*STRICT, *WEAK):
        try:
            open_ways = leaks(kind)
        except SandboxError as error:
            reasons.append(f"{kind}: {error}")
            continue
        if kind in WEAK or not open_ways:
            return Sandbox(kind)
        reasons.append(f"{kind}: a program can {' and '.join(open_ways)}")
    raise ConfigError(
        f"reward.sandbox: this machine shuts neither files nor networks ({'; '.join(reasons)}); "
        "reward.sandbox limits runs programs with limits on time and memory alone"
    )
