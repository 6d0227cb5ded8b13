"""TensorBoard: event files in a folder of the driver's machine: `<folder>/RUN`, for a trial `<folder>/SWEEP/TRIAL`.

All metrics of a step are one event, so a step is there or it is not. Parameters are TensorBoard's hyperparameters;
sample tables, texts and tags are texts. Only this module imports tensorboardX, which is small and comes with Ray Tune.
Left out: reading back, and the viewer (`pip install tensorboard`).
"""

from __future__ import annotations

import functools
import itertools
import json
import shlex
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rlx.config.errors import ConfigError, one_line
from rlx.config.sweep import DEFAULT_METRIC
from rlx.tracking.base import ERROR_TAG, Failure, Reach, RunStatus, typed

_KEY_FILE = "run.json"
_TAGS = "tags"  # before the names of texts that are tags
_LENGTH, _CHECKSUM = 12, 4  # bytes before an event (its length, and the checksum of that) and after it
_METRICS = ("reward/mean", "task/accuracy", DEFAULT_METRIC)
"""what TensorBoard shows beside the hyperparameters of runs"""


class TensorBoardService:
    """The event files in one folder. Implements `TrackingService`.

    Args:
        folder: on this machine.
    """

    name: Final = "tensorboard"
    title = "TensorBoard"
    reach = Reach.PROCESS  # TensorBoard reads the files of a run one after the other, never two side by side

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, str(folder)

    def check(self, experiment: str) -> None:
        """Makes the folder.

        Raises:
            ConfigError: it cannot be made.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"tracking.backends tensorboard: {one_line(error)}") from None

    def browse_command(self) -> str:
        """What to type in a shell to see the runs in a browser."""
        return f"tensorboard --logdir {shlex.quote(self.address)}"

    def run_page(self, run_id: str | None) -> str:
        """The address at which `browse_command` serves."""
        return "http://localhost:6006"

    def make_run(
        self,
        key: str,
        experiment: str,
        name: str,
        *,
        parent: str | None,
        params: Mapping[str, str],
        tags: Mapping[str, str],
        at: int,
    ) -> str:
        """Returns the folder of the run that has a key; makes it first if no run has the key."""
        sweep = tags.get("rlx.sweep")
        place = f"{sweep}/{name.removeprefix(f'{sweep}.')}" if sweep else name
        places = itertools.chain([place], (f"{place}-{number}" for number in itertools.count(2)))
        run_id = next(each for each in places if _claim(self.folder / each, key))
        writer = self.writer(run_id)
        writer.start(params, at)
        writer.set_tags(tags)
        return run_id

    def reopen_run(self, run_id: str, at: int, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Says that the run goes on, in a further file of its folder. One whose folder was removed begins again."""
        writer = self.writer(run_id)
        if not (self.folder / run_id / _KEY_FILE).exists():
            writer.begin_again(params, tags, at)
            _claim(self.folder / run_id, run_id)  # so that no other run takes it
        writer.reopen()

    def writer(self, run_id: str) -> TensorBoardRun:
        """Opens a run for writing."""
        with _OPENING:
            return run_at(self.folder / run_id)

    def failure(self, error: Exception) -> Failure:
        """Whether another attempt is useless: a value is no number or text."""
        return Failure.REFUSED if isinstance(error, TypeError | ValueError) else Failure.AWAY

    def cause(self, error: Exception) -> str:
        """Why a file cannot be written."""
        return one_line(error)


class TensorBoardRun:
    """Writes the event files of one run, all of them in one process. Implements `RunWriter`.

    A step that the files have already is left out, unless it is done `again`; a text that is written again takes the
    place of the earlier one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._events: Any = None  # the open file; None before the first event, and after the run's end
        self._ended: RunStatus | None = None  # None while it goes on
        self.last_step = _last_step(folder)

    def start(self, params: Mapping[str, str], at: int) -> None:
        """Writes the parameters."""
        from tensorboardX import summary

        values = {key: typed(value) for key, value in params.items()}
        for part in summary.hparams(values, dict.fromkeys(_METRICS))[:2]:  # the third says that the run has ended
            self._write(part, 0, at)

    def begin_again(self, params: Mapping[str, str], tags: Mapping[str, str], at: int) -> None:
        """Writes the parameters and tags into new files: those of before were removed, also one that is open here."""
        with self._lock:
            self._events, self.last_step = None, _last_step(self._folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self.start(params, at)
        self.set_tags(tags)

    def reopen(self) -> None:
        """Writes that the run goes on, without an error."""
        self._ended = None
        error = {ERROR_TAG: ""} if _has_text(self._folder, f"{_TAGS}/{ERROR_TAG}") else {}
        self.set_tags({"status": RunStatus.RUNNING} | error)

    def missing(self) -> str:
        """Nothing: the service keeps everything."""
        return ""

    def log(self, metrics: Mapping[str, float], step: int, at: int, again: bool = False) -> None:
        """Writes all metrics of a step as one event."""
        from tensorboardX import summary

        if step <= self.last_step and not again:
            return
        whole = summary.Summary()
        for name, value in metrics.items():
            whole.MergeFrom(summary.scalar(name, value))
        self._write(whole, step, at)
        self.last_step = max(step, self.last_step)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int, again: bool = False) -> None:
        """Writes completions as a table in Markdown."""
        if step > self.last_step or again:
            lines = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)]
            self._text("samples", "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines), step)

    def log_text(self, name: str, text: str) -> None:
        """Writes a text as it is; TensorBoard would show a page of HTML as a megabyte of source."""
        if not name.endswith(".html"):
            self._text(name, "\n".join(f"    {line}" for line in text.splitlines()))

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Writes each tag as a text."""
        for name, value in tags.items():
            self._text(f"{_TAGS}/{name}", value)

    def end(self, status: RunStatus, at: int) -> None:
        """Writes how the run ended, unless that has been done, and closes its file."""
        if (status := status.after(self._ended)) != self._ended:
            self.set_tags({"status": status})
            self._ended = status
        with self._lock:
            if self._events is not None:
                self._events.close()
                self._events = None

    def _text(self, name: str, text: str, step: int = 0) -> None:
        from tensorboardX import summary

        self._write(summary.text(name, text), step)

    def _write(self, summary: Any, step: int, at: int | None = None) -> None:
        """Writes an event; returns when the file has it."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event

        with self._lock:
            if self._events is None:
                number = len(list(_event_files(self._folder)))  # names have seconds: two files may be of one second
                self._events = EventsWriter(str(self._folder / "events"), f".{number:04d}")
            self._events.write_event(Event(summary=summary, step=step, wall_time=at / 1000 if at else time.time()))
            self._events.flush()


_OPENING = threading.Lock()


@functools.cache
def run_at(folder: Path) -> TensorBoardRun:
    """The run in a folder: one object for all in this process who write to it."""
    return TensorBoardRun(folder)


def _claim(folder: Path, key: str) -> bool:
    """Makes the folder of the run with a key; False if it is another run's."""
    file = folder / _KEY_FILE
    folder.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        file.write_text(json.dumps({"key": key}))
    return bool(json.loads(file.read_text())["key"] == key)


def _cell(value: Any) -> str:
    """A value as a cell of a table in Markdown."""
    return str(value).replace("|", "\\|").replace("\n", "<br>")


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def _event_files(folder: Path) -> Iterator[Path]:
    return folder.glob("events.out.tfevents.*")


def _last_step(folder: Path) -> int:
    """The last step of a run whose metrics are in its files; -1 if there is none."""
    for file in sorted(_event_files(folder), key=lambda file: file.name.rpartition(".")[2], reverse=True):
        if steps := [event.step for event in events(file) if _is_of_metrics(event)]:
            return int(max(steps))
    return -1


def _has_text(folder: Path, name: str) -> bool:
    """Whether the files of a run have a text of a name."""
    found = (value.tag for file in _event_files(folder) for event in events(file) for value in event.summary.value)
    return f"{name}/text_summary" in found


def _is_of_metrics(event: Any) -> bool:
    return any(value.HasField("simple_value") for value in event.summary.value)


def events(file: Path) -> Iterator[Any]:
    """The events of a file, TensorBoard's `Event`, up to the first that a killed process has not written to its end."""
    from tensorboardX.proto.event_pb2 import Event

    with file.open("rb") as stream:
        while len(head := stream.read(_LENGTH)) == _LENGTH:
            (size,) = struct.unpack("<Q", head[:8])
            if len(event := stream.read(size)) < size or len(stream.read(_CHECKSUM)) < _CHECKSUM:
                return
            yield Event.FromString(event)
