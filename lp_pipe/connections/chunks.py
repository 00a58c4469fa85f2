"""Frames as a sequence of bounded messages: the same bytes as over a socket, cut into chunks."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from queue import Empty, SimpleQueue

from lp_pipe.connections import frames
from lp_pipe.connections.frames import Frame, Piece
from lp_pipe.connections.memory import memory_for

CHUNK_BYTES = 1 << 20  # measured with benchmarks/tcp.py: 256 KiB takes a quarter longer
_MAX_WAITING_BYTES = 2 * CHUNK_BYTES


def cut(pieces: Sequence[Piece]) -> Iterable[bytes]:
    """Return the bytes of the pieces, one after another, in chunks that are copies."""
    return [b"".join(pieces)] if sum(map(len, pieces)) <= CHUNK_BYTES else _cut(pieces)


def _cut(pieces: Sequence[Piece]) -> Iterator[bytes]:
    parts: list[memoryview] = []
    room = CHUNK_BYTES
    for piece in pieces:
        view = memoryview(piece)
        while len(view):
            parts.append(view[:room])
            view = view[room:]
            room -= len(parts[-1])
            if not room:
                yield b"".join(parts)
                parts, room = [], CHUNK_BYTES
    if parts:
        yield b"".join(parts)


class Outbox:
    """A queue of chunks: senders put them, and the one thread that sends them iterates.

    Small chunks that wait at the same time are joined into one. `put` blocks while the queue holds more than the
    sending thread will take soon: this is how a peer that does not read slows down the senders.
    """

    def __init__(self) -> None:
        # None marks the end. A SimpleQueue wakes its reader without Python code and without a lock held: the woken
        # thread would only wait again for the lock, which costs more than all the rest.
        self._chunks: SimpleQueue[bytes | None] = SimpleQueue()
        self._next: bytes | None = None
        self._put_bytes = self._taken_bytes = 0  # each is written by one thread at a time
        self._is_awaited = False
        self._has_room = threading.Condition()
        self._is_ended = False

    def put(self, chunk: bytes) -> bool:
        """Add a chunk, waiting for room; False when the outbox has ended. One thread at a time."""
        if self._is_full():
            self._wait_for_room()
        if self._is_ended:
            return False
        self._put_bytes += len(chunk)
        self._chunks.put(chunk)
        return True

    def finish(self, last: bytes = b"") -> None:
        """Accept nothing after `last`, and wake the thread that waits in `put`. Never blocks."""
        with self._has_room:
            if self._is_ended:
                return
            self._is_ended = True
            if last:
                self._chunks.put(last)
            self._has_room.notify_all()

    def end(self) -> None:
        """Accept nothing more, and end the iteration after the chunks that are queued."""
        self.finish()
        self._chunks.put(None)

    def _is_full(self) -> bool:
        return self._put_bytes - self._taken_bytes >= _MAX_WAITING_BYTES

    def _wait_for_room(self) -> None:
        with self._has_room:
            self._is_awaited = True  # set before the check: a thread that takes after the check will notify
            self._has_room.wait_for(lambda: self._is_ended or not self._is_full())
            self._is_awaited = False

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        chunk = self._next if self._next is not None else self._chunks.get()
        self._next = None
        if chunk is None:
            self._chunks.put(None)  # every later call ends as well
            raise StopIteration
        chunk = self._with_more(chunk)
        self._taken_bytes += len(chunk)
        if self._is_awaited:
            with self._has_room:
                self._has_room.notify_all()
        return chunk

    def _with_more(self, chunk: bytes) -> bytes:
        """Append the chunks that are queued already, as far as they fit."""
        parts, size = [chunk], len(chunk)
        while size < CHUNK_BYTES:
            try:
                self._next = self._chunks.get_nowait()
            except Empty:
                break
            if self._next is None:
                self._chunks.put(None)
                break
            if size + len(self._next) > CHUNK_BYTES:
                break
            parts.append(self._next)
            size += len(self._next)
            self._next = None
        return chunk if len(parts) == 1 else b"".join(parts)


class ChunkReader:
    """A reader that cuts the bytes of chunks into frames; a large piece is assembled in its own memory."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._rest = memoryview(b"")

    def read_frame(self) -> Frame | None:
        """Return the next frame, or None at a clean end.

        Raises:
            FrameError: the bytes are no frame, or the frame is over the limits.
            ConnectionError: the end came inside a frame.
        """
        if not self._refill():
            return None
        length = frames.header_length(self._view(frames.PREFIX_BYTES))
        header = frames.decode_header(self._view(length))
        body = self._read(header.body_bytes)
        buffers = [self._read(size) for size in header.buffer_bytes]
        return Frame(header.kind, header.id, header.name, body, buffers)

    def _refill(self) -> bool:
        """Make sure that a byte is available; False at the end."""
        while not len(self._rest):
            chunk = next(self._chunks, None)
            if chunk is None:
                return False
            self._rest = memoryview(chunk)
        return True

    def _view(self, size: int) -> memoryview:
        """Return exactly `size` bytes, valid until the next read."""
        return self._take(size) if size <= len(self._rest) else memoryview(self._read(size))

    def _read(self, size: int) -> bytearray | memoryview:
        """Return exactly `size` bytes in memory of their own, so that arrays built on it stay writable."""
        if size <= len(self._rest):
            return bytearray(self._take(size))
        data = memory_for(size)
        done = 0
        while done < size:
            if not self._refill():
                raise ConnectionError(f"the peer ended inside a frame ({done} of {size} bytes)")
            part = self._take(min(size - done, len(self._rest)))
            data[done : done + len(part)] = part
            done += len(part)
        return data

    def _take(self, size: int) -> memoryview:
        part, self._rest = self._rest[:size], self._rest[size:]
        return part
