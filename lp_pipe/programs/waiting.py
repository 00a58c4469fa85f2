"""Waiting for other nodes, and not longer than the program lives."""

import asyncio
import contextlib
from collections.abc import Iterator

import lp_pipe as lp

_NEWS_OF_A_STOP_S = 1.0  # one node may hear of it before another


class Changes:
    """The changes of one object in a node. All but the constructor runs in the server's event loop.

    A server gives calls in progress the whole grace period before it ends; those that only wait must not use it up.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        lp.register_stop_handler(self._wake_from_outside)

    async def wait(self) -> bool:
        """Until the next change; False when the node stops."""
        self._loop = asyncio.get_running_loop()  # first: a stop that comes after the look at its event must find it
        if not lp.stop_event().is_set():
            await self._event.wait()
        return not lp.stop_event().is_set()

    def notify(self) -> None:
        """Something has changed: wake all who wait."""
        self._event.set()
        self._event = asyncio.Event()

    def _wake_from_outside(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits in it
                self._loop.call_soon_threadsafe(self.notify)


@contextlib.contextmanager
def until_the_stop() -> Iterator[None]:
    """A peer that is gone ends the body, which is no failure when the reason is that the program stops."""
    try:
        yield
    except lp.Unavailable:
        if not lp.wait_for_stop(_NEWS_OF_A_STOP_S):
            raise
