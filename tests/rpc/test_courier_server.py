"""A server without a program, and its clients, which know its host and port."""

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import lp_pipe as lp
from lp_pipe.connections import port_tokens
from lp_pipe.errors import Unauthenticated

pytestmark = pytest.mark.usefixtures("no_leaks")

WITHIN_S = 20.0


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


class Counter:
    def __init__(self) -> None:
        self._count = 0
        self._is_slow = threading.Event()

    def add(self, number: int = 1) -> int:
        self._count += number
        return self._count

    def slowly(self) -> str:
        self._is_slow.set()
        time.sleep(0.5)
        return "done"

    def wait_until_slow(self) -> bool:
        return self._is_slow.wait(WITHIN_S)


@pytest.fixture
def server() -> Iterator[lp.CourierServer]:
    with lp.CourierServer(Counter(), "grpc:127.0.0.1:0", thread_pool_size=16) as found:
        yield found


def test_a_client_in_another_process_needs_only_host_and_port(server: lp.CourierServer) -> None:
    port = lp.get_port_from_address(server.address)
    assert server.address == f"127.0.0.1:{port}"
    client = lp.CourierClient(server.address, call_timeout=WITHIN_S)
    assert client.add(2) == 2
    code = f"""
        import lp_pipe as lp
        client = lp.CourierClient("localhost:{port}")
        print(client.add(40), client.futures.add().result(), lp.list_methods(client))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "42 43 ['add', 'slowly', 'wait_until_slow']\n", done.stderr


def test_without_a_server_a_call_waits_for_it_as_long_as_it_may(unused_port: int) -> None:
    address = f"127.0.0.1:{unused_port}"
    with pytest.raises(lp.Unavailable, match=f"127.0.0.1:{unused_port}"):
        lp.CourierClient(address, wait_for_ready=False).add()
    began = time.monotonic()
    with pytest.raises(lp.DeadlineExceeded):
        lp.CourierClient(address, call_timeout=0.5).add()
    assert 0.4 < time.monotonic() - began < WITHIN_S
    waiting = lp.CourierClient(address).futures.add()
    with lp.CourierServer(Counter(), f"grpc:{address}"):
        assert waiting.result(WITHIN_S) == 1


def test_after_a_stop_nothing_serves_there_and_calls_in_progress_have_ended(
    server: lp.CourierServer, state_home: Path
) -> None:
    client = lp.CourierClient(server.address, call_timeout=WITHIN_S, wait_for_ready=False)
    assert client.add() == 1
    pending = client.futures.slowly()
    assert client.wait_until_slow()
    server.stop()
    assert pending.result(WITHIN_S) == "done"
    server.stop()
    with pytest.raises(lp.Unavailable):
        client.add()
    assert list((state_home / "lp_pipe" / "servers").iterdir()) == []


def test_only_this_user_can_call_it(server: lp.CourierServer, monkeypatch: pytest.MonkeyPatch) -> None:
    port = lp.get_port_from_address(server.address)
    (file,) = port_tokens._path(port).parent.iterdir()
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    client = lp.CourierClient(server.address, wait_for_ready=False)
    monkeypatch.setattr(port_tokens, "find", lambda port: "")  # as for another user
    with pytest.raises(lp.Unavailable, match="no process of this user"):
        client.add()
    monkeypatch.setattr(port_tokens, "find", lambda port: "guessed")
    with pytest.raises(Unauthenticated):
        client.add()


def test_a_token_of_ones_own_is_all_that_clients_need(state_home: Path) -> None:
    with lp.CourierServer(Counter(), "grpc:127.0.0.1:0#secret") as server:
        assert server.address.endswith("#secret")
        assert "secret" not in repr(server)
        assert lp.CourierClient(server.address, call_timeout=WITHIN_S).add() == 1
        assert list(state_home.iterdir()) == []


@pytest.mark.parametrize("endpoint", ["grpc:", "127.0.0.1", "grpcs:127.0.0.1:0", "tls:127.0.0.1:0", "10.0.0.1:80"])
def test_what_cannot_be_served_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match=endpoint):
        lp.CourierServer(Counter(), endpoint)


@pytest.mark.parametrize("address", ["10.0.0.1:80", "example.com:80", "127.0.0.1", "127.0.0.1:", ":80", None])
def test_what_is_no_address_of_this_host_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=str(address)):
        lp.CourierClient(address)


@pytest.fixture
def unused_port() -> int:
    with lp.CourierServer(Counter()) as server:
        return lp.get_port_from_address(server.address)
