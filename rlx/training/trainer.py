"""One rank's live objects, what of their state a checkpoint keeps, and what they say to other ranks.

The order in which they are used is train_loop's.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from rlx import __version__
from rlx.algorithms import adaptive, advantages, importance_sampling
from rlx.config.run import RunConfig
from rlx.data import stream
from rlx.mesh import Mesh
from rlx.models import fsdp, lora
from rlx.models.policy import PolicyOutput
from rlx.rewards import functions, scoring
from rlx.rollout.base import Engines
from rlx.runs import ray_train
from rlx.storage import checkpoint_files
from rlx.storage.addresses import open_storage
from rlx.storage.checkpoint_catalog import CheckpointEntry
from rlx.storage.checkpoint_files import ModelAndOptimizer
from rlx.storage.checkpoint_manifest import Manifest
from rlx.storage.checkpoint_writer import CheckpointWriter
from rlx.storage.filesystem import retry
from rlx.tracking.base import Tracker
from rlx.training import experience
from rlx.training.collector import Selection
from rlx.training.experience import Experience
from rlx.training.rollout_queue import RolloutQueue
from rlx.types import Completion, Prompt, Response, Sampling, ScoredCompletion, Scorer

_PATIENCE_S = 5.0  # with MLflow, at the end of a run

Sums = dict[str, float | Tensor]
"""statistics of this rank, to be summed over ranks and then divided"""


@dataclass
class Run:
    """What a rank works with, and what of its state a checkpoint keeps."""

    config: RunConfig
    device: torch.device
    grid: Mesh
    trained: dict[str, ModelAndOptimizer]  # the policy, and the critic if it is a model of its own
    average: dict[str, Tensor]  # of the policy's weights, by name; empty if none is kept
    rates: dict[str, list[float]]  # of each model's parameter groups, the learning rate before the schedule
    copy: Any  # the frozen reference, if it is a model of its own
    rounds: RolloutQueue
    supervised: stream.PromptStream | None  # prompts whose answers are learnt beside the reward
    held_out: list[Prompt]  # this replica's share
    fleet: Engines
    sampling: Sampling
    tokenizer: Any
    scorers: dict[str, Scorer]
    held_out_scorers: dict[str, Scorer]
    tracker: Tracker
    saver: CheckpointWriter
    box: str  # where the driver listens
    kl: adaptive.AdaptiveKL
    scores: adaptive.RunningScores
    scattered: frozenset[str] = frozenset()  # models of which a rank never has all gradients, see `reduce_gradients`
    step: int = 0  # PPO steps done; also the version of the weights
    tokens: int = 0  # response tokens generated so far, by all ranks
    evaluation: dict[str, float] = field(default_factory=dict)  # the newest
    metrics: dict[str, float] = field(default_factory=dict)  # of the step that a checkpoint was taken of
    stopping: bool = False  # this step was the last
    _saved: int = 0  # step of the newest checkpoint, or of the state that a run began with

    @property
    def policy(self) -> Any:
        return self.trained["policy"].model

    @property
    def critic(self) -> Any:
        """The value model; None if it is a head on the policy, or there is none."""
        return self.trained["critic"].model if "critic" in self.trained else None

    @property
    def learning(self) -> list[str]:
        """Which of the models learn in the step that begins now: not the policy while the critic warms up."""
        warming = self.step < self.config.train.critic_warmup
        return [name for name in self.trained if not (warming and name == "policy")]

    @property
    def scores_late(self) -> bool:
        """Whether the old logprobs of a step's first mini-batch are those of its own pass in the update: the policy is
        still the old one then. Without a reference, a critic, or parts that are scored while others are drawn."""
        config = self.config
        alone = config.reference == "none" and config.critic == "none" and config.rollout.num_chunks == 1
        return alone and config.algorithm.old_logprobs == "recomputed"

    def is_due(self, every: int) -> bool:
        """Whether something done every so many steps, and after the last, is to be done now."""
        return self.step == self.config.train.steps or (every > 0 and self.step % every == 0)

    def draw(self) -> Iterator[list[Completion]]:
        """The completions of the next round of prompts, part by part, those of a prompt together; later rounds are
        begun as far ahead as rollout.max_staleness allows."""
        return self.rounds.next(self.step, self.config.train.steps)

    def settle(self) -> None:
        """Waits for what is being drawn ahead, unless it goes on with the next weights."""
        if not self.config.rollout.partial_rollouts:
            self.rounds.settle(self.step)

    def rest(self) -> None:
        """Has engines that share their GPU with a worker leave it to the worker, until the next push."""
        if self.config.rollout.placement == "colocated":
            self.fleet.sleep()

    def answer_greedily(self, prompts: Sequence[Prompt]) -> list[Completion]:
        """The likeliest completion of each prompt under the policy as it is; a collective call."""
        return self.fleet.finish(self.fleet.begin(prompts, [self.sampling.greedy], self.step), self.step)

    def judge(self, completions: Sequence[Completion], scorers: Mapping[str, Scorer]) -> list[ScoredCompletion]:
        """Each completion with its score."""
        settings = self.config.reward
        pattern = re.compile(settings.answer_pattern) if settings.answer_pattern else None
        texts = self.tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
        responses = [
            Response(c.prompt, text, functions.extract_answer(text, pattern), len(c.token_ids), c.finished)
            for c, text in zip(completions, texts, strict=True)
        ]
        # Once per replica: scorers may fail, or draw lots.
        scores = self.grid.broadcast_from_leader(
            scoring.score(responses, scorers, settings) if self.grid.is_tp_leader else None
        )
        names, rows = scores.by_function.keys(), zip(*scores.by_function.values(), strict=True)
        by_function = [dict(zip(names, row, strict=True)) for row in rows]
        columns = zip(completions, scores.total, scores.is_correct, by_function, strict=True)
        return [ScoredCompletion(*row) for row in columns]

    def penalized(self, judged: Sequence[ScoredCompletion]) -> list[ScoredCompletion]:
        """The same, what is taken off for the length taken off."""
        chosen, limit = self.config.algorithm, self.config.rollout.max_tokens
        lengths = torch.tensor([len(one.completion.token_ids) for one in judged])
        late = advantages.overlong_penalty(lengths, limit, chosen.overlong_buffer, chosen.overlong_penalty).tolist()
        unfinished = [chosen.missing_eos_penalty * (not one.completion.finished) for one in judged]
        return [replace(j, score=j.score - a - b) for j, a, b in zip(judged, late, unfinished, strict=True)]

    def importance(self, batch: Experience, cut: bool = True) -> Tensor:
        """Importance weight of each token, `[B, T]`; with `cut` false the plain ratio that it is made of."""
        chosen, old = self.config.algorithm, (batch.logprobs, batch.rollout_logprobs, batch.mask)
        if not cut:
            return importance_sampling.importance_weights(*old, "tis", 0.0, math.inf, chosen.rollout_correction_level)
        bounds = (chosen.rollout_correction_low, chosen.rollout_correction_high)
        return importance_sampling.importance_weights(
            *old, self.config.rollout_correction, *bounds, chosen.rollout_correction_level
        )

    def selection(self) -> Selection:
        """An empty one, of the groups that this replica trains on in a step."""
        train = self.config.train
        return Selection(
            wanted=train.prompts_per_step // self.grid.dp_size,
            samples=train.samples_per_prompt,
            filtered=self.config.algorithm.filter_groups,
            greedy=self.config.algorithm.estimator.needs_greedy,
            at_once=self.config.rollout.num_chunks > 1,
        )

    def wants_more(self, selection: Selection) -> bool:
        """Whether some rank has not yet all the groups that it trains on."""
        if selection.rounds == 0 or not selection.filtered:
            return selection.rounds == 0
        return self.largest([selection.missing])[0] > 0 and selection.rounds < self.config.algorithm.filter_rounds

    def experiences(self, judged: Sequence[ScoredCompletion]) -> list[Experience]:
        """Completions and their scores as tensors on this rank's device; none of none."""
        return [experience.build(judged, self.tokenizer.pad_token_id or 0).to(self.device)] if judged else []

    def answers(self, number: int) -> Experience:
        """This replica's share of the supervised rows of optimizer step `number`, cut at rollout.max_tokens."""
        assert self.supervised
        limit, count = self.config.rollout.max_tokens, self.config.data.ptx_batch
        per_step = self.config.train.ppo_epochs * self.config.train.num_minibatches
        self.supervised.position = (self.step * per_step + number) * count
        rows = []
        for prompt in self.supervised.next(count):
            ids = self.tokenizer(prompt.answer, add_special_tokens=False).input_ids
            ids = tuple([*ids, self.tokenizer.eos_token_id][:limit])
            rows.append(ScoredCompletion(Completion(prompt, 0, ids, (0.0,) * len(ids), True, self.step), 0.0, True, {}))
        return self.experiences(rows)[0]

    def before_update(self, batch: Experience) -> PolicyOutput:
        """What the old policy says of its responses, or what the engines said of each token when they drew it."""
        if self.config.algorithm.old_logprobs == "rollout":
            return PolicyOutput(batch.rollout_logprobs, -batch.rollout_logprobs, None)  # entropy is the mean of -log p
        scored: PolicyOutput = self.policy(*batch.inputs, self.sampling.temperature, True)
        return scored

    def reference_logprobs(self, batch: Experience) -> Tensor | None:
        """What the reference gives these responses; None without one."""
        temperature = self.sampling.temperature
        if self.copy is not None:
            return self.copy(*batch.inputs, temperature).logprobs
        if self.config.reference == "none":
            return None
        with lora.adapters_off(self.policy):
            return self.policy(*batch.inputs, temperature).logprobs

    def cut(self, batches: Sequence[Experience]) -> list[list[Experience]]:
        """The micro-batches of each batch: as many on every rank, since each forward pass gathers shards."""
        budget = self.config.train.micro_batch_tokens
        counts = self.largest([float(experience.micro_batch_count(batch, budget)) for batch in batches])
        cut = [experience.micro_batches(batch, int(count)) for batch, count in zip(batches, counts, strict=True)]
        for micro in (micro for micros in cut for micro in micros):
            _ = micro.places  # here, where nothing is queued on the GPU yet
        return cut

    def reshard(self) -> None:
        """Gives up what forward passes without a backward pass have left gathered of the models."""
        for part in (*(trained.model for trained in self.trained.values()), self.copy):
            if part is not None:
                fsdp.reshard(part)

    def reduce_gradients(self, now: bool) -> None:
        """Whether the next backward pass is the last before an optimizer step and reduces gradients over ranks; of a
        `scattered` model each pass does.

        Weights that come from no other rank are gathered, that is cast, once for all passes up to it.
        """
        for name, trained in self.trained.items():
            part = cast(FSDPModule, trained.model)
            part.set_requires_gradient_sync(now or name in self.scattered)
            if self.grid.dp_size == 1 and name not in self.config.model.offload:
                part.set_reshard_after_backward(now)

    def push(self, starting: bool = False) -> None:
        """Sends the policy to the engines; returns on every rank once they have it.

        Args:
            starting: engines may have to start first.
        """
        # At first what is drawn is of a run before, on the same engines.
        keep = self.config.rollout.partial_rollouts and not starting
        self.fleet.push(self.step, starting=starting, keep=keep)

    def update_average(self) -> None:
        """Moves the average of the policy's weights towards them, after an optimizer step."""
        if not self.average:
            return
        decay = self.config.train.ema_decay or 0.0
        for name, weight in self.policy.named_parameters():
            if name in self.average:
                self.average[name].mul_(decay).add_(weight.detach(), alpha=1 - decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it the policy's weights, here and in the engines, are the averages; a collective call."""
        weights = {name: p for name, p in self.policy.named_parameters() if name in self.average}
        kept = {name: p.detach().clone() for name, p in weights.items()}
        with torch.no_grad():
            for name, p in weights.items():
                p.copy_(self.average[name])
            self.push()
            yield
            for name, p in weights.items():
                p.copy_(kept[name])
            self.push()

    def summed(self, values: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Each value summed over all replicas; the same on every rank."""
        total = torch.tensor([float(value) for value in values.values()], dtype=torch.float64, device=self.device)
        return dict(zip(values, self.grid.all_reduce_sum(total).tolist(), strict=True))

    def largest(self, values: Sequence[float]) -> list[float]:
        """Each value's maximum over all ranks."""
        highest = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        return list(highest.tolist())

    def report(self, metrics: dict[str, float], samples: list[dict[str, Any]]) -> None:
        """The step's metrics to MLflow and Ray Train; when one is due, a checkpoint is begun beside training.

        Ray Train is told of a checkpoint with the first report after it has become whole.
        """
        last, news = self.is_stopping(), self.saver.finished_checkpoint()
        if news:
            metrics = metrics | {"time/checkpoint_write": news.seconds}
        self.evaluation |= {key: value for key, value in metrics.items() if key.startswith("eval/")}
        started = time.perf_counter()
        due = self.step > self._saved and (last or self.is_due(self.config.checkpoint.every))
        shards = checkpoint_files.copy_shards(self.trained, self.average) if due else {}
        if due and self.grid.is_tp_leader:  # neighbours have the same completions
            shards |= self.rounds.state()
        if due:
            self.saver.wait()  # for the one before
            metrics = metrics | {"time/checkpoint": time.perf_counter() - started}
        # Logged first: no checkpoint is ever ahead of the records.
        self.tracker.log_samples(samples, self.step)
        self.tracker.log(metrics, self.step)
        if due:
            self.tracker.flush()
            self.saver.save(shards, self.manifest(metrics))
            self._saved = self.step
        if last or not self.config.checkpoint.async_save:
            self.saver.wait()
            news = self.saver.finished_checkpoint() or news
        whole = ray.train.Checkpoint(news.folder.path, news.folder.filesystem) if news and not self.grid.rank else None
        ray_train.report(self.box, metrics | self.evaluation | {"step": self.step}, last, whole)

    def is_stopping(self) -> bool:
        """Whether this step is the last: all are done, or the driver asks for an end; the same on all ranks."""
        asked = self.grid.rank == 0 and ray_train.is_to_stop(self.box)
        self.stopping = self.step >= self.config.train.steps or self.largest([float(asked)])[0] > 0
        return self.stopping

    def close(self) -> None:
        """Gives back what outlives the objects: threads and process groups; what MLflow has not taken is kept."""
        self.saver.close()
        self.fleet.close()
        self.tracker.close(_PATIENCE_S)
        self.grid.close()

    def manifest(self, metrics: Mapping[str, float]) -> Manifest:
        """All state beside tensors. Nothing on a rank draws from its global random state, so none is kept."""
        return Manifest(
            rlx=__version__,
            step=self.step,
            ranks=self.grid.world_size,
            metrics=dict(metrics),
            tokens=self.tokens,
            kl=self.kl.state_dict(),
            scores=self.scores.state_dict(),
            cursor=self.rounds.prompts.cursor(self.rounds.position()),
            evaluation=self.evaluation,
            mlflow_run_id=self.tracker.run_id if self.grid.rank == 0 else None,
            config=self.config.model_dump(mode="json"),
            files={},
        )

    def restore(self) -> None:
        """Continues from the run's newest checkpoint that is whole; if there is none, begins where the config says."""
        if found := self.saver.newest_checkpoint(partial(ray_train.notify, self.box)):
            self._take(found)
        elif self.config.checkpoint.init_from:
            self._start_from(
                self.saver.verified_checkpoint(open_storage(self.config.checkpoint.init_from, create=False))
            )

    def _start_from(self, found: CheckpointEntry) -> None:
        if self.config.checkpoint.init_state == "all":
            self._take(found)
            return
        retry(partial(checkpoint_files.load_weights, found.files, self.trained), f"reading {found.folder.path}")
        self.average = initial_ema(self.config, self.policy)

    def _take(self, found: CheckpointEntry) -> None:
        assert found.manifest
        manifest = found.manifest
        load = partial(checkpoint_files.load_state, found.files, self.trained, self.average)
        retry(load, f"reading {found.folder.path}")
        self.step = self._saved = manifest.step
        self.tokens, self.metrics, self.evaluation = manifest.tokens, manifest.metrics, dict(manifest.evaluation)
        self.kl.load_state_dict(manifest.kl)
        self.scores.load_state_dict(manifest.scores)
        self.rounds.prompts.seek(manifest.cursor)
        retry(partial(self._take_rounds, found, manifest.dp_size), f"reading {found.folder.path}")

    def _take_rounds(self, found: CheckpointEntry, replicas: int) -> None:
        with checkpoint_files.CheckpointReader(found.files) as parts:
            self.rounds.restore(parts, self.step, replicas)


def initial_ema(config: RunConfig, policy: Any) -> dict[str, Tensor]:
    """The average of the policy's trained weights at the start, by name; empty if the config asks for none."""
    if config.train.ema_decay is None:
        return {}
    return {name: p.detach().clone() for name, p in policy.named_parameters() if p.requires_grad}
