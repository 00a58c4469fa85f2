"""The replies and stream items that a client's connection still waits for, by the id of their call."""

import contextlib

from lp_pipe.connections import Frame
from lp_pipe.rpc.calls import CallFuture, PendingCall, SyncCall
from lp_pipe.rpc.stream_consumer import Inbox


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
