"""Large buffers between two processes of one host go through shared memory: one copy, and none on the other side.

                                          ◄───── LOAN_RETURN, empty ──────────  a first large buffer came: lend me
    lender     copies into a free segment ── ticket, in place of the buffer ──►  borrower maps it (once)
               segment is free again      ◄────────── LOAN_RETURN ─────────────  when the last view of it has gone

The first ticket of a segment travels with its descriptor (SCM_RIGHTS), so that what was sent can be read after the
lender has ended. Reading descriptors costs a microsecond a read: only who has seen a large buffer pays it.

Segments are used over and over, because fresh pages cost ten times a copy. The lender makes them and keeps a few idle
ones; while too much is lent out, buffers go through the socket as small ones do. Segments are anonymous files (memfd):
the kernel frees them with the last process that uses them, however it ends.
"""

import contextlib
import ctypes
import mmap
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from lp_pipe.connections.forked import private_when_forked
from lp_pipe.connections.frames import FrameError, Ticket
from lp_pipe.connections.kernel_calls import has_memfd
from lp_pipe.connections.shortage import told
from lp_pipe.connections.thread_locks import release_if_held_here
from lp_pipe.connections.when_gone import when_gone


def is_supported() -> bool:
    """Return whether buffers can be lent here."""
    return has_memfd() and hasattr(socket, "MSG_CMSG_CLOEXEC")


LEAST_BYTES = 1 << 18  # below, a socket is as fast
MOST_DESCRIPTORS = 64  # with one frame; the kernel takes 253

_MOST_LENT_BYTES = 1 << 31
_MOST_IDLE_BYTES = 1 << 28
_AGAIN_S = 0.1  # then those are asked again who did not read
_COPY_BYTES = 1 << 22  # at a time: a copy holds the interpreter's lock
_TICKET = struct.Struct("<Q Q Q")  # the segment's inode, its bytes, those of the buffer
_TOKEN = struct.Struct("<Q")
_DESCRIPTOR = struct.Struct("i")


_GiveBack = weakref.WeakMethod[Callable[[bytes], bool]]
_Return = tuple[_GiveBack, bytes]


class Lender:
    """The sender's side of a connection. `lend` is called by one thread at a time, `take_back` by any."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._lent: dict[int, _Segment] = {}
        self._idle: list[_Segment] = []  # the warmest last
        self._dropped: list[int] = []
        self._bytes = 0  # of all segments
        self.is_welcome = False  # whether the peer's reads are such that descriptors arrive

    def lend(self, buffers: Sequence[Any]) -> list[Any]:
        """The same buffers, with a ticket in place of each that is large enough."""
        if not self.is_welcome:
            return list(buffers)
        lent: list[Any] = []
        for index, buffer in enumerate(buffers):
            ticket = self._ticket(memoryview(buffer).cast("B")) if index < MOST_DESCRIPTORS else None
            lent.append(ticket or buffer)
        return lent

    def take_back(self, returned: bytes | bytearray | memoryview) -> None:
        """The borrower needs a segment no more; `returned` is the body of its frame, empty before the first loan."""
        if not returned:
            self.is_welcome = True
            return
        with self._lock:
            segment = self._lent.pop(_TOKEN.unpack(returned)[0], None)
            if segment is not None:
                self._idle.append(segment)
                while sum(segment.size for segment in self._idle) > _MOST_IDLE_BYTES and len(self._idle) > 1:
                    self._drop(self._idle[0])

    def recover(self) -> None:
        """Give back the lock, where an exception has interrupted the calling thread between two bytecodes."""
        release_if_held_here(self._lock)

    def close(self) -> None:
        """The connection has ended: nothing will come back."""
        with self._lock:
            self._lent.clear()
            self._idle.clear()

    def _ticket(self, view: memoryview) -> Ticket | None:
        if view.nbytes < LEAST_BYTES:
            return None
        segment = self._take(view.nbytes)
        if segment is None:
            return None
        segment.fill(view)
        with self._lock:
            dropped, self._dropped = self._dropped, []
        data = _TICKET.pack(segment.inode, segment.size, view.nbytes) + b"".join(map(_TOKEN.pack, dropped))
        ticket = Ticket(data)
        if not segment.is_known:
            segment.is_known = True
            ticket.segment = segment  # kept until it was sent, even if the connection is closed meanwhile
        return ticket

    def _take(self, size: int) -> "_Segment | None":
        """A segment that nobody uses, from now on lent; None when no more may be lent, or made."""
        with self._lock:
            fitting = next((segment for segment in reversed(self._idle) if size <= segment.size <= 4 * size), None)
            if fitting is not None:
                self._idle.remove(fitting)
            elif (fitting := self._make(1 << (size - 1).bit_length())) is None:
                return None
            self._lent[fitting.inode] = fitting
            return fitting

    def _make(self, size: int) -> "_Segment | None":
        while self._idle and self._bytes + size > _MOST_LENT_BYTES:
            self._drop(self._idle[0])
        if self._bytes + size > _MOST_LENT_BYTES:
            return None
        try:
            segment = _Segment(size)
        except OSError:  # out of descriptors, or of memory that may be mapped: the socket does it as well
            return None
        self._bytes += size
        return segment

    def _drop(self, segment: "_Segment") -> None:
        self._idle.remove(segment)
        self._bytes -= segment.size
        self._dropped.append(segment.inode)  # the borrower hears of it with the next ticket


class _Segment:
    """Shared memory, closed and unmapped when the last reference goes; its inode is its name."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.descriptor = os.memfd_create("lp_pipe-loan", os.MFD_CLOEXEC)
        when_gone(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, size)
        self.inode = os.fstat(self.descriptor).st_ino
        self.is_known = False  # to the borrower
        self._view = memoryview(mmap.mmap(self.descriptor, size))

    def fill(self, source: memoryview) -> None:
        for start in range(0, source.nbytes, _COPY_BYTES):
            part = source[start : start + _COPY_BYTES]
            self._view[start : start + part.nbytes] = part


class Borrower:
    """The receiver's side of a connection; used by the thread that reads.

    give_back: sends the body of a LOAN_RETURN to the lender; called in a thread of this module, once more after a while
        when it returns False, because the lender does not read just now.
    """

    def __init__(self, give_back: Callable[[bytes], bool]) -> None:
        # Weakly: the ends of loans are watched for by a table of the whole process, which would keep the connection,
        # and with it whatever its owner has kept of what it received, for ever.
        self._give_back = weakref.WeakMethod(give_back)
        self._arrived: dict[int, int] = {}  # descriptors by inode, until their tickets are opened
        self._mapped: dict[int, mmap.mmap] = {}

    def welcome(self) -> None:
        """Let the peer know that it may lend: from now on every read gives `take` the descriptors that come with it."""
        _returns.start()
        _returns.put(self._give_back, b"")

    def take(self, control: Sequence[tuple[int, int, bytes]]) -> None:
        """What came with a read; `control` as of socket.recvmsg."""
        for level, kind, data in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                for (descriptor,) in _DESCRIPTOR.iter_unpack(data[: len(data) - len(data) % _DESCRIPTOR.size]):
                    self._arrived[os.fstat(descriptor).st_ino] = descriptor

    def open(self, ticket: bytes | bytearray) -> memoryview:
        """The buffer that the ticket stands for, writable; the segment goes back when the last view of it has gone.

        Raises:
            FrameError: the segment did not arrive: this process is out of descriptors.
        """
        inode, size, length = _TICKET.unpack_from(ticket)
        for (token,) in _TOKEN.iter_unpack(memoryview(ticket)[_TICKET.size :]):
            self._mapped.pop(token, None)
        if inode in self._arrived:
            self._mapped[inode] = _map(self._arrived.pop(inode), size)
        if inode not in self._mapped:
            advice = "its process has too many open files; raise the limit of that process (ulimit -n)"
            raise FrameError(f"shared memory did not arrive at the end that receives: {advice}")
        # Every loan is an object of its own, whose end we learn of; the mapping stays.
        loan = (ctypes.c_char * length).from_buffer(self._mapped[inode])
        when_gone(loan, _returns.put, self._give_back, _TOKEN.pack(inode))
        return memoryview(loan).cast("B")

    def close(self) -> None:
        while self._arrived:
            _, descriptor = self._arrived.popitem()
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._mapped.clear()


def _map(descriptor: int, size: int) -> mmap.mmap:
    try:
        mapping = mmap.mmap(descriptor, size)
        private_when_forked(mapping, descriptor)
        return mapping
    except (OSError, ValueError) as error:
        raise FrameError(f"the end that receives cannot map the sender's shared memory: {told(error)}") from error
    finally:
        os.close(descriptor)


class _Returns:
    """Sends what was borrowed back: the collector drops views anywhere, also inside of `send`.

    One thread for all lenders: one that does not read must not hold the others' segments up.
    """

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)  # the child has borrowed nothing

    def _reset(self) -> None:
        self._queue: SimpleQueue[_Return] = SimpleQueue()
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Before anything is borrowed: `put` must take no locks."""
        if self._thread is not None:
            return  # also where an exception has interrupted a thread as it gave the lock back
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="return loans", daemon=True)
                thread.start()  # before it counts: the system may have no more
                self._thread = thread

    def put(self, give_back: _GiveBack, body: bytes) -> None:
        self._queue.put((give_back, body))

    def _run(self) -> None:
        late: list[_Return] = []
        again_at = 0.0
        while True:
            with contextlib.suppress(Empty):
                late += self._not_taken([self._queue.get(timeout=_AGAIN_S if late else None)])
            if late and time.monotonic() >= again_at:
                late, again_at = self._not_taken(late), time.monotonic() + _AGAIN_S

    def _not_taken(self, returns: "list[_Return]") -> "list[_Return]":
        """What is left of these after one more try."""
        left: list[_Return] = []
        for give_back, body in returns:
            method = give_back()
            if method is not None and not method(body):
                left.append((give_back, body))
        return left


_returns = _Returns()
