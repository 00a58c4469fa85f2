"""Frames cut into chunks and put together again; what waits is bounded."""

import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lp_pipe.connections import Frame, frames, memory
from lp_pipe.connections.chunks import CHUNK_BYTES, ChunkReader, Outbox, cut

WITHIN_S = 20.0


def test_small_frames_are_one_chunk_and_large_ones_are_bounded() -> None:
    assert list(cut([b"head", bytearray(b"body"), memoryview(b"buffer")])) == [b"headbodybuffer"]
    data = os.urandom(2 * CHUNK_BYTES)
    chunks = list(cut([b"head", data]))
    assert b"".join(chunks) == b"head" + data
    assert [len(chunk) for chunk in chunks] == [CHUNK_BYTES, CHUNK_BYTES, 4]


@given(
    sizes=st.lists(st.integers(0, 50), max_size=5),
    body=st.binary(max_size=50),
    cuts=st.lists(st.integers(0, 500), max_size=10),
)
def test_where_the_bytes_are_cut_means_nothing(sizes: list[int], body: bytes, cuts: list[int]) -> None:
    sent = [Frame(frames.CALL, 7, "add", body, [bytes([size]) * size for size in sizes]), Frame(frames.RESULT, 8)]
    data = b"".join(piece for frame in sent for piece in frames.encode(frame))
    ends = [*sorted(min(end, len(data)) for end in cuts), len(data)]
    reader = ChunkReader(data[start:end] for start, end in zip([0, *ends], ends, strict=False))
    for frame in sent:
        got = reader.read_frame()
        assert got is not None
        assert (got.kind, got.id, got.name, bytes(got.body)) == (frame.kind, frame.id, frame.name, frame.body)
        assert [bytes(buffer) for buffer in got.buffers] == list(frame.buffers)
    assert reader.read_frame() is None


def test_an_end_inside_a_frame_is_an_error() -> None:
    data = b"".join(frames.encode(Frame(frames.CALL, body=b"x" * 100)))
    with pytest.raises(ConnectionError, match="ended inside a frame"):
        ChunkReader([data[:-1]]).read_frame()


def test_small_chunks_that_wait_go_as_one_and_in_order() -> None:
    outbox = Outbox()
    for number in range(10):
        assert outbox.put(bytes([number]))
    assert outbox.put(b"x" * CHUNK_BYTES)
    outbox.finish(b"last")
    outbox.end()
    assert list(outbox) == [bytes(range(10)), b"x" * CHUNK_BYTES, b"last"]
    assert list(outbox) == []
    assert not outbox.put(b"too late")


def test_who_puts_waits_for_room_and_is_freed_by_the_end() -> None:
    outbox = Outbox()
    outcomes: list[bool] = []

    def put_until_the_end() -> None:
        while not outcomes or outcomes[-1]:
            outcomes.append(outbox.put(b"x" * CHUNK_BYTES))

    thread = threading.Thread(target=put_until_the_end)
    thread.start()
    for _ in range(20):
        assert len(next(outbox)) == CHUNK_BYTES
    thread.join(0.1)
    assert thread.is_alive()
    outbox.end()
    thread.join(WITHIN_S)
    assert len(outcomes) <= 20 + 5
    assert outcomes[-1] is False


def test_memory_for_a_large_piece_is_taken_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_LARGE_BYTES", 1000)
    body = bytes(range(256)) * 20
    data = b"".join(frames.encode(Frame(frames.CALL, 1, "name", body, [body])))
    frame = ChunkReader(data[start : start + 700] for start in range(0, len(data), 700)).read_frame()
    assert frame is not None and frame.body == body and frame.buffers == [body]
