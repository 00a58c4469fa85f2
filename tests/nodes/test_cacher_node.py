"""A proxy between many readers and one server."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import lp_pipe as lp

WITHIN_S = 20.0


class Source:
    """Counts its calls."""

    def __init__(self) -> None:
        self._calls = 0
        self._gate = threading.Event()

    def get(self, *args: Any, **kwargs: Any) -> Any:
        self._calls += 1
        return self._calls, args, kwargs

    def slow(self) -> int:
        time.sleep(0.2)
        return self.get()[0]

    def fail(self) -> None:
        raise ValueError(f"call {self.get()[0]}")

    def stream(self) -> Iterator[int]:
        self._gate.wait(WITHIN_S)
        return (item for item in range(100))

    def open_gate(self) -> None:
        self._gate.set()

    def __call__(self, x: int) -> int:
        return -x


def launched(mode: str, *args: Any, **kwargs: Any) -> tuple[lp.Run, Any]:
    program = lp.Program("cacher")
    source = program.add_node(lp.CourierNode(Source), label="source")
    cacher = program.add_node(lp.CacherNode(source, *args, **kwargs), label="cacher")
    run = lp.launch(program, mode)
    return run, cacher.dereference()


def test_a_result_is_fetched_once_per_interval(mode: str) -> None:
    run, client = launched(mode, refresh_interval=60.0)
    with run:
        assert client.get(1, [2], k=3) == (1, (1, [2]), {"k": 3})
        assert client.get(1, [2], k=3)[0] == 1
        assert client.get(2)[0] == 2  # other arguments, another result
        assert client.get()[0] == 3
        assert client(5) == -5
        assert lp.list_methods(client) == ["__call__", "fail", "get", "open_gate", "slow", "stream"]


def test_it_is_fetched_again_after_the_interval(mode: str) -> None:
    run, client = launched(mode, refresh_interval=0.2)
    with run:
        first = client.get()[0]
        deadline = time.monotonic() + WITHIN_S
        while client.get()[0] == first:
            assert time.monotonic() < deadline


def test_misses_at_the_same_time_share_a_call(mode: str) -> None:
    run, client = launched(mode, refresh_interval=60.0)
    with run:
        assert {future.result(WITHIN_S) for future in [client.futures.slow() for _ in range(40)]} == {1}


def test_misses_at_the_same_time_get_a_stream_each(mode: str) -> None:
    """Regression: they shared a stream, and each got the items that the others did not take."""
    run, client = launched(mode, refresh_interval=60.0)
    with run:
        streams = [client.futures.stream() for _ in range(3)]
        deadline = time.monotonic() + WITHIN_S
        while sum(lp.cache_info(client)) < len(streams):
            assert time.monotonic() < deadline
        client.open_gate()
        assert [list(stream.result(WITHIN_S)) for stream in streams] == [[*range(100)]] * 3
        assert lp.cache_info(client) == (0, len(streams) + 1)


def test_errors_are_passed_on_and_not_kept(mode: str) -> None:
    run, client = launched(mode, refresh_interval=60.0)
    with run:
        for call in (1, 2):
            with pytest.raises(ValueError, match=f"call {call}"):
                client.fail()
        with pytest.raises(lp.MethodNotFound, match="did you mean 'get'"):
            client.gett()


def test_other_methods_pass_through(mode: str) -> None:
    run, client = launched(mode, refresh_interval=60.0, methods=["slow"])
    with run:
        assert [client.get()[0], client.get()[0]] == [1, 2]
        assert [client.slow(), client.slow()] == [3, 3]


def test_the_interval_must_be_positive() -> None:
    with pytest.raises(ValueError, match="refresh_interval"):
        lp.CacherNode(lp.CourierNode(Source).create_handle(), refresh_interval=0)


def test_what_would_cache_nothing_is_refused() -> None:
    """Methods "get" were "g", "e" and "t", none of which there is: all calls were passed on, in silence."""
    node = lp.CourierNode(Source)
    with pytest.raises(TypeError, match=r"methods .*got 'get'"):
        lp.CacherNode(node.create_handle(), 1.0, methods="get")
    with pytest.raises(TypeError, match=r"handle .*CourierNode\(Source\)"):
        lp.CacherNode(node, 1.0)  # type: ignore[arg-type]
