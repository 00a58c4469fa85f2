"""A PartSender sends urgent frames first, survives the end of a connection, and sends what waits at its own end."""

import threading
from collections.abc import Callable

from lp_pipe.collectives.part_sender import Outlet, PartSender
from lp_pipe.connections import Connection, Frame
from lp_pipe.connections.base import OnClose, OnFrame
from lp_pipe.errors import Unavailable

WITHIN_S = 20


class SlowConnection(Connection):
    """A connection that sends a frame only when it is let."""

    def __init__(self, peer: str) -> None:
        super().__init__(peer)
        self.room = threading.Semaphore(0)
        self.sent: list[str] = []

    def start(self, on_frame: OnFrame, on_close: OnClose) -> None: ...

    def send(self, frame: Frame) -> None:
        assert self.room.acquire(timeout=WITHIN_S)
        if self.closed_reason is not None:
            raise Unavailable(self.closed_reason)
        self.sent.append(frame.name)

    def close(self, reason: str = "closed") -> None:
        self._mark_closed(reason)
        self.room.release()


def put(sender: PartSender, outlet: Outlet, *urgencies: int) -> None:
    for urgency in urgencies:
        sender.put(outlet, urgency, make(str(urgency)))


def make(name: str) -> Callable[[], Frame]:
    return lambda: Frame(0, name=name)


def test_urgent_frames_overtake_those_that_wait() -> None:
    sender, connection, is_making = PartSender("test"), SlowConnection("a"), threading.Event()
    outlet = sender.add(connection, lambda error: None)

    def first() -> Frame:
        is_making.set()
        return Frame(0, name="first")

    sender.put(outlet, 9, first)
    assert is_making.wait(WITHIN_S)
    put(sender, outlet, 5, 1, 3, 1)
    for _ in range(5):
        connection.room.release()
    sender.close(drops_rest=False)
    assert connection.sent == ["first", "1", "1", "3", "5"]


def test_a_connection_that_ends_neither_stops_the_others_nor_takes_more() -> None:
    sender, errors = PartSender("test"), list[Exception]()
    broken, whole = SlowConnection("broken"), SlowConnection("whole")
    outlets = [sender.add(one, errors.append) for one in (broken, whole)]
    broken.close("gone")
    for number in range(20):
        whole.room.release()
        for outlet in outlets:
            put(sender, outlet, number)
    sender.close(drops_rest=False)
    assert whole.sent == [str(number) for number in range(20)]
    assert [str(error) for error in errors] == ["gone"] and not broken.sent


def test_frames_that_are_dropped_are_never_made() -> None:
    sender, connection, made = PartSender("test"), SlowConnection("a"), list[int]()
    outlet = sender.add(connection, lambda error: None)
    sender.remove(outlet)
    sender.put(outlet, 0, lambda: made.append(1) or Frame(0))  # type: ignore[func-returns-value]
    sender.close(drops_rest=True)
    sender.close(drops_rest=True)
    assert not made and not connection.sent
