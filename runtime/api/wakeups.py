"""Waits of event loops for what other threads bring: one call into a loop wakes all who wait there."""

import asyncio
import threading
from collections import deque

_HERE = threading.local()


class Wakeups:
    """Those who wait on one event loop and have news, told all together: calls into a loop cost more than all else of a
    token."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._told: deque[Waiter] = deque()
        self._called = False

    def add(self, waiter: "Waiter") -> None:
        """Have someone told; from any thread."""
        self._told.append(waiter)
        if self._called:
            return
        self._called = True
        try:
            self.loop.call_soon_threadsafe(self._tell)
        except RuntimeError:  # the loop was closed, maybe just now, and nobody waits any more
            self._told.clear()

    def _tell(self) -> None:
        self._called = False  # first: whoever is added from now on calls again
        while self._told:
            self._told.popleft().resolve()


class Waiter:
    """A task's wait for news from other threads, again and again. Make it on the event loop that waits.

    News between two waits are remembered. A wait may end without any.
    """

    def __init__(self) -> None:
        self._wakeups = _wakeups()
        self._waiting: asyncio.Future[None] | None = None
        self._has_news = False

    def wake(self) -> None:
        if not self._has_news:
            self._has_news = True
            self._wakeups.add(self)

    async def wait(self) -> None:
        if not self._has_news:
            self._waiting = self._wakeups.loop.create_future()
            await self._waiting
        self._has_news = False

    def resolve(self) -> None:
        """End the wait, if there is one; on the event loop."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


def _wakeups() -> Wakeups:
    loop = asyncio.get_running_loop()
    found: Wakeups | None = getattr(_HERE, "wakeups", None)
    if found is None or found.loop is not loop:
        found = _HERE.wakeups = Wakeups(loop)
    return found
