"""A branch: the steps of a recorded run done again from one of its checkpoints, as a run of its own in another folder.

It has the settings of the run, other settings where they are asked for, and all of the checkpoint's state, so that its
steps are those of the run to the last bit on a CPU. Left out: comparing the two (comparing.py, pairs.py).
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pyarrow import fs

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, with_overrides
from rlx.config.run import LONGEST_NAME, valid_name
from rlx.replay.recorded import RecordedRun
from rlx.runs import launch, preflight, run_folder
from rlx.runs.launch import RunResult
from rlx.runs.preflight import PreparedRun
from rlx.runs.processes import RunProcesses
from rlx.samples.episodes import KnownEpisodes
from rlx.storage.addresses import join_address, open_storage
from rlx.storage.checkpoint_catalog import CheckpointEntry
from rlx.tracking.services import mlflow
from rlx.types import Notify, OnReport, Replay

REPLAYS = "replays"
"""folder of a storage in which replays lie while they run"""
MOVABLE = (
    "model.path",
    "model.critic_path",
    "model.reference_path",
    "data.source",
    "data.ptx_source",
    "eval.source",
    "reward.model",
    "reward.url",
    "reward.judge_url",
    "ray_address",
    "wait_for_resources",
)
"""settings that name what a step needs, and may name another place of the same"""
_ROOM = 32  # characters of a branch's name for what follows its stem


@dataclass(frozen=True)
class Branch:
    """Steps of a run that are to be done again."""

    run: RecordedRun
    start: CheckpointEntry | None  # None: from the first step
    until: int  # the last step of it
    changes: Mapping[str, Any] = field(default_factory=dict)  # settings that differ from those of the run
    trust: bool = False  # take the run's settings, whoever wrote them
    attributes_gradient: bool = False  # the last step keeps the shares of its prompts in the gradient
    asks_again: bool = False  # environments, also for what they have said to the run

    @property
    def steps(self) -> range:
        """The steps that are done again; 0 is the evaluation before the first."""
        return range(self.start.step + 1 if self.start else 0, self.until + 1)

    @property
    def origin(self) -> str:
        """The name of the checkpoint that it starts from, or "the start"."""
        return self.start.name if self.start else "the start"

    def prepare(self) -> PreparedRun:
        """Checks that it can be run here.

        Raises:
            ConfigError: it cannot.
        """
        recorded = from_tree(self.tree())
        model = recorded.model.path  # the tiny model lies in the storage of the run
        path = None if "model.path" in self.changes else preflight.model_folder(model, self.run.storage)
        prepared = preflight.prepare(from_tree(with_overrides(self.tree(), self.changes)), model_path=path)
        begun = self.until + prepared.config.rollout.max_staleness  # rounds of these steps begin, too
        known = None if self.asks_again else KnownEpisodes.of_steps(self.run.folder, self.steps[0] - 1, begun).read
        evaluated = self.run.evaluated_ends(recorded.eval)
        replay = Replay(self.until, self.attributes_gradient, evaluated, known)
        return replace(prepared, replay=replay, replayed=self.run.folder)

    def tree(self) -> dict[str, Any]:
        """The settings with which the run went on from there, with the checkpoint to start from."""
        first = 1 + (self.start.step if self.start else 0)
        tree = self.run.settings_of(first, trust=self.trust, given=self.changes)
        if self.start is None:
            return tree
        address = join_address(self.run.address, self.start.name)
        return with_overrides(tree, {"checkpoint.init_from": address, "checkpoint.init_state": "all"})


def stem(run: RecordedRun) -> str:
    """What names of its branches begin with: its name, or the nearest one, if a person has renamed its folder."""
    return valid_name(run.name)[: LONGEST_NAME - _ROOM]


def branch_to(run: RecordedRun, step: int, *, trust: bool = False) -> Branch:
    """The shortest branch that ends with a step.

    Raises:
        ConfigError: the run has no such step, or nothing tells its settings.
    """
    if not 1 <= step <= run.steps:
        raise ConfigError(f"--step {step}: run {run.name} has steps 1 to {run.steps}")
    refuse_unknown(run, step, f"--step {step}")
    return Branch(run, run.before(step), step, trust=trust)


def refuse_unknown(run: RecordedRun, step: int, asked: str) -> None:
    """Raises ConfigError if nothing tells with which settings a step was done; `asked`: what the error is said of."""
    if unknown := run.unknown_at(step):
        start, end = run.before(step), run.after(step)
        between = f"steps {start.step if start else 0} and {end.step if end else run.steps}"
        raise ConfigError(
            f"{asked}: a resume of run {run.name} changed {', '.join(unknown)} between {between}, and the "
            "checkpoint where it began is deleted: nothing tells the settings of the steps between"
        )


@dataclass(frozen=True)
class Scratch:
    """A place for branches that leave nothing: a storage, and an MLflow database."""

    address: str
    uri: str

    def placed(self, branch: Branch) -> Branch:
        """The branch as a run there; it keeps the completions of all its prompts, and its last weights."""
        own = {
            "name": f"{stem(branch.run)}-{branch.until}",
            "storage": self.address,
            "checkpoint.every": 0,
            "tracking.backends": ("mlflow",),
            "tracking.uri": self.uri,
            "tracking.completions": 1.0,
            "tracking.system_metrics": False,
        }
        return replace(branch, changes={**branch.changes, **own})


@contextmanager
def scratch(run: RecordedRun, *, keep: bool = False) -> Iterator[Scratch]:
    """Gives a place beside a run, which is gone afterwards. Processes that have worked there must end before.

    Args:
        keep: the storage stays, without the database.
    """
    name = f"{stem(run)}-{uuid.uuid4().hex[:8]}"
    folder = open_storage(run.storage, create=False) / REPLAYS / name
    with tempfile.TemporaryDirectory(prefix="rlx-replay-") as records:
        try:
            yield Scratch(join_address(run.storage, REPLAYS, name), mlflow.default_uri(Path(records)))
        finally:
            if not keep:
                folder.delete()


def run_branch(
    prepared: PreparedRun,
    branch: Branch,
    on_report: OnReport | None = None,
    notify: Notify | None = None,
    processes: RunProcesses | None = None,
) -> RunResult:
    """Does the steps of a branch, on a cluster that is connected.

    Raises:
        ConfigError, RunError: it cannot be run, or failed.
    """
    with run_folder.new_run(prepared.config) as (config, folder):
        replies = branch.run.folder / "judge"
        if replies.exists():  # what a judge has said once it might not say again
            fs.copy_files(
                replies.path,
                (folder / "judge").path,
                source_filesystem=replies.filesystem,
                destination_filesystem=folder.filesystem,
            )
        ready = replace(prepared, config=config)
        return launch.run(ready, folder, on_report=on_report, notify=notify, processes=processes)


def records_of(prepared: PreparedRun) -> str:
    """The address of the MLflow store that a prepared run reports to."""
    return preflight.tracking_uri(prepared.config.tracking, prepared.config.storage)
