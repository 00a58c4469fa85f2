"""Measure the cost of a 64 MiB array as argument or result of a call on one host, beside memcpy and a unary grpc call.

    python -m benchmarks.arrays [--repeats 15] [--mib 64] [--json FILE]

Steady state: memory that was used before is used again, by all parties. They take turns, call by call.
"""

import argparse
import contextlib
import pathlib
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lp_pipe as lp
from benchmarks.calls import child_server
from benchmarks.report import machine, show_table, spread, write_json

Array = NDArray[np.uint8]
_METHOD = "/benchmark/take"
_WARM_UP = 3


class Owner:
    """Takes arrays, and gives one."""

    def __init__(self, size: int) -> None:
        self._array = np.ones(size, np.uint8)

    def take(self, array: Array) -> int:
        return int(array[-1])

    def give(self) -> Array:
        return self._array


@contextlib.contextmanager
def lp_pipe_party(size: int, folder: str) -> Iterator[lp.CourierClient]:
    program = lp.Program("bench_arrays")
    owner = program.add_node(lp.CourierNode(Owner, size), label="owner")
    with lp.launch(program, "process", run_dir=f"{folder}/run") as run:
        yield run.client(owner)


@contextlib.contextmanager
def grpc_party(folder: str) -> Iterator[Callable[[Any], Any]]:
    import grpc

    options = [("grpc.max_send_message_length", -1)]
    with (
        child_server(_serve_grpc, f"unix:{folder}/grpc") as address,
        grpc.insecure_channel(address, options=options) as channel,
    ):
        yield channel.unary_unary(_METHOD, pickle.dumps, pickle.loads)


def _serve_grpc(address: str, is_ready: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    handler = grpc.unary_unary_rpc_method_handler(
        lambda array, _: int(array[-1]), request_deserializer=pickle.loads, response_serializer=pickle.dumps
    )
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.max_receive_message_length", -1)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("benchmark", {"take": handler}),))
    server.add_insecure_port(address)
    server.start()
    is_ready.set()
    server.wait_for_termination()


def measure(size: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of every call."""
    array, copy = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lp-bench-"))
        client = stack.enter_context(lp_pipe_party(size, folder))
        grpc_take = stack.enter_context(grpc_party(folder))
        parties: dict[str, Callable[[], object]] = {
            "memcpy": lambda: np.copyto(copy, array),
            "lp_pipe, argument": lambda: client.take(array),
            "lp_pipe, result": lambda: client.give(),
            "grpc unary, argument": lambda: grpc_take(array),
        }
        seconds: dict[str, list[float]] = {name: [] for name in parties}
        for turn in range(_WARM_UP + repeats):
            for name, party in parties.items():
                start = time.perf_counter()
                party()
                if turn >= _WARM_UP:
                    seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--mib", type=int, default=64, help="size of the array")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file instead of stdout")
    options = parser.parse_args()
    figures = {name: spread(values) for name, values in measure(options.mib << 20, options.repeats).items()}
    floor = figures["memcpy"]
    rows = [
        [
            name,
            f"{times['median'] * 1e3:.1f} ({times['min'] * 1e3:.1f}–{times['max'] * 1e3:.1f})",
            f"{times['median'] / floor['median']:.1f}x",
            f"{times['min'] / floor['min']:.1f}x",
        ]
        for name, times in figures.items()
    ]
    show_table(f"{options.mib} MiB; median (min–max)", ["", "ms", "to memcpy", "(best)"], rows)
    write_json({"benchmark": "arrays", "machine": machine(), "mib": options.mib, "seconds": figures}, options.json)


if __name__ == "__main__":
    main()
