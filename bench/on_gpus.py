"""Runs commands side by side on the GPUs of this machine, each on GPUs of its own, in the order of a file.

    python bench/on_gpus.py [bench/gpu_jobs.yaml] [--out FOLDER] [--gpus N] [--only NAME ...]

The file lists jobs: `name`, `gpus` (how many), `seconds` (after which it is ended), `command`, and `after` (jobs that
end before it begins). A job begins when its GPUs are free and all jobs before it have begun; CUDA_VISIBLE_DEVICES names
them. What a job prints is in OUT/NAME.log as it comes, what begins and ends in OUT/events. The file is read again and
again, so jobs can be added or taken out while others run. Nothing of a job is left when it has ended.
Jobs share the host: figures that its processors decide need a run alone.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import workload

from rlx.config.errors import ConfigError
from rlx.config.loading import read_yaml

_LOOK_S = 0.5
_GRACE_S = 10.0  # from the first signal to the second
_MARK = "RLX_BENCH_JOB"
"""a variable of all processes of a job, by which they are found"""


@dataclass(frozen=True)
class Job:
    """A command and what it needs."""

    name: str
    command: str
    gpus: int = 1
    seconds: float = 600.0
    after: tuple[str, ...] = ()


@dataclass
class Running:
    """A job that has begun."""

    job: Job
    gpus: list[int]
    process: subprocess.Popen[bytes]
    begun: float = field(default_factory=time.monotonic)

    @property
    def is_late(self) -> bool:
        return time.monotonic() - self.begun > self.job.seconds


@dataclass
class Machine:
    """The GPUs, and the jobs on them."""

    out: Path
    free: set[int]
    running: list[Running] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)

    def say(self, words: str) -> None:
        workload.say(words)
        with (self.out / "events").open("a") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {words}\n")

    def begin_what_fits(self, jobs: Sequence[Job]) -> None:
        """Begins jobs in their order, until one has to wait."""
        begun = self.ended | {each.job.name for each in self.running}
        for job in (job for job in jobs if job.name not in begun):
            if job.gpus > len(self.free) or set(job.after) - self.ended:
                return
            self._begin(job)

    def _begin(self, job: Job) -> None:
        gpus = sorted(self.free)[: job.gpus]
        self.free -= set(gpus)
        given = os.environ | {
            _MARK: job.name,
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
            "PYTHONUNBUFFERED": "1",
        }
        with (self.out / f"{job.name}.log").open("wb") as log:
            log.write(f"$ {job.command}\n".encode())
            log.flush()
            process = subprocess.Popen(
                ["bash", "-c", job.command], stdout=log, stderr=subprocess.STDOUT, env=given, start_new_session=True
            )
        self.running.append(Running(job, gpus, process))
        self.say(f"{job.name} begins on {gpus}")

    def end_what_is_over(self) -> None:
        """Frees the GPUs of jobs that have ended, or have had their time."""
        for each in [each for each in self.running if each.is_late or each.process.poll() is not None]:
            self.end(each)

    def end(self, each: Running) -> None:
        """Ends a job, with all its processes."""
        code = each.process.poll()
        status = f"exit status {code}" if code is not None else "its time is over" if each.is_late else "ended early"
        with suppress(ProcessLookupError):
            os.killpg(each.process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            each.process.wait(_GRACE_S)
        _kill_all(each.job.name)
        each.process.wait()
        self.running.remove(each)
        self.free |= set(each.gpus)
        self.ended.add(each.job.name)
        self.say(f"{each.job.name} ends after {time.monotonic() - each.begun:.0f} s: {status}")


def _kill_all(job: str) -> None:
    """Ends all processes of a job at once, and returns when they are gone: the next one may need what they hold."""
    deadline = time.monotonic() + _GRACE_S
    while (left := processes_of(job)) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_S / 10)


def processes_of(job: str) -> list[int]:
    """Processes that a job has begun, also those that have left its session, as Ray's do."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{_MARK}={job}".encode() in (place / "environ").read_bytes().split(b"\0"):
                found.append(int(place.name))
    return found


def read_jobs(file: Path, only: Sequence[str] = ()) -> list[Job]:
    """The jobs of a file, all or those of these names.

    Raises:
        ConfigError: it cannot be read, or what is in it are no jobs.
    """
    try:
        jobs = [Job(**each | {"after": tuple(each.get("after", ()))}) for each in read_yaml(str(file))["jobs"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file}: not a list of jobs ({error})") from None
    return [job for job in jobs if not only or job.name in only]


def read_again(file: Path, only: Sequence[str]) -> list[Job] | None:
    """The jobs of a file that may be half written; None if it cannot be read."""
    try:
        return read_jobs(file, only)
    except ConfigError:
        return None


def main(argv: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("file", type=Path, nargs="?", default=Path(__file__).with_name("gpu_jobs.yaml"))
    options.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "on_gpus")
    options.add_argument("--gpus", type=int, help="how many there are (default: all that torch sees)")
    options.add_argument("--only", nargs="+", default=[], help="jobs of these names alone")
    given = options.parse_args(argv)
    given.out.mkdir(parents=True, exist_ok=True)
    count = workload.gpus() if given.gpus is None else given.gpus
    machine, jobs = Machine(given.out, set(range(count))), read_jobs(given.file, given.only)
    seen: list[Job] | None = jobs
    try:
        while (left := [job for job in jobs if job.name not in machine.ended]) or machine.running:
            if not machine.running and min(job.gpus for job in left) > count:
                machine.say(f"left out, for want of GPUs: {', '.join(job.name for job in left)}")
                break
            machine.begin_what_fits([job for job in left if job.gpus <= count])
            time.sleep(_LOOK_S)
            machine.end_what_is_over()
            newest = read_again(given.file, given.only)
            if newest is not None and newest == seen:  # a file that is being written differs from one look to the next
                jobs = newest
            seen = newest
    finally:
        for each in list(machine.running):
            machine.end(each)
    return 0


if __name__ == "__main__":
    sys.exit(main())
