"""Rounds of generation, in the order of training, which begin up to `max_staleness` steps ahead of training.

With `max_staleness` 0 a round begins once the engines have the weights that it is drawn with, at the latest when it is
needed, and its chunks are handed out while later ones are generated.
Rounds that were waited for go into checkpoints, so that a resumed run trains on the same completions. Left out: which
engine generates what (rlx.rollout), and scores (collector).
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rlx.data.stream import PromptStream
from rlx.rollout.base import Engines, PendingRollout
from rlx.storage.checkpoint_files import CheckpointReader, Shard
from rlx.storage.checkpoint_keys import PROMPT_SUCCESS, queued_round
from rlx.types import Completion, Episode, Sampling

_COLUMNS = ("prompts", "versions", "lengths", "finished", "tokens", "logprobs")
_EPISODES = "episodes_"
"""what the name of a rank's episodes begins with; its number follows"""


@dataclass
class QueuedRound:
    """One round of prompts, in chunks that are generated or being generated."""

    position: int  # of the prompt stream before this round's prompts
    chunks: list[PendingRollout]
    step: int  # steps trained before the one that trains on it
    is_complete: bool = False  # all ranks are known to have all of their completions: `wait` has asked


def reports_logprobs(step: int, every: int) -> bool:
    """Whether the engines report log-probabilities of completions that are drawn after so many steps."""
    return step % every == 0


@dataclass
class RolloutQueue:
    """One rank's rounds; every rank makes the same calls in the same order."""

    engines: Engines
    prompts: PromptStream
    samplings: Callable[[int], Sequence[Sampling]]  # by steps trained before: a prompt gets one completion by each
    prompts_per_step: int  # of a round, over all replicas
    num_chunks: int  # number of chunks in which a round is handed out
    max_staleness: int  # steps that a completion's weights may be older than the weights that train on it
    logprobs_every: int = 1  # steps between those of whose completions the engines report log-probabilities
    environment: str = ""  # the settings of an environment that decide what its episodes are
    seconds: float = 0.0  # that the engines took for the round handed out last
    _rounds: deque[QueuedRound] = field(default_factory=deque, init=False)

    def begin(self, step: int, steps: int) -> None:
        """Begins the next round, and later ones as far ahead as they may be, unless they have begun; does not wait.

        Args:
            step: steps trained so far; also the version of the weights that the engines hold.
            steps: the step at which training ends; no round begins that no step would train on.
        """
        while len(self._rounds) <= min(self.max_staleness, steps - step - 1):
            self._rounds.append(self._begin(step, step + len(self._rounds)))

    def next(self, step: int, steps: int) -> Iterator[list[Completion]]:
        """The completions of the next round, chunk by chunk, those of a prompt together; the arguments are `begin`'s.

        Raises:
            RuntimeError: a completion is older than `max_staleness` allows.
        """
        self.begin(step, steps)
        current = self._rounds.popleft()
        for chunk in current.chunks:
            completions = self.engines.finish(chunk, step)
            oldest = min(completion.version for completion in completions)
            if step - oldest > self.max_staleness:
                excess = step - oldest - self.max_staleness
                raise RuntimeError(f"step {step + 1}: weights of step {oldest} are too old by {excess}")
            yield completions
        self.seconds = max(chunk.seconds for chunk in current.chunks)

    def wait(self, step: int) -> None:
        """Waits for all rounds that have begun.

        If no engine is left, the missing completions are generated later, with newer weights.
        """
        for queued in self._rounds:
            queued.is_complete = all([self.engines.wait(chunk, step) for chunk in queued.chunks])

    def position(self) -> int:
        """The position in the prompt stream at which a resumed run continues after the complete rounds."""
        return next((queued.position for queued in self._rounds if not queued.is_complete), self.prompts.position)

    def state(self) -> dict[str, Shard]:
        """This rank's part of the complete rounds, and a curriculum's estimates, as tensors for a checkpoint."""
        shards = {}
        if self.prompts.success is not None and self.prompts.rank == 0:
            estimates = torch.from_numpy(self.prompts.success.copy())
            shards[PROMPT_SUCCESS] = Shard(estimates, (0,), tuple(estimates.shape))
        for number, queued in enumerate(itertools.takewhile(lambda queued: queued.is_complete, self._rounds)):
            completions = [completion for chunk in queued.chunks for completion in chunk.completions]
            for name, column in _columns(completions, self.samplings(queued.step)[0].max_tokens).items():
                rows, *rest = column.shape
                offset = (rows * self.prompts.rank, *(0 for _ in rest))
                shards[queued_round(number, name)] = Shard(column, offset, (rows * self.prompts.ranks, *rest))
            if completions[0].episode:
                stored = _as_bytes(completions)
                name = queued_round(number, f"{_EPISODES}{self.prompts.rank}")
                shards[name] = Shard(stored, (0,), tuple(stored.shape))
            if self.prompts.rank == 0:
                shards[queued_round(number, "position")] = Shard(torch.tensor([queued.position]), (0,), (1,))
                request = self._request(queued.step)
                shards[queued_round(number, "asked")] = Shard(request, (0,), tuple(request.shape))
        return shards

    def restore(self, reader: CheckpointReader, step: int, replicas: int) -> None:
        """Restores a checkpoint's rounds that are fresh enough and were sampled with the same settings.

        The other rounds are generated again.

        Args:
            step: of the checkpoint.
            replicas: that the checkpoint was written on.
        """
        if self.prompts.success is not None and PROMPT_SUCCESS in reader.names:
            self.prompts.success[:] = reader.read_full(PROMPT_SUCCESS).numpy()
        number, restored = 0, deque[QueuedRound]()
        while queued_round(number, "position") in reader.names:
            position = int(reader.read_full(queued_round(number, "position")))
            columns = {name: reader.read_full(queued_round(number, name)) for name in _COLUMNS}
            is_same = torch.equal(reader.read_full(queued_round(number, "asked")), self._request(step + number))
            staleness = step + number - int(columns["versions"].min())
            if not is_same or number >= self.max_staleness or staleness > self.max_staleness:
                self.prompts.position = position
                break
            names = [queued_round(number, f"{_EPISODES}{rank}") for rank in range(replicas)]
            stored = [_of_bytes(reader.read_full(name)) for name in names if name in reader.names]
            chunk = self._own_share(columns, replicas, step + number, [each for part in stored for each in part])
            restored.append(QueuedRound(position, [chunk], step + number, is_complete=True))
            number += 1
        self._rounds = restored

    def _begin(self, step: int, trained_after: int) -> QueuedRound:
        """The next round, drawn with the weights of `step` as the step after `trained_after` will score it."""
        position = self.prompts.position
        prompts = self.prompts.next(self.prompts_per_step)
        edges = [len(prompts) * i // self.num_chunks for i in range(self.num_chunks + 1)]
        chunks = [prompts[start:stop] for start, stop in itertools.pairwise(edges)]
        reported = reports_logprobs(step, self.logprobs_every)
        samplings = [replace(each, logprobs=each.logprobs and reported) for each in self.samplings(trained_after)]
        return QueuedRound(position, [self.engines.begin(chunk, samplings, step) for chunk in chunks], trained_after)

    def _request(self, step: int) -> Tensor:
        """The settings that the completions of a step's round depend on, as numbers `[1 + S]` of S samplings, and one
        more of an environment."""
        each = [repr(one) for one in self.samplings(step)] + ([self.environment] if self.environment else [])
        numbers = [float(zlib.crc32(text.encode())) for text in each]
        return torch.tensor([float(self.prompts_per_step), *numbers], dtype=torch.float64)

    def _own_share(
        self, columns: Mapping[str, Tensor], replicas: int, step: int, stored: Sequence[_StoredEpisode] = ()
    ) -> PendingRollout:
        """This replica's completions of a round that `replicas` replicas wrote, one after the other.

        Args:
            stored: the episode of each completion in the columns, if they are episodes.
        """
        samplings = self.samplings(step)
        group = len(samplings)
        # Replica r of R has every R-th prompt from the r-th on.
        order = torch.arange(len(columns["prompts"])).view(replicas, -1, group).transpose(0, 1).reshape(-1, group)
        rows = order[self.prompts.rank :: self.prompts.ranks].flatten()
        completions = _completions({name: column[rows] for name, column in columns.items()}, self.prompts, group)
        if stored:
            completions = [
                replace(each, prompt=replace(each.prompt, token_ids=tuple(own.opening)), episode=own.episode)
                for each, own in zip(completions, [stored[row] for row in rows.tolist()], strict=True)
            ]
        groups: list[list[Completion] | None] = [completions[i : i + group] for i in range(0, len(completions), group)]
        return PendingRollout([each[0].prompt for each in groups if each], samplings, step, groups, [])


@dataclass(frozen=True, slots=True)
class _StoredEpisode:
    """An episode in a checkpoint, beside the tensors of its round."""

    opening: tuple[int, ...]  # tokens of the environment's first messages
    episode: Episode


def _as_bytes(completions: Sequence[Completion]) -> Tensor:
    """The episodes of completions as JSON, `[N]` uint8: an environment need not be asked again."""
    rows = [(each.prompt.token_ids, each.episode.as_json()) for each in completions if each.episode]
    return torch.frombuffer(bytearray(json.dumps(rows).encode()), dtype=torch.uint8).clone()


def _of_bytes(stored: Tensor) -> list[_StoredEpisode]:
    """Reads what `_as_bytes` gives, `[N]` uint8."""
    rows = json.loads(bytes(stored.tolist()))
    return [_StoredEpisode(tuple(opening), Episode.of_json(episode)) for opening, episode in rows]


def _columns(completions: Sequence[Completion], width: int) -> dict[str, Tensor]:
    """Completions as tensors with one row each, `[B]` or `[B, width]`; see `_COLUMNS`."""
    tokens = torch.zeros(len(completions), width, dtype=torch.int32)
    logprobs = torch.zeros(len(completions), width, dtype=torch.float64)  # exactly what the engine reported
    for row, completion in enumerate(completions):
        length = len(completion.token_ids)
        tokens[row, :length] = torch.tensor(completion.token_ids, dtype=torch.int32)
        if completion.logprobs:  # a greedy completion has none
            logprobs[row, :length] = torch.tensor(completion.logprobs, dtype=torch.float64)
    plain = {
        "prompts": [completion.prompt.id for completion in completions],
        "versions": [completion.version for completion in completions],
        "lengths": [len(completion.token_ids) for completion in completions],
        "finished": [int(completion.finished) for completion in completions],
    }
    return {name: torch.tensor(column) for name, column in plain.items()} | {"tokens": tokens, "logprobs": logprobs}


def _completions(columns: Mapping[str, Tensor], prompts: PromptStream, group: int) -> list[Completion]:
    """The completions in a round's tensors, `group` of each prompt."""
    rows = zip(*(columns[name].tolist() for name in _COLUMNS), strict=True)
    requested = prompts.with_ids(columns["prompts"].tolist())
    return [
        Completion(prompt, row % group, tuple(tokens[:length]), tuple(logprobs[:length]), bool(finished), version)
        for row, (prompt, (_, version, length, finished, tokens, logprobs)) in enumerate(
            zip(requested, rows, strict=True)
        )
    ]
