"""Frames out of a stream socket, as far as they have arrived: reading may stop anywhere and resume later."""

import socket
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from lp_pipe.connections import frames, shm_buffers
from lp_pipe.connections.frames import Frame, FrameError
from lp_pipe.connections.memory import memory_for
from lp_pipe.connections.shm_buffers import BufferImporter

_READ_AHEAD_BYTES = 1 << 16
_CONTROL_BYTES = socket.CMSG_SPACE(4 * shm_buffers.MAX_DESCRIPTORS)


class Readable(Protocol):
    """A socket, or an object that reads like one."""

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0, /) -> int: ...


class SocketReader:
    """Cuts a byte stream into frames; reads ahead a little, and reads large pieces straight into their own memory.

    importer: None where no memory can be shared.
    """

    def __init__(self, sock: Readable, importer: BufferImporter | None = None) -> None:
        self._socket = sock
        self._importer = importer
        self._ahead = memoryview(bytearray(_READ_AHEAD_BYTES))
        self._start = self._end = 0
        self._frame: Frame | None = None  # begun and not complete
        self._references: Sequence[int] = ()  # the indices of its buffers that are still references
        self._missing: deque[memoryview] = deque()  # its memory that is not filled yet
        self._is_importing = False
        self.is_drained = False
        self.has_more = False  # whether a part of the next frame was read together with the last one

    @property
    def is_inside_frame(self) -> bool:
        return self._frame is not None

    @property
    def missing_bytes(self) -> int:
        """The number of bytes that the begun frame lacks."""
        return sum(map(len, self._missing)) - (self._end - self._start) if self._missing else 0

    def close(self) -> None:
        """Release the peer's memory; buffers that were handed out stay valid as long as they are used."""
        if self._importer is not None:
            self._importer.close()

    def receive(self, flags: int) -> int:
        """Read the socket once; 0 at the end of the stream.

        Raises:
            BlockingIOError: nothing is there (with MSG_DONTWAIT), or the socket's timeout has passed.
        """
        target = self._missing[0] if self._missing else self._space()
        self.is_drained = True
        count = self._socket.recv_into(target, 0, flags) if not self._is_importing else self._receive(target, flags)
        # A read ends where descriptors arrived, though more may be there; then only an empty read shows that nothing is
        # left.
        self.is_drained = count < len(target) and not self._is_importing
        if not self._missing:
            self._end += count
        elif count == len(target):
            self._missing.popleft()
        else:
            self._missing[0] = target[count:]
        return count

    def _receive(self, target: memoryview, flags: int) -> int:
        assert self._importer is not None and isinstance(self._socket, socket.socket)
        count, control, _, _ = self._socket.recvmsg_into([target], _CONTROL_BYTES, flags | socket.MSG_CMSG_CLOEXEC)
        if control:
            self._importer.take(control)
        return count

    def next_frame(self) -> Frame | None:
        """Return the next frame that has arrived as a whole."""
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
        self.has_more = self._end > self._start
        if self._references and frame is not None:
            if self._importer is None:
                raise FrameError("a frame refers to shared memory, which another host cannot map")
            buffers = list(frame.buffers)
            for index in self._references:
                buffers[index] = self._importer.open(buffers[index])
            frame = frame._replace(buffers=buffers)
        return frame

    def _begin(self) -> bool:
        """Take the next header, if it has arrived, and allocate what it announces."""
        ready = self._end - self._start
        if ready < frames.PREFIX_BYTES:
            return False
        body_start = self._start + frames.PREFIX_BYTES
        length = frames.header_length(self._ahead[self._start : body_start])
        if ready < frames.PREFIX_BYTES + length:
            return False
        self._start = body_start
        header = frames.decode_header(self._take(length))
        # Each gets memory of its own, so that arrays built on it stay writable.
        body = self._piece(header.body_bytes)
        sizes = header.buffer_bytes
        buffers = [self._piece(size) for size in sizes] if sizes else ()
        self._references = header.references
        is_large = bool(sizes) and max(sizes) >= shm_buffers.MIN_BYTES
        if is_large and self._importer is not None and not self._is_importing and shm_buffers.is_supported():
            self._is_importing = True
            self._importer.announce()
        self._frame = Frame(header.kind, header.id, header.name, body, buffers)
        return True

    def _piece(self, size: int) -> bytearray | memoryview:
        """Return memory that is filled as the bytes arrive."""
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
        """Return where to read ahead. Used space is freed first, so a header (at most MAX_HEADER_BYTES) fits in."""
        rest = self._end - self._start
        if self._start:
            self._ahead[:rest] = bytes(self._ahead[self._start : self._end])
            self._start, self._end = 0, rest
        if rest == len(self._ahead):
            larger = memoryview(bytearray(2 * rest))
            larger[:rest] = self._ahead
            self._ahead = larger
        return self._ahead[rest:]
