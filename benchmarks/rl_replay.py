"""Measure replay between processes beside Ray and Reverb, the memory of a table, and its checkpoints.

    python -m benchmarks.rl_replay [--repeats 5] [--seconds 2] [--quick] [--json FILE]

One process inserts transitions, 32 a call, and another samples 256 a call, each waiting for every answer. "in": only
the first one runs; "in + out": both. Ray's party is an actor with our own table, so that the figures differ by what is
between the processes. Reverb has its own table; where dm-reverb does not install, that is said. The parties take turns.
"""

import argparse
import logging
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time
from contextlib import redirect_stdout
from importlib.util import find_spec
from typing import Any

import numpy as np

import lp_pipe as lp
import lp_pipe.rl as rl
from benchmarks.report import machine, show_table, spread, write_json
from lp_pipe.checkpoint import Checkpoints
from lp_pipe.rl.replay.table import TableState

INSERT, SAMPLE, CAPACITY = 32, 256, 100_000
KINDS = ("in", "in + out, in", "in + out, out")


def transitions(count: int) -> rl.Transition:
    """Return transitions of CartPole's shape."""
    observation = np.zeros((count, 4), np.float32)
    number = np.zeros(count, np.float32)
    return rl.Transition(observation, np.zeros(count, np.int64), number, number, observation, None)


def rate_of(call: Any, count: int, seconds: float) -> float:
    """Return items a second, of calls one after the other."""
    for _ in range(10):
        call()
    start, calls = time.perf_counter(), 0
    while (now := time.perf_counter()) < start + seconds:
        call()
        calls += 1
    return calls * count / (now - start)


class Side:
    """A process that inserts or samples, when it is told to."""

    def __init__(self, replay: Any) -> None:
        self._replay = replay

    def insert(self, seconds: float) -> float:
        items = transitions(INSERT)
        return rate_of(lambda: self._replay.insert("replay", items), INSERT, seconds)

    def sample(self, seconds: float) -> float:
        return rate_of(lambda: self._replay.sample("replay", SAMPLE), SAMPLE, seconds)


def lp_pipe_party(seconds: float) -> list[float]:
    """Return the three rates of a replay node."""
    program = lp.Program("replay")
    table = rl.Table(CAPACITY, rl.Prioritized(), rate_limiter=rl.MinSize(1))
    replay = program.add_node(rl.ReplayNode({"replay": table}), label="replay")
    handles = [program.add_node(lp.CourierNode(Side, replay), label=label) for label in ("inserter", "sampler")]
    with redirect_stdout(sys.stderr), lp.launch(program, "process") as run:
        inserter, sampler = (run.client(handle) for handle in handles)
        alone = inserter.insert(seconds)
        both = inserter.futures.insert(seconds), sampler.futures.sample(seconds)
        rates = [alone, *(one.result() for one in both)]
        run.stop()
    return rates


class RayTable:
    """Our table as a Ray actor."""

    def __init__(self) -> None:
        table = rl.Table(CAPACITY, rl.Prioritized(), rate_limiter=rl.MinSize(1))
        self._state = TableState(table, np.random.default_rng(0))

    def insert(self, items: Any) -> Any:
        return self._state.insert(items)

    def sample(self, count: int) -> Any:
        return self._state.sample(count)


class RayReplay:
    """The calls of a replay client, to a Ray actor."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def insert(self, _: str, items: Any) -> Any:
        import ray

        return ray.get(self._table.insert.remote(items))

    def sample(self, _: str, count: int) -> Any:
        import ray

        return ray.get(self._table.sample.remote(count))


def ray_party(seconds: float) -> list[float]:
    """Return the three rates of a Ray actor."""
    import ray

    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        table = ray.remote(RayTable).remote()
        sides = [ray.remote(Side).remote(RayReplay(table)) for _ in range(2)]
        alone = ray.get(sides[0].insert.remote(seconds))
        return [alone, *ray.get([sides[0].insert.remote(seconds), sides[1].sample.remote(seconds)])]
    finally:
        ray.shutdown()


def reverb_side(port: int, is_insert: bool, seconds: float, results: Any) -> None:
    import reverb

    client = reverb.Client(f"localhost:{port}")
    if is_insert:
        rows = [rl.tree.row(transitions(INSERT), index)[:5] for index in range(INSERT)]

        def call() -> None:
            with client.trajectory_writer(num_keep_alive_refs=1) as writer:
                for row in rows:
                    writer.append(row)
                    writer.create_item("replay", 1.0, [column[-1:] for column in writer.history])
                writer.flush()

        results.put(rate_of(call, INSERT, seconds))
    else:
        results.put(rate_of(lambda: list(client.sample("replay", SAMPLE)), SAMPLE, seconds))


def reverb_party(seconds: float) -> list[float]:
    """Return the three rates of a Reverb server."""
    import reverb

    table = reverb.Table(
        "replay", reverb.selectors.Prioritized(0.6), reverb.selectors.Fifo(), CAPACITY, reverb.rate_limiters.MinSize(1)
    )
    server = reverb.Server([table])
    context = multiprocessing.get_context("spawn")
    rates = []
    for sides in ([True], [True, False]):
        queues = [context.Queue() for _ in sides]
        processes = [
            context.Process(target=reverb_side, args=(server.port, side, seconds, queue))
            for side, queue in zip(sides, queues, strict=True)
        ]
        for process in processes:
            process.start()
        rates += [queue.get(timeout=120.0) for queue in queues]
        for process in processes:
            process.join()
    server.stop()
    return rates


def grown_by(capacity: int, inserts: int, results: Any) -> None:
    """Report the growth of the process from a full table on, in percent."""
    state = TableState(rl.Table(capacity, rl.Prioritized()), np.random.default_rng(0))
    items = transitions(100)
    before = 0
    for number in range(0, inserts, 100):
        if number == 2 * capacity:
            before = resident_bytes()
        state.update_priorities(state.insert(items), np.full(100, float(number % 7)))
    results.put(100.0 * (resident_bytes() - before) / before)


def resident_bytes() -> int:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def growth(capacity: int, inserts: int) -> float:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=grown_by, args=(capacity, inserts, results))
    process.start()
    percent: float = results.get(timeout=240.0)
    process.join()
    return percent


def checkpoint_costs(count: int) -> dict[str, float]:
    """Return the ms that a checkpoint of items of 420 bytes stops its caller, and the % that one with 1 % new writes.

    write_s: the seconds of the first one, which writes all; second_write_s: of the second one.
    """
    program = lp.Program("replay checkpoint")
    replay = program.add_node(rl.ReplayNode({"replay": rl.Table(count, rl.Prioritized())}), label="replay")
    items = {"observation": np.zeros((count // 100, 52)), "reward": np.zeros(count // 100, np.float32)}
    with (
        tempfile.TemporaryDirectory() as folder,
        redirect_stdout(sys.stderr),
        lp.launch(program, "process", run_dir=pathlib.Path(folder) / "run") as run,
    ):
        client = run.client(replay)
        checkpoints = Checkpoints({"replay": rl.ReplayPart(client)}, folder)
        stops, writes = [], []
        for number in (1, 2):
            for _ in range(100 if number == 1 else 1):
                client.insert("replay", items)
            sample = client.sample("replay", 4096)
            client.update_priorities("replay", sample.keys, np.ones(4096))
            start = time.perf_counter()
            checkpoints.save(number, wait=False)
            stops.append(time.perf_counter() - start)
            checkpoints.wait_until_written()
            writes.append(time.perf_counter() - start)
        second = pathlib.Path(folder) / "step-00000002"
        written = [file.stat() for file in second.rglob("*") if file.is_file()]
        changed = sum(one.st_size for one in written if one.st_nlink == 1) / sum(one.st_size for one in written)
        run.stop()
    return {
        "stop_ms": 1000.0 * max(stops),
        "written_percent": 100.0 * changed,
        "write_s": writes[0],
        "second_write_s": writes[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--quick", action="store_true", help="twice, for a tenth of the time")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    repeats, seconds = (2, 0.2) if arguments.quick else (arguments.repeats, arguments.seconds)
    inserts = 300_000 if arguments.quick else 1_000_000
    parties = {"lp_pipe": lp_pipe_party}
    if find_spec("ray"):
        parties["Ray"] = ray_party
    if find_spec("reverb"):
        parties["Reverb"] = reverb_party
    missing = [name for name in ("Ray", "Reverb") if name not in parties]
    runs: dict[str, list[list[float]]] = {name: [] for name in parties}
    for _ in range(repeats):
        for name, party in parties.items():
            runs[name].append(party(seconds))
    rates = {
        name: {kind: spread(values) for kind, values in zip(KINDS, zip(*some, strict=True), strict=True)}
        for name, some in runs.items()
    }
    rows = [[name, *(f"{rates[name][kind]['median']:,.0f}" for kind in KINDS)] for name in parties]
    for name in list(parties)[1:]:
        times = [rates["lp_pipe"][kind]["median"] / rates[name][kind]["median"] for kind in KINDS]
        rows.append([f"lp_pipe / {name}", *(f"{one:.1f} ×" for one in times)])
    title = "Transitions a second between processes" + "".join(f"; {name} is not installed here" for name in missing)
    show_table(title, ["party", *KINDS], rows)
    grown = {capacity: growth(capacity, inserts) for capacity in (10_000, 100_000)}
    title = f"Growth of a table's process, from twice its capacity to {inserts:,} inserts"
    show_table(title, ["capacity", "%"], [[f"{capacity:,}", f"{percent:.2f}"] for capacity, percent in grown.items()])
    costs = checkpoint_costs(10_000 if arguments.quick else 100_000)
    show_table(
        "A checkpoint of the table, and one with 1 % new items", list(costs), [[f"{one:.2f}" for one in costs.values()]]
    )
    figures = {"rates": rates, "missing": missing, "growth_percent": grown, "checkpoint": costs}
    write_json({"benchmark": "rl_replay", "machine": machine(), **figures}, arguments.json)


if __name__ == "__main__":
    main()
