"""A trial of an environment before a run: in a process of its own, so that one that hangs can be ended.

It begins an episode twice with the same seed, and says the expected answer. Left out: tools that are never called.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rlx.config.errors import ConfigError, one_line
from rlx.config.sections.rollout import EnvironmentConfig
from rlx.rewards.child import ChildError, ChildProcess
from rlx.types import Prompt, TaskRow

if TYPE_CHECKING:  # it imports Ray, which takes seconds, and most runs have no environment
    from rlx.environments.host import HostSettings, Reply

_LOG = logging.getLogger("rlx")
_EPISODES, _CALLS, _MARGIN_S = 2, 3, 10.0
_OF_ANY_MACHINE = frozenset({"CPU", "memory"})


def host_settings(environment: EnvironmentConfig) -> HostSettings:
    """What the hosts of a run are started with."""
    from rlx.environments.host import HostSettings

    return HostSettings(
        str(environment.name),
        environment.params,
        environment.timeout_s,
        environment.concurrency,
        environment.memory_mb,
    )


def try_environment(environment: EnvironmentConfig, prompts: Sequence[Prompt]) -> None:
    """Tries an environment, if there is one, on the first of the prompts; says so if it is not deterministic.

    Where environments need labels of a node, a GPU or the like, this machine may have none: a failure is only shown.

    Raises:
        ConfigError: it raises, hangs or ends its process.
    """
    if environment.name is None:
        return
    try:
        _try_here(environment, prompts)
    except ConfigError as error:
        needed = {name for name, amount in environment.resources_per_actor.items() if amount} - _OF_ANY_MACHINE
        if isinstance(error, _MistakenClassError) or not (needed or environment.label_selector):
            raise
        _LOG.warning("on this machine, which need not be like those of the environments: %s", error)


class _MistakenClassError(ConfigError):
    """The class cannot be an environment on any machine."""


def _try_here(environment: EnvironmentConfig, prompts: Sequence[Prompt]) -> None:
    settings = replace(host_settings(environment), concurrency=1)
    child = ChildProcess(partial(_trial, settings))
    try:
        for prompt in prompts[:1]:
            longest_s = _EPISODES * _CALLS * settings.timeout_s + _MARGIN_S
            failure, is_same, is_mistaken = child.call(prompt.task, longest_s)
            if failure:
                raise (_MistakenClassError if is_mistaken else ConfigError)(failure)
            if not is_same:
                _LOG.warning(
                    "warning: environment.name %s says something else when an episode is repeated with the same seed: "
                    "a resumed run, or one that loses a process, will not be exact",
                    environment.name,
                )
    except ChildError as error:
        raise ConfigError(f"environment.name {environment.name} {error}") from None
    finally:
        child.close()


def _trial(settings: HostSettings) -> Callable[[TaskRow], tuple[str, bool, bool]]:
    """Runs in the child process: makes what tries the environment on a row, and says why it fails, if it repeats, and
    if it would fail everywhere."""

    def tried(row: TaskRow) -> tuple[str, bool, bool]:
        try:
            _check_tools(settings.name)
        except ConfigError as error:
            return str(error), True, True
        one, other = (asyncio.run(_played(settings, row)) for _ in range(_EPISODES))
        failures = [str(reply.error) for reply in one if reply.failure]
        if one[0].observation and not one[0].observation.messages:
            failures = ["reset has returned no messages, so that the policy would have nothing to read"]
        return (f"environment.name {settings.name}: {failures[0]}" if failures else ""), one == other, False

    return tried


def _check_tools(name: str) -> None:
    """Raises ConfigError if there is no such environment, or one of its tools cannot be described to a model."""
    from rlx.environments.base import load_environment
    from rlx.environments.tools import schemas

    found = load_environment(name)
    try:
        schemas(found)
    except ValueError as error:
        raise ConfigError(f"environment.name {name}: {one_line(error)}") from None


async def _played(settings: HostSettings, row: TaskRow) -> list[Reply]:
    from rlx.environments.host import Action, Beginning, EnvironmentHost

    host = EnvironmentHost(settings)
    replies = await host.repeat("trial", Beginning(row, 0), [Action(row.answer, 0)])
    return [*replies, await host.close("trial")]
