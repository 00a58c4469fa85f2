"""The exception of a future that nothing asks for is a warning."""

import concurrent.futures
import gc
import logging
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

import lp_pipe as lp
from lp_pipe.rpc import Server, calls

WITHIN_S = 20.0


class Replay:
    def add(self, item: object) -> None:
        raise ValueError(f"no {item}")

    def other(self) -> None:
        raise KeyError("other")

    def fine(self) -> int:
        return 1


@pytest.fixture(autouse=True)
def no_limit_of_before() -> None:
    calls._shown.clear()


@pytest.fixture
def client(caplog: pytest.LogCaptureFixture) -> Iterator[lp.CourierClient]:
    caplog.set_level(logging.WARNING)
    server = Server(Replay(), "inproc:test_unread_errors", name="replay/0")
    yield lp.CourierClient(server.endpoint, peer="replay/0")
    server.close()


def failed(future: "Future[Any]") -> "Future[Any]":
    concurrent.futures.wait([future], WITHIN_S)
    return future


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    gc.collect()
    return [record.getMessage() for record in caplog.records if record.name == calls.__name__]


def test_a_dropped_failure_is_a_warning(client: lp.CourierClient, caplog: pytest.LogCaptureFixture) -> None:
    failed(client.futures.add(7))
    failed(client.futures.fine())
    (message,) = warnings_of(caplog)
    assert "replay/0.add()" in message and "ValueError" in message and "no 7" in message


def test_a_failure_that_was_asked_for_is_none(client: lp.CourierClient, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError):
        client.futures.add(1).result(WITHIN_S)
    with pytest.raises(ValueError):
        failed(client.futures.add(1)).result()
    assert failed(client.futures.add(1)).exception() is not None
    failed(client.futures.add(1)).add_done_callback(lambda done: None)
    waiting = client.futures.add(1)
    waiting.add_done_callback(lambda done: None)
    failed(waiting)
    del waiting
    client.futures.add(1).cancel()
    assert warnings_of(caplog) == []


def test_a_method_that_fails_again_and_again_is_told_a_few_times(
    client: lp.CourierClient, caplog: pytest.LogCaptureFixture
) -> None:
    for item in range(20):
        failed(client.futures.add(item))
    failed(client.futures.other())
    messages = warnings_of(caplog)
    assert len([one for one in messages if "add()" in one]) == 3
    assert len([one for one in messages if "other()" in one]) == 1


def test_what_is_kept_until_the_end_of_the_process_is_told_there() -> None:
    script = textwrap.dedent("""
        import concurrent.futures
        import lp_pipe as lp
        from lp_pipe.rpc import Server
        class Replay:
            def add(self): raise ValueError("full")
        server = Server(Replay(), "inproc:x", name="replay/0")
        kept = lp.CourierClient(server.endpoint, peer="replay/0").futures.add()
        concurrent.futures.wait([kept])
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "replay/0.add()" in done.stderr and "ValueError" in done.stderr
