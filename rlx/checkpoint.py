"""Training state <-> a folder: sharded tensors by torch's distributed checkpoint, everything else in one JSON manifest.

Each rank writes its own shards to its own folder; Ray Train merges and uploads the folders. Loads on any number of
ranks. Exporting to Hugging Face folders is not done here.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.optim import Optimizer

MANIFEST = "manifest.json"
_TRAINED_ONLY = StateDictOptions(ignore_frozen_params=True, strict=False)
_METADATA = ".metadata"  # what distributed checkpoint writes last


@dataclass(frozen=True, slots=True)
class Trained:
    """A model and the optimizer of its parameters."""

    model: nn.Module
    optimizer: Optimizer


@contextmanager
def written(
    models: Mapping[str, Trained], average: Mapping[str, Tensor], manifest: Mapping[str, Any], rank: int
) -> Iterator[str]:
    """A temporary folder with this rank's part of a checkpoint; all ranks call it. Rank 0 writes the manifest too."""
    with tempfile.TemporaryDirectory(prefix="rlx-checkpoint-") as folder:
        stepped = [name for name, trained in models.items() if trained.optimizer.state]
        save_shards(_tensors(models, average, stepped), checkpoint_id=folder)
        if rank == 0:
            Path(folder, MANIFEST).write_text(json.dumps(manifest, indent=1))
        yield folder


def load(folder: str, models: Mapping[str, Trained], average: Mapping[str, Tensor]) -> dict[str, Any]:
    """Puts a checkpoint's tensors into the models, optimizers and the average of the policy's weights, whatever the
    number of ranks; gives its manifest.

    Raises:
        ValueError: there is no whole checkpoint in the folder.
    """
    for name in (MANIFEST, _METADATA):
        if not Path(folder, name).is_file():
            raise ValueError(f"no checkpoint in {folder}: there is no {name} in it")
    kept = FileSystemReader(folder).read_metadata().state_dict_metadata
    stepped = {name for name in models if any(key.startswith(f"{name}.optimizer.") for key in kept)}
    tensors = _tensors(models, average, stepped)
    load_shards(tensors, checkpoint_id=folder)
    for name, trained in models.items():
        _put(trained, tensors[name])
    return dict(json.loads(Path(folder, MANIFEST).read_text()))


def _put(trained: Trained, state: Mapping[str, Any]) -> None:
    """Weights and moments; what a config says of an optimizer (betas, decay) stays as this run's config has it."""
    set_model_state_dict(trained.model, state["model"], options=_TRAINED_ONLY)
    if "optimizer" not in state:
        return
    own = [{key: value for key, value in group.items() if key != "params"} for group in trained.optimizer.param_groups]
    set_optimizer_state_dict(trained.model, trained.optimizer, state["optimizer"], options=_TRAINED_ONLY)
    for group, settings in zip(trained.optimizer.param_groups, own, strict=True):
        group.update(settings)


def _tensors(
    models: Mapping[str, Trained], average: Mapping[str, Tensor], stepped: Collection[str]
) -> dict[str, dict[str, Any]]:
    """What is trained, and the state of the optimizers that have stepped: frozen weights are the model folder's own.

    torch gives an optimizer without state one, by a step on zeros; it would count.
    """
    tensors: dict[str, dict[str, Any]] = {"average": dict(average)} if average else {}
    for name, trained in models.items():
        weights = get_model_state_dict(trained.model, options=_TRAINED_ONLY)
        # Under both names of a tied one: torch itself leaves out the first only.
        frozen = {n for n, p in trained.model.named_parameters(remove_duplicate=False) if not p.requires_grad}
        tensors[name] = {"model": {key: tensor for key, tensor in weights.items() if key not in frozen}}
        if name in stepped:
            tensors[name]["optimizer"] = get_optimizer_state_dict(
                trained.model, trained.optimizer, options=_TRAINED_ONLY
            )
    return tensors
