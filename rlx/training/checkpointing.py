"""The state of training in checkpoints: what is saved when, and how a run continues from what was saved.

The writer (rlx.storage.checkpoint_writer) knows files and ranks; this module knows which state there is. `_manifest`
and `_load` are the two sides of it. Left out: which checkpoints stay (rlx.storage.checkpoint_catalog).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlx import __version__
from rlx.config import rules
from rlx.config.errors import one_line
from rlx.config.sections.train import TrainConfig
from rlx.storage import checkpoint_files, checkpoint_keys
from rlx.storage.addresses import open_storage
from rlx.storage.checkpoint_catalog import REFERENCE, CheckpointEntry, Retention, checkpoint_name
from rlx.storage.checkpoint_files import CheckpointReader, Copies, Shard
from rlx.storage.checkpoint_manifest import Manifest
from rlx.storage.checkpoint_writer import CheckpointWriter, FinishedCheckpoint
from rlx.storage.filesystem import Storage, retry
from rlx.training.rollout_queue import RolloutQueue
from rlx.training.trainer import Trainer, initial_ema
from rlx.types import Notify


class PinnedMemory:
    """Main memory that a GPU copies into several times as fast as into other memory; taken once and kept.

    torch's own pinned memory is rounded up to powers of two for each tensor, and its stager for checkpoints
    (torch.distributed.checkpoint.staging, 2.11) fails the second time.
    """

    _ALIGNED = 64  # bytes; tensors of any dtype may begin there

    def __init__(self, notify: Notify) -> None:
        self._notify = notify
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copies(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of tensors, until the next call."""
        sizes = [-(-tensor.nbytes // self._ALIGNED) * self._ALIGNED for tensor in tensors.values()]
        if sum(sizes) > self._memory.nbytes:
            self._take(sum(sizes))
        places = self._memory[: sum(sizes)].split(sizes)
        copied = {}
        for (key, tensor), place in zip(tensors.items(), places, strict=True):
            copied[key] = place[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copied[key].copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()
        return copied

    def _take(self, size: int) -> None:
        self._memory = torch.empty(size, dtype=torch.uint8)
        driver, address = torch.cuda.cudart(), self._memory.data_ptr()
        try:
            torch.cuda.check_error(driver.cudaHostRegister(address, size, 0))
        except RuntimeError as error:  # such as a limit of locked memory
            self._notify(f"checkpoints pause training for longer: main memory cannot be pinned ({one_line(error)})")
            return
        # Without `atexit`: when a process ends, its memory goes with it.
        weakref.finalize(self._memory, driver.cudaHostUnregister, address).atexit = False


@dataclass
class Checkpointer:
    """Saves and restores one rank's part of a run; every rank makes the same calls in the same order."""

    trainer: Trainer
    queue: RolloutQueue
    writer: CheckpointWriter
    notify: Notify
    copies: Copies  # of this rank's tensors
    signature: str = ""  # of the config
    restored_metrics: dict[str, float] = field(default_factory=dict)  # of the step that was restored
    resumed_from: CheckpointEntry | None = None  # the run's own checkpoint that was restored
    _saved_step: int = 0  # of the newest checkpoint, or of the state that the run began with
    _keeps_reference: bool = False  # see `Manifest.reference`

    def is_due(self, is_last: bool) -> bool:
        """Whether the current step is saved: it is due or the last, and not saved yet."""
        every = self.trainer.config.checkpoint.every
        return self.trainer.step > self._saved_step and (is_last or self.trainer.is_due(every))

    def copy_state(self) -> tuple[dict[str, Shard], float]:
        """Copies of this rank's tensors in main memory, and the seconds for which training paused for them."""
        started = time.perf_counter()
        self.writer.wait()  # for the previous checkpoint, whose memory these copies may take
        shards = checkpoint_files.copy_shards(self.trainer.models, self.trainer.ema, self.copies)
        if self.trainer.mesh.is_leader:  # neighbours have the same completions
            shards |= self.queue.state()
        return shards, time.perf_counter() - started

    def save(self, shards: Mapping[str, Shard], metrics: Mapping[str, float], run_id: str | None) -> None:
        """Begins to write the current step's checkpoint; training continues meanwhile."""
        self.writer.save(shards, self._manifest(metrics, run_id))
        self._saved_step = self.trainer.step

    def has_finished(self) -> bool:
        """Whether this rank knows of a checkpoint that has become complete and was not taken yet."""
        return self.writer.has_finished()

    def take_finished(self) -> FinishedCheckpoint | None:
        """The oldest checkpoint that was not taken yet, once nothing is being written; None if there is none."""
        self.writer.wait()
        finished = self.writer.finished_checkpoint()
        if finished and finished.problem and self.trainer.mesh.rank == 0:
            self.notify(f"old checkpoints are left, training goes on: {finished.problem}")
        return finished

    def restore(self) -> None:
        """Continues from the run's newest complete checkpoint; without one, starts where the config says."""
        settings = self.trainer.config.checkpoint
        source = self.resumed_from = self.writer.newest_checkpoint(self.notify)
        is_resume = source is not None
        if source is None and settings.init_from:
            source = self.writer.verified_checkpoint(open_storage(settings.init_from, create=False))
        if source is None:
            return
        is_whole = is_resume or settings.init_state == "all"
        self._load(source) if is_whole else self._load_weights(source)
        has_reference_copy = self.trainer.reference is not None and not self.trainer.config.model.reference_path
        if settings.init_from and has_reference_copy:
            self._restore_reference(source, is_resume, is_whole)

    def _restore_reference(self, source: CheckpointEntry, is_resume: bool, is_whole: bool) -> None:
        """Gives the frozen copy the weights that the policy had when training began; a collective call.

        Training began with this run, or with the run that it continues. The weights are kept in the run's folder,
        because the checkpoint that a run starts from may be deleted. A run that had no reference before this resume
        has kept none, and reads them where it began.

        Raises:
            StorageError: they cannot be read.
        """
        assert source.manifest
        trainer, policy, settings = self.trainer, self.trainer.models["policy"], self.trainer.config.checkpoint
        is_kept = is_whole and source.manifest.reference
        began_here = is_resume and settings.init_state != "all"
        if trainer.config.model.reference_weights == "model" or (is_whole and not is_kept and not began_here):
            return
        if is_kept:
            run = Storage(source.folder.filesystem, source.folder.path.rpartition("/")[0])
            source = self.writer.verified_checkpoint(run / REFERENCE / checkpoint_name(0))
        elif is_resume:
            source = self.writer.verified_checkpoint(open_storage(str(settings.init_from), create=False))
        what = f"reading {source.folder}"
        retry(partial(checkpoint_files.read_reference, source.files, policy, trainer.reference), what)
        self._keeps_reference = True
        if not (is_resume and is_kept):
            writer = CheckpointWriter(self.writer.run / REFERENCE, Retention())
            manifest = self._manifest({}, None).model_copy(update={"step": 0})
            writer.save(checkpoint_files.copy_reference(policy, trainer.reference), manifest)
            writer.wait()
            writer.close()

    def close(self) -> None:
        """Ends the writer's thread and process group, once nothing is being written."""
        self.writer.close()

    def _manifest(self, metrics: Mapping[str, float], run_id: str | None) -> Manifest:
        """All state that is not a tensor. No code of a rank uses its global random state, so none is kept."""
        trainer = self.trainer
        return Manifest(
            rlx=__version__,
            step=trainer.step,
            ranks=trainer.mesh.world_size,
            metrics=dict(metrics),
            tokens=trainer.tokens,
            seconds=trainer.seconds,
            kl=trainer.kl.state_dict(),
            scores=trainer.reward_stats.state_dict(),
            cursor=self.queue.prompts.cursor(self.queue.position()),
            evaluation=trainer.evaluation,
            mlflow_run_id=run_id,
            config=trainer.config.model_dump(mode="json"),
            files={},
            signature=self.signature,
            reference=self._keeps_reference,
        )

    def _load(self, entry: CheckpointEntry) -> None:
        assert entry.manifest
        manifest, trainer, what = entry.manifest, self.trainer, f"reading {entry.folder}"
        retry(partial(checkpoint_files.load_state, entry.files, trainer.models, trainer.ema), what)
        trainer.step = self._saved_step = manifest.step
        # What the run has no eval.sets for any more would else be reported with every step to come.
        evaluation = trainer.config.eval
        self.restored_metrics = evaluation.still_measured(manifest.metrics)
        trainer.tokens, trainer.seconds = manifest.tokens, manifest.seconds
        trainer.evaluation = evaluation.still_measured(manifest.evaluation)
        if _saved(manifest, "algorithm").get("kl_coef") in (None, trainer.config.algorithm.kl_coef):
            trainer.kl.load_state_dict(manifest.kl)  # else it adapts from the number that was given since
        trainer.reward_stats.load_state_dict(manifest.scores)
        self.queue.prompts.seek(manifest.cursor)
        retry(partial(self._load_queue, entry, manifest.dp_size), what)
        _tell(trainer, self.notify, _moved_end(trainer.config.train, _saved(manifest, "train")))

    def _load_queue(self, entry: CheckpointEntry, replicas: int) -> None:
        with CheckpointReader(entry.files) as reader:
            self.queue.restore(reader, self.trainer.step, replicas)

    def _load_weights(self, entry: CheckpointEntry) -> None:
        assert entry.manifest
        trainer, config, models = self.trainer, self.trainer.config, dict(self.trainer.models)
        path = config.model.critic_path
        if path and path != _saved(entry.manifest, "model").get("critic_path"):  # the checkpoint's critic is another
            del models["critic"]
        known = retry(partial(checkpoint_files.load_weights, entry.files, models), f"reading {entry.folder}")
        trainer.ema = initial_ema(config.train, trainer.policy)
        critic = {"separate": "critic", "head": "policy"}.get(config.resolved_critic)
        if critic in models and not checkpoint_keys.has_values(known, critic):
            _tell(trainer, self.notify, _new_critic(trainer, entry.name))
        if "critic" in trainer.models.keys() - models and checkpoint_keys.has_weights(known, "critic"):
            _tell(trainer, self.notify, [f"the critic starts from model.critic_path {path}, not from {entry.name}"])


def _tell(trainer: Trainer, notify: Notify, lines: Sequence[str]) -> None:
    """Tells the person who watches what all ranks know."""
    for line in lines if trainer.mesh.rank == 0 else ():
        notify(line)


def _saved(manifest: Manifest, section: str) -> Mapping[str, Any]:
    """The settings of a section when a checkpoint was written; none if it does not have them."""
    settings = manifest.config.get(section)
    return settings if isinstance(settings, Mapping) else {}


def _moved_end(train: TrainConfig, saved: Mapping[str, Any]) -> list[str]:
    """What to say of learning rates that jump, because they fall towards a last step that is another one now."""
    kind, steps = train.lr_schedule, saved.get("steps")
    if kind == "constant" or saved.get("lr_schedule") != kind or not isinstance(steps, int) or steps == train.steps:
        return []
    jump = "up" if train.steps > steps else "down"
    return [
        f"warning: train.steps is {train.steps}, it was {steps}: with train.lr_schedule {kind} the learning rates jump "
        f"{jump} here, to what a run of {train.steps} steps has"
    ]


def _new_critic(trainer: Trainer, checkpoint: str) -> list[str]:
    """What to say of a critic that has learnt nothing, because the checkpoint has none of its kind."""
    config = trainer.config
    start = "a new value head" if config.resolved_critic == "head" else config.model.critic_path or config.model.path
    lines = rules.warnings(config.algorithm, config.model, config.train, config.rollout)
    return [f"{checkpoint} has no critic of this kind: it starts from {start}", *(f"warning: {line}" for line in lines)]
