"""The message of a connection: a small header, a body, and raw buffers that are never copied into it."""

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from lp_pipe.errors import LpPipeError
from lp_pipe.protos import frame_pb2

CALL = frame_pb2.KIND_CALL
RESULT = frame_pb2.KIND_RESULT
ERROR = frame_pb2.KIND_ERROR
CANCEL = frame_pb2.KIND_CANCEL
SUPERVISION = frame_pb2.KIND_SUPERVISION
CHANNEL_OPEN = frame_pb2.KIND_CHANNEL_OPEN
CHANNEL_DATA = frame_pb2.KIND_CHANNEL_DATA
CHANNEL_CREDIT = frame_pb2.KIND_CHANNEL_CREDIT
CHANNEL_NOTE = frame_pb2.KIND_CHANNEL_NOTE
CLOSE = frame_pb2.KIND_CLOSE
STREAM_OPEN = frame_pb2.KIND_STREAM_OPEN
STREAM_ITEM = frame_pb2.KIND_STREAM_ITEM
STREAM_END = frame_pb2.KIND_STREAM_END
STREAM_CREDIT = frame_pb2.KIND_STREAM_CREDIT

MAX_HEADER_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 1 << 36

# The number of header bytes that follow, then: version of this format, kind, length of the name, id, length of the
# body. A protobuf header took four times as long, which was a tenth of a call between two processes.
_HEAD = struct.Struct("<I B B H Q Q")
_VERSION = 1
PREFIX_BYTES = 4
_PREFIX = struct.Struct("<I")
_FIXED = struct.Struct("<B B H Q Q")
_MAX_NAME_BYTES = (1 << 16) - 1
_KINDS = frozenset(frame_pb2.Kind.values())


_REFERENCE_BIT = 1 << 63  # in a buffer's size: a reference to shared memory travels in its place
BUFFER_RETURN = frame_pb2.KIND_BUFFER_RETURN


class BufferReference(bytes):
    """A reference to a buffer in shared memory (see shm_buffers.py).

    segment: the memory itself, sent along if the peer does not have it yet.
    """

    segment: Any = None


Piece = bytes | bytearray | memoryview


class FrameError(LpPipeError, ValueError):
    """The bytes are not a frame, or the frame is over the limits: the connection cannot be used any more."""


class Frame(NamedTuple):
    """A message. `buffers` holds bytes-like objects; within one process it may hold any object, by reference."""

    kind: int
    id: int = 0
    name: str = ""
    body: Piece = b""
    buffers: Sequence[Any] = ()

    @property
    def size_bytes(self) -> int:
        """The bytes of body and buffers, without objects of the same process."""
        return len(self.body) + sum([buffer.nbytes for buffer in self.buffers if isinstance(buffer, memoryview)])


class Header(NamedTuple):
    """A parsed header, with lengths in bytes. `references`: the indices of the buffers that arrive as references."""

    kind: int
    id: int
    name: str
    body_bytes: int
    buffer_bytes: Sequence[int]
    references: Sequence[int] = ()


def encode(frame: Frame) -> list[Piece]:
    """Return the pieces of a frame in the order in which they are sent.

    Raises:
        FrameError: it has too many buffers, or too long a name.
    """
    name = frame.name.encode()
    if len(name) > _MAX_NAME_BYTES:
        raise FrameError(f"a frame's name has {len(name)} bytes; at most {_MAX_NAME_BYTES} are allowed")
    count = len(frame.buffers)
    length = _FIXED.size + len(name) + 8 * count
    if length > MAX_HEADER_BYTES:
        raise FrameError(f"a frame with {count} buffers needs a header of {length} bytes; pack them together")
    head = _HEAD.pack(length, _VERSION, frame.kind, len(name), frame.id, len(frame.body)) + name
    if not count:
        return [head, frame.body]
    views = [memoryview(buffer).cast("B") for buffer in frame.buffers]
    sizes = [
        len(buffer) | _REFERENCE_BIT if type(buffer) is BufferReference else view.nbytes
        for buffer, view in zip(frame.buffers, views, strict=True)
    ]
    return [head + struct.pack(f"<{count}Q", *sizes), frame.body, *views]


def header_length(prefix: bytes | memoryview) -> int:
    """Return the length of the header that follows these 4 bytes.

    Raises:
        FrameError: the length is over the limit, so the peer does not speak this protocol.
    """
    (length,) = _PREFIX.unpack(prefix)
    if length > MAX_HEADER_BYTES:
        raise FrameError(f"a frame header of {length} bytes is over the limit of {MAX_HEADER_BYTES}")
    return int(length)


def decode_header(data: Piece) -> Header:
    """Parse a header and check its limits.

    Raises:
        FrameError: it does not parse, or announces more bytes than allowed.
    """
    sizes_bytes = len(data) - _FIXED.size
    if sizes_bytes < 0:
        raise FrameError(f"a frame header does not parse: it has {len(data)} bytes")
    version, kind, name_bytes, frame_id, body_bytes = _FIXED.unpack_from(data)
    sizes_bytes -= name_bytes
    if version != _VERSION or kind not in _KINDS or sizes_bytes < 0 or sizes_bytes % 8:
        raise FrameError(
            f"a frame header does not parse (version {version}, kind {kind}): the peer is not this lp_pipe"
        )
    end = _FIXED.size + name_bytes
    try:
        name = str(data[_FIXED.size : end], "utf-8") if name_bytes else ""
    except UnicodeDecodeError as error:
        raise FrameError(f"a frame header does not parse: {error}") from error
    sizes: Sequence[int] = ()
    references: Sequence[int] = ()
    if sizes_bytes:
        sizes = struct.unpack_from(f"<{sizes_bytes // 8}Q", data, end)
        references = [index for index, size in enumerate(sizes) if size & _REFERENCE_BIT]
        sizes = [size & ~_REFERENCE_BIT for size in sizes] if references else sizes
    total = body_bytes + sum(sizes)
    if total > MAX_MESSAGE_BYTES:
        raise FrameError(f"a frame of {total} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    return Header(kind, frame_id, name, body_bytes, sizes, references)
