"""Signatures of settings. They show whether this user wrote what a run, a sweep or a checkpoint keeps; and which
settings are not taken from somebody else.

Each user has a key: the file rlx/key below $XDG_CONFIG_HOME or ~/.config, made when it is first needed. Whoever copies
a folder cannot sign other settings with it. The key itself leaves neither its file nor the driver's process.
Left out: what is made of somebody else's settings (`rlx.runs.run_folder`).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlx.config.loading import from_tree
from rlx.config.run import RunConfig
from rlx.config.sections.base import flatten
from rlx.config.sections.data import GENERATED
from rlx.config.sections.reward import SCORERS
from rlx.storage.filesystem import Storage

SIGNATURE = "signature"
"""file in the folder of a run or sweep"""
_KEY_BYTES = 32
_KEY_OF_THIS_PROCESS = secrets.token_bytes(_KEY_BYTES)  # where no file can be kept: nothing is known again later

POWERFUL = (
    "model.path",
    "model.critic_path",
    "model.reference_path",
    "model.trust_remote_code",
    "data.source",
    "data.sources",
    "data.ptx_source",
    "data.expected_pattern",
    "data.params",
    "eval.source",
    "eval.sets",
    "rollout.engine_options",
    "environment.name",
    "environment.params",
    "rollout.sampling_options",
    "reward.functions",
    "reward.answer_pattern",
    "reward.format_pattern",
    "reward.model",
    *("reward.url", "reward.url_key_env", "reward.judge_url", "reward.judge_url_key_env", "reward.judge_model"),
    *("reward.judge_rubric", "reward.judge_pattern", "reward.sandbox", "reward.timeout_s", "reward.on_timeout"),
    *(f"reward.code_{name}" for name in ("cpu_s", "mean_cpu_s", "idle_s", "wall_s", "memory_mb", "processes")),
    *(f"reward.code_{name}" for name in ("disk_mb", "open_files", "output_mb", "parallel")),
    *("environment.timeout_s", "environment.memory_mb"),
    "tracking.uri",
    "tracking.backends",
    "ray_address",
    "checkpoint.init_from",
)
"""settings that name code, models, addresses, services or patterns, or limit programs: not taken from somebody else"""
USED_BY_EXPORTS = ("model.trust_remote_code", "tracking.uri")
"""those of them that decide what an export does with the model of a checkpoint; whoever exports it has named it"""


@dataclass(frozen=True)
class Signer:
    """Signs settings with a key that was derived from the user's, so that other processes of a sweep can have it."""

    nonce: str
    key: bytes = field(repr=False)

    @classmethod
    def new(cls) -> Signer:
        nonce = secrets.token_hex(16)
        return cls(nonce, _derived_key(nonce))

    def sign(self, content: Any) -> str:
        """Returns the signature of what JSON can hold."""
        return f"{self.nonce}:{_digest(self.key, content)}"


def is_own(content: Any, signature: str) -> bool:
    """Whether this user has signed it."""
    nonce, _, digest = signature.partition(":")
    return hmac.compare_digest(digest.encode(), _digest(_derived_key(nonce), content).encode())


def is_own_folder(folder: Storage, content: Any) -> bool:
    """Whether the signature in a folder is this user's, and of that content."""
    try:
        return is_own(content, (folder / SIGNATURE).read_text())
    except (OSError, ValueError, TypeError, RecursionError):  # there is none, it is no text, or no JSON has the content
        return False


def powers(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a config tree that name code, models, addresses or patterns, by dotted key."""
    values, defaults = flatten(from_tree(dict(tree))), flatten(RunConfig())
    return {key: values[key] for key in POWERFUL if values[key] != defaults[key] and not _is_built_in(key, values[key])}


def _is_built_in(key: str, value: Any) -> bool:
    """Whether the value of such a setting is a part of rlx: rewards and environments by names, or generated prompts."""
    if key == "reward.functions":
        return all(name in SCORERS for name in value)
    if key == "data.params":  # a text may be the path of a file
        return all(isinstance(each, int | float | None) for each in value.values())
    return (key == "environment.name" and ":" not in value) or (key == "data.source" and value.startswith(GENERATED))


def _digest(key: bytes, content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _derived_key(nonce: str) -> bytes:
    return hmac.new(_user_key(), nonce.encode(), hashlib.sha256).digest()


def _user_key() -> bytes:
    """The key in the user's file."""
    try:
        file = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "rlx" / "key"
        if not file.exists():
            _create_key(file)
        key = file.read_bytes()
    except (OSError, RuntimeError):  # there is no home, or it cannot be written
        return _KEY_OF_THIS_PROCESS
    return key if len(key) >= _KEY_BYTES else _KEY_OF_THIS_PROCESS


def _create_key(file: Path) -> None:
    """Writes a key that only this user can read; of several processes that do so at once, the first one's stays."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent) as unfinished:  # its mode is 0600
        unfinished.write(secrets.token_bytes(_KEY_BYTES))
        unfinished.flush()
        with suppress(FileExistsError):
            os.link(unfinished.name, file)
