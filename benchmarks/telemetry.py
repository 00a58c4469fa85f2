"""Measure what it costs a program to be watched: sinks that hang, traces, the pipeline's own metrics.

    python -m benchmarks.telemetry [--rounds 9] [--quick] [--json FILE]

What is compared takes turns in pairs, so that other load on the machine hits both alike.

1. sink: the p50 of `log_metrics` in thread mode, where the caller itself writes the file and fills the queues: without
   a sink, and with one that hangs. What the latter leaves out is counted.
2. calls: the p50 of a call between two processes: of a run that was never traced, of one while it is traced, and of
   the same one between its traces.
3. trace: bytes an event in the trace of a pipeline; the clocks of two processes: how far a handler reaches out of its
   call, at most.
4. utilization: what the pipeline's log of utilization and bubble adds to a step: CPU seconds of the node's thread.
"""

import argparse
import json
import logging
import pathlib
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import lp_pipe as lp
import lp_pipe.pipeline as pp
from benchmarks.report import machine, show_table, spread, write_json
from lp_pipe.pipeline.conductor.utilization import UtilizationLog
from lp_pipe.pipeline.protocol import Report
from lp_pipe.telemetry.metrics import MetricsLog

_PAIRS = 10  # of batches of calls in a round


class Server:
    def add(self, a: int, b: int) -> int:
        return a + b


class User:
    """Measures its calls to the server, when it is asked to."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def p50_us(self, calls: int) -> float:
        return _p50_us(lambda: self._server.add(1, 2), calls)


class StageLog:
    """Measures the log of utilization, which needs a node."""

    def note_us(self, steps: int) -> tuple[float, float]:
        """Return the mean microseconds of a step's note, and of a record."""
        log = UtilizationLog(SimpleNamespace(predicted_seconds=(), placement=(), replicas=()))  # type: ignore[arg-type]
        log._has_predicted = True
        reports = [Report(busy_s=1e-3) for _ in range(4)]
        began = time.thread_time()
        for step in range(steps):
            log.note(step, reports, 2e-3)
        noted = time.thread_time() - began
        took = []
        for step in range(50):
            log.note(step, reports, 2e-3)
            began = time.thread_time()
            log.close()
            took.append(time.thread_time() - began)
        return 1e6 * noted / steps, 1e6 * statistics.mean(took)


def _p50_us(function: Any, count: int) -> float:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times)


def measure_sink(folder: pathlib.Path, rounds: int, records: int) -> dict[str, Any]:
    """Return the p50 of a record in both logs; the sink's queue is full for most of the rounds."""
    release = threading.Event()
    without, hanging = MetricsLog(folder / "a.jsonl"), MetricsLog(folder / "b.jsonl", [lambda record: release.wait()])
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lp_pipe").addHandler(handler)
    plain, hung = [], []
    for turn in range(rounds):
        for log, found in [(without, plain), (hanging, hung)][:: 1 if turn % 2 else -1]:
            found.append(_p50_us(lambda log=log, turn=turn: log.record("node/0", {"loss": 0.5}, turn), records))
    without.close()
    threading.Timer(6.0, release.set).start()  # after the 5 s that a sink has at the end
    hanging.close()
    logging.getLogger("lp_pipe").removeHandler(handler)
    lines = (folder / "b.jsonl").read_text().count("\n")
    return {
        "without_us": spread(plain),
        "hanging_us": spread(hung),
        "ratio": statistics.median(b / a for a, b in zip(plain, hung, strict=True)),
        "records": rounds * records,
        "in_file": lines,
        "said": said,
    }


def measure_calls(folder: pathlib.Path, rounds: int, calls: int) -> dict[str, Any]:
    """Return the p50 of calls in two runs, of which one is traced in turn, and the last trace's clocks."""
    found: dict[str, list[float]] = defaultdict(list)
    with _pair(folder / "never") as (_, never), _pair(folder / "traced") as (run, traced):
        for user in (never, traced):
            user.p50_us(calls)
        for _ in range(rounds):
            for name in ("off", "on"):
                if name == "on":
                    run._tracer.begin(folder / "calls.json")
                for turn in range(_PAIRS):
                    for user, key in [(never, f"never, {name}"), (traced, name)][:: 1 if turn % 2 else -1]:
                        found[key].append(user.p50_us(calls // _PAIRS))
            run._tracer.end()
    pairs = {name: zip(found[name], found[f"never, {name}"], strict=True) for name in ("off", "on")}
    return {
        **{name: spread(values) for name, values in found.items()},
        "off_ratio": statistics.median(one / never_us for one, never_us in pairs["off"]),
        "on_adds_us": statistics.median(one - never_us for one, never_us in pairs["on"]),
        "clock_us": clock_us(folder / "calls.json"),
    }


def _pair(folder: pathlib.Path) -> Any:
    program = lp.Program("bench_telemetry")
    server = program.add_node(lp.CourierNode(Server), label="server")
    user = program.add_node(lp.CourierNode(User, server), label="user")
    return _Launched(program, user, folder)


class _Launched:
    def __init__(self, program: lp.Program, user: Any, folder: pathlib.Path) -> None:
        self._run = lp.launch(program, "process", run_dir=folder)
        self._user = user

    def __enter__(self) -> tuple[Any, Any]:
        return self._run, self._run.client(self._user)

    def __exit__(self, *_: object) -> None:
        self._run.stop()
        self._run.wait()


def clock_us(path: pathlib.Path) -> float:
    """Return the difference of two processes' clocks: the largest of all calls with their handlers."""
    spans = [one for one in json.loads(path.read_text())["traceEvents"] if one["ph"] == "X"]
    calls = sorted((one for one in spans if one["name"] == "server/0.add"), key=lambda one: one["ts"])
    handlers = sorted((one for one in spans if one["name"] == "add"), key=lambda one: one["ts"])
    first = handlers[0]["ts"]
    calls = [one for one in calls if one["ts"] + one["dur"] >= first]  # of one that had begun before
    offs = []
    for call, handler in zip(calls, handlers, strict=False):
        there = handler["ts"] - call["ts"]
        back = call["ts"] + call["dur"] - handler["ts"] - handler["dur"]
        offs.append(max(0.0, -there, -back))  # a handler outside of its call
    return max(offs)


def train(pipeline: Any, steps: int) -> None:
    import torch

    x = torch.randn(32, 16)
    for _ in range(steps):
        pipeline.step((x, x))
    lp.stop()


def measure_trace(folder: pathlib.Path, steps: int) -> dict[str, Any]:
    """Return the size of a pipeline's trace."""
    from torch import nn, optim

    program = lp.Program("bench_trace")
    model = pp.Model(
        [nn.Linear(16, 16), nn.Linear(16, 16)], nn.functional.mse_loss, lambda named: optim.SGD(named, 0.1)
    )
    handle = pp.add_pipeline(program, model, stages=2, microbatches=4)
    program.add_node(lp.PyNode(train, handle, steps), label="trainer")
    lp.launch(program, "process", run_dir=folder / "trace", trace=True).wait()
    path = folder / "trace" / "trace.json"
    events = json.loads(path.read_text())["traceEvents"]
    return {"events": len(events), "bytes_an_event": path.stat().st_size / len(events)}


def measure_utilization(folder: pathlib.Path, steps: int) -> dict[str, Any]:
    program = lp.Program("bench_utilization")
    handle = program.add_node(lp.CourierNode(StageLog), label="stages")
    with lp.launch(program, "process", run_dir=folder / "utilization") as run:
        note_us, record_us = run.client(handle).note_us(steps)
    step_ms = 1.0  # short: what is added to it is the largest share
    return {
        "note_us": note_us,
        "record_us": record_us,
        "of_a_step_of_1_ms": (note_us / 1e3 + record_us / 1e6) / step_ms,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="few rounds: figures of no use")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args(argv)
    rounds, count = (2, 200) if options.quick else (options.rounds, 3000)
    with tempfile.TemporaryDirectory(prefix="lp-bench-") as name:
        folder = pathlib.Path(name)
        sink = measure_sink(folder, rounds, count)
        calls = measure_calls(folder, rounds, count)
        trace = measure_trace(folder, 5 if options.quick else 100)
        utilization = measure_utilization(folder, 20 * count)
    rows = [
        ("log_metrics, p50: no sink", f"{sink['without_us']['median']:.1f} µs", ""),
        ("log_metrics, p50: a sink that hangs", f"{sink['ratio']:.3f} ×", "1.1 ×"),
        ("records in the file", f"{sink['in_file']:,} of {sink['records']:,}", "all"),
        ("calls, p50: never traced", f"{calls['never, off']['median']:.1f} µs", ""),
        ("calls, p50: between two traces", f"{calls['off_ratio']:.3f} ×", "1.02 ×"),
        ("calls, p50: while traced", f"+ {calls['on_adds_us']:.1f} µs", "+ 40 µs"),
        ("two processes' clocks", f"{calls['clock_us']:.1f} µs", "1000 µs"),
        ("an event of a trace", f"{trace['bytes_an_event']:.0f} bytes", "200 bytes"),
        ("utilization and bubble, of a step of 1 ms", f"{utilization['of_a_step_of_1_ms']:.2%}", "1 %"),
    ]
    show_table("Being watched", ["", "measured", "bar"], rows)
    figures = {"benchmark": "telemetry", "machine": machine(), "sink": sink, "calls": calls}
    write_json({**figures, "trace": trace, "utilization": utilization}, options.json)


if __name__ == "__main__":
    main()
