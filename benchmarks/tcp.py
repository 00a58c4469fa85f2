"""Measure a call over TCP: lp_pipe over TLS, over a gRPC stream with and without mTLS, and grpcio's unary calls.

    python -m benchmarks.tcp [--repeats 7] [--quick] [--json FILE]

Latency: the median over calls of `add(1, 2)`, one after another. Bandwidth: `size(array)` with a numpy array of
64 MiB. grpcio's calls are plain, with pickled arguments, and without a limit of size. Both ends are processes of this
host, connected through its loopback interface. The parties take turns, round after round.
"""

import argparse
import contextlib
import multiprocessing
import pathlib
import pickle
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import lp_pipe as lp
from benchmarks.calls import latency_us
from benchmarks.report import machine, show_table, spread, write_json
from lp_pipe.connections.credentials import Credentials, generate_credentials, use_credentials
from lp_pipe.rpc import Server

ARRAY_BYTES = 64 << 20
BASE = "grpcio unary"
_METHODS = ("add", "size")
_NO_LIMIT = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Target:
    """The server."""

    def add(self, a: int, b: int) -> int:
        return a + b

    def size(self, array: "np.ndarray[Any, Any]") -> int:
        return array.nbytes


class LpPipe:
    def __init__(self, address: str) -> None:
        self._client = lp.CourierClient(address)

    def call(self) -> object:
        return self._client.add(1, 2)

    def size(self, array: "np.ndarray[Any, Any]") -> object:
        return self._client.size(array)


class Grpc:
    def __init__(self, address: str) -> None:
        import grpc

        channel = grpc.insecure_channel(address, _NO_LIMIT)
        self._add, self._size = (channel.unary_unary(f"/bench/{name}", pickle.dumps, pickle.loads) for name in _METHODS)

    def call(self) -> object:
        return self._add((1, 2))

    def size(self, array: "np.ndarray[Any, Any]") -> object:
        return self._size((array,))


Party = LpPipe | Grpc
Serve = Callable[..., None]


def serve_lp_pipe(ready: Any, credentials: bytes, endpoint: str, threads: int) -> None:
    """threads: the server's thread_pool_size."""
    use_credentials(Credentials.from_bytes(credentials))
    server = Server(Target(), endpoint, thread_pool_size=threads)
    ready.send(server.endpoint)
    threading.Event().wait()


def serve_grpc(ready: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    target = Target()

    def handler(name: str) -> grpc.RpcMethodHandler:
        method = getattr(target, name)
        return grpc.unary_unary_rpc_method_handler(lambda args, _: method(*args), pickle.loads, pickle.dumps)

    server = grpc.server(ThreadPoolExecutor(16), options=_NO_LIMIT)
    handlers = {name: handler(name) for name in _METHODS}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    ready.send(f"127.0.0.1:{port}")
    server.wait_for_termination()


@contextlib.contextmanager
def child(serve: Serve, *args: Any) -> Iterator[str]:
    """Run `serve` in a process of its own; gives its address."""
    spawn = multiprocessing.get_context("spawn")
    receiver, ready = spawn.Pipe(duplex=False)
    process = spawn.Process(target=serve, args=(ready, *args), daemon=True)
    process.start()
    try:
        if not receiver.poll(30):
            raise SystemExit(f"{serve.__name__} did not come up within 30 s")
        yield receiver.recv()
    finally:
        process.kill()
        process.join()


def open_parties(stack: contextlib.ExitStack) -> dict[str, Party]:
    credentials = generate_credentials()
    use_credentials(credentials)
    data = credentials.to_bytes()
    parties: dict[str, Party] = {BASE: Grpc(stack.enter_context(child(serve_grpc)))}
    for name, scheme, threads in (
        ("lp_pipe, TLS, inline", "tls", 0),
        ("lp_pipe, TLS", "tls", 16),
        ("lp_pipe, gRPC with mTLS, inline", "grpcs", 0),
        ("lp_pipe, gRPC with mTLS", "grpcs", 16),
        ("lp_pipe, plain gRPC, inline", "grpc", 0),
        ("lp_pipe, plain gRPC", "grpc", 16),
    ):
        address = stack.enter_context(child(serve_lp_pipe, data, f"{scheme}:127.0.0.1:0", threads))
        parties[name] = LpPipe(address)
    return parties


def gigabytes_per_s(party: Party, array: "np.ndarray[Any, Any]", calls: int) -> float:
    """Median over the calls."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        party.size(array)
        times.append(time.perf_counter() - start)
    return array.nbytes / statistics.median(times) / 1e9


def measure(calls: int, large_calls: int, repeats: int) -> dict[str, dict[str, Any]]:
    latencies: dict[str, list[float]] = {}
    bandwidths: dict[str, list[float]] = {}
    array = np.arange(ARRAY_BYTES // 8)
    with contextlib.ExitStack() as stack:
        parties = open_parties(stack)
        for party in parties.values():
            latency_us(party, 100)  # type: ignore[arg-type]
            party.size(array)
        for _ in range(repeats):
            for name, party in parties.items():
                latencies.setdefault(name, []).append(latency_us(party, calls))  # type: ignore[arg-type]
                bandwidths.setdefault(name, []).append(gigabytes_per_s(party, array, large_calls))
    return {
        name: {"latency_p50_us": spread(latencies[name]), "gigabytes_per_s": spread(bandwidths[name])}
        for name in parties
    }


def show(parties: dict[str, dict[str, Any]]) -> None:
    base = parties[BASE]
    rows = []
    for name, party in parties.items():
        latency, bandwidth = party["latency_p50_us"], party["gigabytes_per_s"]
        rows.append(
            [
                name,
                f"{latency['median']:.0f} ({latency['min']:.0f}–{latency['max']:.0f})",
                f"{latency['median'] / base['latency_p50_us']['median']:.2f}x",
                f"{bandwidth['median']:.2f} ({bandwidth['min']:.2f}–{bandwidth['max']:.2f})",
                f"{bandwidth['median'] / base['gigabytes_per_s']['median']:.1f}x",
            ]
        )
    columns = ["", "add(1, 2) p50, µs", "to grpcio", "64 MiB array, GB/s", "to grpcio"]
    show_table("over TCP on the loopback; median (min–max) of the rounds", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="rounds")
    parser.add_argument("--quick", action="store_true", help="few calls: only to see that it works")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file instead of stdout")
    options = parser.parse_args()
    calls, large_calls, repeats = (50, 1, 2) if options.quick else (500, 3, options.repeats)
    parties = measure(calls, large_calls, repeats)
    show(parties)
    settings = {"calls": calls, "large_calls": large_calls, "repeats": repeats, "array_bytes": ARRAY_BYTES}
    write_json({"benchmark": "tcp", "machine": machine(), "settings": settings, "parties": parties}, options.json)


if __name__ == "__main__":
    main()
