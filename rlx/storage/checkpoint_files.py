"""Training state <-> safetensors files: each rank writes its shards to one file, any number of ranks reads them.

A file says of each tensor where its part lies in the full tensor. So a rank reads the parts that it needs straight from
the storage, and no rank talks to another. Left out: which files make a checkpoint (checkpoint_catalog.py) and writing
them while training goes on (checkpoint_writer.py).
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rlx.storage import checkpoint_keys
from rlx.storage.filesystem import Storage, fsync_folder
from rlx.storage.quantized_state import plain_parts

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""the dtypes of a safetensors header that a checkpoint may have"""
_TRAINED_ONLY = StateDictOptions(ignore_frozen_params=True, strict=False)
_LAYOUT = "layout"  # key in a file's header: offset and full shape of each tensor


class CheckpointError(ValueError):
    """The checkpoint does not fit the model, or a file of it is malformed. The text names the tensor or the file."""


@dataclass(frozen=True, slots=True)
class ModelAndOptimizer:
    """A model and the optimizer of its parameters."""

    model: nn.Module
    optimizer: Optimizer


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's part of a tensor."""

    local: Tensor
    offset: tuple[int, ...]  # of the part's first element in the full tensor
    shape: tuple[int, ...]  # of the full tensor


Copies = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""makes copies in main memory"""


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def new_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors in main memory."""
    return {key: tensor.to("cpu", copy=True) for key, tensor in tensors.items()}


def copy_shards(
    models: Mapping[str, ModelAndOptimizer], ema: Mapping[str, Tensor], copies: Copies = new_copies
) -> dict[str, Shard]:
    """Copies the shards that this rank must write to main memory; training may change the originals afterwards.

    Where several ranks hold the same part of a tensor, only the first of them copies it.

    Args:
        ema: the moving average of the policy's weights by name, each of the weight's shape; empty if there is none.
        copies: makes the copies.

    Returns:
        Shards by key (checkpoint_keys.py); `local` has the shape of this rank's part, which is never empty.
    """
    stepped = [name for name, trained in models.items() if trained.optimizer.state]
    return _copied(_state_tensors(models, ema, stepped), copies)


def _copied(tensors: Iterable[tuple[str, Tensor]], copies: Copies = new_copies) -> dict[str, Shard]:
    shards = {key: _local_shard(tensor) for key, tensor in tensors if _is_written_here(tensor)}
    here = copies({key: shard.local.detach() for key, shard in shards.items() if shard.local.numel()})
    return {key: Shard(copy, shards[key].offset, shards[key].shape) for key, copy in here.items()}


def write_shards(shards: Mapping[str, Shard], file: Path) -> None:
    """Writes shards to a local file and flushes it to the disk.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    layout = {key: {"offset": shard.offset, "shape": shard.shape} for key, shard in shards.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        tensors = {key: shard.local.contiguous() for key, shard in shards.items()}
        save_file(tensors, file, metadata={_LAYOUT: json.dumps(layout)})
    except SafetensorError as error:
        raise OSError(f"{file}: {error}") from None
    with file.open("rb+") as written:
        os.fsync(written.fileno())
    fsync_folder(file.parent)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def load_state(files: Sequence[Storage], models: Mapping[str, ModelAndOptimizer], ema: Mapping[str, Tensor]) -> None:
    """Reads a checkpoint into models, optimizers and the moving average of the policy, in place. Collective.

    Settings of the optimizers (learning rate, betas, decay) are left as they are.

    Args:
        ema: the moving average of the policy's weights by name, each of the weight's shape; empty if there is none.

    Raises:
        CheckpointError: the checkpoint lacks a tensor, or has it in another shape.
    """
    with CheckpointReader(files) as reader:
        stepped = [name for name in models if checkpoint_keys.has_optimizer_state(reader.names, name)]
        for key, tensor in _state_tensors(models, ema, stepped):
            _read_into(tensor, reader, key)


def load_weights(files: Sequence[Storage], models: Mapping[str, ModelAndOptimizer]) -> set[str]:
    """Reads only weights, in place; returns the checkpoint's keys. Optimizers stay fresh, as do a critic and a value
    head that the checkpoint lacks.

    Raises:
        CheckpointError: the checkpoint has no policy, lacks a tensor, or has it in another shape.
    """
    with CheckpointReader(files) as reader:
        if not checkpoint_keys.has_weights(known := set(reader.names), "policy"):
            raise CheckpointError("the checkpoint has no weights of a policy")
        for name in (name for name in models if checkpoint_keys.has_weights(known, name)):
            for weight, tensor in _trained_weights(models[name]).items():
                key = checkpoint_keys.model_weight(name, weight)
                if key in known or not checkpoint_keys.is_of_value_head(weight):
                    _read_into(tensor, reader, key)
        return known


def read_reference(files: Sequence[Storage], policy: ModelAndOptimizer, reference: nn.Module) -> None:
    """Reads the weights of a checkpoint's policy into a frozen copy of the policy, in place; no value head.

    Raises:
        CheckpointError: the checkpoint lacks a weight, or has it in another shape.
    """
    with CheckpointReader(files) as reader:
        for key, tensor in _reference_weights(policy, reference).items():
            _read_into(tensor, reader, key)


def copy_reference(policy: ModelAndOptimizer, reference: nn.Module) -> dict[str, Shard]:
    """Copies the shards of a frozen copy of the policy that this rank must write, under the keys of the policy."""
    return _copied(_reference_weights(policy, reference).items())


def _read_into(tensor: Tensor, reader: CheckpointReader, key: str) -> None:
    """Overwrites this rank's shard of a tensor with its part in the checkpoint."""
    shard = _local_shard(tensor)
    if shard.local.numel():
        shard.local.copy_(reader.read(key, shard.offset, tuple(shard.local.shape), shard.shape))


class CheckpointReader:
    """The open files of a checkpoint: reads any part of any tensor.

    Raises:
        CheckpointError: a file is malformed, or two files disagree about a tensor.
    """

    def __init__(self, files: Sequence[Storage]) -> None:
        self._open_files = ExitStack()
        self._pieces: dict[str, list[_Piece]] = {}
        try:
            for file in files:
                for name, piece in _read_header(file, self._open_files):
                    known = self._pieces.setdefault(name, [])
                    if known and (known[0].dtype, known[0].full_shape) != (piece.dtype, piece.full_shape):
                        raise CheckpointError(f"{file.name}: {name!r} has another dtype or shape in other files")
                    known.append(piece)
        except BaseException:
            self._open_files.close()
            raise

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._open_files.close()

    @property
    def names(self) -> list[str]:
        """The keys of all tensors in the checkpoint (checkpoint_keys.py)."""
        return list(self._pieces)

    def read_full(self, name: str) -> Tensor:
        """Reads a full tensor; it has the shape that it had when it was written.

        Raises:
            CheckpointError: the checkpoint does not have it in full.
        """
        if name not in self._pieces:
            raise CheckpointError(f"the checkpoint has no {name}")
        shape = self._pieces[name][0].full_shape
        return self.read(name, (0,) * len(shape), shape, shape)

    def read(self, name: str, offset: Sequence[int], size: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Reads the part of a tensor that begins at `offset` and is `size`; the full tensor has this `shape`.

        Returns:
            A tensor of shape `size`.

        Raises:
            CheckpointError: the checkpoint lacks the tensor or a piece of the part, or has it in another shape.
        """
        pieces = self._pieces.get(name, [])
        if not pieces:
            raise CheckpointError(f"the checkpoint has no {name}: it is of another model")
        full_shape = pieces[0].full_shape
        if tuple(shape) != full_shape:
            raise CheckpointError(f"{name} is {list(full_shape)} in the checkpoint, {list(shape)} in this model")
        wanted = [(start, start + length) for start, length in zip(offset, size, strict=True)]
        overlaps = [(piece, area) for piece in pieces if (area := _intersection(piece.area, wanted)) is not None]
        _check_coverage(name, [area for _, area in overlaps], math.prod(size))
        part = torch.empty(tuple(size), dtype=pieces[0].dtype)
        for piece, area in overlaps:
            part[_slices(area, offset)] = piece.read(_slices(area, piece.offset))
        return part


_Area = list[tuple[int, int]]
"""of a tensor: the first index along each dimension, and the one after the last"""


def _intersection(first: _Area, second: _Area) -> _Area | None:
    """Returns the area that two areas share; None if they share nothing."""
    shared = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True)]
    return shared if all(a < b for a, b in shared) else None


def _slices(area: _Area, offset: Sequence[int]) -> tuple[slice, ...]:
    """Returns the index of an area in a tensor whose first element is at `offset`."""
    return tuple(slice(start - shift, stop - shift) for (start, stop), shift in zip(area, offset, strict=True))


def _check_coverage(name: str, areas: Sequence[_Area], count: int) -> None:
    """Raises CheckpointError unless the areas cover `count` elements, each once: before memory is allocated."""
    covered = sum(math.prod(stop - start for start, stop in area) for area in areas)
    overlapping = any(_intersection(a, b) is not None for a, b in itertools.combinations(areas, 2))
    if overlapping or covered != count:
        raise CheckpointError(f"{name} is not in full in the checkpoint")


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a tensor that lies in one file."""

    file: Any
    start: int  # first byte in the file
    dtype: torch.dtype
    offset: tuple[int, ...]
    size: tuple[int, ...]
    full_shape: tuple[int, ...]

    @property
    def area(self) -> _Area:
        return [(start, start + length) for start, length in zip(self.offset, self.size, strict=True)]

    def read(self, part: tuple[slice, ...]) -> Tensor:
        """Reads a part of the piece: only the rows that the part touches are read from the file."""
        first, last = (part[0].start, part[0].stop) if part else (0, 1)
        row_bytes = self.dtype.itemsize * math.prod(self.size[1:])
        data = self.file.read_at((last - first) * row_bytes, self.start + first * row_bytes)
        rows = torch.frombuffer(bytearray(data), dtype=self.dtype).view(last - first, *self.size[1:])
        return rows[(slice(None), *part[1:])] if part else rows.view(())


def _read_header(file: Storage, open_files: ExitStack) -> Iterator[tuple[str, _Piece]]:
    """Opens a safetensors file and yields its tensors by name.

    The file is eight bytes with the length of a JSON header, the header, and the bytes of the tensors.
    """
    opened = open_files.enter_context(file.filesystem.open_input_file(file.path))
    try:
        length = int.from_bytes(opened.read_at(8, 0), "little")
        if 8 + length > opened.size():
            raise ValueError("the file ends within its header")
        header = json.loads(bytes(opened.read_at(length, 8)))
        layout = json.loads(header.pop("__metadata__")[_LAYOUT])
        expected_start = 8 + length
        for name, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            start, end = (8 + length + position for position in _counts(tensor["data_offsets"]))
            offset, full_shape = _counts(layout[name]["offset"]), _counts(layout[name]["shape"])
            piece = _Piece(opened, start, DTYPES[tensor["dtype"]], offset, _counts(tensor["shape"]), full_shape)
            is_inside = all(stop <= full for (_, stop), full in zip(piece.area, full_shape, strict=True))
            if not is_inside or start != expected_start or end - start != piece.dtype.itemsize * math.prod(piece.size):
                raise ValueError(f"{name!r} does not lie where the header says")
            expected_start = end
            yield name, piece
        if expected_start != opened.size():
            raise ValueError(f"the file has {opened.size()} bytes, not {expected_start}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = " ".join(f"{type(error).__name__} {error}".split())
        raise CheckpointError(f"{file.name} is not a file of a checkpoint: {reason}") from None


def _counts(values: Any) -> tuple[int, ...]:
    """Returns a list of a header as sizes or offsets; raises ValueError if it has anything but integers >= 0."""
    if not isinstance(values, list) or not all(type(n) is int and n >= 0 for n in values):
        raise ValueError(f"{values!r:.80} are not sizes or offsets")
    return tuple(values)


# ---------------------------------------------------------------------------------------------------------------------
# Live tensors


def _state_tensors(
    models: Mapping[str, ModelAndOptimizer], ema: Mapping[str, Tensor], stepped: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yields the key and the live tensor of everything that training changes. Collective.

    Frozen weights are not among them: they are in the model's folder.

    Args:
        stepped: models whose optimizer has, or will get, state. torch makes the state of an optimizer that has none,
            by a step with zero gradients.
    """
    for weight, tensor in ema.items():
        yield checkpoint_keys.ema_weight(weight), tensor
    for name, trained in models.items():
        for weight, tensor in _trained_weights(trained).items():
            yield checkpoint_keys.model_weight(name, weight), tensor
        if name in stepped:
            state = get_optimizer_state_dict(trained.model, trained.optimizer, options=_TRAINED_ONLY)["state"]
            for parameter, moments in cast(Mapping[str, Mapping[str, Tensor]], state).items():
                for moment, tensor in itertools.chain.from_iterable(plain_parts(*each) for each in moments.items()):
                    yield checkpoint_keys.optimizer_state(name, parameter, moment), tensor


def _trained_weights(trained: ModelAndOptimizer) -> dict[str, Tensor]:
    """Returns the trained weights by name; a tied weight under its first name."""
    weights = cast(dict[str, Tensor], get_model_state_dict(trained.model, options=_TRAINED_ONLY))
    # Under both names of a tied weight: torch itself leaves out the first name only.
    frozen = {n for n, p in trained.model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    tied = {n for n, _ in trained.model.named_parameters(remove_duplicate=False)}
    tied -= {n for n, _ in trained.model.named_parameters()}
    return {name: tensor for name, tensor in weights.items() if name not in frozen | tied}


def _reference_weights(policy: ModelAndOptimizer, reference: nn.Module) -> dict[str, Tensor]:
    """Returns the live weights of a frozen copy that the policy trains, by the policy's keys."""
    weights = cast(dict[str, Tensor], get_model_state_dict(reference))
    names = [name for name in _trained_weights(policy) if name in weights]  # it has no value head
    return {checkpoint_keys.model_weight("policy", name): weights[name] for name in names}


def _local_shard(tensor: Tensor) -> Shard:
    """Returns this rank's part of a tensor; it shares the tensor's memory."""
    if not isinstance(tensor, DTensor):
        return Shard(tensor, (0,) * tensor.dim(), tuple(tensor.shape))
    local = tensor.to_local()
    chunks = cast(Any, tensor).__create_chunk_list__()
    offset = tuple(chunks[0].offsets) if chunks else (0,) * tensor.dim()
    return Shard(local, offset, tuple(tensor.shape))


def _is_written_here(tensor: Tensor) -> bool:
    """Whether this rank is the first of the ranks that hold the same part of a tensor."""
    if not isinstance(tensor, DTensor):
        return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or []
    if 0 not in tensor.device_mesh.mesh:  # another tensor-parallel rank holds the same on a mesh of its own
        return False
    return all(at == 0 or not place.is_replicate() for place, at in zip(tensor.placements, coordinate, strict=True))
