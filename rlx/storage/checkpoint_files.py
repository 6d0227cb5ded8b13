"""Training state <-> safetensors files: each rank's shards in one file of its own, read on any number of ranks.

A file says of each tensor where in the whole it lies, so a rank reads the parts that it needs, straight from the
storage, and no rank talks to another. Which files make a checkpoint, and whether they are whole, is archive's; writing
beside training is saver's.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from rlx.storage.filesystem import Storage
from rlx.storage.filesystem import sync_folder
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing import Any
from typing import cast
import itertools
import json
import math
import os
import torch



_TRAINED_ONLY = StateDictOptions(ignore_frozen_params=True, strict=False)
_LAYOUT = "layout"  # in a file's header: of each tensor, its place in the whole
_KINDS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class CheckpointError(ValueError):
    """A checkpoint that is not of this model; the text names the tensor."""


@dataclass(frozen=True, slots=True)
class ModelAndOptimizer:
    """A model and the optimizer of its parameters."""

    model: nn.Module
    optimizer: Optimizer


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a tensor."""

    local: Tensor
    offset: tuple[int, ...]  # of its first element in the whole
    shape: tuple[int, ...]  # of the whole


def copy_shards(models: Mapping[str, ModelAndOptimizer], average: Mapping[str, Tensor]) -> dict[str, Shard]:
    """Copies in main memory of what this rank has to write: training may go on at once.

    A tensor that several ranks have alike is the first one's to write.
    """
    stepped = [name for name, trained in models.items() if trained.optimizer.state]
    shards = {name: _shard(tensor) for name, tensor in _tensors(models, average, stepped) if _is_mine(tensor)}
    return {
        name: Shard(shard.local.detach().to("cpu", copy=True), shard.offset, shard.shape)
        for name, shard in shards.items()
        if shard.local.numel()
    }


def write(shards: Mapping[str, Shard], file: Path) -> None:
    """Writes shards to a file and sees to it that they are on the disk; OSError if they do not fit."""
    layout = {name: {"offset": shard.offset, "shape": shard.shape} for name, shard in shards.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        local = {name: shard.local.contiguous() for name, shard in shards.items()}
        save_file(local, file, metadata={_LAYOUT: json.dumps(layout)})
    except SafetensorError as error:
        raise OSError(f"{file}: {error}") from None
    with file.open("rb+") as written:
        os.fsync(written.fileno())
    sync_folder(file.parent)


def load(files: Sequence[Storage], models: Mapping[str, ModelAndOptimizer], average: Mapping[str, Tensor]) -> None:
    """Puts a checkpoint's tensors into models, optimizers and the average of the policy's weights; a collective call.

    What a config says of an optimizer (betas, decay) stays as this run's config has it.

    Raises:
        CheckpointError: it lacks a tensor of the model, or has it in another shape.
    """
    with CheckpointReader(files) as parts:
        stepped = {name for name in models if any(key.startswith(f"{name}.optimizer.") for key in parts.names)}
        for name, tensor in _tensors(models, average, stepped):
            shard = _shard(tensor)
            if shard.local.numel():
                shard.local.copy_(parts.read(name, shard.offset, tuple(shard.local.shape), shard.shape))


def load_weights(files: Sequence[Storage], models: Mapping[str, ModelAndOptimizer]) -> None:
    """Puts a checkpoint's weights alone into the models that it has; optimizers stay fresh."""
    with CheckpointReader(files) as parts:
        if not any(name.startswith("policy.model.") for name in parts.names):
            raise CheckpointError("the checkpoint has no weights of a policy")
        for name, trained in models.items():
            for key, tensor in _weights(trained).items():
                shard = _shard(tensor)
                if shard.local.numel() and any(n.startswith(f"{name}.model.") for n in parts.names):
                    shard.local.copy_(
                        parts.read(f"{name}.model.{key}", shard.offset, tuple(shard.local.shape), shard.shape)
                    )


class CheckpointReader:
    """The files of a checkpoint, open for reading any part of any of its tensors."""

    def __init__(self, files: Sequence[Storage]) -> None:
        self._open = ExitStack()
        self._pieces: dict[str, list[_Piece]] = {}
        try:
            for file in files:
                for name, piece in _pieces(file, self._open):
                    known = self._pieces.setdefault(name, [])
                    if known and (known[0].kind, known[0].whole) != (piece.kind, piece.whole):
                        raise CheckpointError(f"{file.name}: {name!r} has another kind or shape in other files")
                    known.append(piece)
        except BaseException:
            self._open.close()
            raise

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def names(self) -> list[str]:
        return list(self._pieces)

    def whole(self, name: str) -> Tensor:
        """A tensor in full."""
        if name not in self._pieces:
            raise CheckpointError(f"the checkpoint has no {name}")
        shape = self._pieces[name][0].whole
        return self.read(name, (0,) * len(shape), shape, shape)

    def read(self, name: str, offset: Sequence[int], size: Sequence[int], shape: Sequence[int]) -> Tensor:
        """`size` elements from `offset` on of a tensor that is `shape` in all.

        Raises:
            CheckpointError: it is not there, not in full, or of another shape.
        """
        pieces = self._pieces.get(name, [])
        if not pieces:
            raise CheckpointError(f"the checkpoint has no {name}: it is of another model")
        if tuple(shape) != pieces[0].whole:
            raise CheckpointError(f"{name} is {list(pieces[0].whole)} in the checkpoint, {list(shape)} in this model")
        asked = [(o, o + s) for o, s in zip(offset, size, strict=True)]
        found = [(piece, box) for piece in pieces if (box := _common(piece.box, asked)) is not None]
        count = sum(math.prod(b - a for a, b in box) for _, box in found)
        twice = any(_common(one, other) is not None for (_, one), (_, other) in itertools.combinations(found, 2))
        if twice or count != math.prod(size):  # known before there is memory for it
            raise CheckpointError(f"{name} is not in full in the checkpoint")
        filled = torch.empty(tuple(size), dtype=pieces[0].kind)
        for piece, box in found:
            target = tuple(slice(a - o, b - o) for (a, b), o in zip(box, offset, strict=True))
            filled[target] = piece.read(tuple(slice(a - p, b - p) for (a, b), p in zip(box, piece.offset, strict=True)))
        return filled


_Box = list[tuple[int, int]]
"""the first index along each dimension, and the one after the last"""


def _common(one: _Box, other: _Box) -> _Box | None:
    """What two boxes have in common; None if that is nothing."""
    both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True)]
    return both if all(a < b for a, b in both) else None


@dataclass(frozen=True, slots=True)
class _Piece:
    """Part of a tensor in a file."""

    file: Any
    start: int  # byte in the file
    kind: torch.dtype
    offset: tuple[int, ...]
    size: tuple[int, ...]
    whole: tuple[int, ...]

    @property
    def box(self) -> _Box:
        return [(o, o + s) for o, s in zip(self.offset, self.size, strict=True)]

    def read(self, part: tuple[slice, ...]) -> Tensor:
        """A part of it: the rows that it touches are read, the rest of the file is not."""
        first, last = (part[0].start, part[0].stop) if part else (0, 1)
        row = self.kind.itemsize * math.prod(self.size[1:])
        data = self.file.read_at((last - first) * row, self.start + first * row)
        rows = torch.frombuffer(bytearray(data), dtype=self.kind).view(last - first, *self.size[1:])
        return rows[(slice(None), *part[1:])] if part else rows.view(())


def _pieces(file: Storage, stack: ExitStack) -> Iterator[tuple[str, _Piece]]:
    """What a safetensors file holds: eight bytes with the length of a JSON header, the header, the tensors' bytes."""
    opened = stack.enter_context(file.filesystem.open_input_file(file.path))
    try:
        length = int.from_bytes(opened.read_at(8, 0), "little")
        if 8 + length > opened.size():
            raise ValueError("it ends within its header")
        header = json.loads(bytes(opened.read_at(length, 8)))
        layout = json.loads(header.pop("__metadata__")[_LAYOUT])
        filled = 8 + length
        for name, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = (8 + length + at for at in _counts(tensor["data_offsets"]))
            place = layout[name]
            offset, size, whole = _counts(place["offset"]), _counts(tensor["shape"]), _counts(place["shape"])
            piece = _Piece(opened, begin, _KINDS[tensor["dtype"]], offset, size, whole)
            inside = all(b <= w for (_, b), w in zip(piece.box, whole, strict=True))
            if not inside or begin != filled or end - begin != piece.kind.itemsize * math.prod(size):
                raise ValueError(f"{name!r} does not lie where it says")
            filled = end
            yield name, piece
        if filled != opened.size():
            raise ValueError(f"it has {opened.size()} bytes, not {filled}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = " ".join(f"{type(error).__name__} {error}".split())
        raise CheckpointError(f"{file.name} is no file of a checkpoint: {reason}") from None


def _counts(values: Any) -> tuple[int, ...]:
    """The whole numbers from 0 on in a list of a header; ValueError if there is anything else."""
    if not isinstance(values, list) or not all(type(n) is int and n >= 0 for n in values):
        raise ValueError(f"{values!r:.80} are no sizes or offsets")
    return tuple(values)


def _tensors(
    models: Mapping[str, ModelAndOptimizer], average: Mapping[str, Tensor], stepped: Sequence[str] | set[str]
) -> Iterator[tuple[str, Tensor]]:
    """The live tensors of what is trained, and of the optimizers that have stepped: frozen weights are the model
    folder's own.

    torch gives an optimizer without state one, by a step on zeros; for those in `stepped` that is meant.
    """
    for name, tensor in average.items():
        yield f"average.{name}", tensor
    for name, trained in models.items():
        for key, tensor in _weights(trained).items():
            yield f"{name}.model.{key}", tensor
        if name in stepped:
            state = get_optimizer_state_dict(trained.model, trained.optimizer, options=_TRAINED_ONLY)["state"]
            for key, moments in cast(Mapping[str, Mapping[str, Tensor]], state).items():
                for moment, tensor in moments.items():
                    yield f"{name}.optimizer.{key}.{moment}", tensor


def _weights(trained: ModelAndOptimizer) -> dict[str, Tensor]:
    """The trained weights by name; one that has two names under the first."""
    weights = cast(dict[str, Tensor], get_model_state_dict(trained.model, options=_TRAINED_ONLY))
    # Under both names of a tied one: torch itself leaves out the first only.
    frozen = {n for n, p in trained.model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    tied = {n for n, _ in trained.model.named_parameters(remove_duplicate=False)}
    tied -= {n for n, _ in trained.model.named_parameters()}
    return {key: tensor for key, tensor in weights.items() if key not in frozen | tied}


def _shard(tensor: Tensor) -> Shard:
    """This rank's part of a tensor, sharing its memory."""
    if not isinstance(tensor, DTensor):
        return Shard(tensor, (0,) * tensor.dim(), tuple(tensor.shape))
    local = tensor.to_local()
    chunks = cast(Any, tensor).__create_chunk_list__()
    offset = tuple(chunks[0].offsets) if chunks else (0,) * tensor.dim()
    return Shard(local, offset, tuple(tensor.shape))


def _is_mine(tensor: Tensor) -> bool:
    """Whether this rank is the first of those that have the same part of a tensor."""
    if not isinstance(tensor, DTensor):
        return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or []
    if 0 not in tensor.device_mesh.mesh:  # a tensor-parallel neighbour's, who has the same on a mesh of its own
        return False
    return all(at == 0 or not place.is_replicate() for place, at in zip(tensor.placements, coordinate, strict=True))
