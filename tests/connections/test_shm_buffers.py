"""Large buffers between processes of one host: lent in shared memory, used in place, given back, used again."""

import contextlib
import gc
import os
import queue
import resource
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from lp_pipe.connections import Frame, fork_isolation, frames, shm_buffers
from lp_pipe.connections.unix import UnixConnection
from tests.forking import holds_in_a_fork
from tests.waiting import until

pytestmark = pytest.mark.skipif(not shm_buffers.is_supported(), reason="no memfd on this system")

WITHIN_S = 10.0
LARGE = 1 << 20


class Ends:
    """Two connected ends; what the second receives lands in `frames`."""

    def __init__(self) -> None:
        near, far = socket.socketpair()
        self.near, self.far = UnixConnection(near, "far"), UnixConnection(far, "near")
        self.frames: queue.Queue[Frame] = queue.Queue()
        self.near.start(lambda frame: None, lambda reason: None)
        self.reasons: queue.Queue[str] = queue.Queue()
        self.far.start(self.frames.put, self.reasons.put)
        self.send(bytes(LARGE))  # this one goes through the socket, and makes the peer ask for shared memory
        self.receive()
        until(lambda: self.near._exporter is not None and self.near._exporter.is_peer_ready)

    def send(self, data: bytes) -> None:
        self.near.send(Frame(frames.CALL, buffers=[data]))

    def receive(self) -> memoryview:
        (buffer,) = self.frames.get(timeout=WITHIN_S).buffers
        return memoryview(buffer)

    def wait_for_returns(self) -> None:
        """Wait until the returned buffers have arrived."""
        exporter = self.near._exporter
        assert exporter is not None
        until(lambda: not exporter._exported)


@pytest.fixture
def ends(no_leaks: None) -> Iterator[Ends]:
    both = Ends()
    yield both
    both.near.close()


def segments() -> set[int]:
    """Inodes of the shared memory that this process has open for lending."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed in between, by another thread
            if "lp_pipe-buffer" in os.readlink(path):
                found.add(path.stat().st_ino)
    return found


def test_a_large_buffer_arrives_whole_and_writable(ends: Ends) -> None:
    data = os.urandom(3 * LARGE + 17)
    ends.send(data)
    buffer = ends.receive()
    assert bytes(buffer) == data
    buffer[:3] = b"abc"
    assert bytes(buffer[:3]) == b"abc"


def test_what_a_forked_process_writes_stays_its_own_and_its_childrens(ends: Ends) -> None:
    """A data loader's workers may write in place to what their parent has received, as to all other memory."""
    ends.send(bytes(LARGE))
    buffer = ends.receive()

    def write() -> bool:
        buffer[0] = 1
        return holds_in_a_fork(lambda: buffer[0] == 1)

    assert holds_in_a_fork(write)
    assert buffer[0] == 0
    assert holds_in_a_fork(lambda: buffer[0] == 0)


def test_no_descriptors_are_kept_for_forked_processes_where_they_become_few(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = set(fork_isolation._mappings)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8, 8))
    ends.send(bytes(LARGE))
    assert len(ends.receive()) == LARGE
    assert set(fork_isolation._mappings) == known


def test_a_forked_process_does_not_keep_what_is_lent_from_being_used_again(ends: Ends) -> None:
    ends.send(bytes(LARGE))
    received = [ends.receive()]
    assert holds_in_a_fork(lambda: len(received[0]) == LARGE)
    known = segments()
    received.clear()
    ends.wait_for_returns()
    ends.send(b"x" * LARGE)
    assert ends.receive()[0] == ord("x")
    assert segments() == known


def test_it_does_not_go_through_the_socket(ends: Ends) -> None:
    ends.send(bytes(LARGE))
    received = ends.receive()
    assert received.nbytes == LARGE
    assert len(segments()) == 1


def test_a_small_buffer_goes_through_the_socket(ends: Ends) -> None:
    ends.send(b"small")
    assert bytes(ends.receive()) == b"small"
    assert not segments()


def test_what_is_held_is_not_overwritten_by_what_comes_next(ends: Ends) -> None:
    ends.send(b"1" * LARGE)
    first = ends.receive()
    ends.send(b"2" * LARGE)
    second = ends.receive()
    assert (first[0], second[-1]) == (ord("1"), ord("2"))
    assert len(segments()) == 2


def test_memory_is_used_again_once_the_last_view_has_gone(ends: Ends) -> None:
    for _ in range(5):
        ends.send(bytes(LARGE))
        part = ends.receive()[10:20]
        before = segments()
        del part
        gc.collect()
        ends.wait_for_returns()
        assert segments() == before
    assert len(segments()) == 1


def test_a_loan_outlives_the_connection(ends: Ends) -> None:
    ends.send(b"x" * LARGE)
    buffer = ends.receive()
    ends.near.close()
    assert bytes(buffer) == b"x" * LARGE


def test_the_memory_goes_with_the_connection(no_leaks: None) -> None:
    ends = Ends()
    ends.send(bytes(LARGE))
    ends.receive()
    ends.near.close()
    until(lambda: not segments())


def test_when_too_much_is_lent_the_socket_takes_over(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_buffers, "_MAX_EXPORTED_BYTES", 2 * LARGE)
    held = []
    for index in range(4):
        ends.send(bytes([index]) * LARGE)
        held.append(ends.receive())
    assert [buffer[-1] for buffer in held] == [0, 1, 2, 3]
    assert len(segments()) == 2


def test_idle_memory_is_bounded_and_forgotten_on_both_sides(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_buffers, "_MAX_IDLE_BYTES", LARGE)
    for size in (LARGE, 8 * LARGE, 64 * LARGE):
        ends.send(bytes(size))
        assert ends.receive().nbytes == size
        gc.collect()
        ends.wait_for_returns()
    ends.send(bytes(LARGE))  # tells the importer which segments are no more
    ends.receive()
    assert len(segments()) == 2


def test_what_was_sent_can_be_read_after_the_lender_has_gone(no_leaks: None) -> None:
    near, far = socket.socketpair()
    reading = UnixConnection(far, "near")
    received: queue.Queue[Frame] = queue.Queue()
    exporter = UnixConnection(near, "far")
    exporter.attach(lambda frame: None, lambda reason: None)
    reading.attach(received.put, lambda reason: None)
    first = threading.Thread(target=exporter.send, args=(Frame(frames.CALL, buffers=[bytes(LARGE)]),))
    first.start()
    while received.empty():
        reading.read_next()
    first.join(WITHIN_S)
    assert exporter.wait(WITHIN_S)
    exporter.read()
    exporter.send(Frame(frames.CALL, buffers=[b"1" * LARGE]))  # nobody reads: it does not go through the socket
    exporter.close("the end")
    assert not segments()
    reading.read()
    received.get_nowait()
    assert bytes(received.get_nowait().buffers[0]) == b"1" * LARGE
    reading.close()


def test_a_read_takes_all_that_is_there_also_behind_descriptors(no_leaks: None) -> None:
    # A read ends where descriptors came. Taken for the last one, it left an edge-triggered server waiting for ever.
    near, far = (UnixConnection(sock, "peer") for sock in socket.socketpair())
    received: list[Frame] = []
    near.attach(lambda frame: None, lambda reason: None)
    far.attach(received.append, lambda reason: None)
    first = threading.Thread(target=near.send, args=(Frame(frames.CALL, buffers=[bytes(LARGE)]),))
    first.start()
    while not received:
        far.read_next()
    first.join(WITHIN_S)
    assert near.wait(WITHIN_S)
    near.read()
    for _ in range(5):
        near.send(Frame(frames.CALL, buffers=[bytes(LARGE)]))
    far.read()
    assert len(received) == 6
    near.close()
    far.close()


def test_a_segment_that_did_not_arrive_ends_the_connection_with_a_reason(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(importer: shm_buffers.BufferImporter, control: list[tuple[int, int, bytes]]) -> None:
        for descriptor in (number for _, _, data in control for number in struct.unpack(f"{len(data) // 4}i", data)):
            os.close(descriptor)

    monkeypatch.setattr(shm_buffers.BufferImporter, "take", lose)
    ends.send(bytes(LARGE))
    assert "shared memory" in ends.reasons.get(timeout=WITHIN_S)


def test_a_frame_that_cannot_be_sent_lends_nothing(ends: Ends) -> None:
    with pytest.raises(frames.FrameError):
        ends.near.send(Frame(frames.CALL, buffers=[bytes(LARGE), *[b"x"] * 200_000]))
    assert ends.near._exporter is not None and not ends.near._exporter._exported


class Exporter:
    """Takes segments back once it reads."""

    def __init__(self) -> None:
        self.reads = threading.Event()
        self.taken: queue.Queue[bytes] = queue.Queue()

    def send_return(self, body: bytes) -> bool:
        if self.reads.is_set():
            self.taken.put(body)
        return self.reads.is_set()


def test_a_lender_that_does_not_read_holds_up_no_other() -> None:
    """The one thread that gives back stood still in a full socket, and all other lenders lent ever more."""
    idle, busy = Exporter(), Exporter()
    busy.reads.set()
    returns = shm_buffers._ReturnThread()
    returns.start()
    for body in (b"1", b"2"):
        for exporter in (idle, busy):
            returns.put(weakref.WeakMethod(exporter.send_return), body)
    assert [busy.taken.get(timeout=WITHIN_S) for _ in range(2)] == [b"1", b"2"]
    assert idle.taken.empty()
    idle.reads.set()
    assert [idle.taken.get(timeout=WITHIN_S) for _ in range(2)] == [b"1", b"2"]


def test_giving_back_does_not_wait_for_a_peer_that_does_not_read() -> None:
    near, far = socket.socketpair()
    connection = UnixConnection(near, "far")
    deadline = time.monotonic() + WITHIN_S
    while connection._send_return(bytes(8)):
        assert time.monotonic() < deadline
    far.recv(1 << 20)
    assert connection._send_return(bytes(8))
    connection.close()
    assert connection._send_return(bytes(8)), "nobody wants it any more"
    far.close()
