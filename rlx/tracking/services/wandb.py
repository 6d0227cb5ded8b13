"""Weights & Biases: a run there has rlx's key as its id, so a run that is resumed here goes on there.

Its project is `tracking.experiment` (or WANDB_PROJECT), its group the sweep. With WANDB_MODE=offline, W&B's files stay
in `<folder>/wandb` until `wandb sync` sends them. Keys stay where W&B looks for them: in WANDB_API_KEY or ~/.netrc.
Only this module imports wandb. Left out: reading back, W&B's own sweeps.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rlx.config.errors import ConfigError, one_line
from rlx.tracking.base import ERROR_TAG, Failure, Reach, RunStatus, typed

_OFFLINE = ("offline", "dryrun", "disabled")
_EXIT_CODES = {RunStatus.FINISHED: 0, RunStatus.FAILED: 1, RunStatus.KILLED: 255}
_TIMEOUT_S = 30.0  # for the server's answer when a run begins; delivery.py tries again
_Run = Any
"""wandb's run"""


class WandbService:
    """W&B as the environment and ~/.netrc name it. Implements `TrackingService`.

    W&B takes the records of a run from one process, which keeps a connection to W&B's own process open.

    Args:
        folder: for W&B's files, on this machine; WANDB_DIR is another one.
    """

    name: Final = "wandb"
    title = "W&B"
    reach = Reach.PROCESS

    def __init__(self, folder: Path) -> None:
        self.folder = Path(os.environ.get("WANDB_DIR", folder))

    @property
    def runs(self) -> OpenRuns:
        """The runs that this process writes."""
        return open_runs(self.folder)

    @property
    def address(self) -> str:
        """W&B's server, or the folder of its files."""
        return str(self.folder / "wandb") if _is_offline() else _server()

    def check(self, experiment: str) -> None:
        """Returns if W&B finds a key, or needs none.

        Raises:
            ConfigError: there is none.
        """
        import wandb

        if not _is_offline() and not wandb.login(prompt=False, verify=False):
            raise ConfigError(
                "tracking.backends wandb: no key for W&B: `wandb login` asks for it, WANDB_API_KEY holds it, and "
                "WANDB_MODE=offline needs none"
            )

    def browse_command(self) -> str:
        """What to type in a shell to see the runs in a browser."""
        return f"wandb sync {self.folder}/wandb/offline-run-*" if _is_offline() else f"open {_server()}"

    def run_page(self, run_id: str | None) -> str:
        """The web address of a run that this process writes; else of the server, or the folder of its files."""
        return self.address if _is_offline() else self.runs.address(run_id) or _server()

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
        """Returns PROJECT/KEY, the id of the run that has a key; W&B makes the run first if it has none of that id."""
        kind = tags.get("rlx.kind", "run")
        run_id = f"{os.environ.get('WANDB_PROJECT', experiment)}/{key}"
        group = tags.get("rlx.sweep", name if kind == "sweep" else None)
        self.runs.open(run_id, name=name, group=group, job_type=kind, config=nested(params) | as_config(tags))
        return run_id

    def reopen_run(self, run_id: str, at: int, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Opens the run again; W&B counts its steps on. An error of before is emptied: W&B's config loses no key."""
        self.runs.go_on(run_id)
        config = self.runs.open(run_id).config
        if _is_offline() or config.get(_config_key(ERROR_TAG)):  # offline, W&B does not know what it was told before
            config.update(as_config({ERROR_TAG: ""}), allow_val_change=True)

    def writer(self, run_id: str) -> WandbRun:
        """Opens a run for writing."""
        return WandbRun(self.runs, run_id)

    def failure(self, error: Exception) -> Failure:
        """Whether wandb rejected a record, so that another attempt is useless."""
        return Failure.REFUSED if isinstance(error, TypeError | ValueError) else Failure.AWAY

    def cause(self, error: Exception) -> str:
        """Why wandb failed, in a few words."""
        return one_line(error, 300)


class OpenRuns:
    """The runs that this process writes, each with a connection to W&B's own process.

    Args:
        folder: for W&B's files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._runs: dict[str, _Run] = {}  # wandb's, by PROJECT/KEY
        self._ended: dict[str, RunStatus] = {}  # how they ended last, unless they go on since

    def address(self, run_id: str | None) -> str | None:
        """The web address of a run; None if it is not open here."""
        return getattr(self._runs.get(run_id or ""), "url", None)

    def open(self, run_id: str, **description: Any) -> _Run:
        """Returns wandb's run, which stays open until `close`.

        Args:
            description: of a run that W&B does not know yet.
        """
        import wandb

        project, key = run_id.rsplit("/", 1)
        with self._lock:
            if run_id not in self._runs:
                logging.getLogger("wandb").setLevel(logging.ERROR)
                self._folder.mkdir(parents=True, exist_ok=True)
                options: Any = {"project": project, "id": key, "resume": "allow", "dir": str(self._folder)}
                # Neither the output nor the machine of this process, which may be an actor, is the run's.
                own = wandb.Settings(
                    console="off", silent=True, disable_git=True, x_disable_stats=True, init_timeout=_TIMEOUT_S
                )
                self._runs[run_id] = wandb.init(**options, **description, reinit="create_new", settings=own)
            return self._runs[run_id]

    def status(self, run_id: str) -> RunStatus | None:
        """How a run ended here, also if it was opened since for late records; None if it goes on."""
        return self._ended.get(run_id)

    def go_on(self, run_id: str) -> None:
        """Forgets how a run ended."""
        self._ended.pop(run_id, None)

    def close(self, run_id: str, status: RunStatus) -> None:
        """Ends a run if it is open; waits until W&B has its records."""
        with self._lock:
            if run := self._runs.pop(run_id, None):
                run.finish(exit_code=_EXIT_CODES[status])
                self._ended[run_id] = status


_OPENING = threading.Lock()


def open_runs(folder: Path) -> OpenRuns:
    """The open runs of this process, which has one connection for each, whoever writes."""
    with _OPENING:
        return _open_runs(folder)


_open_runs = functools.cache(OpenRuns)


class WandbRun:
    """Writes to one run of W&B. Implements `RunWriter`.

    W&B takes each step once, in order; `run.step` is the next one, also after a run has been resumed. So a step that is
    done `again` keeps its first values.
    """

    def __init__(self, runs: OpenRuns, run_id: str) -> None:
        self._runs, self._run_id = runs, run_id

    @property
    def _run(self) -> _Run:
        return self._runs.open(self._run_id)

    def missing(self) -> str:
        """Nothing: the service keeps everything."""
        return ""

    def log(self, metrics: Mapping[str, float], step: int, at: int, again: bool = False) -> None:
        """Logs all metrics of a step; returns when W&B's own process, which outlives this one, has them."""
        run = self._run
        if step >= run.step:
            run.log(dict(metrics), step=step, commit=True)
            assert run.step > step  # the answer comes after the records before it

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int, again: bool = False) -> None:
        """Logs completions as a table of the step, which `log` completes."""
        import wandb

        run = self._run
        if step >= run.step:
            table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
            run.log({"samples": table}, step=step, commit=False)

    def log_text(self, name: str, text: str) -> None:
        """Stores a file of the run."""
        run = self._run
        file = Path(run.dir, "rlx", name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        run.save(str(file), base_path=run.dir, policy="now")

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Adds tags to the run's config."""
        ended = self._runs.status(self._run_id)
        self._run.config.update(as_config(tags), allow_val_change=True)
        if ended:
            self._runs.close(self._run_id, ended)

    def end(self, status: RunStatus, at: int) -> None:
        """Ends the run, unless it has this status already."""
        ended = self._runs.status(self._run_id)
        if (status := status.after(ended)) != ended:
            self._runs.open(self._run_id)  # a lost process may have left it open
        self._runs.close(self._run_id, status)


def nested(settings: Mapping[str, str]) -> dict[str, Any]:
    """Values by dotted name as W&B shows them: a dict in a dict."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *path, last = key.split(".")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[last] = typed(value)
    return tree


def as_config(tags: Mapping[str, str]) -> dict[str, Any]:
    """Tags as W&B shows them, beside the settings: W&B's own tags have no values, and of a dict in the config it would
    replace the whole."""
    return {_config_key(name): typed(value) for name, value in tags.items()}


def _config_key(tag: str) -> str:
    return tag.replace(".", "_")  # W&B advises against dots


def _is_offline() -> bool:
    return os.environ.get("WANDB_MODE") in _OFFLINE


def _server() -> str:
    return os.environ.get("WANDB_BASE_URL", "https://wandb.ai").replace("://api.", "://")
