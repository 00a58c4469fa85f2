"""The producer's end of a stream: a handler's generator, run as far as its consumer's credits allow."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from lp_pipe.rpc.responder import Responder
from lp_pipe.telemetry import waits

_log = logging.getLogger(__name__)

MAX_ITEMS = 16
MAX_BYTES = 16 << 20  # fewer items fit if they are large; one is always allowed


class StreamWindow:
    """Back-pressure of a stream: the items that were sent and not yet taken by the consumer."""

    def __init__(self) -> None:
        self._sizes: deque[int] = deque()
        self._bytes = 0

    @property
    def is_open(self) -> bool:
        """Whether one more item may be sent."""
        return not self._sizes or (len(self._sizes) < MAX_ITEMS and self._bytes < MAX_BYTES)

    def sent(self, size_bytes: int) -> None:
        self._sizes.append(size_bytes)
        self._bytes += size_bytes

    def taken(self, items: int) -> None:
        for _ in range(min(items, len(self._sizes))):
            self._bytes -= self._sizes.popleft()


class InProgress(Protocol):
    """A call in progress that the caller can influence; called from the connection's thread, so no method blocks."""

    def credit(self, items: int) -> None:
        """Note that the consumer has taken this many items."""

    def cancel(self) -> None:
        """End the call: the caller has gone or wants no more, or the server is stopping. Idempotent."""


class ThreadStream:
    """A generator that runs step by step as tasks of a pool.

    Without credits it is parked: no thread waits for the consumer. At most one thread is in the generator at a time,
    not always the same one. After a window of items the stream goes to the back of the pool's queue, so that an endless
    stream leaves room for other calls.

    serving: a context manager that records that a thread is in the generator.
    """

    def __init__(
        self,
        items: Iterator[Any],
        responder: Responder,
        submit: Callable[[Callable[[], None]], object],
        serving: Callable[[], waits.waiting],
    ) -> None:
        self._items = items
        self._responder = responder
        self._submit = submit
        self._serving = serving
        self._window = StreamWindow()
        self._lock = threading.Lock()
        self._is_busy = False
        self._is_over = False
        self._is_cancelled = False

    def start(self) -> None:
        self._responder.open_stream()
        self._wake()

    def credit(self, items: int) -> None:
        with self._lock:
            self._window.taken(items)
        self._wake()

    def cancel(self) -> None:
        self._is_cancelled = True
        self._wake()

    def _wake(self) -> None:
        if self._claim(is_new=True):
            self._submit(self._work)

    def _claim(self, is_new: bool) -> bool:
        """Return whether there is something to do for the calling thread; if not, the stream is parked."""
        with self._lock:
            if is_new and self._is_busy:
                return False
            self._is_busy = not self._is_over and (self._is_cancelled or self._window.is_open)
            return self._is_busy

    def _work(self) -> None:
        for _ in range(MAX_ITEMS):
            self._step()
            if not self._claim(is_new=False):
                return
        self._submit(self._work)

    def _step(self) -> None:
        if self._is_cancelled:
            self._end(self._responder.cancelled)
            return
        try:
            with self._serving():
                item = next(self._items)
        except StopIteration:
            self._end(self._responder.end_stream)
        except BaseException as error:  # also SystemExit, which goes to the consumer only
            self._end(self._responder.error, error)
        else:
            if not self._responder.item(item, self._sent):
                self._end(lambda: None)

    def _sent(self, size_bytes: int) -> None:
        with self._lock:
            self._window.sent(size_bytes)

    def _end(self, say: Callable[..., None], *args: Any) -> None:
        """Close the generator, then tell the consumer: when it sees the end, `finally` blocks have run."""
        self._is_over = True
        try:
            self._items.close()  # type: ignore[attr-defined]
        except BaseException as error:  # logged, because the consumer is not told
            _log.warning("%s(): closing the generator raised %r", self._responder.method, error)
        say(*args)
