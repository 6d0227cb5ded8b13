"""TODO rlx.storage.checkpoint_manifest."""

from __future__ import annotations

from collections.abc import Mapping
from pydantic import BaseModel
from pydantic import ConfigDict
from pydantic import Field
from pydantic import NonNegativeInt
from pydantic import PositiveInt
from typing import Annotated
from typing import Any
from typing import Literal
import hashlib
import json
import pydantic


MANIFEST = "manifest.json"


class OtherFormatError(ValueError):
    """A manifest that another version of rlx wrote: nothing is wrong with it, only it cannot be read."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class FileRecord(_Record):
    """One file of a checkpoint."""

    bytes: NonNegativeInt
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*\.safetensors$")]
"""no folder in it: what a manifest names lies beside it"""


class Manifest(_Record):
    """All of a checkpoint that is no tensor."""

    format: Literal[1] = 1
    rlx: str
    step: NonNegativeInt  # also the version of the weights
    ranks: PositiveInt
    metrics: dict[str, float]  # of this step alone
    tokens: NonNegativeInt
    kl: dict[str, float]
    scores: dict[str, float]
    cursor: dict[str, int]
    evaluation: dict[str, float]
    mlflow_run_id: str | None
    config: dict[str, Any]
    files: dict[FileName, FileRecord]

    @property
    def replicas(self) -> int:
        """Of its ranks, those with completions of their own."""
        return self.ranks // int(self.config.get("parallel", {}).get("tp", 1))

    def text(self) -> str:
        """As it is written: with a checksum over all of it."""
        content = self.model_dump(mode="json")
        return json.dumps({"sha256": _digest(content)} | content, indent=1)

    @classmethod
    def parsed(cls, text: str) -> Manifest:
        """The manifest in a text; ValueError says in one line what is wrong with it."""
        try:
            content = json.loads(text)
            said, digest = content.pop("sha256"), _digest(content)
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
            raise ValueError(f"{MANIFEST} is no manifest") from None
        if isinstance(written := content.get("format"), int) and 1 < written < 1000:
            raise OtherFormatError(f"{MANIFEST} has format {written}, this rlx reads format 1")
        if written != 1:
            raise ValueError(f"{MANIFEST} has format {written!r:.40}, this rlx reads format 1")
        if said != digest:
            raise ValueError(f"{MANIFEST} is not what was written: its checksum differs")
        try:
            return cls.model_validate(content)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            where = " ".join(".".join(str(part) for part in first["loc"]).split())  # one line, whatever the keys
            raise ValueError(f"{MANIFEST}: {where}: {first['msg']}") from None


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
