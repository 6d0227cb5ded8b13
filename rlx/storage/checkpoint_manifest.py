"""The manifest of a checkpoint: everything in it that is not a tensor, as JSON with a checksum over itself.

Left out: the files that the manifest names (checkpoint_files.py) and which folders with a manifest are complete
checkpoints (checkpoint_catalog.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

MANIFEST = "manifest.json"
FORMAT: Final = 2
"""format 1 was written before the settings had their present names"""


class OtherFormatError(ValueError):
    """The manifest is in the format of another version of rlx: it is not damaged, but this version cannot read it."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class FileRecord(_Record):
    """Size and checksum of one file of a checkpoint."""

    bytes: NonNegativeInt
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*\.safetensors$")]
"""a name without a folder: the files lie beside the manifest"""


class Manifest(_Record):
    """All parts of a checkpoint that are not tensors."""

    format: Literal[2] = FORMAT
    rlx: str  # version that wrote the checkpoint
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
    signature: str = ""  # of the config, see `signatures`
    seconds: float = 0.0  # of the steps so far; 0 in checkpoints of before it was kept
    reference: bool = False  # the run keeps the weights of its reference, see `checkpoint_catalog.REFERENCE`

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks that wrote the checkpoint: the ranks with completions of their own."""
        parallel = self.config.get("parallel", {})
        return self.ranks // (int(parallel.get("tp", 1)) * int(parallel.get("sp", 1)))

    def to_json(self) -> str:
        """Returns the text of the manifest file, with a checksum over the content."""
        content = self.model_dump(mode="json")
        return json.dumps({"sha256": content_digest(content)} | content, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Reads the text of a manifest file.

        Raises:
            OtherFormatError: another version of rlx wrote it.
            ValueError: it is damaged; the text says in one line how.
        """
        try:
            content = json.loads(text)
            digest, expected = content.pop("sha256"), content_digest(content)
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
            raise ValueError(f"{MANIFEST} is not a manifest") from None
        _check_format(content)
        if digest != expected:
            raise ValueError(f"{MANIFEST} has been changed: its checksum differs")
        try:
            return cls.model_validate(content)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            field = " ".join(".".join(str(part) for part in first["loc"]).split())  # one line, whatever the keys are
            raise ValueError(f"{MANIFEST}: {field}: {first['msg']}") from None


def content_digest(content: Mapping[str, Any]) -> str:
    """Returns the checksum over the content of a manifest."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _check_format(content: Mapping[str, Any]) -> None:
    """Raises OtherFormatError for the formats of other versions, ValueError for anything else."""
    number = content.get("format")
    if type(number) is int and number != FORMAT and 0 < number < 1000:
        version = content.get("rlx")
        author = " ".join(version.split())[:20] if isinstance(version, str) else "?"
        raise OtherFormatError(
            f"{MANIFEST} has format {number}, written by rlx {author}: this version of rlx reads format {FORMAT} only"
        )
    if type(number) is not int or number != FORMAT:
        raise ValueError(f"{MANIFEST} has format {number!r:.40}: this version of rlx reads format {FORMAT} only")
