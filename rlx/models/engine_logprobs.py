"""The distribution from which an engine draws a token, made by hand from the model's logits and the sampling options.

The doctor compares engines with it. Training does not use it: it compares engines with softmax(logits / temperature),
and corrects the difference by importance weights. Order of the steps and meaning of the options: vLLM 0.24 and 0.32,
v1/sample/sampler.py. V is the vocabulary. Left out: the logits themselves (policy).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rlx.models.policy import ResponseTokens
from rlx.types import Sampling


@dataclass
class EngineScorer:
    """A `LogitScorer` for the response tokens of one batch, as engines with sampling options score them.

    It takes logits chunk by chunk, in the order of the tokens, once. Where neighbours share a row, these are a
    neighbour's part of the tokens (see `SequenceGroup.share`).
    """

    tokens: ResponseTokens
    prompt_lengths: Tensor  # [B]
    sampling: Sampling
    bad_tokens: Sequence[Sequence[int]]  # token ids of each of the bad words, see `bad_word_tokens`
    first: int = 0  # the number of the first token that is scored here
    _scored: int = field(default=0, init=False)

    def __call__(
        self, logits: Tensor, targets: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities `[N]` of targets `[N]` from logits `[N, V]`; no entropy."""
        sampling, rows = replace(self.sampling, temperature=temperature), []
        for own, target in zip(logits.float(), targets, strict=True):
            prompt, drawn = self._before(min(self.first + self._scored, len(self.tokens.before) - 1))
            rows.append(torch.log_softmax(engine_logits(own, prompt, drawn, sampling, self.bad_tokens), -1)[target])
            self._scored += 1
        return torch.stack(rows), None

    def _before(self, number: int) -> tuple[Tensor, Tensor]:
        """The prompt `[P]` of a token, by its number in the batch, and what was drawn before it, `[T]`."""
        row, column = (int(index[number]) for index in self.tokens.token_index)
        start = int(self.prompt_lengths[row])
        return self.tokens.ids[row, :start], self.tokens.ids[row, start : start + column]


def engine_logits(
    logits: Tensor, prompt: Tensor, drawn: Tensor, sampling: Sampling, bad_tokens: Sequence[Sequence[int]]
) -> Tensor:
    """Logits `[V]` whose softmax an engine draws from, from the model's `[V]`, the prompt `[P]`, the response `[T]`.

    Raises:
        ValueError: an option that is not known here.
    """
    logits, banned, options = logits.clone(), -torch.inf, dict(sampling.options)
    if (allowed := options.pop("allowed_token_ids", None)) is not None:
        kept = torch.zeros_like(logits, dtype=torch.bool)
        kept[allowed] = True
        logits[~kept] = banned
    past = drawn.tolist()
    for *start, last in bad_tokens:
        if len(start) <= len(past) and past[len(past) - len(start) :] == start:
            logits[last] = banned
    if len(past) < sampling.min_tokens:
        logits[list(sampling.stop_token_ids)] = banned
    for token, bias in options.pop("logit_bias", {}).items():
        logits[int(token)] += bias
    if options:
        raise ValueError(f"rollout.sampling_options.{next(iter(options))}: rlx cannot compute what engines make of it")
    return _most_probable(_penalized(logits, prompt, drawn, sampling) / sampling.temperature, sampling)


def _penalized(logits: Tensor, prompt: Tensor, drawn: Tensor, sampling: Sampling) -> Tensor:
    """Logits `[V]` with the penalties for tokens that occur in the prompt or the response so far."""
    counts = torch.bincount(drawn, minlength=len(logits))
    seen = (counts + torch.bincount(prompt, minlength=len(logits))) > 0
    factor = sampling.repetition_penalty
    logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
    return logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)


def _most_probable(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits `[V]` of the tokens that min_p, top_k and top_p leave, in this order; -inf for the others."""
    probabilities = torch.softmax(logits, -1)
    logits = logits.masked_fill(probabilities < sampling.min_p * probabilities.max(), -torch.inf)
    if 0 < sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p < 1:
        ascending, order = logits.sort()
        left_out = torch.softmax(ascending, -1).cumsum(-1) <= 1 - sampling.top_p
        left_out[-1] = False
        logits = logits.index_fill(0, order[left_out], -torch.inf)
    return logits


def bad_word_tokens(tokenizer: Any, words: Sequence[str]) -> list[list[int]]:
    """The token ids of each word at the start of a text and, where these begin otherwise, after a blank."""
    found = []
    for word in words:
        alone, inside = (
            list(tokenizer(f"{blank}{word.lstrip()}", add_special_tokens=False).input_ids) for blank in ("", " ")
        )
        found.append(alone)
        if inside and inside[0] != alone[0] and len(inside) == len(alone):
            found.append(inside)
    return found
