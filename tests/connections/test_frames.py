"""A frame's bytes: a length, a header, the body, and the buffers as they are."""

from collections.abc import Callable

import pytest

from lp_pipe.connections import Frame, frames


def test_the_pieces_of_a_frame_are_not_copied() -> None:
    body, buffer = b"body", bytearray(b"buffer")
    head, *rest = frames.encode(Frame(frames.CALL, 7, "add", body, [buffer]))
    assert rest[0] is body
    assert isinstance(rest[1], memoryview)
    assert rest[1].obj is buffer
    length = frames.header_length(bytes(head[: frames.PREFIX_BYTES]))
    header = frames.decode_header(bytes(head[frames.PREFIX_BYTES :]))
    assert length == len(head) - frames.PREFIX_BYTES
    assert (header.kind, header.id, header.name) == (frames.CALL, 7, "add")
    assert (header.body_bytes, list(header.buffer_bytes)) == (4, [6])


def test_a_header_over_the_limit_is_not_sent() -> None:
    with pytest.raises(frames.FrameError, match="pack them together"):
        frames.encode(Frame(frames.CALL, 1, buffers=[b""] * (1 << 17)))
    with pytest.raises(frames.FrameError, match="name"):
        frames.encode(Frame(frames.CALL, 1, "x" * (1 << 16)))


@pytest.mark.parametrize("prefix", [b"\xff\xff\xff\xff", b"\x01\x00\x10\x00"])
def test_a_length_over_the_limit_is_refused(prefix: bytes) -> None:
    with pytest.raises(frames.FrameError, match="limit"):
        frames.header_length(prefix)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda header: header[:5],
        lambda header: b"\x63" + header[1:],  # another version
        lambda header: header[:1] + b"\xff" + header[2:],  # no such kind
        lambda header: header[:2] + b"\xff\xff" + header[4:],  # a name longer than the header
        lambda header: header + b"\x00",  # a piece of a length
        lambda header: header.replace(b"add", b"\xff\xff\xff"),  # not UTF-8
    ],
)
def test_a_header_that_does_not_parse_is_refused(spoil: Callable[[bytes], bytes]) -> None:
    head = bytes(frames.encode(Frame(frames.CALL, 7, "add", buffers=[b"buffer"]))[0])
    with pytest.raises(frames.FrameError, match="parse"):
        frames.decode_header(spoil(head[frames.PREFIX_BYTES :]))
