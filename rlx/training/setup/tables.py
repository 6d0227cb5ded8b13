"""A replica's prompts, in the order in which a run takes them.

Left out: the tables and the orders themselves (rlx.data).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlx.data import sources
from rlx.data.curriculum import CurriculumStream
from rlx.data.mixture import JoinedRows, MixedOrder
from rlx.data.stream import PromptStream, Share
from rlx.mesh import Mesh
from rlx.models.loading import end_tokens
from rlx.training.setup.inputs import TrainingInputs
from rlx.training.trainer import SupervisedRows


def share_of(inputs: TrainingInputs, mesh: Mesh, names: Sequence[str]) -> Share:
    """This replica's share of prompt tables, as one."""
    shares = [inputs.tables[name] for name in names]
    share = shares[0] if len(shares) == 1 else replace(shares[0], rows=JoinedRows(tuple(each.rows for each in shares)))
    assert (share.rank, share.ranks) == (mesh.dp_rank, mesh.dp_size), "prompts of another rank"
    return share


def training_prompts(inputs: TrainingInputs, mesh: Mesh) -> PromptStream:
    """The prompts that this replica draws for, in their order."""
    config, names = inputs.config, sources.table_names(inputs.config.data, "train")
    share = share_of(inputs, mesh, names)
    if config.data.curriculum == "none" and not isinstance(share.rows, JoinedRows):
        return share.stream(config.seed)
    sizes = share.rows.sizes if isinstance(share.rows, JoinedRows) else [len(share.rows)]
    order = MixedOrder(config.seed, sizes, [each.weight for each in config.data.sources] or [1.0])
    if config.data.curriculum == "none":
        return share.stream(config.seed, order)
    target, period = config.data.curriculum_range, config.data.curriculum_period
    return CurriculumStream(share.rows, config.seed, share.rank, share.ranks, mixed=order, target=target, period=period)


def supervised_rows(inputs: TrainingInputs, mesh: Mesh, tokenizer: Any) -> SupervisedRows | None:
    """This replica's share of the answers that the policy learns besides; None without data.ptx_source."""
    config = inputs.config
    if not config.data.ptx_source:
        return None
    rows = share_of(inputs, mesh, ["ptx"]).stream(config.seed)
    ends = end_tokens(inputs.model_path, tokenizer, config.model.trust_remote_code)
    return SupervisedRows(rows, tokenizer, ends[:1], config.rollout.max_tokens, config.data.ptx_batch)
