"""One call of a Ray actor with a deadline, and the errors that it can raise.

`wait_for` is for any actor. `get_result` is for engines: its errors say what the caller may do next. Left out: that
decision, and repeating calls.
"""

from __future__ import annotations

import math
import time
from typing import Any

import ray

_CALL_S = 0.5
"""Ray answers at once for an actor that it will not start again"""


class CallError(RuntimeError):
    """A call of an actor gave no result; the text names the actor and the cause."""


class CallTimeoutError(CallError):
    """The actor did not answer in time."""


class CallFailedError(CallError):
    """The called method raised an error."""

    def __init__(self, actor: str, cause: BaseException) -> None:
        super().__init__(f"{actor} failed: {cause}")
        self.cause = cause


class ActorDiedError(CallError):
    """The process of the actor ended, or could not start."""


class RolloutError(RuntimeError):
    """Completions could not be generated; the text names the engine."""


class PromptRefusedError(RolloutError, ValueError):
    """An engine refuses a prompt, and would refuse it again."""


class EngineLostError(RolloutError):
    """An engine died or failed: it gets no more requests until it has received the weights again."""


class EngineTimeoutError(EngineLostError):
    """An engine did not answer in time. It may hang, so its process has to be replaced."""

    @classmethod
    def of(cls, engine: int) -> EngineTimeoutError:
        """The error of the engine with this index."""
        return cls(f"engine {engine} did not answer in time")


def is_dead(actor: Any) -> bool:
    """Whether an actor is dead and Ray will not replace it, such as one that could not start."""
    try:
        ray.get(actor.__ray_ready__.remote(), timeout=_CALL_S)
    except ray.exceptions.ActorDiedError:
        return True
    except (ray.exceptions.RayError, TimeoutError):
        pass
    return False


class Lifeline:
    """A call of an engine that does not return, and fails when the engine's process ends.

    It tells a process that ended, which Ray is replacing, from one that hangs: both do not answer other calls.
    """

    def __init__(self, engine: Any) -> None:
        self._call = engine.lives.remote()

    @property
    def is_broken(self) -> bool:
        """Whether the process has ended since."""
        if not ray.wait([self._call], timeout=0)[0]:
            return False
        try:
            ray.get(self._call)
        except ray.exceptions.RayActorError:
            return True
        return False


def is_done(call: Any, deadline: float) -> bool:
    """Whether a call has returned or its deadline, a time of `time.monotonic()`, has passed."""
    return bool(ray.wait([call], timeout=0)[0]) or time.monotonic() >= deadline


def wait_for(call: Any, actor: str, deadline: float) -> Any:
    """Waits for the result of a call until `deadline`, a time of `time.monotonic()`.

    Args:
        actor: how errors name the actor.

    Raises:
        CallTimeoutError: the actor did not answer in time.
        CallFailedError: the called method raised an error.
        ActorDiedError: the process of the actor ended, or could not start.
    """
    try:
        return ray.get(call, timeout=None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
    except ray.exceptions.GetTimeoutError:
        raise CallTimeoutError(f"{actor} did not answer in time") from None
    except ray.exceptions.RayTaskError as error:
        raise CallFailedError(actor, error.cause) from None
    except ray.exceptions.RayError as error:
        raise ActorDiedError(f"{actor} died: {cause_of_death(error)}") from None


def get_result(call: Any, engine: int, deadline: float) -> Any:
    """Waits for the result of a call of an engine until `deadline`, a time of `time.monotonic()`.

    Args:
        engine: the index of the engine, for the text of errors.

    Raises:
        EngineTimeoutError: the engine did not answer in time.
        EngineLostError: the engine died or failed; the text has the cause.
        PromptRefusedError: the engine refused the request.
    """
    try:
        return wait_for(call, f"engine {engine}", deadline)
    except CallTimeoutError:
        raise EngineTimeoutError.of(engine) from None
    except CallFailedError as error:
        if isinstance(error.cause, ValueError):
            raise PromptRefusedError(f"engine {engine} refused a prompt: {error.cause}") from None
        raise EngineLostError(str(error)) from None
    except ActorDiedError as error:
        raise EngineLostError(str(error)) from None


def cause_of_death(error: ray.exceptions.RayError) -> str:
    """One line of Ray's report. For an actor that did not start it is a traceback, with the cause in its last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if "unavailable" in lines[0]:  # the actor was killed: Ray reports its connection only
        return "its process ended"
    return f"{lines[0]} {lines[-1] if lines[1:] else ''}".strip()
