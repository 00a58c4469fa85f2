"""The consumer's end of a stream: iteration over what a handler's generator yields in another node."""

import contextlib
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Protocol, Self

from lp_pipe.connections import Frame, frames
from lp_pipe.errors import Unavailable
from lp_pipe.protos import frame_pb2
from lp_pipe.rpc.daemon_pool import DaemonPool
from lp_pipe.rpc.fork_guard import ForkGuard
from lp_pipe.rpc.stream_producer import MAX_ITEMS
from lp_pipe.telemetry import waits

_END = Frame(frames.STREAM_END)

# Dropped streams are closed here: the garbage collector runs `__del__` anywhere, also inside `connection.send`.
_closer = DaemonPool(1, "close dropped streams").survive_forks()


class Inbox:
    """The part of a stream that has arrived and was not taken yet: at most a window of items."""

    def __init__(self) -> None:
        self._replies: SimpleQueue[Frame | Exception] = SimpleQueue()
        self._is_closed = False
        self.on_arrival: Callable[[], object] | None = None

    def close(self) -> None:
        """End the stream for every later and waiting `take`."""
        self._is_closed = True
        self.deliver(_END)

    def deliver(self, reply: Frame | Exception) -> None:
        self._replies.put(reply)
        if self.on_arrival is not None:
            self.on_arrival()

    def take(self, timeout_s: float | None = None) -> Frame | Exception:
        """Return the next item, in order; after the last one the end, any number of times.

        Raises:
            queue.Empty: nothing arrived within the time (None: no limit).
        """
        reply = self._replies.get(timeout=timeout_s) if timeout_s != 0 else self._replies.get_nowait()
        if not is_item(reply):
            self._replies.put(_END)
        return _END if self._is_closed else reply

    @property
    def is_empty(self) -> bool:
        return self._replies.empty()


class StreamSource(Protocol):
    """The connection that a stream comes from (a ClientConnection)."""

    def send(self, frame: Frame) -> None:
        """Send a frame of a call that was sent already."""

    def read_for(self, inbox: Inbox, timeout_s: float | None) -> None:
        """Read until the inbox has something, in code that has interrupted the reading thread."""

    def end_stream(self, call_id: int) -> None:
        """Stop a stream; its generator is closed, unless it has ended."""


class ItemStream:
    """An inbox and the way back to the producer. While it exists the generator stays open; dropping it closes that."""

    def __init__(self, inbox: Inbox, source: StreamSource, call_id: int) -> None:
        self.inbox = inbox
        self._source = source
        self._call_id = call_id
        self._taken = 0
        self._fork_guard = ForkGuard()
        _closer.ensure_thread()  # not in __del__, which must not take locks

    def check_owner(self) -> None:
        """Check that this process made the stream.

        Raises:
            Unavailable: this process has inherited it; nothing arrives here.
        """
        self._fork_guard.check("this stream of a handler's items")

    def take(self, timeout_s: float | None) -> Frame | Exception:
        """Take from the inbox, also in a signal handler that has interrupted the reading thread."""
        if self.inbox.is_empty:
            self._source.read_for(self.inbox, timeout_s)
        return self.inbox.take(timeout_s)

    def taken(self) -> None:
        """Count a taken item, and tell the producer before it runs out of credits, but not for every item."""
        self._taken += 1
        if self._taken >= MAX_ITEMS // 2 or self.inbox.is_empty:
            body = frame_pb2.StreamCredit(items=self._taken).SerializeToString()
            self._taken = 0
            with contextlib.suppress(Unavailable):  # the inbox has the reason
                self._source.send(Frame(frames.STREAM_CREDIT, self._call_id, body=body))

    def close(self) -> None:
        """Close the generator; a thread that waits for an item sees the end."""
        self._source.end_stream(self._call_id)
        self.inbox.close()

    def __del__(self) -> None:
        _closer.submit(self._source.end_stream, self._call_id)


class RemoteItems:
    """The base of both iterators. `outcome` decodes an item or raises; `too_late` makes the error of a timeout.

    waiting: a context manager that records that a thread waits for an item.
    """

    def __init__(
        self,
        stream: ItemStream,
        outcome: Callable[[Any], Any],
        timeout_s: float | None,
        too_late: Callable[[], Exception],
        waiting: Callable[[], waits.waiting],
    ) -> None:
        self._stream = stream
        self._outcome = outcome
        self._timeout_s = timeout_s
        self._too_late = too_late
        self._waiting = waiting

    def _value(self, reply: Frame | Exception, stop: type[Exception]) -> Any:
        if is_item(reply):
            self._stream.taken()
        elif isinstance(reply, Frame) and reply.kind == frames.STREAM_END:
            raise stop
        return self._outcome(reply)


class RemoteIterator(RemoteItems, Iterator[Any]):
    """The iterator that a call of a generator handler returns: its items, as they are produced.

    Closing or dropping it closes the generator. call_timeout holds for every item; when it runs out the stream ends.

    Raises (while iterating): the generator's exception as RemoteError, DeadlineExceeded, Unavailable.
    """

    def __next__(self) -> Any:
        self._stream.check_owner()
        try:
            with self._waiting():
                reply = self._stream.take(self._timeout_s)
        except Empty:
            self.close()
            raise self._too_late() from None
        return self._value(reply, StopIteration)

    def close(self) -> None:
        """Close the generator on the server; iterating on ends at once."""
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def is_item(reply: Frame | Exception) -> bool:
    """Return whether the reply is an item, so that more may follow."""
    return isinstance(reply, Frame) and reply.kind == frames.STREAM_ITEM
