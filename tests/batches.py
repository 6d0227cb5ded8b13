"""Batches of completions whose scores a test knows."""

from collections.abc import Sequence

from rlx.training.experience import RolloutBatch, build_batch
from rlx.types import ScoredCompletion


def scored_batch(scored: Sequence[ScoredCompletion], pad_id: int, mask_truncated: bool = False) -> RolloutBatch:
    """The completions as `build_batch` makes them, with their scores."""
    return build_batch([each.completion for each in scored], pad_id, mask_truncated).with_scores(scored)
