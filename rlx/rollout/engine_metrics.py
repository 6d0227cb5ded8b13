"""What an engine tells Prometheus, with the name of the run that it works for; engines outlive runs.

Left out: the metrics of a run itself (rlx.tracking).
"""

from __future__ import annotations

from collections.abc import Sequence

from ray.util.metrics import Counter, Gauge

from rlx.rollout.base import Request


class EngineMetrics:
    """The queue of an engine, its demand for the KV cache, and the tokens that it has generated."""

    def __init__(self, cache_tokens: int) -> None:
        """
        Args:
            cache_tokens: the number of tokens that the KV cache holds.
        """
        self._cache_tokens, self._run, self._in_work, self._needed = cache_tokens, "", 0, 0
        self._requests = Gauge("rlx_engine_requests", "Completions that an engine works on now.", ("run",))
        self._demand = Gauge(
            "rlx_engine_cache_demand",
            "Share of the KV cache that the completions in work may need; some wait where it is above 1.",
            ("run",),
        )
        self._tokens = Counter("rlx_engine_tokens", "Tokens that an engine has generated.", ("run",))

    def begin(self, run: str) -> None:
        """Notes the run that the engine works for from here on; requests of an earlier run may not have ended yet."""
        if run == self._run:
            return
        if self._run:
            self._show(0, 0)
        self._run = run
        self._show(self._in_work, self._needed)

    def asked(self, requests: Sequence[Request]) -> None:
        """Counts requests, and the tokens that they may have, as work."""
        self._add(requests, 1)

    def ended(self, requests: Sequence[Request], tokens: int) -> None:
        """Counts requests as ended, and the tokens that were generated for them."""
        self._add(requests, -1)
        if tokens:  # Ray takes no 0
            self._tokens.inc(tokens, {"run": self._run})

    def _add(self, requests: Sequence[Request], sign: int) -> None:
        self._in_work += sign * len(requests)
        self._needed += sign * sum(len(request.prompt) + request.sampling.max_tokens for request in requests)
        self._show(self._in_work, self._needed)

    def _show(self, in_work: int, needed: int) -> None:
        self._requests.set(in_work, {"run": self._run})
        self._demand.set(needed / self._cache_tokens, {"run": self._run})
