"""Calls between hosts: over TCP, plain and with mTLS, they are what they are on one host."""

import asyncio
import contextlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import lp_pipe as lp
from lp_pipe.connections.credentials import Credentials
from lp_pipe.rpc import Server

WITHIN_S = 20.0


@pytest.fixture(params=["grpc", "grpcs"])
def endpoint(request: pytest.FixtureRequest, no_leaks: None, run_credentials: Credentials) -> str:
    return f"{request.param}:127.0.0.1:0"


class Target:
    def echo(self, value: Any) -> Any:
        return value

    def count(self, stop: int) -> Iterator[int]:
        yield from range(stop)

    async def double(self, value: int) -> int:
        return 2 * value


@pytest.fixture(params=[0, 4], ids=["inline", "pool"])
def client(request: pytest.FixtureRequest, endpoint: str) -> Iterator[lp.CourierClient]:
    with contextlib.closing(Server(Target(), endpoint, thread_pool_size=request.param)) as server:
        yield lp.CourierClient(server.endpoint)


def test_calls_futures_streams_and_coroutines(client: lp.CourierClient) -> None:
    assert client.echo({"a": (1, 2)}) == {"a": (1, 2)}
    assert [future.result(WITHIN_S) for future in [client.futures.echo(i) for i in range(200)]] == list(range(200))
    assert list(client.count(1000)) == list(range(1000))

    async def doubles() -> list[int]:
        return await asyncio.gather(*(client.aio.double(i) for i in range(50)))

    assert asyncio.run(doubles()) == [2 * i for i in range(50)]


def test_large_tensors_go_both_ways(client: lp.CourierClient) -> None:
    torch = pytest.importorskip("torch")
    sent = torch.arange(26 << 20, dtype=torch.float32)  # 104 MiB
    got = client.echo(sent)
    assert torch.equal(got, sent)
    got += 1  # it can be written to
    array = np.arange(1 << 20)
    assert np.array_equal(client.echo(array), array)


def test_a_killed_server_is_unavailable_and_its_successor_is_found(endpoint: str, run_credentials: Credentials) -> None:
    source = """
        import os, signal, sys, time
        from lp_pipe.connections import credentials
        from lp_pipe.rpc import Server
        class Mortal:
            def die(self):
                os.kill(os.getpid(), signal.SIGKILL)
            def pid(self):
                return os.getpid()
        credentials.use_credentials(credentials.Credentials.from_bytes(sys.stdin.buffer.read()))
        print(Server(Mortal(), sys.argv[1]).endpoint, flush=True)
        time.sleep(1000)
    """

    @contextlib.contextmanager
    def serving(endpoint: str) -> Iterator[tuple[str, int]]:
        command = [sys.executable, "-c", textwrap.dedent(source), endpoint]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            with process.stdin:
                process.stdin.write(run_credentials.to_bytes())
            yield process.stdout.readline().decode().strip(), process.pid
            process.kill()

    with serving(endpoint) as (address, pid):
        client = lp.CourierClient(address, call_timeout=WITHIN_S)
        assert client.pid() == pid
        with pytest.raises(lp.Unavailable, match=r"die\(\).*killed"):
            client.die()
    with serving(address) as (_, pid):
        assert client.pid() == pid
