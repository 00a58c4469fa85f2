"""A frame's bytes: a length, a header, the body, and the buffers as they are."""

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
        frames.encode(Frame(frames.CALL, 1, "x" * (1 << 20)))


@pytest.mark.parametrize("prefix", [b"\xff\xff\xff\xff", b"\x01\x00\x10\x00"])
def test_a_length_over_the_limit_is_refused(prefix: bytes) -> None:
    with pytest.raises(frames.FrameError, match="limit"):
        frames.header_length(prefix)


def test_a_header_that_does_not_parse_is_refused() -> None:
    with pytest.raises(frames.FrameError, match="parse"):
        frames.decode_header(b"\xff\xff\xff")
