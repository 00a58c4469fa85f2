"""Measure the simulation of a large schedule: 512 stages and 2,048 micro-batches of 1F1B, two million actions.

    python -m benchmarks.simulator [--schedules 1f1b,zb_h1] [--stages 512] [--microbatches 2048] [--quick] [--json FILE]

Each schedule is made and simulated in a process of its own, so that the peak of its resident memory is its own; the
interpreter and lp_pipe are part of it. Goal: to simulate takes less than a minute and 1 GiB. On a busy machine the CPU
seconds say more than those of the clock.
"""

import argparse
import json
import pathlib
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import lp_pipe.pipeline as pp
from benchmarks.report import machine, show_table, spread, write_json

SCHEDULES = ("1f1b", "zb_h1")
_PARTS = ("make_s", "simulate_s", "simulate_cpu_s")
_EQUAL = pp.Costs(forward=1, backward_input=1, backward_weight=1)
_KIB = 1024 if sys.platform != "darwin" else 1  # what ru_maxrss counts in


def measured(name: str, stages: int, microbatches: int) -> dict[str, Any]:
    """Measure in this process: seconds of each part, and the peak of memory after making and after simulating."""
    made_s, _, schedule = _timed(lambda: pp.make_schedule(name, stages, microbatches))
    made_bytes = _peak_bytes()
    simulated_s, simulated_cpu_s, timeline = _timed(lambda: pp.simulate(schedule, _EQUAL))
    return {
        "actions": sum(map(len, timeline.spans)),
        "makespan": timeline.makespan,
        "make_s": made_s,
        "simulate_s": simulated_s,
        "simulate_cpu_s": simulated_cpu_s,
        "made_bytes": made_bytes,
        "simulated_bytes": _peak_bytes(),
    }


def _timed(act: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds by the clock and of the CPU, and the result."""
    began, began_cpu = time.perf_counter(), time.process_time()
    result = act()
    return time.perf_counter() - began, time.process_time() - began_cpu, result


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB


def in_own_process(name: str, stages: int, microbatches: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.simulator", "--measure", name]
    command += [f"--stages={stages}", f"--microbatches={microbatches}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {**runs[0], **{part: spread(run[part] for run in runs) for part in _PARTS}}


def show(parties: dict[str, dict[str, Any]], stages: int, microbatches: int) -> None:
    rows = [
        [
            name,
            f"{party['actions']:,}",
            *(f"{party[part]['median']:.1f}" for part in _PARTS),
            *(f"{party[part] / 2**20:.0f}" for part in ("made_bytes", "simulated_bytes")),
        ]
        for name, party in parties.items()
    ]
    columns = ["", "actions", "make s", "simulate s", "its CPU s", "peak MiB, made", "simulated"]
    show_table(f"{stages} stages, {microbatches} micro-batches; medians", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="names, with commas: %(default)s")
    parser.add_argument("--stages", type=int, default=512)
    parser.add_argument("--microbatches", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=1, help="processes for each schedule")
    parser.add_argument("--quick", action="store_true", help="a small schedule, twice: only to see that it works")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file instead of stdout")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    stages, microbatches, repeats = options.stages, options.microbatches, options.repeats
    if options.measure:
        print(json.dumps(measured(options.measure, stages, microbatches)))
        return
    if options.quick:
        stages, microbatches, repeats = 8, 32, 2
    parties = {
        name: summary([in_own_process(name, stages, microbatches) for _ in range(repeats)])
        for name in options.schedules.split(",")
    }
    show(parties, stages, microbatches)
    settings = {"stages": stages, "microbatches": microbatches, "repeats": repeats}
    write_json({"benchmark": "simulator", "machine": machine(), "settings": settings, "parties": parties}, options.json)


if __name__ == "__main__":
    main()
