"""An end that waits looks for a moment whether something comes, before it sleeps, as long as that is of use."""

import itertools
import socket
import threading
from collections.abc import Iterator

import pytest

from lp_pipe.channels import reading_condition
from lp_pipe.channels.reading_condition import ReadingCondition
from lp_pipe.connections import frames
from lp_pipe.connections.frames import Frame
from lp_pipe.connections.unix import UnixConnection
from tests.channels.edges import PATIENCE_S, in_thread, is_blocked


class Looked(UnixConnection):
    """A condition that counts how often a thread looked instead of sleeping."""

    looks = 0

    def is_ready(self) -> bool:
        self.looks += 1
        return super().is_ready()


class End:
    """A connection's end with what has arrived at it."""

    def __init__(self, sock: socket.socket) -> None:
        self.arrived: list[Frame] = []
        self.state = threading.Condition(threading.Lock())
        self.reading = ReadingCondition(self.state)
        self.connection = Looked(sock, "peer")
        self.connection.make_interruptible()
        self.connection.attach(self.arrived.append, lambda reason: None)
        self.reading.attach(self.connection)

    def wait(self, count: int, timeout_s: float) -> bool:
        with self.state:
            return self.reading.wait_for(lambda: len(self.arrived) >= count, timeout_s)

    def looks_in_a_wait(self) -> int:
        """A wait for what does not come; on a busy machine it may be over before there was a look."""
        before = self.connection.looks
        assert not self.wait(len(self.arrived) + 1, 0.001)
        return self.connection.looks - before


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[End, UnixConnection]]:
    monkeypatch.setattr(reading_condition, "_switches", lambda: 0)  # whoever else uses this machine's cores
    near, far = socket.socketpair()
    end, peer = End(near), UnixConnection(far, "end")
    end.reading._spinner._is_possible = True  # also where a test has one core
    yield end, peer
    peer.close()
    end.connection.close()


def test_looking_in_vain_becomes_rare(ends: tuple[End, UnixConnection]) -> None:
    end, _ = ends
    waits = [end.looks_in_a_wait() for _ in range(150)]
    assert any(waits[:20])
    assert sum(looks > 0 for looks in waits) < 15


def test_looking_is_worth_it_again_once_something_was_there(ends: tuple[End, UnixConnection]) -> None:
    end, peer = ends
    end.looks_in_a_wait()
    assert end.looks_in_a_wait() == 0, "one wait is left out after one in vain"
    peer.send(Frame(frames.CHANNEL_NOTE))
    assert end.wait(1, PATIENCE_S)
    assert end.looks_in_a_wait() > 0


def test_who_loses_the_core_to_another_thread_stops_looking(
    ends: tuple[End, UnixConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    end, _ = ends
    monkeypatch.setattr(reading_condition, "_PREEMPTED_S", -1.0)  # each look at the clock counts as late
    switches = itertools.count()
    monkeypatch.setattr(reading_condition, "_switches", lambda: next(switches))
    assert max(end.looks_in_a_wait() for _ in range(20)) == 1
    monkeypatch.setattr(reading_condition, "_switches", lambda: 0)
    assert max(end.looks_in_a_wait() for _ in range(20)) > 1, "where only the hypervisor took it, looking goes on"


def test_nobody_looks_where_there_is_one_core(ends: tuple[End, UnixConnection]) -> None:
    end, _ = ends
    end.reading._spinner._is_possible = False
    assert [end.looks_in_a_wait() for _ in range(3)] == [0, 0, 0]


def test_being_woken_while_looking_is_not_lost(ends: tuple[End, UnixConnection]) -> None:
    end, _ = ends
    is_over = False

    def wait() -> bool:
        with end.state:
            return end.reading.wait_for(lambda: is_over, PATIENCE_S)

    for _ in range(20):
        is_over = False
        end.reading._spinner._misses = end.reading._spinner._skipped = 0
        waiting = in_thread(wait)
        with end.state:
            is_over = True
            end.reading.wake()
        assert waiting.result(PATIENCE_S)


def test_who_comes_to_wait_while_another_thread_has_a_look_reads_when_that_one_is_done(
    ends: tuple[End, UnixConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody read the connection any more, and the value that came next was not received.
    end, peer = ends
    has_begun, may_end = threading.Event(), threading.Event()
    is_ready = end.connection.is_ready

    def is_ready_late() -> bool:
        has_begun.set()
        assert may_end.wait(PATIENCE_S)
        return is_ready()

    monkeypatch.setattr(end.connection, "is_ready", is_ready_late)
    looking = in_thread(end.reading.poll)
    assert has_begun.wait(PATIENCE_S)
    waiting = in_thread(end.wait, 1, 2 * PATIENCE_S)
    assert is_blocked(waiting)
    may_end.set()
    looking.result(PATIENCE_S)
    peer.send(Frame(frames.CHANNEL_NOTE))
    assert waiting.result(PATIENCE_S)
