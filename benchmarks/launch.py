"""Measure the start of a program, beside the same number of bare interpreters or threads.

    python -m benchmarks.launch [--repeats 3] [--quick] [--json FILE]

Every measurement runs in a fresh interpreter, and the parties take turns. "running" means: each node has answered a
call. The launcher of the torch nodes has imported torch, as a training script has; the time counts from launch().
"""

import argparse
import contextlib
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import lp_pipe as lp
from benchmarks.report import machine, show_table, spread, write_json

NODES = 8
MANY_THREADS = 1000
MANY_PROCESSES = 200


class Worker:
    """A node that does nothing; with torch it needs what training nodes need."""

    def __init__(self, module: str) -> None:
        __import__(module)

    def ping(self) -> int:
        return 0


def nodes_until_running(mode: str, count: int, module: str, folder: str) -> float:
    """Seconds from launch() to the last node's first reply."""
    program = lp.Program("bench_launch")
    with program.group("workers"):
        handles = [program.add_node(lp.CourierNode(Worker, module)) for _ in range(count)]
    start = time.perf_counter()
    with lp.launch(program, mode, run_dir=f"{folder}/run") as run:
        for reply in [run.client(handle).futures.ping() for handle in handles]:
            reply.result()
        return time.perf_counter() - start


def start_and_stop(mode: str, count: int, folder: str) -> float:
    """Seconds from launch() to the end of the last node."""
    program = lp.Program("bench_launch")
    with program.group("waiting"):
        for _ in range(count):
            program.add_node(lp.PyNode(lp.wait_for_stop))
    start = time.perf_counter()
    run = lp.launch(program, mode, run_dir=f"{folder}/run")
    while any(entry["state"] != "running" for entry in run.status()["waiting"]):
        time.sleep(0.01)
    run.stop()
    run.wait()
    return time.perf_counter() - start


def lp_pipe_torch(folder: str) -> float:
    import torch.nn  # noqa: F401

    return nodes_until_running("process", NODES, "torch", folder)


def lp_pipe_plain(folder: str) -> float:
    return nodes_until_running("process", NODES, "cloudpickle", folder)


def lp_pipe_two(folder: str) -> float:
    return nodes_until_running("process", 2, "cloudpickle", folder)


def lp_pipe_threads(folder: str) -> float:
    return start_and_stop("thread", MANY_THREADS, folder)


def lp_pipe_processes(folder: str) -> float:
    return start_and_stop("process", MANY_PROCESSES, folder)


def bare_torch(folder: str) -> float:
    return bare_interpreters("import torch", folder)


def bare_grpc(folder: str) -> float:
    return bare_interpreters("import grpc, cloudpickle", folder)


def bare_interpreters(code: str, folder: str) -> float:
    """Seconds until NODES interpreters, started at once, have run `code`."""
    start = time.perf_counter()
    processes = [subprocess.Popen([sys.executable, "-c", code], cwd=folder) for _ in range(NODES)]
    statuses = [process.wait() for process in processes]
    if any(statuses):
        raise SystemExit(f"{code!r} failed: {statuses}")
    return time.perf_counter() - start


def bare_threads(folder: str) -> float:
    """Seconds to start, wake and join MANY_THREADS threads."""
    stop = threading.Event()
    start = time.perf_counter()
    threads = [threading.Thread(target=stop.wait) for _ in range(MANY_THREADS)]
    for thread in threads:
        thread.start()
    stop.set()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


MEASUREMENTS: dict[str, Callable[[str], float]] = {
    f"{NODES} x python -c 'import torch'": bare_torch,
    f"lp_pipe, {NODES} process nodes with torch running": lp_pipe_torch,
    f"{NODES} x python -c 'import grpc, cloudpickle'": bare_grpc,
    f"lp_pipe, {NODES} process nodes running": lp_pipe_plain,
    "lp_pipe, 2 process nodes: first replies": lp_pipe_two,
    f"{MANY_THREADS} threads started and joined": bare_threads,
    f"lp_pipe, {MANY_THREADS} thread nodes started and stopped": lp_pipe_threads,
    f"lp_pipe, {MANY_PROCESSES} process nodes started and stopped": lp_pipe_processes,
}
# Beside what a measurement is seen, and the most that it shall take of it.
GOALS = {
    lp_pipe_torch: (bare_torch, 0.25),
    lp_pipe_plain: (bare_grpc, 1.5),
    lp_pipe_threads: (bare_threads, 10.0),
}


def measure_apart(name: str) -> float:
    """Run one measurement in an interpreter of its own."""
    with tempfile.TemporaryDirectory(prefix="lp-bench-") as folder:
        command = [sys.executable, "-m", "benchmarks.launch", "--measure", name, "--folder", folder]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.split()[-1])


def show(figures: dict[str, dict[str, float]]) -> None:
    rows = []
    names = {function: name for name, function in MEASUREMENTS.items()}
    for name, seconds in figures.items():
        goal = GOALS.get(MEASUREMENTS[name])
        beside = figures.get(names[goal[0]]) if goal else None
        ratio = f"{seconds['median'] / beside['median']:.2f}x (goal {goal[1]}x)" if goal and beside else ""
        rows.append([name, f"{seconds['median']:.2f} ({seconds['min']:.2f}–{seconds['max']:.2f})", ratio])
    show_table("starting; median (min–max) of the rounds", ["", "seconds", "to the bare ones"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--quick", action="store_true", help="one round of the small ones: only to see that it works")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file instead of stdout")
    parser.add_argument("--measure", choices=MEASUREMENTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        with contextlib.redirect_stdout(sys.stderr):
            seconds = MEASUREMENTS[options.measure](options.folder)
        print(seconds)
        return
    names = [
        name for name, function in MEASUREMENTS.items() if not options.quick or function in (lp_pipe_two, bare_grpc)
    ]
    rounds = [{name: measure_apart(name) for name in names} for _ in range(1 if options.quick else options.repeats)]
    figures = {name: spread(figure[name] for figure in rounds) for name in names}
    show(figures)
    write_json({"benchmark": "launch", "machine": machine(), "seconds": figures}, options.json)


if __name__ == "__main__":
    main()
