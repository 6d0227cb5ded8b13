"""The share of each prompt in the gradient of a step that was opened: a small file of a replay.

Left out: computing the shares (rlx.training.update).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial

from rlx.config.errors import ConfigError
from rlx.storage.filesystem import Storage, retry

GRADIENTS = "gradients"
"""folder of a run with the shares"""


def write_shares(run: Storage, step: int, shares: Mapping[int, float]) -> None:
    """Writes the shares of a step by the ids of the prompts.

    Raises:
        StorageError: the storage does not take them.
    """
    file = _file(run, step)
    retry(partial(file.write_text, json.dumps({str(prompt): share for prompt, share in shares.items()})), file.path)


def read_shares(run: Storage, step: int) -> dict[int, float] | None:
    """The shares of a step by the ids of the prompts; None if they were not kept.

    Raises:
        ConfigError: the file is not what rlx wrote.
        StorageError: the storage does not answer.
    """
    file = _file(run, step)
    if not retry(file.exists, f"reading {file}"):
        return None
    try:
        return {int(prompt): float(share) for prompt, share in retry(file.read_json, f"reading {file}").items()}
    except (ValueError, TypeError):
        raise ConfigError(f"{file} is damaged: it is not what rlx wrote") from None


def _file(run: Storage, step: int) -> Storage:
    return run / GRADIENTS / f"step_{step:06d}.json"
