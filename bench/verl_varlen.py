"""Loaded by veRL: attention over packed rows by torch's own kernel, as flash-attn is not installed.

Its way without padding gives a model one row of sequences, whose positions begin at 0 again where a sequence begins.
Left out: what removes the padding, which veRL does itself.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AutoModelForTokenClassification
from verl.utils import model as verl_models

ATTENTION = "verl_varlen"
"""the name by which transformers knows it"""

# Before torch 2.12 the kernel takes fewer heads of keys than of queries without being told.
_FEWER_KEYS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
_last: list[Any] = [None, None, 0]
"""the positions of the last row, where its sequences begin and end, and the longest: one search for all layers"""


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **others: Any
) -> tuple[Tensor, None]:
    """`[1, P, heads, size]`, each sequence by itself; query, key and value are `[1, heads, P, size]`."""
    cuts, longest = _sequences(others["position_ids"])
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    ends = cuts, cuts, longest, longest
    out: Any = varlen_attn(query, key, value, *ends, scale=scaling, window_size=(-1, 0), **_FEWER_KEYS)
    return out[None], None


def _sequences(positions: Tensor) -> tuple[Tensor, int]:
    if _last[0] is not positions:
        starts = (positions[0] == 0).nonzero().flatten()
        cuts = torch.cat([starts, starts.new_tensor([positions.shape[1]])]).int()
        _last[:] = positions, cuts, int(cuts.diff().max())
    return _last[1], _last[2]


def value_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
    """veRL's critic with the attention that its config names; veRL's own function asks for flash-attn in any case."""
    return AutoModelForTokenClassification.from_pretrained(
        local_path,
        dtype=torch_dtype,
        config=model_config,
        attn_implementation=model_config._attn_implementation,
        trust_remote_code=trust_remote_code,
    )


AttentionInterface.register(ATTENTION, attention)
verl_models.load_valuehead_model = value_model
