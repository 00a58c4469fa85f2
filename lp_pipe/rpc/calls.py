"""The objects that wait for a reply: a blocked thread's call, and futures."""

import atexit
import contextlib
import functools
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any, Literal, Protocol

from lp_pipe.connections import Frame
from lp_pipe.context import NodeContext, current_context, entered
from lp_pipe.errors import Unavailable
from lp_pipe.rpc.daemon_pool import DaemonPool
from lp_pipe.rpc.fork_guard import ForkGuard
from lp_pipe.rpc.remote_error import text_of
from lp_pipe.rpc.stream_consumer import Inbox, ItemStream
from lp_pipe.telemetry import waits

_log = logging.getLogger(__name__)
_MOST_OF_A_METHOD = 3  # warnings of unread errors

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


_shown: Counter[tuple[str, str]] = Counter()
_unread: "weakref.WeakSet[UnreadError]" = weakref.WeakSet()


class UnreadError:
    """The error of a failed future; warns when the future is freed or the process ends, unless `read` was called."""

    def __init__(self, peer: str, method: str, error: BaseException) -> None:
        self._peer = peer
        self._method = method
        self._text = f"{type(error).__name__}: {text_of(error)}"
        self._is_read = False
        self._may_be_of_a_stop = isinstance(error, Unavailable)
        _unread.add(self)

    def read(self) -> None:
        """Note that the exception was asked for."""
        self._is_read = True

    def warn(self) -> None:
        """Write the warning, unless the exception was read, or only says that the program stops."""
        is_read, self._is_read = self._is_read, True
        node = current_context()
        if is_read or (self._may_be_of_a_stop and (node is None or node.is_stopping)):
            return
        _shown[self._peer, self._method] += 1
        shown = _shown[self._peer, self._method]
        if shown > _MOST_OF_A_METHOD:
            return
        last = "; further ones of this method are not shown" if shown == _MOST_OF_A_METHOD else ""
        _log.warning(
            "%s.%s() has failed, and its exception was never retrieved: keep what client.futures.%s(...) returns, and "
            "ask for its result(), its exception() or a callback%s: %s",
            *(self._peer, self._method, self._method, last, self._text),
        )

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be ending
            self.warn()


@atexit.register
def _warn_of_all() -> None:
    for one in list(_unread):
        one.warn()


class PendingCalls:
    """The calls that wait on one connection.

    Exactly one side removes each call: its reply, its deadline, the code that gives it up, or the connection's end.
    """

    def __init__(self) -> None:
        self.blocked: dict[int, SyncCall] = {}  # their threads wait, and may read
        self.futures: dict[int, CallFuture] = {}  # a thread may ask for them, and reads then
        self.promised: dict[int, CallFuture] = {}  # a thread will ask for them
        self.others: dict[int, PendingCall] = {}
        self.inboxes: dict[int, Inbox] = {}
        self.arrived: tuple[int, PendingCall] | None = None  # the call that is being settled

    def __bool__(self) -> bool:
        return bool(self.blocked or self.futures or self.promised or self.others or self.inboxes)

    def __contains__(self, call_id: int) -> bool:
        return any(call_id in calls for calls in (self.blocked, self.futures, self.promised, self.others))

    def is_urgent(self) -> bool:
        """Return whether frames may arrive that no waiting thread will read."""
        return bool(self.others or self.inboxes)

    def add(self, call_id: int, call: PendingCall) -> None:
        if not isinstance(call, CallFuture) or call.reader == "thread":
            self.others[call_id] = call
        elif call.reader == "caller":
            self.promised[call_id] = call
        else:
            self.futures[call_id] = call

    def take(self, call_id: int) -> PendingCall | None:
        for calls in (self.blocked, self.futures, self.promised, self.others):
            call: PendingCall | None = calls.pop(call_id, None)
            if call is not None:
                return call
        return None

    def take_arrived(self, call_id: int) -> PendingCall | None:
        """Remove and return the call of a reply; if the thread is interrupted now, `fail_arrived` finds the call."""
        for calls in (self.blocked, self.futures, self.promised, self.others):
            call: PendingCall | None = calls.get(call_id)
            if call is not None:
                self.arrived = call_id, call
                return calls.pop(call_id, None)
        return None

    def fail_arrived(self, error: Exception) -> None:
        """Settle the call for which an exception interrupted the delivery of the reply."""
        if self.arrived is not None:
            call_id, call = self.arrived
            self.arrived = None
            self.take(call_id)
            if not call.has_reply:
                call.deliver(error)

    def take_inbox(self, frame: Frame, is_last: bool) -> Inbox | None:
        return self.inboxes.pop(frame.id, None) if is_last else self.inboxes.get(frame.id)

    def fail(self, error: Exception) -> None:
        """Settle all calls and streams with the error: nothing will arrive any more."""
        for waiting in (self.blocked, self.futures, self.promised, self.others, self.inboxes):
            while waiting:
                with contextlib.suppress(KeyError):
                    _, waiter = waiting.popitem()
                    waiter.deliver(error)
