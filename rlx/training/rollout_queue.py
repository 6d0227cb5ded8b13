"""Rounds of generation in the order in which they are trained on, begun up to so many steps ahead of training.

With `ahead` 0 a round is begun when it is needed, and its parts are handed out while the later ones are drawn. Rounds
that are whole go into checkpoints, so that a resumed run trains on the same completions; which engine draws what is
fleet's.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlx.data import stream
from rlx.rollout.base import Engines, PendingRollout
from rlx.storage.checkpoint_files import CheckpointReader, Shard
from rlx.types import Completion, Sampling

_COLUMNS = ("prompts", "versions", "lengths", "finished", "tokens", "logprobs")


@dataclass
class QueuedRollout:
    """A round of prompts on its way, in parts."""

    position: int  # of the prompt stream before its prompts were taken
    parts: list[PendingRollout]
    is_whole: bool = False  # all ranks are known to have all of theirs


@dataclass
class RolloutQueue:
    """One rank's; every rank makes the same calls in the same order."""

    fleet: Engines
    prompts: stream.PromptStream
    samplings: Sequence[Sampling]  # of each prompt one completion by each
    size: int  # prompts of a round, over all ranks
    parts: int  # that a round is handed out in
    ahead: int  # steps that a completion's weights may be older than those that are trained
    seconds: float = 0.0  # that the engines took for the rounds that were handed out since this was set to 0
    _begun: deque[QueuedRollout] = field(default_factory=deque, init=False)

    def next(self, step: int, steps: int) -> Iterator[list[Completion]]:
        """The completions of the next round, part by part, those of each prompt together.

        Args:
            step: steps trained, also the version of the weights that the engines hold.
            steps: at which training ends: nothing is begun that no step would train on.

        Raises:
            RuntimeError: a completion is older than allowed.
        """
        while len(self._begun) <= min(self.ahead, steps - step - 1):
            self._begun.append(self._new(step))
        round_ = self._begun.popleft()
        for part in round_.parts:
            completions = self.fleet.finish(part, step)
            oldest = min(completion.version for completion in completions)
            if step - oldest > self.ahead:
                raise RuntimeError(
                    f"step {step + 1}: weights of step {oldest} are too old by {step - oldest - self.ahead}"
                )
            yield completions
        self.seconds += max(part.seconds for part in round_.parts)

    def settle(self, step: int) -> None:
        """Waits for all that is being drawn; what no engine is left for is drawn later, with later weights."""
        for round_ in self._begun:
            round_.is_whole = all([self.fleet.wait(part, step) for part in round_.parts])

    def position(self) -> int:
        """Of the prompt stream, where a run would go on that has the rounds that are whole."""
        return next((one.position for one in self._begun if not one.is_whole), self.prompts.position)

    def state(self) -> dict[str, Shard]:
        """This rank's part of the rounds that are whole."""
        shards = {}
        for number, round_ in enumerate(itertools.takewhile(lambda one: one.is_whole, self._begun)):
            completions = [completion for part in round_.parts for completion in part.completions]
            columns = _columns(completions, self.samplings[0].max_tokens)
            for name, column in columns.items():
                rows, *rest = column.shape
                whole = (rows * self.prompts.ranks, *rest)
                shards[f"ahead.{number}.{name}"] = Shard(column, (rows * self.prompts.rank, *(0 for _ in rest)), whole)
            if self.prompts.rank == 0:
                shards[f"ahead.{number}.position"] = Shard(torch.tensor([round_.position]), (0,), (1,))
                asked = self._asked()
                shards[f"ahead.{number}.asked"] = Shard(asked, (0,), tuple(asked.shape))
        return shards

    def restore(self, parts: CheckpointReader, step: int, ranks: int) -> None:
        """Takes up the rounds of a checkpoint that are not too old for this run, and are what it would have asked for;
        the others will be drawn again.

        Args:
            ranks: with completions of their own, that the checkpoint was taken on.
        """
        number, found = 0, deque[QueuedRollout]()
        while f"ahead.{number}.position" in parts.names:
            position = int(parts.read_full(f"ahead.{number}.position"))
            columns = {name: parts.read_full(f"ahead.{number}.{name}") for name in _COLUMNS}
            is_ours = torch.equal(parts.read_full(f"ahead.{number}.asked"), self._asked())
            if not is_ours or number >= self.ahead or step + number - int(columns["versions"].min()) > self.ahead:
                self.prompts.position = position
                break
            found.append(QueuedRollout(position, [self._share(columns, ranks, step + number)], is_whole=True))
            number += 1
        self._begun = found

    def _new(self, step: int) -> QueuedRollout:
        position = self.prompts.position
        prompts = self.prompts.next(self.size)
        edges = [len(prompts) * i // self.parts for i in range(self.parts + 1)]
        shares = [prompts[start:stop] for start, stop in itertools.pairwise(edges)]
        return QueuedRollout(position, [self.fleet.begin(share, self.samplings, step) for share in shares])

    def _asked(self) -> Tensor:
        """What a round is made of, as numbers."""
        each = [(one.temperature, one.top_p, float(one.top_k), float(one.max_tokens)) for one in self.samplings]
        return torch.tensor([float(self.size), *itertools.chain.from_iterable(each)], dtype=torch.float64)

    def _share(self, columns: Mapping[str, Tensor], ranks: int, step: int) -> PendingRollout:
        """This rank's completions of a round that `ranks` ranks have written, one after the other."""
        group = len(self.samplings)
        # Rank r of R has every R-th prompt from the r-th on.
        order = torch.arange(len(columns["prompts"])).view(ranks, -1, group).transpose(0, 1).reshape(-1, group)
        rows = order[self.prompts.rank :: self.prompts.ranks].flatten()
        own = _completions({name: column[rows] for name, column in columns.items()}, self.prompts, group)
        groups: list[list[Completion] | None] = [own[i : i + group] for i in range(0, len(own), group)]
        return PendingRollout([one[0].prompt for one in groups if one], self.samplings, step, groups, [])


def _columns(completions: Sequence[Completion], width: int) -> dict[str, Tensor]:
    """Completions as tensors, a row each; see `_COLUMNS`."""
    tokens = torch.zeros(len(completions), width, dtype=torch.int32)
    logprobs = torch.zeros(len(completions), width, dtype=torch.float64)  # exactly what the engine said
    for row, completion in enumerate(completions):
        length = len(completion.token_ids)
        tokens[row, :length] = torch.tensor(completion.token_ids, dtype=torch.int32)
        logprobs[row, :length] = torch.tensor(completion.logprobs, dtype=torch.float64)
    plain = {
        "prompts": [completion.prompt.id for completion in completions],
        "versions": [completion.version for completion in completions],
        "lengths": [len(completion.token_ids) for completion in completions],
        "finished": [int(completion.finished) for completion in completions],
    }
    return {name: torch.tensor(column) for name, column in plain.items()} | {"tokens": tokens, "logprobs": logprobs}


def _completions(columns: Mapping[str, Tensor], prompts: stream.PromptStream, group: int) -> list[Completion]:
    """The completions in tensors, `group` of each prompt."""
    rows = zip(*(columns[name].tolist() for name in _COLUMNS), strict=True)
    asked = stream.prompts(prompts.table, columns["prompts"].tolist())
    return [
        Completion(prompt, row % group, tuple(tokens[:length]), tuple(logprobs[:length]), bool(finished), version)
        for row, (prompt, (_, version, length, finished, tokens, logprobs)) in enumerate(zip(asked, rows, strict=True))
    ]
