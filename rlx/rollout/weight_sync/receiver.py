"""The receiving end of weight updates, in each worker process of a vLLM engine: loads Hugging Face tensors.

While one bucket is loaded the next one arrives. On a GPU the host waits only at the end: the stream keeps the order,
and the checksums are read once. Left out: how buckets arrive (the transports' files).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlx.rollout.weight_sync.base import Incoming, ReceivingEnd, check_interrupted, deadline, wait
from rlx.rollout.weight_sync.buckets import is_sound, views
from rlx.rollout.weight_sync.process_group import open_store
from rlx.rollout.weight_sync.topology import TRANSPORTS
from rlx.types import WeightSyncError

Loader = Callable[[Iterator[tuple[str, Tensor]]], None]


class WeightLoader:
    """Extends vLLM's worker (worker_extension_cls): loads Hugging Face tensors into the running model."""

    device: Any  # these are the worker's
    rank: int
    model_config: Any
    get_model: Callable[[], Any]
    reload_weights: Callable[..., None]
    rlx_receiver: Receiver | None = None
    rlx_in_place: bool | None = None  # see `_rlx_loads_in_place`; None: not looked yet

    def rlx_gpu(self) -> str:
        """The UUID of the worker's GPU; empty on CPU."""
        return str(torch.cuda.get_device_properties(self.device).uuid) if self.device.type == "cuda" else ""

    def rlx_receive(self, incoming: Incoming) -> WeightSyncError | None:
        """Receives and loads a whole update; returns the error, because a raised one would end the process."""
        if self.rlx_receiver is None:
            self.rlx_receiver = Receiver(self.device, self.rank)
        if self.rlx_in_place is None:
            self.rlx_in_place = self._rlx_loads_in_place()
        if self.rlx_in_place:
            return self.rlx_receiver.receive(incoming, self.get_model().load_weights, reads_late=False)
        return self.rlx_receiver.receive(incoming, self.rlx_load_weights, reads_late=True)

    def rlx_load_weights(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Loads all tensors of an update, whose shapes are those of the Hugging Face model."""
        # One call for each update: vLLM fuses q, k, v from what a single call brings.
        self.reload_weights(weights_iterator=tensors)
        model = self.get_model()
        head = getattr(model, "lm_head", None)
        tied = getattr(model.config, "tie_word_embeddings", False)
        if tied and head is not None and next(model.parameters()).device.type == "cpu":
            # On CPU a reload does not refresh the head's packed copy of the embedding, without any error.
            head.quant_method.process_weights_after_loading(head)

    def _rlx_loads_in_place(self) -> bool:
        """Whether weights may be written where they are used: on GPU, where no layer keeps them in another form.

        It takes an eighth of the time of a reload.
        """
        model = self.get_model()
        methods = {type(m.quant_method).__name__ for m in model.modules() if getattr(m, "quant_method", None)}
        plain = methods <= {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
        return self.device.type == "cuda" and plain and not self.model_config.use_mla


class Receiver:
    """Receives updates, each by the transport that it names; keeps the connection from one update to the next."""

    def __init__(self, device: torch.device, worker: int) -> None:
        self._device, self._worker = device, worker
        self._store: Any = None
        self._address: tuple[str, int] | None = None  # of the store
        self._name = ""  # of the transport
        self._end: ReceivingEnd | None = None

    def receive(self, incoming: Incoming, load: Loader, reads_late: bool) -> WeightSyncError | None:
        """Loads an update. It returns an error and does not raise it, because the loader must not be interrupted.

        Args:
            load: vLLM's loader; it is called once.
            reads_late: whether the loader may still read a tensor when it has asked for the next one.
        """
        errors: list[WeightSyncError] = []

        def tensors() -> Iterator[tuple[str, Tensor]]:
            try:
                yield from self._tensors(incoming, reads_late)
            except WeightSyncError as error:
                errors.append(error)
            except TimeoutError:
                errors.append(WeightSyncError(f"waited {incoming.timeout_s:.0f} s for the weights"))
            except RuntimeError as error:  # such as torch.OutOfMemoryError
                errors.append(WeightSyncError(str(error)))

        try:
            load(tensors())
        except Exception as error:
            self._fail(incoming, error)
            raise
        if errors:
            self._fail(incoming, errors[0])
        return errors[0] if errors else None

    def _tensors(self, incoming: Incoming, reads_late: bool) -> Iterator[tuple[str, Tensor]]:
        """The tensors of an update by name; checks that they arrive as they were sent."""
        sound = torch.ones((), dtype=torch.bool, device=self._device)
        buckets = self._connect(incoming).receive(incoming)
        for bucket, layout in zip(buckets, incoming.layouts, strict=True):
            sound &= is_sound(bucket, layout)
            for name, tensor in views(bucket, layout):
                yield name, tensor.clone() if reads_late else tensor
        if self._device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
            wait(done.query, deadline(incoming), partial(check_interrupted, self._store, incoming))
        if not sound:
            raise WeightSyncError("the checksum of a bucket differs from what was sent")

    def _connect(self, incoming: Incoming) -> ReceivingEnd:
        name = incoming.sources[self._worker].transport
        if self._end and (self._name, self._address) != (name, incoming.address):
            self._end.close()
            self._end = None
        if incoming.address != self._address:
            self._store, self._address = open_store(incoming.address, incoming.timeout_s), incoming.address
        if self._end is None:
            make = TRANSPORTS[name].receiver
            assert make, f"{name} does not reach workers"
            self._end, self._name = make(self._device, self._worker), name
        self._end.connect(incoming, self._store)
        return self._end

    def _fail(self, incoming: Incoming, error: Exception) -> None:
        if self._end:
            self._end.fail(incoming, error)
