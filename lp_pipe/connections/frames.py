"""One message of a connection: a small header, a body, and raw buffers that are never copied into it."""

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
CLOSE = frame_pb2.KIND_CLOSE
STREAM_OPEN = frame_pb2.KIND_STREAM_OPEN
STREAM_ITEM = frame_pb2.KIND_STREAM_ITEM
STREAM_END = frame_pb2.KIND_STREAM_END
STREAM_CREDIT = frame_pb2.KIND_STREAM_CREDIT

MAX_HEADER_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 1 << 36

_PREFIX = struct.Struct("<I")
PREFIX_BYTES = _PREFIX.size


class FrameError(LpPipeError, ValueError):
    """Bytes that are not a frame, or a frame over the limits: the connection cannot be used any more."""


class Frame(NamedTuple):
    """`buffers` holds bytes-like objects; between two ends in one process it may hold any object, by reference."""

    kind: int
    id: int = 0
    name: str = ""
    body: bytes | bytearray | memoryview = b""
    buffers: Sequence[Any] = ()


def encode(frame: Frame) -> list[bytes | bytearray | memoryview]:
    """The pieces of a frame in the order in which they go over the wire."""
    views = [memoryview(buffer).cast("B") for buffer in frame.buffers]
    header = frame_pb2.FrameHeader(
        kind=frame.kind,  # type: ignore[arg-type]
        id=frame.id,
        name=frame.name,
        body_bytes=len(frame.body),
        buffer_bytes=[view.nbytes for view in views],
    ).SerializeToString()
    if len(header) > MAX_HEADER_BYTES:
        raise FrameError(f"a frame with {len(views)} buffers has a header of {len(header)} bytes; pack them together")
    return [_PREFIX.pack(len(header)) + header, frame.body, *views]


def header_length(prefix: bytes | memoryview) -> int:
    """Length of the header that follows these 4 bytes.

    Raises:
        FrameError: it is over the limit, so this is no peer of ours.
    """
    (length,) = _PREFIX.unpack(prefix)
    if length > MAX_HEADER_BYTES:
        raise FrameError(f"a frame header of {length} bytes is over the limit of {MAX_HEADER_BYTES}")
    return int(length)


def decode_header(data: bytes | bytearray | memoryview) -> frame_pb2.FrameHeader:
    """Parse and bound a header.

    Raises:
        FrameError: it does not parse, or announces more bytes than allowed.
    """
    try:
        header = frame_pb2.FrameHeader.FromString(bytes(data))
    except Exception as error:  # protobuf's DecodeError, whose module differs between its implementations
        raise FrameError(f"a frame header does not parse: {error}") from error
    total = header.body_bytes + sum(header.buffer_bytes)
    if total > MAX_MESSAGE_BYTES:
        raise FrameError(f"a frame of {total} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    return header
