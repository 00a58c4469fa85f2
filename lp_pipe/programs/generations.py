"""Servers that may go back to a checkpoint: their callers must notice, and begin anew with the others.

The node that drives the others opens all servers with the name of a *generation*. When a node has died, it opens them
again with an earlier state and a new name. Calls for an older generation are refused; their callers join the new one.
"""

from collections.abc import Callable

import lp_pipe as lp
from lp_pipe.rpc.changes import Changes


class StaleGeneration(RuntimeError):
    """The caller's generation is over: join the new one, unless the program stops."""


class GenerationServer:
    """A server with a generation, None before the first one. Its handlers are async, so it needs no lock.

    Raises (every call with a generation): StaleGeneration: the generation is over, or the program stops.
    """

    def __init__(self) -> None:
        self._generation: str | None = None
        self._changes = Changes()

    async def outlive(self, generation: str) -> None:
        """Wait for the generation's end, which raises StaleGeneration."""
        await self._until(generation, lambda: False)

    async def _until_opened(self, after: str | None = None) -> str:
        """Wait for another generation than `after`, and return it.

        Raises:
            StaleGeneration: the program stops.
        """
        while self._generation is None or self._generation == after:
            await self._change()
        return self._generation

    async def _until(self, generation: str, is_so: Callable[[], bool]) -> None:
        self._check(generation)
        while not is_so():
            await self._change()
            self._check(generation)

    async def _change(self) -> None:
        if not await self._changes.wait():
            raise StaleGeneration("the program stops")

    def _check(self, generation: str) -> None:
        if generation != self._generation:
            raise StaleGeneration(f"generation {generation} is over, now there is {self._generation or 'none yet'}")


def has_stopped() -> bool:
    """Wait a moment before the next try, which fails at once if a peer is gone; return whether the program stops."""
    return lp.wait_for_stop(_PAUSE_S)


_PAUSE_S = 0.02
