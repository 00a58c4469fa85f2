"""A thread that sends parts over several connections, the most urgent ones first."""

import contextlib
import heapq
import itertools
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable

from lp_pipe.connections import Connection, Frame, PulledConnection
from lp_pipe.connections.fork_isolation import close_in_children
from lp_pipe.connections.kernel_calls import has_epoll, new_selector
from lp_pipe.connections.socket_connection import SocketConnection

# A socket takes no more while the system has so much that TCP has not begun to send: what is in there cannot be
# overtaken. One TLS record: with 64 KiB, front layers' sums over links of 200 Mbit/s come some 10 ms later.
_UNSENT_BYTES = 1 << 14
# The frames that an outlet may be ahead of the slowest one, by the number of outlets. TCP shares a link unevenly, so
# without a limit a server has all parts of one worker while it waits for another's, and its own link is idle.
_AHEAD = 1
_CLOSE_PATIENCE_S = 2.0

MakeFrame = Callable[[], Frame]


class Outlet:
    """One end of a connection, and the frames that wait there for room in its socket.

    on_error: called, in any thread, if a frame cannot be sent; nothing is sent afterwards.
    """

    def __init__(self, connection: Connection, on_error: Callable[[Exception], None]) -> None:
        self.connection = connection
        self.on_error = on_error
        self.queue: list[tuple[int, int, MakeFrame]] = []  # a heap: urgency, order, what makes the frame
        self.is_busy = False  # a thread sends, or will, or the socket has no room
        self.is_paused = False
        self.is_over = False
        self.watched = -1  # the descriptor that the thread waits for


class PartSender:
    """Sends frames over each connection as fast as its socket takes them, the most urgent ones first.

    A socket is given little at a time, so that urgent frames overtake others here, and need not wait in the system's
    buffers behind them. No connection gets far ahead of the others. No call blocks, so the buffers of frames must not
    change later.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._order = itertools.count()
        self._outlets: list[Outlet] = []
        self._ready: deque[Outlet] = deque()  # for the thread to send from
        self._sent = 0  # frames
        self._is_over = False
        self._selector: selectors.BaseSelector | None = None  # the thread's, once there is one
        self._wake_ends = socket.socketpair()
        for end in self._wake_ends:
            end.setblocking(False)
            close_in_children(end)

    def add(self, connection: Connection, on_error: Callable[[Exception], None]) -> Outlet:
        """Return the outlet of a connection, for which `remove` must be called when it ends."""
        if isinstance(connection, SocketConnection):
            connection.prefer_cubic()
            connection.limit_unsent(_UNSENT_BYTES)
        outlet = Outlet(connection, on_error)
        with self._changed:
            outlet.is_over = self._is_over
            self._outlets.append(outlet)
        return outlet

    def remove(self, outlet: Outlet) -> None:
        """Drop what waits for this outlet."""
        with self._changed:
            self._end(outlet)
            self._outlets = [one for one in self._outlets if one is not outlet]

    def put(self, outlet: Outlet, urgency: int, make_frame: MakeFrame) -> None:
        """Let the thread send a frame, after those of a smaller number."""
        with self._changed:
            if self._is_first(outlet, urgency, make_frame):
                self._hand_over(outlet)

    def send(self, outlet: Outlet, urgency: int, make_frame: MakeFrame) -> None:
        """Send a frame in this thread if there is room for it now, else as `put`."""
        with self._changed:
            if not self._is_first(outlet, urgency, make_frame):
                return
            if not outlet.connection.can_begin_sending:
                self._hand_over(outlet)
                return
        self._send_from(outlet)

    def close(self, *, drops_rest: bool) -> None:
        """End the thread. What waits is dropped, or sent before, unless the peers take too long to read it."""
        with self._changed:
            if self._is_over:
                return
            seen = -1
            while not drops_rest and self._has_more() and self._sent != seen:
                seen = self._sent
                self._changed.wait_for(lambda: not self._has_more(), _CLOSE_PATIENCE_S)
            for outlet in self._outlets:
                self._end(outlet)
            self._outlets.clear()
            self._is_over = True
            if self._selector is not None:
                self._wake()
            else:
                self._close_wake_ends()

    def _has_more(self) -> bool:
        return any(one.is_busy or one.queue for one in self._outlets)

    def _is_first(self, outlet: Outlet, urgency: int, make_frame: MakeFrame) -> bool:
        """Queue a frame; return whether the caller must see to its sending. Called with the lock."""
        if outlet.is_over:
            return False
        heapq.heappush(outlet.queue, (urgency, next(self._order), make_frame))
        if outlet.is_busy:
            return False
        outlet.is_busy, outlet.is_paused = True, False
        return True

    def _hand_over(self, outlet: Outlet) -> None:
        """Let the thread send what is queued. Called with the lock."""
        self._ready.append(outlet)
        self._start()
        self._wake()

    def _start(self) -> selectors.BaseSelector:
        if self._selector is None:
            self._selector = new_selector()
            self._selector.register(self._wake_ends[0], selectors.EVENT_READ)
            threading.Thread(target=self._run, args=(self._selector,), name=f"send {self._name}", daemon=True).start()
        return self._selector

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is full, so the thread wakes anyway
            self._wake_ends[1].send(b"\0")

    def _close_wake_ends(self) -> None:
        for end in self._wake_ends:
            end.close()

    def _run(self, selector: selectors.BaseSelector) -> None:
        while True:
            for key, _ in selector.select(0 if self._ready else None):
                if key.data is None:
                    self._wake_ends[0].recv(1 << 12)
                else:
                    self._send_from(key.data, has_rest=True)
            with self._changed:
                ready = list(self._ready)
                self._ready.clear()
                if self._is_over:
                    selector.close()
                    self._close_wake_ends()
                    return
            for outlet in ready:
                self._send_from(outlet)

    def _send_from(self, outlet: Outlet, *, has_rest: bool = False) -> None:
        """Send what is queued until there is no more room. has_rest: of a frame, which is sent first."""
        connection = outlet.connection
        try:
            while True:
                if has_rest:
                    has_room = connection.continue_sending()
                elif (make_frame := self._next(outlet)) is None:
                    return
                elif connection.can_begin_sending:
                    has_room = connection.begin_sending(make_frame())
                else:
                    connection.send(make_frame())
                    with self._changed:
                        self._ready.append(outlet)  # the other outlets come first
                    return
                if not has_room:
                    self._wait_for_room(outlet)
                    return
                has_rest = False
        except Exception as error:  # a closed connection, or no memory
            self.remove(outlet)
            outlet.on_error(error)

    def _next(self, outlet: Outlet) -> MakeFrame | None:
        """Return what makes the outlet's next frame; None if there is none, or the other outlets' frames come first."""
        with self._changed:
            is_early = outlet.queue and outlet.queue[0][:2] > self._latest()
            if outlet.queue and not is_early:
                make_frame = heapq.heappop(outlet.queue)[2]
                self._sent += 1
                self._resume()
                return make_frame
            outlet.is_busy = False
            outlet.is_paused = bool(is_early)
            self._watch(outlet, -1)
            self._changed.notify_all()
        return None

    def _latest(self) -> tuple[int, int]:
        """Return the urgency and order up to which frames may be sent now."""
        queues = [one.queue for one in self._outlets if one.queue]
        urgency, order, _ = min(one[0] for one in queues)
        return urgency, order + _AHEAD * len(self._outlets)

    def _resume(self) -> None:
        """Let outlets go on that have waited for the others. Called with the lock."""
        paused = [one for one in self._outlets if one.is_paused]
        if not paused:
            return
        latest = self._latest() if any(one.queue for one in self._outlets) else (0, 0)
        for outlet in paused:
            if outlet.queue and outlet.queue[0][:2] <= latest:
                outlet.is_paused = False
                outlet.is_busy = True
                self._hand_over(outlet)

    def _wait_for_room(self, outlet: Outlet) -> None:
        assert isinstance(outlet.connection, PulledConnection), "those that can begin are"
        with self._changed:
            if not outlet.is_over:
                self._watch(outlet, outlet.connection.fileno())
                if not has_epoll():  # a new descriptor counts only from the thread's next look
                    self._wake()

    def _watch(self, outlet: Outlet, descriptor: int) -> None:
        """Let the thread wait for room in the outlet's socket; -1: no longer. Called with the lock."""
        if outlet.watched == descriptor:
            return
        selector = self._start()
        if outlet.watched >= 0:
            with contextlib.suppress(KeyError, OSError):
                selector.unregister(outlet.watched)
        outlet.watched = descriptor
        if descriptor >= 0:
            selector.register(descriptor, selectors.EVENT_WRITE, outlet)

    def _end(self, outlet: Outlet) -> None:
        outlet.is_over = True
        outlet.is_busy = outlet.is_paused = False
        outlet.queue.clear()
        self._watch(outlet, -1)
        self._resume()
        self._changed.notify_all()
