"""Scores of completions: their texts, the answers in these, and what the reward functions of their prompts give.

Left out: the scores of a batch of responses (scoring.py), and penalties for length, which training subtracts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
class _Judged:
    """The completions of one source, read and scored."""

    places: list[int]  # among all completions
    completions: list[Completion]
    texts: list[str]
    answers: list[str | None]
    scores: scoring.Scores | None  # None: another rank scores for the replica


@dataclass(frozen=True)
class PendingScores:
    """Completions that a thread of this process scores."""

    mesh: Mesh
    judged: Future[tuple[list[_Judged], float]]

    def result(self) -> tuple[list[ScoredCompletion], float]:
        """Waits; each completion with its score, and the seconds that scoring took. A collective call of a replica's
        ranks.

        Raises:
            Exception: as `scoring.score`.
        """
        parts, seconds = self.judged.result()
        scored: dict[int, ScoredCompletion] = {}
        for part in parts:  # neighbours have the same completions, so as many parts
            scored |= zip(part.places, self._scored(part), strict=True)
        return [scored[place] for place in range(len(scored))], seconds

    def _scored(self, part: _Judged) -> list[ScoredCompletion]:
        completions, texts, answers = part.completions, part.texts, part.answers
        scores = self.mesh.broadcast_from_leader(part.scores)
        rows = zip(*scores.by_function.values(), strict=True)
        by_function = [dict(zip(scores.by_function, row, strict=True)) for row in rows]
        pairs = zip(scores.is_correct, completions, strict=True)
        correct = [is_correct and not each.has_failed for is_correct, each in pairs]
        columns = zip(completions, scores.total, correct, by_function, strict=True)
        said = zip(texts, answers, strict=True)
        return [
            ScoredCompletion(*row, text=text, answer=answer) for row, (text, answer) in zip(columns, said, strict=True)
        ]


@dataclass(frozen=True)
class CompletionScorer:
    """Turns completions into scored completions: decodes them, finds the answers, calls the reward functions."""

    sources: Sequence[SourceRewards]  # by the number of the source
    tokenizer: Any
    mesh: Mesh

    def __call__(self, completions: Sequence[Completion]) -> list[ScoredCompletion]:
        """Each completion with its score; a collective call of a replica's ranks."""
        return self.begin(completions).result()[0]

    def begin(self, completions: Sequence[Completion]) -> PendingScores:
        """Begins to score completions in a thread, so that the models may compute meanwhile."""
        thread = ThreadPoolExecutor(1, "rlx-scores")
        judged = thread.submit(self._judged, completions)
        thread.shutdown(wait=False)  # it ends with this work
        return PendingScores(self.mesh, judged)

    def _judged(self, completions: Sequence[Completion]) -> tuple[list[_Judged], float]:
        """The completions of each source that has some, and the seconds that this took."""
        started, parts = time.perf_counter(), list[_Judged]()
        for number, source in enumerate(self.sources):
            places = [place for place, each in enumerate(completions) if each.prompt.source == number]
            if places:
                parts.append(self._of_source(source, places, [completions[place] for place in places]))
        return parts, time.perf_counter() - started

    def _of_source(self, source: SourceRewards, places: list[int], completions: list[Completion]) -> _Judged:
        texts = self.tokenizer.batch_decode([c.said for c in completions], skip_special_tokens=True)
        answers = functions.extract_answers(texts, source.reward.answer_pattern)
        responses = [
            Response(c.prompt, text, answer, c.num_drawn, c.finished, c.episode.score if c.episode else None)
            for c, text, answer in zip(completions, texts, answers, strict=True)
        ]
        # One rank of a replica scores for all: a reward function may fail, or give random scores.
        scores = scoring.score(responses, source.functions, source.reward) if self.mesh.is_leader else None
        return _Judged(places, completions, texts, answers, scores)
