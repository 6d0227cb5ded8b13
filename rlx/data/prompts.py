"""Prompts through Ray Data: read, template, tokenize, filter, once; then each rank's share of every step, in an order
that depends on (seed, epoch) alone.

Ray Data's own split is not used: it drops a remainder, changes with the number of workers and has no position to
resume from (docs/decisions.md). Here every rank sees the whole prepared table, shared memory on its node, and takes
its rows of the global order; so the prompts of step s are the same on any number of ranks.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import ray.data
import ray.train

from rlx.config.errors import ConfigError
from rlx.config.sections import DataConfig
from rlx.data.files import error_reason, quiet_ray_data

_LOG = logging.getLogger("rlx")


def hold_out(rows: ray.data.Dataset, size: int) -> tuple[ray.data.Dataset, ray.data.Dataset]:
    """(training rows, held-out rows): the last `size` rows, at most a tenth but at least one, are held out."""
    rows = rows.materialize()
    count = rows.count()
    if count < 2:
        raise ConfigError(f"data.source: {count} rows are too few to hold one out; set eval.source")
    train, held_out = rows.split_at_indices([count - max(1, min(size, count // 10))])
    return train, held_out


def prepare(
    rows: ray.data.Dataset | Iterable[dict[str, Any]], config: DataConfig, model: str, trust_remote_code: bool = False
) -> ray.data.Dataset:
    """The prompt table: token ids with the model's chat template applied, over-long prompts left out with a warning.

    Args:
        rows: {question, answer[, entry]} each.
        model: folder or name of the model whose tokenizer is used.

    Raises:
        ConfigError: the tokenizer cannot be used, or no prompt is left.
    """
    quiet_ray_data()
    source = rows if isinstance(rows, ray.data.Dataset) else ray.data.from_items(list(rows), override_num_blocks=1)
    source = source.materialize()
    settings = {
        "model": model,
        "trust": trust_remote_code,
        "system": config.system_prompt,
        "limit": config.max_prompt_tokens,
    }
    try:
        table = source.map_batches(
            _tokenize, fn_kwargs=settings, batch_format="pyarrow", batch_size=None, num_cpus=0
        ).materialize()
    except Exception as error:
        raise ConfigError(f"model.path {model}: its tokenizer: {error_reason(error)}") from None
    count, left = source.count(), table.count()
    too_long = f"{count - left} of {count} prompts are longer than data.max_prompt_tokens ({config.max_prompt_tokens})"
    if not left:
        raise ConfigError(f"no prompt is left: {too_long}")
    if left < count:
        _LOG.warning("%s and left out", too_long)
    return table


def load_tokenizer(model: str, trust_remote_code: bool = False) -> Any:
    """The model's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)


# ---------------------------------------------------------------------------------------------------------------------
# Tokens (in Ray tasks)


_cached_tokenizer = functools.cache(load_tokenizer)


def _tokenize(batch: pa.Table, model: str, trust: bool, system: str | None, limit: int) -> pa.Table:
    """One block of rows -> the same rows with token_ids, those longer than `limit` left out."""
    tokenizer = _cached_tokenizer(model, trust)
    token_ids = [encode_prompt(tokenizer, question, system) for question in batch["question"].to_pylist()]
    # Typed, so that an empty block fits to the others.
    table = batch.append_column("token_ids", pa.array(token_ids, pa.list_(pa.int32())))
    return table.filter(pa.array([len(ids) <= limit for ids in token_ids], pa.bool_()))


def encode_prompt(tokenizer: Any, question: str, system: str | None) -> list[int]:
    if not tokenizer.chat_template:
        return list(tokenizer(f"{system}\n\n{question}" if system else question).input_ids)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": question})
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
