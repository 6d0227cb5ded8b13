"""Weights through Ray's object store: shared memory within a node, a copy between nodes. It reaches every engine."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

import ray

from rlx.actors import EngineLostError, EngineTimeoutError, RolloutError, get_result
from rlx.rollout.weight_sync.buckets import Bucket


class ObjectStorePush:
    """The sender's side of one weight update; see `Engine.start_update`. An engine that fails is left out of the rest:
    the others, and the other ranks, are in the middle of it."""

    def __init__(self, engines: Mapping[int, Any], version: int, timeout_s: float) -> None:
        self.engines = dict(engines)
        self.failed: dict[int, EngineLostError] = {}
        self.version = version
        self.timeout_s = timeout_s
        self.name = uuid.uuid4().hex
        self.receipts: dict[int, Any] = {}  # of the bucket sent last

    def start(self, tensors: int, keep: bool) -> None:
        opened = (self.name, tensors, self.timeout_s, keep)
        self._settle({index: engine.start_update.remote(*opened) for index, engine in self.engines.items()})

    def send(self, bucket: Bucket) -> None:
        """Returns while the engines load this bucket; two at most are under way, so that memory never holds all."""
        self._settle(self.receipts)
        sent = ray.put(bucket)
        self.receipts = {index: engine.receive.remote(self.name, sent) for index, engine in self.engines.items()}

    def finish(self) -> None:
        self._settle({i: engine.finish_update.remote(self.name, self.version) for i, engine in self.engines.items()})

    def _settle(self, calls: Mapping[int, Any]) -> None:
        """Waits for all calls, and leaves out the engines whose call failed."""
        deadline = time.monotonic() + self.timeout_s
        for index, call in calls.items():
            try:
                get_result(call, index, deadline)
            except RolloutError as error:
                self.failed[index] = sending_failed(self.version, error)
                del self.engines[index]


def sending_failed(version: int, error: Exception) -> EngineLostError:
    """The same error with the version in its text."""
    kind = EngineTimeoutError if isinstance(error, EngineTimeoutError) else EngineLostError
    return kind(f"sending weight version {version}: {error}")
