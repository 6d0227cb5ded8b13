"""TODO rlx.actors."""

from __future__ import annotations

import math
import time
from typing import Any

import ray
from ray._private import state

HUNG = "did not answer in time"


class RolloutError(RuntimeError):
    """Completions could not be drawn; the text names the engine."""


class PromptRefusedError(RolloutError, ValueError):
    """An engine refuses a prompt, and would refuse it again."""


class EngineLostError(RolloutError):
    """An engine died, failed or did not answer: it cannot be asked again until it holds the weights again."""


def is_alive(engine: Any) -> bool:
    """Whether Ray takes an engine for running, rather than for dead or starting again."""
    return bool(state.actors(engine._actor_id.hex()).get("State") == "ALIVE")


def is_dead(engine: Any) -> bool:
    """Whether an engine is gone for good: Ray does not replace one that could not start."""
    return bool(state.actors(engine._actor_id.hex()).get("State") == "DEAD")


def is_done(call: Any, deadline: float) -> bool:
    return bool(ray.wait([call], timeout=0)[0]) or time.monotonic() >= deadline


def get_result(call: Any, engine: int, deadline: float) -> Any:
    """What an engine answers to a call until `deadline`, a time of `time.monotonic()`.

    Raises:
        EngineLostError: it died, failed or did not answer in time; the text names it and has its last words.
        PromptRefusedError: it refused what it was asked.
    """
    try:
        return ray.get(call, timeout=None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
    except ray.exceptions.GetTimeoutError:
        raise EngineLostError(f"engine {engine} {HUNG}") from None
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ValueError):
            raise PromptRefusedError(f"engine {engine} refused a prompt: {error.cause}") from None
        raise EngineLostError(f"engine {engine} failed: {error.cause}") from None
    except ray.exceptions.RayError as error:
        # Of an engine that did not start, Ray gives a whole traceback, the cause in its last line.
        words = [line.strip() for line in str(error).splitlines() if line.strip()]
        # Of one that was killed there are none but Ray's own, about its connection.
        said = (
            "its process ended" if "unavailable" in words[0] else f"{words[0]} {words[-1] if words[1:] else ''}".strip()
        )
        raise EngineLostError(f"engine {engine} died: {said}") from None
