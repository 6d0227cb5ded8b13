"""One rank's live objects: built from the config, restored from a checkpoint, and what they say to other ranks.

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
from pathlib import Path
from typing import Any, cast

import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from rlx import (
    __version__,
    adaptive,
    algorithms,
    checkpoint,
    controller,
    data,
    experience,
    model,
    remote_reward,
    reward_model,
    rewards,
    roles,
    tasks,
)
from rlx.archive import Entry, Manifest
from rlx.checkpoint import Trained
from rlx.config import ConfigError, RunConfig
from rlx.experience import Selection
from rlx.fleet import Fleet
from rlx.rollout.direct import Direct
from rlx.rollout.pool import Rollouts
from rlx.saver import Retention, Saver
from rlx.storage import Storage, open_storage, patiently
from rlx.tracker import Tracker
from rlx.types import Completion, Experience, Judged, Prompt, Response, Sampling, Scorer

_PATIENCE_S = 5.0  # with MLflow, at the end of a run

Sums = dict[str, float | Tensor]
"""statistics of this rank, to be summed over ranks and then divided"""


@dataclass
class Run:
    """What a rank works with, and what of its state a checkpoint keeps."""

    config: RunConfig
    device: torch.device
    rank: int
    ranks: int
    trained: dict[str, Trained]  # the policy, and the critic if it is a model of its own
    average: dict[str, Tensor]  # of the policy's weights, by name; empty if none is kept
    rates: dict[str, list[float]]  # of each model's parameter groups, the learning rate before the schedule
    copy: Any  # the frozen reference, if it is a model of its own
    prompts: data.PromptStream
    supervised: data.PromptStream | None  # prompts whose answers are learnt beside the reward
    held_out: list[Prompt]  # this rank's share
    fleet: Fleet
    sampling: Sampling
    tokenizer: Any
    scorers: dict[str, Scorer]
    held_out_scorers: dict[str, Scorer]
    tracker: Tracker
    saver: Saver
    box: str  # where the driver listens
    kl: adaptive.AdaptiveKL
    scores: adaptive.RunningScores
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

    def is_due(self, every: int) -> bool:
        """Whether something done every so many steps, and after the last, is to be done now."""
        return self.step == self.config.train.steps or (every > 0 and self.step % every == 0)

    def draw(self, prompts: Sequence[Prompt]) -> list[Completion]:
        """The completions of each prompt, those of one together; the greedy one last if the estimator asks for it."""
        samples = self.config.train.samples_per_prompt
        drawn = self.generate(prompts, self.sampling, samples)
        if not self.needs_greedy:
            return drawn
        likeliest = self.generate(prompts, self.greedy, 1)
        groups = (drawn[i * samples : (i + 1) * samples] for i in range(len(prompts)))
        return [completion for group, last in zip(groups, likeliest, strict=True) for completion in (*group, last)]

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, samples: int) -> list[Completion]:
        """`samples` completions of each prompt under the policy as it is; a collective call."""
        return self.fleet.generate(prompts, sampling, samples, self.step, self.push)

    @property
    def needs_greedy(self) -> bool:
        return self.config.algorithm.advantage == "remax"

    @property
    def greedy(self) -> Sampling:
        return replace(self.sampling, temperature=0.0, top_p=1.0, top_k=-1)

    def judge(self, completions: Sequence[Completion], scorers: Mapping[str, Scorer]) -> list[Judged]:
        """Each completion with its score."""
        settings = self.config.reward
        pattern = re.compile(settings.answer_pattern) if settings.answer_pattern else None
        texts = self.tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
        responses = [
            Response(c.prompt, text, rewards.extract_answer(text, pattern), len(c.token_ids), c.finished)
            for c, text in zip(completions, texts, strict=True)
        ]
        scores = rewards.score(responses, scorers, settings)
        parts = [dict(zip(scores.parts, row, strict=True)) for row in zip(*scores.parts.values(), strict=True)]
        return [Judged(*one) for one in zip(completions, scores.total, scores.right, parts, strict=True)]

    def penalized(self, judged: Sequence[Judged]) -> list[Judged]:
        """The same, what is taken off for the length taken off."""
        chosen, limit = self.config.algorithm, self.config.rollout.max_tokens
        lengths = torch.tensor([len(one.completion.token_ids) for one in judged])
        late = algorithms.overlong_penalty(lengths, limit, chosen.overlong_buffer, chosen.overlong_penalty).tolist()
        unfinished = [chosen.missing_eos_penalty * (not one.completion.finished) for one in judged]
        return [replace(j, score=j.score - a - b) for j, a, b in zip(judged, late, unfinished, strict=True)]

    def importance(self, batch: Experience, cut: bool = True) -> Tensor:
        """Importance weight of each token, `[B, T]`; with `cut` false the plain ratio that it is made of."""
        chosen, old = self.config.algorithm, (batch.logprobs, batch.rollout_logprobs, batch.mask)
        if not cut:
            return algorithms.importance_weights(*old, "tis", 0.0, math.inf, chosen.importance_level)
        bounds = (chosen.importance_low, chosen.importance_high)
        return algorithms.importance_weights(*old, chosen.importance, *bounds, chosen.importance_level)

    def selection(self) -> Selection:
        """An empty one, of the groups that this rank trains on in a step."""
        train = self.config.train
        return Selection(
            wanted=train.prompts_per_step // self.ranks,
            samples=train.samples_per_prompt,
            filtered=self.config.algorithm.filter_groups,
            greedy=self.needs_greedy,
        )

    def wants_more(self, selection: Selection) -> bool:
        """Whether some rank has not yet all the groups that it trains on."""
        if selection.rounds == 0 or not selection.filtered:
            return selection.rounds == 0
        return self.largest([selection.missing])[0] > 0 and selection.rounds < self.config.algorithm.filter_rounds

    def experience(self, judged: Sequence[Judged]) -> Experience:
        """Completions and their scores as tensors on this rank's device."""
        return experience.build(judged, self.tokenizer.pad_token_id or 0).to(self.device)

    def answers(self, number: int) -> Experience:
        """This rank's share of the supervised rows of the step's optimizer step `number`, cut at rollout.max_tokens."""
        assert self.supervised
        limit, count = self.config.rollout.max_tokens, self.config.data.ptx_batch
        per_step = self.config.train.epochs * self.config.train.minibatches
        self.supervised.position = (self.step * per_step + number) * count
        rows = []
        for prompt in self.supervised.next(count):
            ids = self.tokenizer(prompt.answer, add_special_tokens=False).input_ids
            ids = tuple([*ids, self.tokenizer.eos_token_id][:limit])
            rows.append(Judged(Completion(prompt, 0, ids, (0.0,) * len(ids), True, self.step), 0.0, True, {}))
        return self.experience(rows)

    def reference_logprobs(self, inputs: tuple[Tensor, Tensor, int]) -> Tensor | None:
        """What the reference gives these responses; None without one."""
        temperature = self.sampling.temperature
        if self.copy is not None:
            return self.copy(*inputs, temperature).logprobs
        if self.config.reference == "none":
            return None
        with model.adapters_off(self.policy):
            return self.policy(*inputs, temperature).logprobs

    def cut(self, batches: Sequence[Experience]) -> list[list[Experience]]:
        """The micro-batches of each batch: as many on every rank, since each forward pass gathers shards."""
        budget = self.config.train.micro_batch_tokens
        counts = self.largest([float(experience.micro_batch_count(batch, budget)) for batch in batches])
        return [experience.micro_batches(batch, int(count)) for batch, count in zip(batches, counts, strict=True)]

    def reshard(self) -> None:
        """Gives up what forward passes have gathered of the models: without a backward pass FSDP keeps the outermost
        part, and its weights are then no shards of the ones that are trained."""
        for part in (*(trained.model for trained in self.trained.values()), self.copy):
            if part is not None:
                cast(FSDPModule, part).reshard()

    def reduce_gradients(self, now: bool) -> None:
        """Whether the next backward pass reduces gradients over ranks, or keeps them for a later one."""
        for trained in self.trained.values():
            cast(FSDPModule, trained.model).set_requires_gradient_sync(now)

    def push(self, timeout_s: float | None = None) -> None:
        """Sends the policy to the engines; returns on every rank once they have it.

        Args:
            timeout_s: longest wait for an engine; None: it may have to start first.
        """
        alone = self.config.model.lora_sync == "adapter"
        weights = model.adapter_weights(self.policy) if alone else model.engine_weights(self.policy)
        starting = timeout_s is None
        self.fleet.push(weights, self.step, timeout_s or self.config.rollout.timeout_s, starting)

    def update_average(self) -> None:
        """Moves the average of the policy's weights towards them, after an optimizer step."""
        decay = self.config.train.ema_decay or 0.0
        for name, weight in self.policy.named_parameters():
            if name in self.average:
                self.average[name].mul_(decay).add_(weight.detach(), alpha=1 - decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it the policy's weights, here and in the engines, are the averages; a collective call."""
        timeout_s = self.config.rollout.sync_timeout_s
        weights = {name: p for name, p in self.policy.named_parameters() if name in self.average}
        kept = {name: p.detach().clone() for name, p in weights.items()}
        with torch.no_grad():
            for name, p in weights.items():
                p.copy_(self.average[name])
            self.push(timeout_s)
            yield
            for name, p in weights.items():
                p.copy_(kept[name])
            self.push(timeout_s)

    def summed(self, values: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Each value summed over all ranks."""
        total = torch.tensor([float(value) for value in values.values()], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return dict(zip(values, total.tolist(), strict=True))

    def largest(self, values: Sequence[float]) -> list[float]:
        """Each value's maximum over all ranks."""
        highest = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        return list(highest.tolist())

    def report(self, metrics: dict[str, float], samples: list[dict[str, Any]]) -> None:
        """The step's metrics to MLflow and Ray Train; when one is due, a checkpoint is begun beside training.

        Ray Train is told of a checkpoint with the first report after it has become whole.
        """
        last, news = self.is_stopping(), self.saver.news()
        if news:
            metrics = metrics | {"time/checkpoint_write": news.seconds}
        self.evaluation |= {key: value for key, value in metrics.items() if key.startswith("eval/")}
        started = time.perf_counter()
        due = self.step > self._saved and (last or self.is_due(self.config.checkpoint.every))
        shards = checkpoint.staged(self.trained, self.average) if due else {}
        if due:
            self.saver.wait()  # for the one before
            metrics = metrics | {"time/checkpoint": time.perf_counter() - started}
        # Logged first: no checkpoint is ever ahead of the records.
        self.tracker.log_samples(samples, self.step)
        self.tracker.log(metrics, self.step)
        if due:
            self.tracker.settle()
            self.saver.save(shards, self.manifest(metrics))
            self._saved = self.step
        if last or not self.config.checkpoint.beside:
            self.saver.wait()
            news = self.saver.news() or news
        whole = ray.train.Checkpoint(news.place.path, news.place.filesystem) if news and not self.rank else None
        controller.report(self.box, metrics | self.evaluation | {"step": self.step}, last, whole)

    def is_stopping(self) -> bool:
        """Whether this step is the last: all are done, or the driver asks for an end; the same on all ranks."""
        asked = self.rank == 0 and controller.is_to_stop(self.box)
        self.stopping = self.step >= self.config.train.steps or self.largest([float(asked)])[0] > 0
        return self.stopping

    def close(self) -> None:
        """Gives back what outlives the objects: threads and a process group; what MLflow has not taken is kept."""
        self.saver.close()
        self.fleet.close()
        self.tracker.close(_PATIENCE_S)

    def manifest(self, metrics: Mapping[str, float]) -> Manifest:
        """All state beside tensors. Nothing on a rank draws from its global random state, so none is kept."""
        return Manifest(
            rlx=__version__,
            step=self.step,
            ranks=self.ranks,
            metrics=dict(metrics),
            tokens=self.tokens,
            kl=self.kl.state_dict(),
            scores=self.scores.state_dict(),
            cursor=self.prompts.cursor(),
            evaluation=self.evaluation,
            mlflow_run_id=self.tracker.run_id if self.rank == 0 else None,
            config=self.config.model_dump(mode="json"),
            files={},
        )

    def restore(self) -> None:
        """Continues from the run's newest checkpoint that is whole; if there is none, begins where the config says."""
        if found := self.saver.newest(partial(controller.say, self.box)):
            self._take(found)
        elif self.config.checkpoint.start_from:
            self._start_from(self.saver.sound(open_storage(self.config.checkpoint.start_from, create=False)))

    def _start_from(self, found: Entry) -> None:
        if self.config.checkpoint.start_with == "state":
            self._take(found)
            return
        patiently(partial(checkpoint.load_weights, found.files, self.trained), f"reading {found.place.path}")
        self.average = roles.average(self.config, self.policy)

    def _take(self, found: Entry) -> None:
        assert found.manifest
        manifest = found.manifest
        load = partial(checkpoint.load, found.files, self.trained, self.average)
        patiently(load, f"reading {found.place.path}")
        self.step = self._saved = manifest.step
        self.tokens, self.metrics, self.evaluation = manifest.tokens, manifest.metrics, dict(manifest.evaluation)
        self.kl.load_state_dict(manifest.kl)
        self.scores.load_state_dict(manifest.scores)
        self.prompts.seek(manifest.cursor)


def assemble(setup: Mapping[str, Any]) -> Run:
    """This rank's objects, continued from the newest checkpoint if the run has one.

    Args:
        setup: `config` tree, `model` folder, `engines` and `reward_models` handles, `tracking` (MLflow's address),
            `folder` (the run's storage), `box` (see controller).
    """
    config = RunConfig.model_validate(setup["config"])
    context = ray.train.get_context()
    if not setup.get("examine"):
        _check_shared(setup["folder"])
    rank, ranks = context.get_world_rank(), context.get_world_size()
    device = ray.train.torch.get_device()
    _forget_peak(device)
    trained, reference = roles.models(config, setup["model"], init_device_mesh(device.type, (ranks,)))
    tokenizer = data.load_tokenizer(setup["model"], config.model.trust_remote_code)
    held_out = data.read_shard("held_out")
    recorded, say = rank == 0 and not setup.get("examine"), partial(controller.say, setup["box"])
    settings, rollout, source, chosen = config.algorithm, config.rollout, config.data, config.checkpoint
    remote = _remote_scorers(config, setup["reward_models"], rank)
    run = Run(
        config=config,
        device=device,
        rank=rank,
        ranks=ranks,
        trained=trained,
        average=roles.average(config, trained["policy"].model),
        rates=roles.learning_rates(config, trained),
        copy=reference,
        prompts=data.PromptStream(data.read_shard("train"), config.seed, rank, ranks),
        supervised=data.PromptStream(data.read_shard("ptx"), config.seed, rank, ranks) if source.ptx_source else None,
        held_out=data.prompts(held_out, range(rank, len(held_out), ranks)),
        fleet=_fleet(config, setup, rank, ranks, device),
        sampling=Sampling(
            rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_tokens, (tokenizer.eos_token_id,)
        ),
        tokenizer=tokenizer,
        scorers=_scorers(config, source.seed, source.size) | remote,
        held_out_scorers=_scorers(config, config.eval.seed, config.eval.size) | remote,
        tracker=Tracker(setup["tracking"], setup["folder"], "rank_0" if recorded else None, say),
        saver=Saver(setup["folder"], Retention(chosen.keep, chosen.best_by, chosen.best_mode)),
        box=setup["box"],
        kl=adaptive.AdaptiveKL(settings.kl_coef, settings.kl_target, settings.kl_horizon),
        scores=adaptive.RunningScores(),
    )
    run.restore()
    return run


def _forget_peak(device: torch.device) -> None:
    """Has peak memory counted from here on: this process may have done another run before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")


def _check_shared(folder: Storage) -> None:
    """ConfigError if this worker's node does not see the run's folder that the driver has made."""
    if not patiently((folder / "run.json").exists, f"reading {folder.path}"):
        node = ray.util.get_node_ip_address()
        raise ConfigError(
            f"storage: {folder.path} is not there on node {node}: name a folder that all nodes have mounted, or s3"
        )


def _fleet(config: RunConfig, setup: Mapping[str, Any], rank: int, ranks: int, device: torch.device) -> Fleet:
    engines = setup["engines"]
    # Adapters go to an engine's own process, which writes them down for vLLM.
    alone = config.model.lora_sync == "adapter"
    return Fleet(
        rollouts=Rollouts(engines, config.seed, rank, config.rollout.timeout_s, config.rollout.sync_timeout_s),
        rank=rank,
        ranks=ranks,
        dtype=getattr(torch, config.model.dtype),
        retries=config.rollout.retries,
        say=partial(controller.say, setup["box"]),
        direct=None if alone else Direct(rank, ranks, device, engines, config.rollout.transport),
    )


def _scorers(config: RunConfig, seed: int, size: int) -> dict[str, Scorer]:
    return rewards.scorers(config.reward, tasks.answer_checker(config.data, seed, size))


def _remote_scorers(config: RunConfig, models: Sequence[Any], rank: int) -> dict[str, Scorer]:
    settings = config.reward
    remote: dict[str, Scorer] = {}
    if settings.model:
        patient = reward_model.ModelReward(models, config.rollout.timeout_s, rank)
        patient([])  # until they are loaded
        remote["model"] = replace(patient, timeout_s=settings.timeout_s)
    if settings.url:
        remote["url"] = remote_reward.RemoteReward.from_config(settings)
    return remote
