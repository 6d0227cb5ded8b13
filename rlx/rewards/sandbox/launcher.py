"""The process that takes one program through its tests within walls: python -c "..." JOB, a file descriptor with JSON.

It puts up the walls, runs the program once for each test, ends it at a limit together with all that it started, and
writes a line of JSON per test. It ends itself, and the program, when its standard input is closed: whoever started it
has gone. The pool has emptied its environment and its memory: neither holds an expected answer.
Left out: what the program should have written; only the process that started this one knows.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import sys
import time
from contextlib import suppress
from typing import Any, NamedTuple

from rlx.rewards.sandbox import kernel, landlock, namespaces, seccomp, watch

_TICK_S = 0.02
_CHUNK = 1 << 16
_PIPE = 1 << 20  # what the largest pipe holds
_ERRORS, _ERROR_BYTES = 1000, 4000  # characters and bytes that are kept of the end of standard error
_RUN = """
import builtins, sys
builtins.exit = builtins.quit = sys.exit
exec(compile(open(3, encoding="utf-8").read(), "program.py", "exec"))
"""
_SERVE = """
import sys
sys.path.insert(0, {library!r})
from rlx.rewards.sandbox.inside import {role} as side
side.main()
"""
_FLAGS = ("-P", "-s", "-S")  # no module is imported from the working folder, the user's or installed packages


class Task(NamedTuple):
    """What a launcher has to do; it travels as JSON."""

    kind: str  # which walls: "namespaces", "landlock" or "limits"
    source: str  # the program
    inputs: list[str]  # the standard input of each test
    keeps_errors: bool  # else nobody reads standard error
    folder: str  # the program's own, unless namespaces give it one
    library: str  # the folder that holds a copy of rlx.rewards.sandbox.inside
    role: str  # "" for a program that reads and prints; else the module of `inside` to run
    socket: int  # for a role: file descriptor of the way to the other side
    cpu_s: float
    idle_s: float
    wall_s: float
    memory: int  # bytes
    processes: int
    disk: int  # bytes
    open_files: int
    output: int  # bytes

    @property
    def has_namespaces(self) -> bool:
        """Whether the program is in a world of its own."""
        return self.kind == "namespaces"

    @property
    def seen(self) -> Task:
        """The job with the paths that the program sees."""
        return self._replace(folder=namespaces.FOLDER, library=namespaces.LIBRARY) if self.has_namespaces else self


def main() -> None:
    """Runs the job of the command line."""
    with open(int(sys.argv[1]), encoding="utf-8") as file:
        job = Task(**json.load(file))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # the first to go when the machine has no memory left
    if job.has_namespaces:
        namespaces.enter(job.library)
    kernel.hide_memory()
    _write({"ready": True})
    try:
        for text in job.inputs:
            result = _run(job, text)
            _write(result)
            if result["ended"] in ("cpu", "idle", "wall"):  # the other tests would take as long
                break
    except OSError as error:
        _write({"failed": str(error)})


def _write(line: dict[str, Any]) -> None:
    os.write(1, json.dumps(line).encode() + b"\n")


# ---------------------------------------------------------------------------------------------------------------------
# In this process


class _Watch:
    """One test of a program while it runs."""

    def __init__(self, job: Task, child: int) -> None:
        self.job, self.child, self.output, self.errors = job, child, bytearray(), b""
        self.started = self.looked = time.monotonic()
        self.reaped_s = self.cpu_s = self.idle_s = 0.0  # of processors by processes that ended; by all; by none

    def limit(self) -> str | None:
        """The limit that the program has reached, if there is one; to be called now and then."""
        used = watch.usage(watch.others() if self.job.has_namespaces else [self.child])
        now, before = time.monotonic(), self.cpu_s
        self.cpu_s = max(before, used.cpu_s + self.reaped_s)
        if not used.is_busy and self.cpu_s == before:
            self.idle_s += now - self.looked
        self.looked = now
        reached = {
            "cpu": self.cpu_s >= self.job.cpu_s,
            "idle": self.idle_s >= self.job.idle_s,
            "wall": now - self.started >= self.job.wall_s,
            "memory": used.memory > self.job.memory,
            "processes": used.tasks > self.job.processes,
            "output": len(self.output) > self.job.output,
            "disk": not self.job.has_namespaces and _is_full(self.job.folder, self.job.disk),
        }
        return next((name for name, is_reached in reached.items() if is_reached), None)

    def reap(self) -> int | None:
        """Waits for all processes that have ended; returns the status of the program if it is one of them."""
        status = None
        with suppress(ChildProcessError):
            while (ended := os.wait4(-1, os.WNOHANG))[0]:
                self.reaped_s += ended[2].ru_utime + ended[2].ru_stime
                status = ended[1] if ended[0] == self.child else status
        return status

    def end(self) -> None:
        """Ends the program and all that it has started."""
        with suppress(ProcessLookupError):
            os.kill(-1 if self.job.has_namespaces else self.child, signal.SIGKILL)
        with suppress(ChildProcessError):
            while True:
                os.wait4(-1, 0)


def _run(job: Task, text: str) -> dict[str, Any]:
    """Runs the program once; OSError if a wall cannot be put up."""
    if job.has_namespaces:
        namespaces.empty_folder(job.disk)
    elif os.listdir(job.folder):
        os.spawnv(os.P_WAIT, "/bin/rm", ["rm", "-rf", "--", job.folder])
        os.makedirs(job.folder, exist_ok=True)
    output, end = os.pipe()
    errors, errors_end = os.pipe()
    if not job.keeps_errors:  # a pipe would slow a program that writes much to it
        os.close(errors_end)
        errors_end = os.open(os.devnull, os.O_WRONLY)
    failure, failed = os.pipe()
    files = [_file(text), end, errors_end, _file(job.source), *([job.socket] if job.role else [])]
    child = os.fork()
    if not child:
        _become(job, files, failed)
    for file in (*files[:4], failed):
        os.close(file)
    state = _Watch(job, child)
    with open(failure, encoding="utf-8") as reader:
        if reason := reader.read():  # ends when the program is executed
            raise OSError(reason)
    ended, code = _follow(state, output, errors)
    state.end()
    os.close(output)
    os.close(errors)
    written = state.output[: job.output].decode("latin-1")
    said = state.errors.decode(errors="replace").replace(job.folder, ".")[-_ERRORS:]
    used = {"cpu_s": max(state.cpu_s, state.reaped_s), "idle_s": state.idle_s}
    return {"ended": ended, "code": code, "output": written, "errors": said, **used}


def _file(text: str) -> int:
    """A file in memory, at its start."""
    file = os.memfd_create("text")
    data = memoryview(text.encode("utf-8", "surrogatepass"))
    while data:
        data = data[os.write(file, data) :]
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _is_full(folder: str, size: int) -> bool:
    """Whether a folder holds more bytes, or more files and folders, than it may.

    Files that were removed but are still open do not count: there are few, and none is larger than that.
    """
    left, count = [folder], 0
    while left:
        try:
            entries = list(os.scandir(left.pop()))
            states = [entry.stat(follow_symlinks=False) for entry in entries]
            left += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:  # the program has just removed it
            continue
        except OSError:  # it hides what is in it
            return True
        count, size = count + len(states), size - sum(min(state.st_size, state.st_blocks * 512) for state in states)
        if count > namespaces.MAX_FILES or size < 0:
            return True
    return False


def _follow(state: _Watch, output: int, errors: int) -> tuple[str, int]:
    """Reads what the program writes until it ends or reaches a limit; which of both, and its exit status."""
    os.set_blocking(output, False)
    os.set_blocking(errors, False)
    ended = os.pidfd_open(state.child)
    with selectors.DefaultSelector() as selector:
        for file in (0, output, errors, ended):
            selector.register(file, selectors.EVENT_READ)
        try:
            while True:
                ready = [key.fd for key, _ in selector.select(_TICK_S)]
                if 0 in ready:  # the other end is closed
                    state.end()
                    os._exit(1)
                if output in ready and not _read(state, output):
                    selector.unregister(output)
                if errors in ready and not _read_errors(state, errors):
                    selector.unregister(errors)
                if (status := state.reap()) is not None:
                    _read(state, output)
                    _read_errors(state, errors)
                    return _verdict(state, os.waitstatus_to_exitcode(status))
                is_due = time.monotonic() - state.looked >= _TICK_S or len(state.output) > state.job.output
                if is_due and (limit := state.limit()):
                    return limit, -1
        finally:
            os.close(ended)


def _read(state: _Watch, output: int) -> bool:
    """Takes what has been written, up to the limit; whether more may come."""
    with suppress(BlockingIOError):
        while len(state.output) <= state.job.output:
            if not (chunk := os.read(output, _CHUNK)):
                return False
            state.output += chunk
    return True


def _read_errors(state: _Watch, errors: int) -> bool:
    """Takes what has been written of standard error, a pipe's content at most, and keeps its end; see `_read`."""
    with suppress(BlockingIOError):
        chunk = os.read(errors, _PIPE)
        state.errors = (state.errors + chunk)[-_ERROR_BYTES:]
        return bool(chunk)
    return True


def _verdict(state: _Watch, code: int) -> tuple[str, int]:
    if len(state.output) > state.job.output:
        return "output", code
    if code == -signal.SIGXCPU:
        return "cpu", code
    return "exit", code


# ---------------------------------------------------------------------------------------------------------------------
# In the process that becomes the program


def _become(job: Task, files: list[int], failed: int) -> None:
    """Executes the program; never returns. What prevents that is written to the last file."""
    try:
        failed = _keep_only([*files, failed])
        job = job.seen
        os.chdir(job.folder)
        _put_up_walls(job)
        code = _SERVE.format(library=job.library, role=job.role) if job.role else _RUN
        environment = {"HOME": job.folder, "TMPDIR": job.folder, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
        os.execve(sys.executable, [sys.executable, *_FLAGS, "-c", code], environment | {"PYTHONHASHSEED": "0"})
    except BaseException as error:
        os.write(failed, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(126)


def _put_up_walls(job: Task) -> None:
    os.setsid()
    kernel.bound_capabilities()
    is_counted = job.has_namespaces and (namespaces.leave_user() or namespaces.counts_processes())
    kernel.drop_capabilities()
    kernel.end_with_parent()
    _limit(job, is_counted)
    if landlock.version() and job.kind != "limits":
        shown = [*namespaces.visible(), job.library, *(["/proc"] if job.has_namespaces else [])]
        landlock.shut_files(shown, [job.folder])
    try:
        seccomp.filter_calls(alone=not job.has_namespaces)
    except OSError:
        if job.kind != "limits":
            raise


def _keep_only(files: list[int]) -> int:
    """Moves these files to the numbers from 0 on, and closes all others; the last one ends with this program."""
    high = [os.dup2(file, 100 + i, inheritable=False) for i, file in enumerate(files)]
    for i, file in enumerate(high):
        os.dup2(file, i, inheritable=i < len(high) - 1)
    os.closerange(len(high), 1 << 16)
    return len(high) - 1


def _limit(job: Task, is_counted: bool) -> None:
    seconds = int(job.cpu_s) + 1  # the launcher counts more exactly; this holds if it should not get to it
    limits = {
        resource.RLIMIT_AS: job.memory,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: job.disk,
        resource.RLIMIT_NOFILE: job.open_files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    if is_counted:  # elsewhere the kernel counts all processes of the user, and none of root's
        limits[resource.RLIMIT_NPROC] = job.processes + 2  # with the two of the launcher, where they are the same user
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (allowed, allowed))
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
