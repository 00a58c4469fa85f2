"""Frames out of a stream socket, as far as they have arrived: reading may stop anywhere and go on later."""

import socket
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from lp_pipe.connections import frames, loans
from lp_pipe.connections.frames import Frame, FrameError
from lp_pipe.connections.loans import Borrower
from lp_pipe.connections.memory import memory_for

_READ_AHEAD_BYTES = 1 << 16
_CONTROL_BYTES = socket.CMSG_SPACE(4 * loans.MOST_DESCRIPTORS)


class Readable(Protocol):
    """A socket, or what reads like one."""

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0, /) -> int: ...


class SocketReader:
    """Cuts a byte stream into frames; reads ahead a little, and large pieces straight into their own memory.

    borrower: None where no memory can be lent.
    """

    def __init__(self, sock: Readable, borrower: Borrower | None = None) -> None:
        self._socket = sock
        self._borrower = borrower
        self._ahead = memoryview(bytearray(_READ_AHEAD_BYTES))
        self._start = self._end = 0
        self._frame: Frame | None = None  # begun, and not complete
        self._loans: Sequence[int] = ()  # those of its buffers that are tickets as yet
        self._missing: deque[memoryview] = deque()  # its memory that is still to be filled
        self._may_borrow = False
        self.is_drained = False

    @property
    def is_inside_frame(self) -> bool:
        return self._frame is not None

    def close(self) -> None:
        """Keep no memory of the peer's; what was handed out stays as long as it is used."""
        if self._borrower is not None:
            self._borrower.close()

    def receive(self, flags: int) -> int:
        """One read of the socket; 0 at the end of the stream.

        Raises:
            BlockingIOError: nothing is there (with MSG_DONTWAIT), or the socket's timeout has passed.
        """
        target = self._missing[0] if self._missing else self._space()
        self.is_drained = True
        count = self._socket.recv_into(target, 0, flags) if not self._may_borrow else self._receive(target, flags)
        # A read ends where descriptors came, though more may be there; then only an empty read tells.
        self.is_drained = count < len(target) and not self._may_borrow
        if not self._missing:
            self._end += count
        elif count == len(target):
            self._missing.popleft()
        else:
            self._missing[0] = target[count:]
        return count

    def _receive(self, target: memoryview, flags: int) -> int:
        assert self._borrower is not None and isinstance(self._socket, socket.socket)
        count, control, _, _ = self._socket.recvmsg_into([target], _CONTROL_BYTES, flags | socket.MSG_CMSG_CLOEXEC)
        if control:
            self._borrower.take(control)
        return count

    def next_frame(self) -> Frame | None:
        """The next frame that has arrived as a whole."""
        if self._frame is None and not self._begin():
            return None
        while self._missing and self._end > self._start:
            target = self._missing[0]
            size = min(len(target), self._end - self._start)
            target[:size] = self._take(size)
            self._missing[0] = target[size:]
            if size == len(target):
                self._missing.popleft()
        if self._missing:
            return None
        frame, self._frame = self._frame, None
        if self._loans and frame is not None:
            if self._borrower is None:
                raise FrameError("a frame lends memory, which cannot be lent between hosts")
            buffers = list(frame.buffers)
            for index in self._loans:
                buffers[index] = self._borrower.open(buffers[index])
            frame = frame._replace(buffers=buffers)
        return frame

    def _begin(self) -> bool:
        """Take the next header, if it is there, and make room for what it announces."""
        ready = self._end - self._start
        if ready < frames.PREFIX_BYTES:
            return False
        body_start = self._start + frames.PREFIX_BYTES
        length = frames.header_length(self._ahead[self._start : body_start])
        if ready < frames.PREFIX_BYTES + length:
            return False
        self._start = body_start
        header = frames.decode_header(self._take(length))
        # Memory of their own: what is built on them stays writable.
        body = self._piece(header.body_bytes)
        buffers = [self._piece(size) for size in header.buffer_bytes]
        self._loans = header.loans
        is_large = max(header.buffer_bytes, default=0) >= loans.LEAST_BYTES
        if is_large and self._borrower is not None and not self._may_borrow and loans.is_supported():
            self._may_borrow = True
            self._borrower.welcome()
        self._frame = Frame(header.kind, header.id, header.name, body, buffers)
        return True

    def _piece(self, size: int) -> bytearray | memoryview:
        """Memory that is filled as the bytes come."""
        if not self._missing and size <= self._end - self._start:
            return bytearray(self._take(size))
        piece = memory_for(size)
        if size:
            self._missing.append(memoryview(piece))
        return piece

    def _take(self, size: int) -> memoryview:
        self._start += size
        return self._ahead[self._start - size : self._start]

    def _space(self) -> memoryview:
        """Where to read ahead: what has been used is freed; a header is at most MAX_HEADER_BYTES, so it fits in."""
        rest = self._end - self._start
        if self._start:
            self._ahead[:rest] = bytes(self._ahead[self._start : self._end])
            self._start, self._end = 0, rest
        if rest == len(self._ahead):
            larger = memoryview(bytearray(2 * rest))
            larger[:rest] = self._ahead
            self._ahead = larger
        return self._ahead[rest:]
