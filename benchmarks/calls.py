"""Measure a call between two processes of one host: lp_pipe, a bare socket, and grpc.

    python -m benchmarks.calls [--repeats 5] [--quick] [--json FILE]

Latency: the median over calls of `add(1, 2)`, one after another. Rate: calls a second with 32 outstanding. The floor
is what Python itself needs: length-prefixed pickle over a unix socket (multiprocessing.connection), one thread at
each end. The parties take turns, round after round.
"""

import argparse
import contextlib
import functools
import multiprocessing
import pathlib
import pickle
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Protocol

import lp_pipe as lp
from benchmarks.report import machine, show_table, spread, write_json

OUTSTANDING = 32
_GRPC_METHOD = "/benchmark/add"


class Party(Protocol):
    """A way to call `add` in the other process."""

    def call(self) -> object:
        """Call and wait."""

    def start(self) -> Callable[[], object]:
        """Begin a call; returns what waits for its result."""


class Adder:
    """The server."""

    def add(self, a: int, b: int) -> int:
        return a + b


class LpPipe:
    def __init__(self, client: lp.CourierClient) -> None:
        self._client = client

    def call(self) -> object:
        return self._client.add(1, 2)

    def start(self) -> Callable[[], object]:
        return self._client.futures.add(1, 2).result


class Floor:
    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection

    def call(self) -> object:
        return self.start()()

    def start(self) -> Callable[[], object]:
        self._connection.send(("add", (1, 2)))
        return self._connection.recv  # replies come in order


class Grpc:
    def __init__(self, channel: Any) -> None:
        self._add = channel.unary_unary(_GRPC_METHOD, pickle.dumps, pickle.loads)

    def call(self) -> object:
        return self._add((1, 2))

    def start(self) -> Callable[[], object]:
        result: Callable[[], object] = self._add.future((1, 2)).result
        return result


@contextlib.contextmanager
def lp_pipe_party(mode: str, threads: int, folder: str) -> Iterator[Party]:
    """threads: the server's thread_pool_size."""
    program = lp.Program("bench_calls")
    node = lp.CourierNode(Adder, courier_kwargs={"thread_pool_size": threads})
    handle = program.add_node(node, label="adder")
    with lp.launch(program, mode, run_dir=f"{folder}/{mode}{threads}") as run:
        yield LpPipe(run.client(handle))


@contextlib.contextmanager
def floor_party(folder: str) -> Iterator[Party]:
    with child_server(_serve_floor, f"{folder}/floor") as address, Client(address, "AF_UNIX") as connection:
        yield Floor(connection)


@contextlib.contextmanager
def grpc_party(folder: str) -> Iterator[Party]:
    import grpc

    with child_server(_serve_grpc, f"unix:{folder}/grpc") as address, grpc.insecure_channel(address) as channel:
        yield Grpc(channel)


@contextlib.contextmanager
def child_server(serve: Callable[..., None], address: str) -> Iterator[str]:
    """Run `serve(address, is_ready)` in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    is_ready = spawn.Event()
    process = spawn.Process(target=serve, args=(address, is_ready), daemon=True)
    process.start()
    try:
        if not is_ready.wait(30):
            raise SystemExit(f"{serve.__name__} did not come up within 30 s")
        yield address
    finally:
        process.kill()
        process.join()


def _serve_floor(address: str, is_ready: Any) -> None:
    adder = Adder()
    with Listener(address, "AF_UNIX") as listener:
        is_ready.set()
        with listener.accept() as connection, contextlib.suppress(EOFError):
            while True:
                method, args = connection.recv()
                connection.send(getattr(adder, method)(*args))


def _serve_grpc(address: str, is_ready: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    adder = Adder()
    handler = grpc.unary_unary_rpc_method_handler(
        lambda args, _: adder.add(*args), request_deserializer=pickle.loads, response_serializer=pickle.dumps
    )
    server = grpc.server(ThreadPoolExecutor(16))
    server.add_registered_method_handlers("benchmark", {"add": handler})
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("benchmark", {"add": handler}),))
    server.add_insecure_port(address)
    server.start()
    is_ready.set()
    server.wait_for_termination()


def has_grpc() -> bool:
    with contextlib.suppress(ImportError):
        import grpc

        return hasattr(grpc, "server")
    return False


def latency_us(party: Party, calls: int) -> float:
    """Median of one call after another."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        party.call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def calls_per_s(party: Party, calls: int) -> float:
    """Measure calls with OUTSTANDING of them in flight; each time wait for the oldest."""
    start = time.perf_counter()
    waiting = deque(party.start() for _ in range(OUTSTANDING))
    for _ in range(calls - OUTSTANDING):
        waiting.popleft()()
        waiting.append(party.start())
    for wait in waiting:
        wait()
    return calls / (time.perf_counter() - start)


def all_parties() -> dict[str, Callable[[str], contextlib.AbstractContextManager[Party]]]:
    parties: dict[str, Callable[[str], contextlib.AbstractContextManager[Party]]] = {
        "socket and pickle": floor_party,
        "lp_pipe process, inline": functools.partial(lp_pipe_party, "process", 0),
        "lp_pipe process": functools.partial(lp_pipe_party, "process", 16),
        "lp_pipe thread, inline": functools.partial(lp_pipe_party, "thread", 0),
        "lp_pipe thread": functools.partial(lp_pipe_party, "thread", 16),
    }
    if has_grpc():
        parties["grpc"] = grpc_party
    return parties


def measure(calls: int, repeats: int) -> dict[str, dict[str, Any]]:
    latencies: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lp-bench-"))
        parties = {name: stack.enter_context(open_party(folder)) for name, open_party in all_parties().items()}
        for party in parties.values():
            latency_us(party, 100)
        for _ in range(repeats):
            for name, party in parties.items():
                latencies.setdefault(name, []).append(latency_us(party, calls))
                rates.setdefault(name, []).append(calls_per_s(party, 2 * calls))
    return {name: {"latency_p50_us": spread(latencies[name]), "calls_per_s": spread(rates[name])} for name in latencies}


def show(parties: dict[str, dict[str, Any]]) -> None:
    floor = parties["socket and pickle"]
    rows = []
    for name, party in parties.items():
        latency, rate = party["latency_p50_us"], party["calls_per_s"]
        rows.append(
            [
                name,
                f"{latency['median']:.0f} ({latency['min']:.0f}–{latency['max']:.0f})",
                f"{latency['min'] / floor['latency_p50_us']['min']:.1f}x",
                f"{rate['median']:,.0f} ({rate['min']:,.0f}–{rate['max']:,.0f})",
                f"{rate['max'] / floor['calls_per_s']['max']:.2f}x",
            ]
        )
    columns = ["", "latency p50, µs", "to the socket (best)", f"calls/s, {OUTSTANDING} outstanding", "(best)"]
    show_table("add(1, 2); median (min–max) of the rounds", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="rounds")
    parser.add_argument("--quick", action="store_true", help="few calls: only to see that it works")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file instead of stdout")
    options = parser.parse_args()
    calls, repeats = (50, 2) if options.quick else (1000, options.repeats)
    parties = measure(calls, repeats)
    show(parties)
    settings = {"calls": calls, "repeats": repeats, "outstanding": OUTSTANDING}
    write_json({"benchmark": "calls", "machine": machine(), "settings": settings, "parties": parties}, options.json)


if __name__ == "__main__":
    main()
