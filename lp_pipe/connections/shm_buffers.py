"""Large buffers between two processes of one host: through shared memory, with one copy by the sender.

                                            ◄── BUFFER_RETURN, empty ──  a first large buffer came: export others
    exporter   copies into a free segment ──── buffer reference ──────►  importer maps it (once)
               segment is free again        ◄────── BUFFER_RETURN ─────  when its last view of it is freed

The first reference to a segment travels with its descriptor (SCM_RIGHTS), so that what was sent can be read after the
exporter has ended. Receiving descriptors costs a microsecond a read, so only peers that have seen a large buffer do it.

Segments are reused, because fresh pages cost ten times a copy. The exporter makes them and keeps a few idle ones; while
too much is exported, buffers go through the socket as small ones do. Segments are anonymous files (memfd): the kernel
frees them with the last process that uses them, however it ends.
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

from lp_pipe.connections.finalizer import add_finalizer
from lp_pipe.connections.fork_isolation import make_private_in_children
from lp_pipe.connections.frames import BufferReference, FrameError
from lp_pipe.connections.kernel_calls import has_memfd
from lp_pipe.connections.resource_limits import describe_error
from lp_pipe.private_python import release_if_held_here


def is_supported() -> bool:
    """Return whether this system can share buffers."""
    return has_memfd() and hasattr(socket, "MSG_CMSG_CLOEXEC")


MIN_BYTES = 1 << 18  # below this, a socket is as fast
MAX_DESCRIPTORS = 64  # per frame; the kernel takes 253

_MAX_EXPORTED_BYTES = 1 << 31
_MAX_IDLE_BYTES = 1 << 28
_RETRY_S = 0.1  # the time after which a return is sent again to a peer that did not read
_COPY_BYTES = 1 << 22  # at a time, because a copy holds the interpreter's lock
_REFERENCE = struct.Struct("<Q Q Q")  # the segment's inode, its size, the buffer's size
_TOKEN = struct.Struct("<Q")
_DESCRIPTOR = struct.Struct("i")


_SendReturn = weakref.WeakMethod[Callable[[bytes], bool]]
_PendingReturn = tuple[_SendReturn, bytes]


class BufferExporter:
    """The sender's side of a connection. `export` is called by one thread at a time, `reclaim` by any."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._exported: dict[int, _Segment] = {}
        self._idle: list[_Segment] = []  # the most recently used last
        self._dropped: list[int] = []
        self._bytes = 0  # of all segments
        self.is_peer_ready = False  # whether the peer reads in a way that receives descriptors

    def export(self, buffers: Sequence[Any]) -> list[Any]:
        """Return the same buffers, with a reference in place of each that is large enough."""
        if not self.is_peer_ready:
            return list(buffers)
        lent: list[Any] = []
        for index, buffer in enumerate(buffers):
            reference = self._reference(memoryview(buffer).cast("B")) if index < MAX_DESCRIPTORS else None
            lent.append(reference or buffer)
        return lent

    def reclaim(self, returned: bytes | bytearray | memoryview) -> None:
        """Free a segment that the importer has returned.

        returned: the body of its frame; empty in the first one, which says that the peer is ready.
        """
        if not returned:
            self.is_peer_ready = True
            return
        with self._lock:
            segment = self._exported.pop(_TOKEN.unpack(returned)[0], None)
            if segment is not None:
                self._idle.append(segment)
                while sum(segment.size for segment in self._idle) > _MAX_IDLE_BYTES and len(self._idle) > 1:
                    self._drop(self._idle[0])

    def recover(self) -> None:
        """Release the lock if an exception interrupted the calling thread while it held it."""
        release_if_held_here(self._lock)

    def close(self) -> None:
        """Drop all segments: the connection has ended, and nothing will come back."""
        with self._lock:
            self._exported.clear()
            self._idle.clear()

    def _reference(self, view: memoryview) -> BufferReference | None:
        if view.nbytes < MIN_BYTES:
            return None
        segment = self._take(view.nbytes)
        if segment is None:
            return None
        segment.fill(view)
        with self._lock:
            dropped, self._dropped = self._dropped, []
        data = _REFERENCE.pack(segment.inode, segment.size, view.nbytes) + b"".join(map(_TOKEN.pack, dropped))
        reference = BufferReference(data)
        if not segment.is_known:
            segment.is_known = True
            # keeps the segment until it is sent, even if the connection is closed meanwhile
            reference.segment = segment
        return reference

    def _take(self, size: int) -> "_Segment | None":
        """Return a free segment and count it as exported; None when no more may be exported, or made."""
        with self._lock:
            fitting = next((segment for segment in reversed(self._idle) if size <= segment.size <= 4 * size), None)
            if fitting is not None:
                self._idle.remove(fitting)
            elif (fitting := self._make(1 << (size - 1).bit_length())) is None:
                return None
            self._exported[fitting.inode] = fitting
            return fitting

    def _make(self, size: int) -> "_Segment | None":
        while self._idle and self._bytes + size > _MAX_EXPORTED_BYTES:
            self._drop(self._idle[0])
        if self._bytes + size > _MAX_EXPORTED_BYTES:
            return None
        try:
            segment = _Segment(size)
        except OSError:  # out of descriptors or of mappable memory: the socket works as well
            return None
        self._bytes += size
        return segment

    def _drop(self, segment: "_Segment") -> None:
        self._idle.remove(segment)
        self._bytes -= segment.size
        self._dropped.append(segment.inode)  # the importer is told with the next reference


class _Segment:
    """A piece of shared memory, closed and unmapped with its last reference; its inode is its name."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.descriptor = os.memfd_create("lp_pipe-buffer", os.MFD_CLOEXEC)
        add_finalizer(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, size)
        self.inode = os.fstat(self.descriptor).st_ino
        self.is_known = False  # whether the importer has its descriptor
        self._view = memoryview(mmap.mmap(self.descriptor, size))

    def fill(self, source: memoryview) -> None:
        for start in range(0, source.nbytes, _COPY_BYTES):
            part = source[start : start + _COPY_BYTES]
            self._view[start : start + part.nbytes] = part


class BufferImporter:
    """The receiver's side of a connection, used by the thread that reads.

    send_return: sends the body of a BUFFER_RETURN to the exporter. It is called in a thread of this module. When it
        returns False, because the exporter does not read just now, it is called again later.
    """

    def __init__(self, send_return: Callable[[bytes], bool]) -> None:
        # A weak reference: pending returns are in a table of the whole process, which would else keep the connection,
        # and all that its owner has kept of what it received, alive for ever.
        self._send_return = weakref.WeakMethod(send_return)
        self._arrived: dict[int, int] = {}  # descriptors by inode, until their references are opened
        self._mapped: dict[int, mmap.mmap] = {}

    def announce(self) -> None:
        """Tell the peer that it may export: from now on, `take` must get the descriptors that come with each read."""
        _returns.start()
        _returns.put(self._send_return, b"")

    def take(self, control: Sequence[tuple[int, int, bytes]]) -> None:
        """Store the descriptors that came with a read; `control` is as from socket.recvmsg."""
        for level, kind, data in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                for (descriptor,) in _DESCRIPTOR.iter_unpack(data[: len(data) - len(data) % _DESCRIPTOR.size]):
                    self._arrived[os.fstat(descriptor).st_ino] = descriptor

    def open(self, reference: bytes | bytearray) -> memoryview:
        """Return the writable buffer that the reference stands for.

        Its segment is returned to the exporter when the last view of the buffer is freed.

        Raises:
            FrameError: the segment did not arrive, because this process is out of descriptors.
        """
        inode, size, length = _REFERENCE.unpack_from(reference)
        for (token,) in _TOKEN.iter_unpack(memoryview(reference)[_REFERENCE.size :]):
            self._mapped.pop(token, None)
        if inode in self._arrived:
            self._mapped[inode] = _map(self._arrived.pop(inode), size)
        if inode not in self._mapped:
            advice = "the receiving process has too many open files; raise its limit (ulimit -n)"
            raise FrameError(f"shared memory of {size} bytes did not arrive: {advice}")
        # Every view is an object of its own, so that its finalizer runs at its end; the mapping stays.
        view = (ctypes.c_char * length).from_buffer(self._mapped[inode])
        add_finalizer(view, _returns.put, self._send_return, _TOKEN.pack(inode))
        return memoryview(view).cast("B")

    def close(self) -> None:
        while self._arrived:
            _, descriptor = self._arrived.popitem()
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._mapped.clear()


def _map(descriptor: int, size: int) -> mmap.mmap:
    try:
        mapping = mmap.mmap(descriptor, size)
        make_private_in_children(mapping, descriptor)
        return mapping
    except (OSError, ValueError) as error:
        raise FrameError(
            f"the receiver cannot map {size} bytes of the sender's shared memory: {describe_error(error)}"
        ) from error
    finally:
        os.close(descriptor)


class _ReturnThread:
    """A thread that sends segments back. Views are freed anywhere, also inside of `send`, where nothing can be sent.

    There is one thread for all exporters, so an exporter that does not read must not hold up the segments of the
    others.
    """

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)  # the child has imported nothing

    def _reset(self) -> None:
        self._queue: SimpleQueue[_PendingReturn] = SimpleQueue()
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread before anything is imported, because `put` must take no locks."""
        if self._thread is not None:
            return  # also where an exception interrupted a thread as it released the lock
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="return buffers", daemon=True)
                thread.start()  # stored after the start: the system may be out of threads
                self._thread = thread

    def put(self, send_return: _SendReturn, body: bytes) -> None:
        self._queue.put((send_return, body))

    def _run(self) -> None:
        late: list[_PendingReturn] = []
        again_at = 0.0
        while True:
            with contextlib.suppress(Empty):
                late += self._not_taken([self._queue.get(timeout=_RETRY_S if late else None)])
            if late and time.monotonic() >= again_at:
                late, again_at = self._not_taken(late), time.monotonic() + _RETRY_S

    def _not_taken(self, returns: "list[_PendingReturn]") -> "list[_PendingReturn]":
        """Return those that could not be sent, after one more try."""
        left: list[_PendingReturn] = []
        for send_return, body in returns:
            method = send_return()
            if method is not None and not method(body):
                left.append((send_return, body))
        return left


_returns = _ReturnThread()
