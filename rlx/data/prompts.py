"""Prompt tables: rows with the token ids of their prompts, made once per run through Ray Data.

Left out: where rows come from (sources.py) and which rank trains on which row (stream.py).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rlx.config.errors import ConfigError
from rlx.config.sections import DataConfig
from rlx.data import ray_data

if TYPE_CHECKING:
    import ray.data

_LOG = logging.getLogger("rlx")


def tokenize_rows(
    rows: ray.data.Dataset | Iterable[dict[str, Any]], config: DataConfig, model: str, trust_remote_code: bool = False
) -> ray.data.Dataset:
    """Returns the rows with a column `token_ids`: the question in the model's chat template.

    Rows with more than `data.max_prompt_tokens` tokens are left out, with a warning.

    Args:
        rows: {question, answer[, entry]} each.
        model: folder or name of the model whose tokenizer is used.

    Raises:
        ConfigError: the tokenizer cannot be used, or no prompt is short enough.
    """
    import ray.data

    ray_data.configure()
    source = rows if isinstance(rows, ray.data.Dataset) else ray.data.from_items(list(rows), override_num_blocks=1)
    source = source.materialize()
    settings = {
        "model": model,
        "trust_remote_code": trust_remote_code,
        "system_prompt": config.system_prompt,
        "max_tokens": config.max_prompt_tokens,
    }
    try:
        table = source.map_batches(
            _tokenize_block, fn_kwargs=settings, batch_format="pyarrow", batch_size=None, num_cpus=0
        ).materialize()
    except Exception as error:
        raise ConfigError(f"model.path {model}: its tokenizer: {ray_data.error_reason(error)}") from None
    _report_long_prompts(source.count(), table.count(), config.max_prompt_tokens)
    return table


def _report_long_prompts(total: int, left: int, max_tokens: int) -> None:
    """Warns if some prompts are too long; raises ConfigError if all are."""
    too_long = f"{total - left} of {total} prompts are longer than data.max_prompt_tokens ({max_tokens})"
    if not left:
        raise ConfigError(f"no prompt is left: {too_long}")
    if left < total:
        _LOG.warning("%s and left out", too_long)


def load_tokenizer(model: str, trust_remote_code: bool = False) -> Any:
    """Returns the tokenizer of a model, by its folder or name."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)


_cached_tokenizer = functools.cache(load_tokenizer)


def _tokenize_block(
    batch: pa.Table, model: str, trust_remote_code: bool, system_prompt: str | None, max_tokens: int
) -> pa.Table:
    """Adds `token_ids` to one block of rows and drops rows with more than `max_tokens`; runs in a Ray task."""
    tokenizer = _cached_tokenizer(model, trust_remote_code)
    token_ids = [encode_prompt(tokenizer, question, system_prompt) for question in batch["question"].to_pylist()]
    # With a type, so that an empty block has the same schema as the others.
    table = batch.append_column("token_ids", pa.array(token_ids, pa.list_(pa.int32())))
    return table.filter(pa.array([len(ids) <= max_tokens for ids in token_ids], pa.bool_()))


def encode_prompt(tokenizer: Any, question: str, system_prompt: str | None) -> list[int]:
    """Returns the token ids `[P]` of a question in the tokenizer's chat template; as bare text if it has none."""
    if not tokenizer.chat_template:
        return list(tokenizer(f"{system_prompt}\n\n{question}" if system_prompt else question).input_ids)
    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    messages.append({"role": "user", "content": question})
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
