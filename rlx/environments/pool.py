"""The hosts of environments as one rank uses them: which episode is where, and what is done when a call fails.

An episode is its beginning and its actions: where a host has died, hung or raised, both are repeated on a fresh
instance. An environment that then answers something else than before is caught. All methods run on one event loop.
Left out: turns of the policy (rlx.rollout.episodes).
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from rlx.actors import ActorDiedError, BulkCalls, CallFailedError, CallTimeoutError, is_dead
from rlx.config.errors import one_line
from rlx.environments.host import Action, Beginning, EnvironmentHost, Host, HostLost, HostSettings, Reply
from rlx.environments.second import SecondInstance
from rlx.types import EnvironmentFailed, FailureKind, Notify, Observation, TaskRow, TurnLength

_UNTOLD = TurnLength()
_MARGIN_S = 10.0
"""a host that has not answered so long after a call's time limit does not run its event loop: it is replaced"""
_LOOK_S = 0.2
_START_S = 120.0
"""longest wait for a host whose process starts"""
_END_S = 5.0
"""longest wait for the `close` of all episodes of a run that ends"""
_MOST_SPARED = 10
"""losses of one call that do not count as its attempts; an episode that ends its process may be taken for another"""


class LocalHost:
    """A host in this process, for tests and for training without Ray."""

    def __init__(self, settings: HostSettings) -> None:
        self._settings, self._host = settings, EnvironmentHost(settings)

    async def call(self, method: str, *args: Any) -> Any:
        """See `Host.call`."""
        return await getattr(self._host, method)(*args)

    def replace(self) -> None:
        """Forgets all episodes; threads that do not end stay."""
        self._host = EnvironmentHost(self._settings)

    async def is_up(self) -> bool:
        """See `Host.is_up`."""
        return True


class ActorHost:
    """A host in a Ray actor."""

    def __init__(self, actor: Any, timeout_s: float) -> None:
        """`timeout_s`: the time in which a call ends, the wait for other ranks' calls there included."""
        self._actor, self._timeout_s, self._has_answered = actor, timeout_s, False
        self._calls, self._is_dead, self._is_starting = BulkCalls(actor, "its host"), False, False

    async def call(self, method: str, *args: Any) -> Any:
        """See `Host.call`. The first call waits until the process is up."""
        # `forget` waits for calls that are under way.
        repeated = len(args[2]) if method == "repeat" else int(method == "forget")
        patience_s = self._timeout_s * (1 + repeated) + (_MARGIN_S if self._has_answered else _START_S)
        try:
            returned = await self._calls.call(method, *args, timeout_s=patience_s)
        except CallTimeoutError:
            raise HostLost(f"its process has not answered for {patience_s:.0f} s") from None
        except ActorDiedError as error:
            self._has_answered, self._is_dead = False, True
            raise HostLost(str(error)) from None
        except CallFailedError as error:  # it answered, with what cannot travel
            cause = error.cause
            failure, is_full = f"raised {type(cause).__name__}: {one_line(cause, 300)}", isinstance(cause, MemoryError)
            reply = Reply(failure=failure, is_stuck=is_full, is_final=not is_full)
            returned = [reply] if method in ("repeat", "forget") else reply
        self._has_answered = True
        return returned

    def replace(self) -> None:
        """See `Host.replace`. Ray starts a process that has died by itself."""
        self._has_answered, self._is_starting = False, True
        if not self._is_dead:
            ray.kill(self._actor, no_restart=False)

    async def is_up(self) -> bool:
        """See `Host.is_up`. Calls of an actor that is being started anew fail at once."""
        if not self._is_starting:
            return True
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and not await asyncio.to_thread(is_dead, self._actor):
            try:
                await asyncio.wait_for(asyncio.wrap_future(self._actor.__ray_ready__.remote().future()), _START_S)
                self._has_answered, self._is_dead, self._is_starting = True, False, False
                return True
            except (ray.exceptions.RayActorError, TimeoutError):
                await asyncio.sleep(_LOOK_S)
        return False


class FailureCounts(Counter[FailureKind]):
    """Calls that failed, by kind; the first of each kind is told."""

    def __init__(self, notify: Notify) -> None:
        super().__init__()
        self._notify = notify

    def add(self, kind: FailureKind, reason: str) -> None:
        """Counts a failure."""
        self[kind] += 1
        if self[kind] == 1:
            self._notify(f"an environment: {reason} - it is counted from here on, and not told again")


@dataclass
class _Record:
    """An open episode: all that is needed to replay it."""

    host: int
    life: int  # of the host, in which the instance was made
    beginning: Beginning
    actions: list[Action] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)  # of the beginning, each action, and the score
    answer: str | None = None  # of an episode that was cut and scored
    is_whole: bool = True  # false: the instance has failed, and is not used again
    second: SecondInstance | None = None  # of an episode that is checked
    second_life: int = 0  # of the host, in which that was made


class EnvironmentPool:
    """One rank's environments."""

    def __init__(self, hosts: Sequence[Host], owner: str, *, retries: int, concurrency: int, notify: Notify) -> None:
        """
        Args:
            owner: the beginning of the keys of its episodes; each rank has its own.
            retries: how often an episode is repeated because a call failed.
            concurrency: calls of a host at the same time.
        """
        self.hosts, self.owner, self.retries = hosts, owner, retries
        self.failures = FailureCounts(notify)
        self._room = [asyncio.Semaphore(concurrency) for _ in hosts]
        self._lives, self._loads = [0] * len(hosts), [0] * len(hosts)
        self._records: dict[str, _Record] = {}

    async def start(self, key: str, row: TaskRow, seed: int, check: bool = False) -> Observation:
        """Begins an episode; returns its first messages.

        Args:
            check: a second instance gets the same actions, so that `close` can say whether the environment is
                deterministic. It may still run when a call of the first one returns.

        Raises:
            EnvironmentFailed: it cannot be begun.
        """
        key, host = self.owner + key, min(range(len(self.hosts)), key=self._loads.__getitem__)
        self._loads[host] += 1
        record = self._records[key] = _Record(host, self._lives[host], Beginning(row, seed))
        observation = await self._attempted(key, record, "start", record.beginning)
        if check:
            life = record.second_life = self._lives[host]
            lost = functools.partial(self._replace, host, life)
            record.second = SecondInstance(key, self.hosts[host], self._room[host], record.beginning, lost)
        return observation

    async def step(
        self, key: str, action: str, seed: int, version: int = 0, length: TurnLength = _UNTOLD
    ) -> Observation:
        """The environment's answer to a turn; `version`: that of the weights that drew it.

        Raises:
            EnvironmentFailed: there is none, also after retries.
        """
        key, made = self.owner + key, Action(action, seed, version, length)
        record = self._records[key]
        observation = await self._attempted(key, record, "step", made)
        record.actions.append(made)
        if record.second:
            record.second.tell("step", made)
        return observation

    async def finish(self, key: str, answer: str) -> Observation:
        """The score of an episode that was cut, as the reward of an observation.

        Raises:
            EnvironmentFailed: there is none, also after retries.
        """
        key = self.owner + key
        record = self._records[key]
        observation = await self._attempted(key, record, "finish", answer)
        record.answer = answer
        if record.second:
            record.second.tell("finish", answer)
        return observation

    async def close(self, key: str, check: bool = False) -> bool:
        """Ends an episode.

        Args:
            check: compare with a second instance: that which `start` has begun, or one that is made now.

        Returns:
            False if the second instance answered differently.
        """
        key = self.owner + key
        record = self._records.pop(key)
        self._loads[record.host] -= 1
        replies = await record.second.replies() if record.second else None
        failed, same, life = None, True, self._lives[record.host]
        try:
            async with self._room[record.host]:
                await self.hosts[record.host].is_up()
                life = self._lives[record.host]
                failed, same = await self._replayed(key, record, replies) if check else (None, True)
                if failed:
                    self._noted(record.host, life, failed)
                for each in (key, record.second.key) if record.second else (key,):
                    await self._end(each, record.host, life)
        except HostLost as lost:
            self._replace(record.host, life, str(lost))
        return same or failed is not None  # one that cannot be repeated at all is no proof

    async def forget(self) -> None:
        """Ends what an earlier process of this owner has left; waits for no host that is starting."""

        async def forget_on(number: int) -> None:
            try:
                async with self._room[number]:
                    life = self._lives[number]
                    for ended in await self.hosts[number].call("forget", self.owner):
                        if ended.failure:
                            self._noted(number, life, ended)
            except HostLost as lost:
                self._replace(number, self._lives[number], str(lost))

        # All at once: what a host is asked later is about new episodes, which must not end with the old ones.
        await asyncio.gather(*map(forget_on, range(len(self.hosts))))

    async def _attempted(self, key: str, record: _Record, method: str, *args: Any) -> Observation:
        """The observation of a call, repeated on a fresh instance as often as `retries` allows.

        A call that is lost with a process that another episode has had replaced is repeated beyond that.
        """
        failed, left = EnvironmentFailed("its process does not start", "died"), self.retries + 1
        for _ in range(left + _MOST_SPARED):
            async with self._room[record.host]:
                if not await self.hosts[record.host].is_up():
                    break
                life = self._lives[record.host]
                try:
                    reply = await self._attempt(key, record, method, *args)
                    if reply.observation is not None:
                        record.life, record.is_whole = life, True
                        record.observations.append(reply.observation)
                        return replace(reply.observation, retries=self.retries + 1 - left)
                    failed, record.is_whole = self._noted(record.host, life, reply), False
                    left -= left if reply.is_final else 1
                except HostLost as lost:
                    failed = EnvironmentFailed(str(lost), "died")
                    left -= self._replace(record.host, life, str(lost))
            if not left:
                break
        raise failed

    async def _attempt(self, key: str, record: _Record, method: str, *args: Any) -> Reply:
        """Makes a call, on an instance that has had all actions before it.

        Another rank may have had the host started anew: then the actions are repeated, which is no failure.

        Raises:
            EnvironmentFailed: the actions come out differently.
            HostLost: see `Host.call`.
        """
        life = self._lives[record.host]
        if method != "start" and (record.life != life or not record.is_whole):
            failed, same = await self._replayed(key, record)
            if failed:
                return replace(failed, failure=f"{failed.failure}, when its actions were repeated")
            if not same:
                raise EnvironmentFailed.unrepeatable()
            record.life, record.is_whole = life, True
        elif not record.is_whole:
            await self._end(key, record.host, life)
        reply: Reply = await self.hosts[record.host].call(method, key, *args)
        if not reply.is_unknown:
            return reply
        record.is_whole = False
        return await self._attempt(key, record, method, *args)

    async def _end(self, key: str, host: int, life: int) -> None:
        """Ends an instance. A `close` that hangs is told, and fails nothing.

        Raises:
            HostLost: see `Host.call`; or too many of them hang, and the process has been replaced.
        """
        ended = await self.hosts[host].call("close", key)
        if ended.failure:
            self._noted(host, life, ended)
        if ended.is_stuck:
            raise HostLost("its process has been replaced")

    def _noted(self, host: int, life: int, reply: Reply) -> EnvironmentFailed:
        """Counts a call that failed; a host that cannot go on after it is replaced."""
        failed = reply.error
        self.failures.add(failed.kind, str(failed))
        if reply.is_stuck:
            self._replace(host, life, "")
        return failed

    async def _replayed(
        self, key: str, record: _Record, replies: Sequence[Reply] | None = None
    ) -> tuple[Reply | None, bool]:
        """Repeats the actions of an episode; returns the first reply that failed, and whether all are as before.

        `replies`: of its second instance, whose host may have been lost and replaced meanwhile.
        """
        if replies is None or record.second_life != self._lives[record.host]:
            if record.life == self._lives[record.host]:
                await self._end(key, record.host, record.life)
            known = (record.beginning, record.actions, record.answer)
            replies = await self.hosts[record.host].call("repeat", key, *known)
        failed = next((reply for reply in replies if reply.failure), None)
        same = [reply.observation for reply in replies] == record.observations
        if not (same or failed):
            self.failures.add("unrepeatable", "it answers the same actions differently when they are repeated")
        return failed, same

    def _replace(self, host: int, life: int, reason: str) -> bool:
        """Starts a host's process anew, once for all who find this process lost; false for those who come later."""
        if self._lives[host] != life:
            return False
        self._lives[host] += 1
        if reason:
            self.failures.add("died", reason)
        self.hosts[host].replace()
        return True


def start_hosts(settings: HostSettings, options: Sequence[dict[str, Any]]) -> list[Any]:
    """Starts a host with each of these options of Ray; does not wait for them.

    Returns:
        The actors' handles, whose methods are those of `EnvironmentHost`.
    """
    actor = ray.remote(EnvironmentHost)
    return [actor.options(max_concurrency=1000, max_restarts=-1, **own).remote(settings) for own in options]


def end_episodes(actors: Sequence[Any]) -> None:
    """Closes the environments of all episodes of these hosts, which nobody plays any more; waits `_END_S` at most."""
    calls = [actor.forget.remote("") for actor in actors]
    if calls:
        ray.wait(calls, num_returns=len(calls), timeout=_END_S)
