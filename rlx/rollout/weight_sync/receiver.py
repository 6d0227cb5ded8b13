"""The receiving end, in each worker process of an engine: vLLM's worker learns to take Hugging Face tensors, from
buckets that come in.

Two buffers take turns: while one is loaded the next fills. On a GPU nobody waits until the end: the order of the
stream is the order of what happens, and the checksums are looked at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlx.rollout.weight_sync import channels
from rlx.rollout.weight_sync.buckets import byte_size, is_sound, views
from rlx.rollout.weight_sync.channels import GivenUpError, Group, Incoming
from rlx.types import WeightSyncError

Loader = Callable[[Iterator[tuple[str, Tensor]]], None]


class WeightLoader:
    """Extends vLLM's worker (worker_extension_cls): loads Hugging Face tensors into the running model."""

    model_runner: Any
    device: Any
    rank: int
    rlx_receiver: Receiver | None = None

    def rlx_gpu(self) -> str:
        """The UUID of its GPU; empty on CPU."""
        return str(torch.cuda.get_device_properties(self.device).uuid) if self.device.type == "cuda" else ""

    def rlx_receive(self, incoming: Incoming) -> WeightSyncError | None:
        """Receives and loads a whole update; gives the error, which would end the process if it were raised."""
        if self.rlx_receiver is None:
            self.rlx_receiver = Receiver(self.device, incoming.engine, self.rank)
        if self._rlx_loads_at_once():
            return self.rlx_receiver.receive(incoming, self.model_runner.get_model().load_weights, keeps=False)
        return self.rlx_receiver.receive(incoming, self.rlx_load_weights, keeps=True)

    def rlx_load_weights(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        # One call per update: vLLM fuses q, k, v from what a single call brings.
        self.model_runner.reload_weights(weights_iterator=tensors)
        model = self.model_runner.get_model()
        head = getattr(model, "lm_head", None)
        tied = getattr(model.config, "tie_word_embeddings", False)
        if tied and head is not None and next(model.parameters()).device.type == "cpu":
            # On CPU the head's packed copy of the embedding is not refreshed by a reload: it stays silently stale.
            head.quant_method.process_weights_after_loading(head)

    def _rlx_loads_at_once(self) -> bool:
        """Whether weights may be written right where they are used: on GPU, where no layer keeps them in a form of its
        own. It takes an eighth of the time of a reload."""
        model = self.model_runner.get_model()
        methods = {type(m.quant_method).__name__ for m in model.modules() if getattr(m, "quant_method", None)}
        plain = methods <= {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
        return self.device.type == "cuda" and plain and not self.model_runner.model_config.use_mla


class Receiver:
    """Keeps the process group and the mapped memory from one update to the next."""

    def __init__(self, device: torch.device, engine: str, worker: int) -> None:
        self._device, self._engine, self._worker = device, engine, worker
        self._store: Any = None
        self._address: tuple[str, int] | None = None
        self._group: Group | None = None
        self._buffers: list[Tensor] = []  # for what comes through the group
        self._mapped: dict[bytes, Tensor] = {}

    def receive(self, incoming: Incoming, load: Loader, keeps: bool) -> WeightSyncError | None:
        """Loads an update; gives the error rather than raise it, as the loader must come to its end.

        Args:
            load: vLLM's, is called once.
            keeps: whether it may still read a tensor when it has asked for the next one.
        """
        failed: list[WeightSyncError] = []

        def tensors() -> Iterator[tuple[str, Tensor]]:
            try:
                yield from self._tensors(incoming, keeps)
            except WeightSyncError as error:
                failed.append(error)
            except TimeoutError:
                failed.append(WeightSyncError(f"waited {incoming.timeout_s:.0f} s for the weights"))
            except RuntimeError as error:  # no memory, say
                failed.append(WeightSyncError(str(error)))

        try:
            load(tensors())
        except Exception as error:
            self._give_up(incoming, error)
            raise
        if failed:
            self._give_up(incoming, failed[0])
        return failed[0] if failed else None

    def _give_up(self, incoming: Incoming, error: Exception) -> None:
        """Tells the trainer whose memory it reads, which may not be the one that hears what the engine answers."""
        if self._group:
            self._group.abandon()
            self._group = None
        if self._store is not None and incoming.sources[self._worker].kind == "shared":
            with suppress(RuntimeError):  # the store is gone, and so is the trainer
                self._store.set(channels.failed(incoming.update, self._engine, self._worker), str(error))

    def _tensors(self, incoming: Incoming, keeps: bool) -> Iterator[tuple[str, Tensor]]:
        source = incoming.sources[self._worker]
        sound = torch.ones((), dtype=torch.bool, device=self._device)
        self._connect(incoming)
        arrive = self._shared if source.kind == "shared" else self._sent
        for bucket, layout in zip(arrive(incoming), incoming.layouts, strict=True):
            sound &= is_sound(bucket, layout)
            for name, tensor in views(bucket, layout):
                yield name, tensor.clone() if keeps else tensor
        if self._device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
            channels.wait(done.query, _deadline(incoming), partial(self._check, incoming))
        if not sound:
            raise WeightSyncError("the checksum of a bucket differs from what was sent")

    def _connect(self, incoming: Incoming) -> None:
        if incoming.address != self._address:
            self._mapped.clear()
            self._store, self._address = channels.opened(incoming.address, incoming.timeout_s), incoming.address
        source = incoming.sources[self._worker]
        if self._group and (self._group.name, self._group.kind) != (incoming.group, source.kind):
            self._group.abandon()
            self._group = None
        if source.kind != "shared" and not self._group:
            check = partial(self._check, incoming)
            check()
            with _others_errors():
                self._group = Group(source.kind, incoming, source.rank, self._device, _deadline(incoming), check)

    def _check(self, incoming: Incoming) -> None:
        if self._store.check([channels.given_up(incoming.group)]):
            raise GivenUpError("the sender gave the update up, as another engine was lost")

    def _sent(self, incoming: Incoming) -> Iterator[Tensor]:
        """Each bucket as it comes through the group. Asking for the next says that this one has been read."""
        assert self._group
        group, sizes = self._group, [byte_size(layout) for layout in incoming.layouts]
        if not self._buffers or len(self._buffers[0]) < max(sizes):
            self._buffers.clear()
            self._buffers += [torch.empty(max(sizes), dtype=torch.uint8, device=self._device) for _ in range(2)]
        buckets = [self._buffers[i % 2][:nbytes] for i, nbytes in enumerate(sizes)]
        with _others_errors():
            works = [group.broadcast(bucket) for bucket in buckets[:2]]
        for i, bucket in enumerate(buckets):
            with _others_errors():
                group.settle(works[i], _deadline(incoming), partial(self._check, incoming))
            yield bucket
            with _others_errors():
                works += [group.broadcast(bucket) for bucket in buckets[i + 2 : i + 3]]

    def _shared(self, incoming: Incoming) -> Iterator[Tensor]:
        """Each bucket in the memory of the trainer on this device. Asking for the next says that it has been read."""
        rank, store = incoming.sources[self._worker].rank, self._store

        def arrived(note: str) -> bytes:
            channels.wait(lambda: store.check([note]), _deadline(incoming), lambda: None)
            return store.get(note)

        for i, layout in enumerate(incoming.layouts):
            handle = arrived(channels.written(incoming.update, i, rank))
            if handle not in self._mapped:
                if len(self._mapped) == 2:
                    self._mapped.clear()  # the trainer has other buffers now
                self._mapped[handle] = channels.mapped(handle, self._device)
            yield self._mapped[handle][: byte_size(layout)]
            if self._device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            store.set(channels.read(incoming.update, i, self._engine, self._worker), "")


@contextmanager
def _others_errors() -> Iterator[None]:
    """What a process group raises here is of its connections, and so as a rule another's fault."""
    try:
        yield
    except WeightSyncError:
        raise
    except RuntimeError as error:
        raise GivenUpError(f"the {type(error).__name__} of a process group: {error}") from None


def _deadline(incoming: Incoming) -> float:
    return time.monotonic() + incoming.timeout_s
