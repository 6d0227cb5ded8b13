"""A second instance of an episode's environment, which is told all that the first was told.

It is asked when the first has answered. So an environment whose answers depend on the time, or on what others did
meanwhile, is found out, and an episode that is over has not to wait until all its turns are replayed. Left out:
comparing the answers, and closing it (pool).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rlx.environments.host import Beginning, Host, HostLost, Reply


class SecondInstance:
    """The second instance of an episode, on the host of the first one."""

    def __init__(
        self, key: str, host: Host, room: asyncio.Semaphore, beginning: Beginning, lost: Callable[[str], object]
    ) -> None:
        """`key`: that of the episode; `lost`: called with the reason if the host is lost."""
        self.key = f"{key}/second"
        self._host, self._room, self._lost = host, room, lost
        self._replies = asyncio.create_task(self._after(None, "start", beginning))

    def tell(self, method: str, *args: Any) -> None:
        """Makes a call once those before it have ended; does not wait."""
        self._replies = asyncio.create_task(self._after(self._replies, method, *args))

    async def replies(self) -> list[Reply] | None:
        """All replies up to the first that failed, once there are no more; None if the host was lost meanwhile."""
        with suppress(HostLost):
            return await self._replies
        return None

    async def _after(self, before: asyncio.Task[list[Reply]] | None, method: str, *args: Any) -> list[Reply]:
        replies = await before if before else []
        if replies and replies[-1].failure:
            return replies
        async with self._room:
            try:
                reply = await self._host.call(method, self.key, *args)
            except HostLost as error:
                self._lost(str(error))
                raise
        if reply.is_unknown:  # another rank has had it replaced, so nobody is told
            raise HostLost(reply.failure)
        return [*replies, reply]
