"""A hundred clients call one server for a minute: errors, latencies at half load, the server's memory.

    python -m benchmarks.soak [--seconds 60] [--clients 100] [--json FILE]

First all clients call as fast as they can, for a few seconds: that is full load. Then each calls at its own pace, so
that all together make half of it; a latency counts from the moment at which the call was due.
"""

import argparse
import pathlib
import random
import tempfile
import threading
import time
from collections.abc import Sequence

import lp_pipe as lp
from benchmarks.report import machine, show_table, write_json

PROCESSES = 4  # that share the clients
FULL_LOAD_S = 4.0


class Server:
    def add(self, a: int, b: int) -> int:
        return a + b

    def memory_bytes(self) -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096


class Callers:
    """Some of the clients, each with its own thread and connection."""

    def __init__(self, server: lp.CourierClient, count: int) -> None:
        self._address = server.address
        self._count = count

    def call(self, seconds: float, calls_per_s: float | None) -> tuple[list[float], list[str]]:
        """Latencies in seconds, and errors; calls_per_s of each client (None: as fast as it can)."""
        latencies: list[list[float]] = [[] for _ in range(self._count)]
        errors: list[str] = []
        end = time.monotonic() + seconds
        threads = [
            threading.Thread(target=self._call_until, args=(end, calls_per_s, kept, errors)) for kept in latencies
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [latency for kept in latencies for latency in kept], errors

    def _call_until(self, end: float, calls_per_s: float | None, latencies: list[float], errors: list[str]) -> None:
        client = lp.CourierClient(self._address)
        due = time.monotonic() + (random.random() / calls_per_s if calls_per_s else 0.0)
        while due < end:
            time.sleep(max(0.0, due - time.monotonic()))
            try:
                if client.add(1, 2) != 3:
                    errors.append("a wrong result")
            except lp.LpPipeError as error:
                errors.append(str(error))
            now = time.monotonic()
            latencies.append(now - due)
            due = due + random.expovariate(calls_per_s) if calls_per_s else now


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def run_all(callers: Sequence[lp.CourierClient], seconds: float, rate: float | None) -> tuple[list[float], list[str]]:
    replies = [caller.futures.call(seconds, rate) for caller in callers]
    results = [reply.result() for reply in replies]
    return [value for latencies, _ in results for value in latencies], [
        text for _, errors in results for text in errors
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file instead of stdout")
    options = parser.parse_args()
    program = lp.Program("bench_soak")
    server = program.add_node(lp.CourierNode(Server), label="server")
    with program.group("callers"):
        each = max(1, options.clients // PROCESSES)
        nodes = [program.add_node(lp.CourierNode(Callers, server, each)) for _ in range(PROCESSES)]
    with (
        tempfile.TemporaryDirectory(prefix="lp-bench-") as folder,
        lp.launch(program, "process", run_dir=folder) as run,
    ):
        callers = [run.client(node) for node in nodes]
        full, errors = run_all(callers, FULL_LOAD_S, None)
        full_rate = len(full) / FULL_LOAD_S
        before = run.client(server).memory_bytes()
        half, more = run_all(callers, options.seconds, full_rate / 2 / (each * PROCESSES))
        after = run.client(server).memory_bytes()
    figures = {
        "full_load_calls_per_s": full_rate,
        "half_load_calls_per_s": len(half) / options.seconds,
        "p50_us": percentile(half, 0.5) * 1e6,
        "p99_us": percentile(half, 0.99) * 1e6,
        "errors": len(errors) + len(more),
        "server_memory_mib": [before / 2**20, after / 2**20],
    }
    show_table(
        f"{each * PROCESSES} clients, one server", ["", ""], [[name, str(value)] for name, value in figures.items()]
    )
    write_json({"benchmark": "soak", "machine": machine(), "seconds": options.seconds, **figures}, options.json)
    if errors or more:
        raise SystemExit(f"{len(errors) + len(more)} calls failed; the first one: {(errors + more)[0]}")


if __name__ == "__main__":
    main()
