"""Calls that wait for a change of their server, but not longer than the program runs."""

import asyncio
import contextlib

from lp_pipe.context import register_stop_handler, stop_event


class Changes:
    """A condition for coroutines: `notify` wakes all that `wait`. Both belong to the event loop.

    A stopping server gives calls in progress the whole grace period. So a stop also wakes the waiting ones, which must
    not use it up.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        register_stop_handler(self.notify_from_outside)

    async def wait(self) -> bool:
        """Wait until the next change; return False when the node stops."""
        self._loop = asyncio.get_running_loop()  # before the check of the stop event: a later stop needs the loop
        if not stop_event().is_set():
            await self._event.wait()
        return not stop_event().is_set()

    def notify(self) -> None:
        """Wake all waiting coroutines."""
        self._event.set()
        self._event = asyncio.Event()

    def attach(self) -> None:
        """Say, in the event loop, that what is read from now on may be changed by another thread, which notifies."""
        self._loop = asyncio.get_running_loop()

    def notify_from_outside(self) -> None:
        """Wake all waiting coroutines; for other threads."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so no coroutine waits in it
                self._loop.call_soon_threadsafe(self.notify)
