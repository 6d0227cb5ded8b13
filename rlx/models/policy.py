"""The trained models: policy, critic and frozen reference, sharded with FSDP2, scoring responses token by token.

Everything is evaluated without dropout: scored twice, a token has the same log-probability. Padding is on the
right and attention is causal, so no attention mask is needed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from rlx.models.logprobs import KEPT, LogitScorer, score_logits, token_logprobs


class ResponseTokens:
    """The N response tokens of padded rows, row by row: no head is ever applied to prompts or padding."""

    def __init__(self, ids: Tensor, prompt_lengths: Tensor, mask: Tensor, places: tuple[Tensor, Tensor]) -> None:
        """See `Policy.forward`."""
        self._ids, self._shape, self._places = ids, mask.shape, places
        rows, columns = places
        self._before = rows * ids.shape[1] + prompt_lengths[rows] - 1 + columns  # the position whose output scores it

    @property
    def targets(self) -> Tensor:
        """`[N]` token ids."""
        return self._ids.flatten()[self._before + 1]

    def hidden(self, backbone: nn.Module) -> Tensor:
        """`[N, H]` last hidden states, of the position before each token."""
        states = backbone(input_ids=self._ids, use_cache=False).last_hidden_state
        return states.flatten(0, 1).index_select(0, self._before)

    def grid(self, flat: Tensor) -> Tensor:
        """`[B, T]` of a number for each token, `[N]`; zero where there is none."""
        return flat.new_zeros(self._shape).index_put(self._places, flat)


class PolicyOutput(NamedTuple):
    """What a policy says about responses; every tensor `[B, T]` float32 over response tokens, zero where padded.

    A tuple, as FSDP in torch 2.11 finds no tensors in a dataclass, and without them no end of the backward pass.
    """

    logprobs: Tensor
    entropy: Tensor | None  # if it was asked for
    values: Tensor | None  # of a value head on the policy


class Policy(nn.Module):
    """A causal language model that scores given responses, with a value head if the critic shares its layers."""

    def __init__(self, lm: nn.Module, value_head: nn.Module | None = None) -> None:
        super().__init__()
        self.lm = lm
        self.value_head = value_head
        self.scores: LogitScorer = score_logits  # or the same, compiled
        self.kept = KEPT  # roles.py gives a GPU's number; 0 where memory counts more than time

    def forward(
        self,
        ids: Tensor,
        prompt_lengths: Tensor,
        mask: Tensor,
        places: tuple[Tensor, Tensor],
        temperature: float,
        entropy: bool = False,
    ) -> PolicyOutput:
        """Scores the response tokens.

        Args:
            ids: `[B, L]`, prompt then response then padding.
            prompt_lengths: `[B]`.
            mask: `[B, T]`, 1 where column t is scored: the t-th token after the prompt.
            places: `[N]` each, the rows and columns of these ones, row by row.
            temperature: the logits are divided by it, as they were when the response was drawn.
            entropy: whether that of each token's distribution is wanted too.
        """
        lm: Any = self.lm
        tokens = ResponseTokens(ids, prompt_lengths, mask, places)
        hidden, head = tokens.hidden(lm.base_model), lm.get_output_embeddings()
        vocabulary, targets = head.weight.shape[0], tokens.targets
        logprobs, entropies = token_logprobs(
            head, vocabulary, hidden, targets, temperature, entropy, self.scores, self.kept
        )
        values = None if self.value_head is None else self.value_head(hidden).squeeze(-1).float()
        spread = None if entropies is None else tokens.grid(entropies)
        return PolicyOutput(tokens.grid(logprobs), spread, None if values is None else tokens.grid(values))


class Critic(nn.Module):
    """A transformer of its own with a value head."""

    def __init__(self, backbone: nn.Module, value_head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.value_head = value_head

    def forward(self, ids: Tensor, prompt_lengths: Tensor, mask: Tensor, places: tuple[Tensor, Tensor]) -> Tensor:
        """Values `[B, T]`: column t is the value before the response's token t is drawn, zero where padded."""
        tokens = ResponseTokens(ids, prompt_lengths, mask, places)
        return tokens.grid(self.value_head(tokens.hidden(self.backbone)).squeeze(-1).float())
