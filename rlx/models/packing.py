"""Packs completions into one row without padding, in which a prompt stands once before all of its responses.

A row is a sequence of segments: a prompt, a response, or both if no other response in the row has that prompt. Tokens
attend to their own segment up to themselves, and those of a response to its prompt too. So what a model computes for a
token does not depend on what else the row holds.
Left out: which completions share a row (rlx.training.experience), and the models (policy).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlx.config.errors import ConfigError
from rlx.mesh import UNSHARED, SequenceGroup

ATTENTION = "rlx_packed"
"""the name by which transformers knows `attention`"""
_HEAD_SIZE = 256  # the largest that torch's kernel takes; it must be a multiple of 8
_BY_LENGTH = ("dynamic", "longrope")  # rotary embeddings of transformers that depend on the largest position given


class Packing(NamedTuple):
    """A row of P tokens in S segments, of which N outputs score a response token.

    Queries attend to K keys: those of the row, in which the keys of a prompt are repeated for each of its responses.
    """

    ids: Tensor  # [1, P] int64
    positions: Tensor  # [1, P] int64, of each token in its completion
    before: Tensor  # [N] int64, the place in the row whose output scores each response token
    queries: Tensor  # [S + 1] int32, where segments begin in the row, and P
    keys: Tensor  # [S + 1] int32, where the keys of segments begin, and K
    key_index: Tensor | None  # [K] int64, the place in the row of each key; None: the keys are those of the row
    longest_queries: int  # at least as many as any segment has; a power of two, so that compiled layers see few of them
    longest_keys: int
    sequence_group: SequenceGroup = UNSHARED  # how neighbours share the tokens while a model runs

    def to(self, device: torch.device) -> Packing:
        """The row on another device."""
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in self._asdict().items() if isinstance(value, Tensor)
        }
        return self._replace(**moved)


class _Segment(NamedTuple):
    source: int  # place of the first token in the flat token ids
    start: int  # position of the first token in its completion: that many keys of the prompt come before
    length: int
    prompt: int  # place of the prompt in the row
    place: int  # place of the first token in the row


def pack_row(
    ids: Tensor, prompts: Tensor, responses: Tensor, groups: Tensor, token_index: tuple[Tensor, Tensor]
) -> Packing:
    """Packs completions; those of a group must be adjacent to share their prompt. Waits for a GPU.

    A response's last token is left out, because its output scores nothing.

    Args:
        ids: `[B, L]` int64, prompt then response then padding.
        prompts, responses: `[B]` int64, their lengths.
        groups: `[B]` int64, equal for completions of the same prompt.
        token_index: `[N]` each, the rows and columns of the response tokens that are scored, row by row.
    """
    lengths = prompts.tolist(), responses.tolist(), groups.tolist()
    segments, last, first = _segments(*lengths, ids.shape[1])
    source, start, length, prompt, place = torch.tensor(segments).T
    keys = start + length
    row = torch.arange(int(length.sum()))
    in_row, index = ((values - place).repeat_interleave(length) + row for values in (start, source))
    rows, columns = token_index
    ends, begins = torch.tensor([last, first], device=ids.device)
    return Packing(
        ids=ids.flatten()[index.to(ids.device)][None],
        positions=in_row.to(ids.device)[None],
        before=torch.where(columns == 0, ends[rows], begins[rows] + columns - 1),
        queries=_cumulative(length).to(ids.device),
        keys=_cumulative(keys).to(ids.device),
        key_index=_key_index(start, keys, prompt, place).to(ids.device) if start.any() else None,
        longest_queries=_power_of_two(int(length.max())),
        longest_keys=_power_of_two(int(keys.max())),
    )


def same_prompts(ids: Tensor, prompts: Tensor, groups: Tensor) -> Tensor:
    """`[B]` int64, equal for adjacent rows of one group whose prompts are the same tokens.

    Args:
        ids: `[B, L]` int64, prompt then response then padding.
        prompts: `[B]` int64, their lengths.
        groups: `[B]` int64.
    """
    inside = torch.arange(int(prompts.max()), device=ids.device) < prompts[:, None]
    compared = torch.cat([groups[:, None], ids[:, : inside.shape[1]].where(inside, -1)], 1)
    changes = (compared[1:] != compared[:-1]).any(1)
    return torch.nn.functional.pad(changes.cumsum(0), (1, 0))


def _segments(
    prompts: Sequence[int], responses: Sequence[int], groups: Sequence[int], width: int
) -> tuple[list[_Segment], list[int], list[int]]:
    """The segments of a row; and of each completion the places of its prompt's last and its response's first token."""
    segments: list[_Segment] = []
    last, first, place = [], [], 0
    for _, members in itertools.groupby(range(len(groups)), groups.__getitem__):
        rows = list(members)
        length, is_alone = prompts[rows[0]], len(rows) == 1
        prompt = place
        begun = length + (responses[rows[0]] - 1 if is_alone else 0)  # tokens of the prompt's own segment
        segments.append(_Segment(rows[0] * width, 0, begun, prompt, prompt))
        place += begun
        for row in rows:
            last.append(prompt + length - 1)
            first.append(prompt + length if is_alone else place)
            if not is_alone and responses[row] > 1:
                segments.append(_Segment(row * width + length, length, responses[row] - 1, prompt, place))
                place += responses[row] - 1
    return segments, last, first


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _cumulative(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def _key_index(start: Tensor, keys: Tensor, prompt: Tensor, place: Tensor) -> Tensor:
    """The place in the row of each key, `[K]`: for each segment its prompt if that is another one, then itself."""
    number = torch.arange(int(keys.sum())) - (keys.cumsum(0) - keys).repeat_interleave(keys)
    start, prompt, place = (values.repeat_interleave(keys) for values in (start, prompt, place))
    return torch.where(number < start, prompt + number, place + number - start)


# --- attention


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packing: Packing | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention of transformers' layers; over the segments of a packed row if `packing` is given.

    Args:
        query: `[1, heads, P, size]`, or `[B, heads, L, size]` without `packing`. Where neighbours share a row, P are
            this process's tokens; they are exchanged so that each process attends from and to all tokens in its heads.
        key, value: the same with as many heads or fewer.

    Returns:
        `[1, P, heads, size]`, or `[B, L, heads, size]`.
    """
    if packing is None:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, scaling=scaling, **others)  # type: ignore[no-any-return]
    group, tokens = packing.sequence_group, packing.ids.shape[1]
    query, key, value = (group.to_heads(states[0].transpose(0, 1), tokens) for states in (query, key, value))
    if packing.key_index is not None:
        key, value = key[packing.key_index], value[packing.key_index]
    attend = _on_gpu if query.is_cuda else _by_segments
    return group.to_tokens(attend(query, key, value, packing, scaling))[None], None


# Before torch 2.12 the kernel takes fewer heads of keys than of queries without being told.
FEWER_KEYS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
"""what torch's kernel is told where there are fewer heads of keys than of queries"""


def _on_gpu(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None) -> Tensor:
    cuts = packing.queries, packing.keys, packing.longest_queries, packing.longest_keys
    # Causal: the last query of a segment is aligned with its last key.
    out: Any = varlen_attn(query, key, value, *cuts, scale=scaling, window_size=(-1, 0), **FEWER_KEYS)
    return out


def _by_segments(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None) -> Tensor:
    """The attention of `_on_gpu` on any device, one segment after the other; slow."""
    out = []
    for (q, end), (k, last) in zip(_spans(packing.queries), _spans(packing.keys), strict=True):
        mask = torch.ones(end - q, last - k, dtype=torch.bool, device=query.device).tril(last - k - (end - q))
        own, keys, values = (states.transpose(0, 1) for states in (query[q:end], key[k:last], value[k:last]))
        out.append(scaled_dot_product_attention(own, keys, values, attn_mask=mask, scale=scaling, enable_gqa=True))
    return torch.cat(out, 1).transpose(0, 1)


def _spans(cuts: Tensor) -> Iterator[tuple[int, int]]:
    return itertools.pairwise(cuts.tolist())


AttentionInterface.register(ATTENTION, attention)


# --- which models can be packed


def enable(lm: Any) -> None:
    """Gives a model of transformers the attention that takes a `packing`."""
    lm.set_attn_implementation(ATTENTION)


def can_pack(transformer: Any, where: str, asked_by: str | None, sp: int = 1) -> bool:
    """Whether a model of transformers, not sharded yet, takes packed rows; `where` it comes from, for an error's text.

    Raises:
        ConfigError: it does not, although a setting asks for it.
    """
    reason = obstacle(transformer, sp)
    if reason and asked_by:
        raise ConfigError(f"{asked_by}: {where}: {reason}")
    return reason is None


@torch.no_grad()
def obstacle(lm: Any, sp: int = 1) -> str | None:
    """Why a model on the CPU cannot take packed rows, which `sp` neighbours share, or None.

    It is tried on three short completions, because a layer may look at other tokens than attention does.
    """
    if reason := config_obstacle(lm.config, sp):
        return reason
    before = lm.config._attn_implementation
    try:
        expected = _trial(lm, packed=False)
        enable(lm)
        gap = 1e-3 if expected.dtype is torch.float32 else 0.05  # half precision rounds at the third digit
        is_same = torch.allclose(_trial(lm, packed=True), expected, rtol=gap, atol=gap * float(expected.abs().max()))
    except Exception as error:
        return f"it does not run with another attention function ({type(error).__name__})"
    finally:
        lm.set_attn_implementation(before)
    return None if is_same else "it computes something else for packed rows"


def config_obstacle(model_config: Any, sp: int = 1) -> str | None:
    """Why models with this config of transformers cannot take packed rows, as far as it says, or None.

    Args:
        sp: so many neighbours share each row.
    """
    config = model_config.get_text_config()
    heads = getattr(config, "num_attention_heads", None) or 1
    if heads % sp:
        return f"it has {heads} attention heads, not a multiple of {sp}"
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if sp > 1 and kind in _BY_LENGTH:
        return f"its positions ({kind}) depend on how long a worker's part of a row is"
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention"} or (not kinds and getattr(config, "sliding_window", None)):
        return "some of its layers do not attend to all earlier tokens"
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return f"its attention heads have {size} numbers each" if size % 8 or size > _HEAD_SIZE else None


def _trial(lm: Any, packed: bool) -> Tensor:
    """`[N, H]` the outputs of a model that score the responses of three completions, two of them to one prompt."""
    ids = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 5, 4], [2, 1, 4, 3, 3]])
    prompts, mask = torch.tensor([3, 3, 2]), torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 1]])
    rows, columns = mask.nonzero(as_tuple=True)
    if not packed:
        states = lm.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return states[rows, prompts[rows] - 1 + columns]
    row = pack_row(ids, prompts, mask.sum(1), torch.tensor([0, 0, 1]), (rows, columns))
    return hidden_states(lm.base_model, row)


def hidden_states(backbone: nn.Module, packing: Packing, group: SequenceGroup = UNSHARED) -> Tensor:
    """`[N, H]` last hidden states at the places before the response tokens.

    Args:
        group: each neighbour runs the backbone on its share of the row, and gets those of its share of the N.
    """
    ids, positions = (group.share(values[0])[None] for values in (packing.ids, packing.positions))
    shared = packing._replace(sequence_group=group)
    states = backbone(input_ids=ids, position_ids=positions, packing=shared, use_cache=False).last_hidden_state[0]
    return group.gather(states, packing.ids.shape[1]).index_select(0, group.share(packing.before))
