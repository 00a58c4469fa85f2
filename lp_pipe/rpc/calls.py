"""The objects that wait for a reply: a blocked thread's call, and futures."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any, Literal, Protocol

from lp_pipe.connections import Frame
from lp_pipe.context import NodeContext, current_context, entered
from lp_pipe.rpc.daemon_pool import DaemonPool
from lp_pipe.rpc.fork_guard import ForkGuard
from lp_pipe.rpc.stream_consumer import ItemStream
from lp_pipe.rpc.unread_errors import UnreadError
from lp_pipe.telemetry import waits

Reply = Frame | ItemStream | Exception


class PendingCall(Protocol):
    @property
    def has_reply(self) -> bool: ...

    def deliver(self, reply: Reply) -> object:
        """Settle the call; called once, from the connection's thread, and again only if that was interrupted."""


class CancellableCall(PendingCall, Protocol):
    """A call for which no thread blocks. `on_cancel` is set once it is sent, and gives it up."""

    on_cancel: Callable[[], bool] | None
    sent: "Sent | None"

    def cancelled(self) -> bool: ...

    def cancel(self) -> object: ...


class Sent(Protocol):
    """The connection on which a call was sent (a ClientConnection)."""

    def forget(self, call_id: int) -> bool:
        """Give the call up; False when its reply has arrived."""

    def cancel(self, call_id: int) -> bool:
        """Give the call up and tell the server."""

    def wait_for(self, future: "CallFuture", deadline: float | None) -> None:
        """Let the calling thread wait for this future; it may read the connection."""

    def read_in_background(self) -> None:
        """Make sure that replies are read even if no thread waits for them."""


Cancel = Callable[[Sent, int], bool]
Reader = Literal["any", "caller", "thread"]  # the thread that will read a reply


class SyncCall:
    """A call for which one thread waits; it uses a bare lock, at a tenth of the cost of an event."""

    __slots__ = ("_event", "_reply")

    def __init__(self) -> None:
        self._event = threading.Lock()
        self._event.acquire()
        self._reply: Reply | None = None

    @property
    def has_reply(self) -> bool:
        return self._reply is not None

    def deliver(self, reply: Reply) -> None:
        self._reply = reply
        self.wake()

    def wake(self) -> None:
        """End the current or the next `wait`."""
        try:  # not contextlib.suppress, which takes longer than the rest
            self._event.release()
        except RuntimeError:  # it was woken already
            return

    def wait(self, deadline: float | None) -> bool:
        """Wait for the reply, or until `wake`; False at the deadline."""
        return self._event.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic()))

    def reply(self) -> Reply:
        """Return the reply; waits if it is being delivered at this moment."""
        while self._reply is None:
            self._event.acquire()
        return self._reply


class CallFuture(Future[Any]):
    """A call in flight. `cancel()` forgets it, also while its handler runs, which is not interrupted.

    target, method: what is called.
    reader: the thread that reads the reply; "any": the thread that asks for it, or else a background thread.
    """

    def __init__(
        self, outcome: Callable[[Reply], Any], target: waits.Target, method: str, reader: Reader = "any"
    ) -> None:
        super().__init__()
        self.reader: Reader = reader
        self._outcome = outcome
        self._target = target
        self._method = method
        self._has_callbacks = self._has_begun_to_settle = False
        self._settling = threading.RLock()
        self.on_cancel: Callable[[], bool] | None = None
        self.sent: Sent | None = None
        self._fork_guard = ForkGuard()
        self._unread: UnreadError | None = None
        self._is_awaited = reader != "any"  # otherwise its exception must not go unnoticed

    @property
    def has_reply(self) -> bool:
        return self.done()

    def result(self, timeout: float | None = None) -> Any:
        try:
            if not self.done():
                with self._waiting(timeout):
                    return super().result(self._read(timeout))
            return super().result()
        finally:
            if self._unread is not None:
                self._unread.read()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            if not self.done():
                with self._waiting(timeout):
                    return super().exception(self._read(timeout))
            return super().exception()
        finally:
            if self._unread is not None:
                self._unread.read()

    def wait(self, deadline: float | None) -> None:
        """Wait until the future is settled or cancelled, or the deadline has passed, while another thread reads."""
        with contextlib.suppress(TimeoutError, CancelledError):
            super().exception(None if deadline is None else deadline - time.monotonic())

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        with self._settling:
            self._has_callbacks = True
        self.mark_awaited()
        if self.sent is not None:
            self.sent.read_in_background()
        node = current_context()
        super().add_done_callback(fn if node is None else functools.partial(_call_in, node, fn))

    def mark_awaited(self) -> None:
        """Note that code asks for the outcome, or will: a callback."""
        self._is_awaited = True
        if self._unread is not None:
            self._unread.read()

    def cancel(self) -> bool:
        if not super().cancel():
            return False
        if self.on_cancel is not None and self.on_cancel():
            self.set_running_or_notify_cancel()  # wakes concurrent.futures.wait
        return True

    def _waiting(self, timeout: float | None) -> waits.waiting:
        return waits.waiting(waits.CALL, self._target, self._method, timeout is not None)

    def _read(self, timeout: float | None) -> float | None:
        """Wait in the way that needs no switch between threads; return what is left of the time.

        Raises:
            Unavailable: a forked child has inherited the call, and would take the reply from its parent.
        """
        self._fork_guard.check(f"the pending call of {self._method}()")
        if self.sent is None or self.done():
            return timeout
        deadline = None if timeout is None else time.monotonic() + timeout
        self.sent.wait_for(self, deadline)
        return None if deadline is None else deadline - time.monotonic()

    def deliver(self, reply: Reply) -> bool:
        """Settle the future; callbacks run outside the connection's thread, so that they may make calls."""
        if self._has_callbacks:
            _callbacks.submit(self._settle, reply)
        else:
            self._settle(reply)
        return True

    def _settle(self, reply: Reply) -> None:
        # a second delivery follows one that was interrupted
        is_again, self._has_begun_to_settle = self._has_begun_to_settle, True
        if not (is_again and self.running()) and not self.set_running_or_notify_cancel():
            return
        try:
            settle = functools.partial(self.set_result, self._outcome(reply))
        except Exception as error:  # belongs to the code that asks for the result
            if not self._is_awaited:
                self._unread = UnreadError(self._target.peer or self._target.endpoint, self._method, error)
            error.__traceback__ = (
                None  # its frames refer to this future, which only the garbage collector would free then
            )
            settle = functools.partial(self.set_exception, error)
        with self._settling:
            if not self._has_callbacks:
                settle()
                return
        if _callbacks.is_running_this():
            settle()
        else:  # a callback was added while the result was decoded; in the connection's thread it could not make calls
            _callbacks.submit(settle)


def add_quick_callback(future: Future[Any], fn: Callable[[Future[Any]], object]) -> None:
    """Add a callback that runs where the reply is read: `fn` must return at once and make no calls.

    That saves a switch between threads. `fn` may not add callbacks to the same future. Its exceptions are logged.
    """
    Future.add_done_callback(future, fn)
    if isinstance(future, CallFuture):
        future.mark_awaited()
        if future.sent is not None:
            future.sent.read_in_background()


def _call_in(node: NodeContext, fn: Callable[[Future[Any]], object], future: Future[Any]) -> None:
    """Run a callback as code of the node that added it: the pool's threads belong to no node."""
    with entered(node):
        node.prepare_thread()
        fn(future)


_callbacks = DaemonPool(16, "call callbacks").survive_forks()
