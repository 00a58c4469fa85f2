"""Waits for what gloo (or a GPU) receives, so that whoever needs it can be told that it will not come.

gloo (torch 2.13) does not wake a thread that waits for a message whose beginning is here when its sender dies, is cut
off, or when the pair is closed: only the wait's own time limit ends it. So a thread of ours waits there.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol

from torch import Tensor

from lp_pipe.channels.note_store import LIMIT
from lp_pipe.channels.transport import TransferError

Arrival = Future[Tensor]


class Awaited(Protocol):
    """As torch.distributed's Work."""

    def wait(self, timeout: timedelta, /) -> Any:
        """Until it is done.

        Raises:
            RuntimeError: it failed, or the time has passed.
        """


class Arrivals:
    """Messages in the order in which they come. Ended by `give_up`, which may be called by any thread, also twice.

    means: what receives them ("gloo").
    """

    def __init__(self, means: str) -> None:
        self._means = means
        self._lock = threading.Lock()
        self._works: SimpleQueue[tuple[Awaited, Tensor, Arrival] | Callable[[], None] | None] = SimpleQueue()
        self._pending: dict[int, Arrival] = {}
        self._reason: str | None = None
        self._thread: threading.Thread | None = None

    def expect(self, work: Awaited, memory: Tensor) -> Arrival:
        """The work's memory, once its message is there; TransferError when it will not come."""
        arrival: Arrival = Future()
        with self._lock:
            if self._reason is not None:
                arrival.set_exception(TransferError(self._reason))
                return arrival
            self._pending[id(arrival)] = arrival
            self._start()
        self._works.put((work, memory, arrival))
        return arrival

    def then(self, call: Callable[[], None]) -> None:
        """`call` once what is expected now has come, or failed; never after `give_up`."""
        with self._lock:
            if self._reason is not None:
                return
            self._start()
        self._works.put(call)

    def give_up(self, reason: str) -> None:
        """Nothing more will come. The thread may be stuck in gloo for a while yet, with one message's memory."""
        with self._lock:
            self._reason = self._reason or reason
            pending, self._pending = list(self._pending.values()), {}
        self._works.put(None)
        for arrival in pending:
            with suppress(InvalidStateError):  # it has come at this moment
                arrival.set_exception(TransferError(reason))

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._wait_for_all, name=f"receive {self._means}", daemon=True)
            thread.start()  # before it counts: the system may have no more
            self._thread = thread

    def _wait_for_all(self) -> None:
        while (item := self._works.get()) is not None:
            if not isinstance(item, tuple):
                item()
                continue
            work, memory, arrival = item
            error = _error_of(work)
            with self._lock:
                self._pending.pop(id(arrival), None)
            with suppress(InvalidStateError):
                if error is None:
                    arrival.set_result(memory)
                else:
                    arrival.set_exception(TransferError(f"{self._means}: {error}"))
            del item, work, memory, arrival  # until the next one comes: memory that nobody uses is used again


def _error_of(work: Awaited) -> str | None:
    try:
        work.wait(LIMIT)
    except RuntimeError as error:
        return str(error)
    return None
