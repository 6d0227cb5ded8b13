"""Scores of completions: their texts, the answers in these, and what the reward functions of their prompts give.

Left out: the scores of a batch of responses (scoring.py), and penalties for length, which training subtracts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlx.config.sections.reward import RewardConfig
from rlx.mesh import Mesh
from rlx.rewards import functions, scoring
from rlx.types import Completion, Response, ScoredCompletion, Scorer


@dataclass(frozen=True)
class SourceRewards:
    """How completions of prompts from one source are scored."""

    reward: RewardConfig
    functions: Mapping[str, Scorer]


@dataclass(frozen=True)
class CompletionScorer:
    """Turns completions into scored completions: decodes them, finds the answers, calls the reward functions."""

    sources: Sequence[SourceRewards]  # by the number of the source
    tokenizer: Any
    mesh: Mesh

    def __call__(self, completions: Sequence[Completion]) -> list[ScoredCompletion]:
        """Each completion with its score; a collective call of a replica's ranks."""
        scored: dict[int, ScoredCompletion] = {}
        for number, source in enumerate(self.sources):
            own = [place for place, each in enumerate(completions) if each.prompt.source == number]
            if own:  # neighbours have the same completions
                scored |= zip(own, self._of_source(source, [completions[place] for place in own]), strict=True)
        return [scored[place] for place in range(len(completions))]

    def _of_source(self, source: SourceRewards, completions: Sequence[Completion]) -> list[ScoredCompletion]:
        texts = self.tokenizer.batch_decode([c.said for c in completions], skip_special_tokens=True)
        answers = functions.extract_answers(texts, source.reward.answer_pattern)
        responses = [
            Response(c.prompt, text, answer, c.num_drawn, c.finished, c.episode.score if c.episode else None)
            for c, text, answer in zip(completions, texts, answers, strict=True)
        ]
        # One rank of a replica scores for all: a reward function may fail, or give random scores.
        is_leader = self.mesh.is_leader
        scores = self.mesh.broadcast_from_leader(
            scoring.score(responses, source.functions, source.reward) if is_leader else None
        )
        rows = zip(*scores.by_function.values(), strict=True)
        by_function = [dict(zip(scores.by_function, row, strict=True)) for row in rows]
        pairs = zip(scores.is_correct, completions, strict=True)
        correct = [is_correct and not each.has_failed for is_correct, each in pairs]
        columns = zip(completions, scores.total, correct, by_function, strict=True)
        said = zip(texts, answers, strict=True)
        return [
            ScoredCompletion(*row, text=text, answer=answer) for row, (text, answer) in zip(columns, said, strict=True)
        ]
