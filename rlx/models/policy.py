"""The networks that score responses token by token: the policy, with or without a value head, and the critic.

Everything is evaluated without dropout: a token that is scored twice has the same log-probability. Padding is on the
right and attention is causal, so no attention mask is needed. Left out: loading, sharding, and how rows are packed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlx.mesh import UNSHARED, SequenceGroup
from rlx.models.logprobs import STORED_LOGITS, LogitScorer, score_logits, token_logprobs
from rlx.models.packing import Packing, hidden_states, pack_row


class ResponseTokens(NamedTuple):
    """What the models take: the N response tokens of completions, row by row. No head is applied to other tokens.

    It is a tuple for the same reason as `PolicyOutput`.
    """

    ids: Tensor  # [B, L] int64, prompt then response then padding
    mask: Tensor  # [B, T], 1 where column t is scored: the t-th token after the prompt
    token_index: tuple[Tensor, Tensor]  # [N] each, the rows and columns of the ones in the mask, row by row
    before: Tensor  # [N], into the flat ids: the position before each token, whose output scores the token
    packing: Packing | None = None  # the same completions packed; None: the model computes them padded

    @classmethod
    def of(cls, ids: Tensor, prompt_lengths: Tensor, mask: Tensor) -> ResponseTokens:
        """Tokens of padded completions: `ids` [B, L], `prompt_lengths` [B] int64, `mask` [B, T]. Waits for a GPU."""
        rows, columns = mask.nonzero(as_tuple=True)
        return cls(ids, mask, (rows, columns), rows * ids.shape[1] + prompt_lengths[rows] - 1 + columns)

    def to(self, device: torch.device) -> ResponseTokens:
        """The tokens on another device."""
        rows, columns = self.token_index
        return ResponseTokens(
            self.ids.to(device),
            self.mask.to(device),
            (rows.to(device), columns.to(device)),
            self.before.to(device),
            self.packing and self.packing.to(device),
        )

    @property
    def targets(self) -> Tensor:
        """`[N]` token ids."""
        return self.ids.flatten()[self.before + 1]

    def hidden(self, backbone: nn.Module, group: SequenceGroup = UNSHARED) -> Tensor:
        """`[N, H]` last hidden states at the position before each token; with neighbours before each of their share."""
        if self.packing:
            return hidden_states(backbone, self.packing, group)
        states = backbone(input_ids=self.ids, use_cache=False).last_hidden_state
        return states.flatten(0, 1).index_select(0, group.share(self.before))

    def grid(self, flat: Tensor, group: SequenceGroup = UNSHARED) -> Tensor:
        """Spreads one number per token, `[N]` or a neighbour's share, over `[B, T]`; zero where there is no token."""
        whole = group.gather(flat, len(self.before))
        return whole.new_zeros(self.mask.shape).index_put(self.token_index, whole)


class Sequences(NamedTuple):
    """What a model reads to score episodes: each context of an episode is a sequence of its own.

    The scores lie in the episodes' own `[B, T]`, so that nothing but the models knows of contexts.
    """

    ids: Tensor  # [S, L] int64, what is read then what is scored then padding
    prompts: Tensor  # [S] int64, how much is read before the first token that is scored
    prompt_numbers: Tensor  # [S] int64, equal for adjacent sequences with the same prompt
    number: Tensor  # [N] int64, the sequence of each scored token
    column: Tensor  # [N] int64, its place after the prompt of that sequence

    @classmethod
    def of(cls, ids: Tensor, prompts: Tensor, mask: Tensor, contexts: Tensor, prompt_numbers: Tensor) -> Sequences:
        """Cuts episodes. Waits for a GPU.

        Args:
            ids: `[B, L]` int64, prompt then response then padding.
            prompts: `[B]` int64, lengths of the prompts.
            mask: `[B, T]`, 1 on tokens that are scored.
            contexts: `[B, T]` int64, the number of the context of each token of the response; 0 extends the prompt.
            prompt_numbers: `[B]` int64, equal for adjacent rows with the same prompt.
        """
        rows, columns = mask.nonzero(as_tuple=True)
        context = contexts[rows, columns]
        begins = torch.ones_like(rows, dtype=torch.bool)
        begins[1:] = (rows[1:] != rows[:-1]) | (context[1:] != context[:-1])
        number = begins.cumsum(0) - 1
        firsts = zip(rows[begins].tolist(), columns[begins].tolist(), context[begins].tolist(), strict=True)
        lasts = columns[torch.cat([begins[1:], begins.new_ones(1)])].tolist()
        lengths, shared, parts = prompts.tolist(), prompt_numbers.tolist(), list[Tensor]()
        read, share, at = list[int](), list[int](), list[int]()
        for (row, first, kind), last in zip(firsts, lasts, strict=True):
            begin = lengths[row] + int((contexts[row] == kind).int().argmax()) if kind else 0
            parts.append(ids[row, begin : lengths[row] + last + 1])
            read.append(lengths[row] + first - begin)
            share.append(len(shared) + len(share) if kind else shared[row])
            at.append(first)
        grid = nn.utils.rnn.pad_sequence(parts, batch_first=True)
        read_, share_, at_ = torch.tensor([read, share, at], device=ids.device)
        return cls(grid, read_, share_, number, columns - at_[number])

    def response_tokens(self, mask: Tensor, packed: bool) -> ResponseTokens:
        """What the models take; `mask`: `[B, T]`, that of the episodes."""
        before = self.number * self.ids.shape[1] + self.prompts[self.number] - 1 + self.column
        rows, columns = mask.nonzero(as_tuple=True)
        tokens = ResponseTokens(self.ids, mask, (rows, columns), before)
        if not packed:
            return tokens
        lengths = self.column.new_zeros(len(self.prompts)).scatter_reduce(0, self.number, self.column + 1, "amax")
        row = pack_row(self.ids, self.prompts, lengths, self.prompt_numbers, (self.number, self.column))
        return tokens._replace(packing=row)


def sequence_lengths(prompts: Tensor, mask: Tensor, contexts: Tensor) -> Tensor:
    """How many tokens each of `Sequences` has, `[B, C]` int64 by the number of its context; 0 where there is none.

    Args:
        prompts, mask, contexts: see `Sequences.of`.
    """
    columns, lengths = torch.arange(mask.shape[1], device=mask.device), []
    for kind in range(int(contexts.max()) + 1):
        of_kind = contexts == kind
        end = ((columns + 1) * (of_kind & mask.bool())).amax(1)
        begin = of_kind.int().argmax(1) if kind else -prompts
        lengths.append((end - begin) * (end > 0))
    return torch.stack(lengths, 1)


class PolicyOutput(NamedTuple):
    """The scores of responses; every tensor is `[B, T]` float32 over response tokens, zero where padded.

    It is a tuple because FSDP in torch 2.11 finds no tensors in a dataclass, and then misses the end of the backward
    pass.
    """

    logprobs: Tensor
    entropy: Tensor | None  # in nats; None unless asked for
    values: Tensor | None  # None without a value head on the policy

    @property
    def estimated_entropy(self) -> Tensor:
        """`[B, T]` the entropy; where it was not asked for, -log p of the token, an estimate from one sample."""
        return -self.logprobs if self.entropy is None else self.entropy


class Policy(nn.Module):
    """A causal language model that scores given responses, with a value head if the critic shares its layers."""

    def __init__(self, lm: nn.Module, value_head: nn.Module | None = None) -> None:
        super().__init__()
        self.lm = lm
        self.value_head = value_head
        self.logit_scorer: LogitScorer = score_logits  # or the same function, compiled
        self.engine_scorer: LogitScorer | None = None  # while it is set, tokens are scored as engines draw them
        self.packs = False  # whether its layers take packed rows, see `packing.enable`
        self.stored_logits = STORED_LOGITS  # see `token_logprobs`; 0 where memory matters more than time
        self.sequence_group = UNSHARED  # how neighbours share packed rows, and the tokens to score

    def forward(self, tokens: ResponseTokens, temperature: float, entropy: bool = False) -> PolicyOutput:
        """Scores the response tokens.

        Args:
            tokens: which ones.
            temperature: logits are divided by it, as they were when the response was sampled.
            entropy: also compute the entropy of the distribution of each token.
        """
        lm: Any = self.lm
        hidden, head = tokens.hidden(lm.base_model, self.sequence_group), lm.get_output_embeddings()
        targets = self.sequence_group.share(tokens.targets)
        scorer, is_usual = self.engine_scorer or self.logit_scorer, self.engine_scorer is None
        logprobs, entropies = token_logprobs(
            head, hidden, targets, temperature, entropy, scorer, self.stored_logits, is_usual
        )
        values = None if self.value_head is None else self.value_head(hidden).squeeze(-1).float()
        return PolicyOutput(
            tokens.grid(logprobs, self.sequence_group),
            None if entropies is None else tokens.grid(entropies, self.sequence_group),
            None if values is None else tokens.grid(values, self.sequence_group),
        )


class Critic(nn.Module):
    """A transformer with weights of its own and a value head."""

    def __init__(self, backbone: nn.Module, value_head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.value_head = value_head
        self.sequence_group = UNSHARED  # see `Policy`

    def forward(self, tokens: ResponseTokens) -> Tensor:
        """Values `[B, T]`: column t is the value before token t of the response is sampled; zero where padded."""
        hidden = tokens.hidden(self.backbone, self.sequence_group)
        return tokens.grid(self.value_head(hidden).squeeze(-1).float(), self.sequence_group)
