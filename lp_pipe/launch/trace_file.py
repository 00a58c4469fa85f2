"""Trace events as ui.perfetto.dev and chrome://tracing read them, written one by one.

Source: the "Trace Event Format" document of the Chromium project: complete ("X"), flow ("s", "f"), counter ("C") and
metadata ("M") events.
"""

import itertools
import json
from collections.abc import Iterable
from io import BufferedWriter
from pathlib import Path
from typing import Any

from lp_pipe.pipeline.schedule.ir import WORDS, Action, Schedule
from lp_pipe.pipeline.schedule.prediction import measured_costs
from lp_pipe.pipeline.schedule.simulate import Timeline, simulate
from lp_pipe.telemetry.tracing import COMPUTE, STEP, TRANSFER, TraceBatch, TraceSpan

_MOST_BYTES = 200_000_000
_LAST_BYTES = 1_000_000  # for what comes at the end: names and the predicted timeline
_STEP_TRACK, _STEP_TRACK_NAME = 0, "steps"
_OPS = {word: op for op, word in WORDS.items()}
_PREDICTED = 1_000_000  # the pid of the predicted timeline
_PREDICTED_STEPS = 50  # of a long trace the first ones


class TraceFile:
    """A JSON file of events. A node is a process in it, a thread a thread; times are microseconds since `began`.

    began: time.monotonic() of this host.
    """

    def __init__(self, path: Path, began: float) -> None:
        self._file: BufferedWriter = path.open("wb")
        self._began = began
        self._size = self._file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        self._is_first = True
        self._pids: dict[str, int] = {}
        self._threads: dict[tuple[int, int], int] = {}
        self._last_step_end: dict[int, int] = {}
        self._stashed: dict[int, int] = {}
        self._half_flows: dict[str, dict[str, Any]] = {}  # ends of transfers whose other end was not written yet
        self._flow_numbers = itertools.count(1)
        self._actions: dict[int, dict[str, list[tuple[Action, float, float]]]] = {}  # of complete steps, by node
        self._steps: dict[str, dict[int, float]] = {}  # by node: complete steps, and when they began
        self.num_left_out = 0

    def add(self, node: str, batch: TraceBatch, offset_s: float = 0.0) -> None:
        """Write the spans of a node. offset_s: what to add to its host's clock."""
        self.num_left_out += batch.num_lost
        pid = self._pid_of(node)
        for span in batch.spans:
            if self._size > _MOST_BYTES - _LAST_BYTES:
                self.num_left_out += 1
                continue
            start = max(0, round((span.start + offset_s - self._began) * 1e9))
            end = max(start, round((span.end + offset_s - self._began) * 1e9))
            if span.category == STEP:
                self._add_step(node, pid, span, start, end)
                continue
            track = self._track_of(pid, span.thread, batch.threads)
            self._write_span(span.name, span.category, (pid, track), start, end, span.args)
            if span.category == TRANSFER:
                self._write_flow(span, pid, track, start, end)
            elif span.category == COMPUTE:
                self._note_action(node, pid, span, end)

    @property
    def num_steps(self) -> int:
        """How many steps are complete, on the node that has taken most of them."""
        return max(map(len, self._steps.values()), default=0)

    def close(self) -> None:
        """Write the predicted timeline, and the end of the file."""
        free_at = 0.0  # a predicted step may take longer than the real one, which computes with fewer neighbours
        for step, timeline, began in self._predicted():
            began = max(began, free_at)
            self._write_timeline(step, timeline, began)
            free_at = began + timeline.makespan
        self._file.write(b"\n]}\n")
        self._file.close()

    def _add_step(self, node: str, pid: int, span: TraceSpan, start: int, end: int) -> None:
        steps = self._steps.setdefault(node, {})
        if start > 0:  # else it had begun before the trace
            steps.setdefault(span.args["step"], start / 1e9)
        start = max(start, self._last_step_end.get(pid, 0))  # the steps of asynchronous schedules overlap
        if start < end:
            self._last_step_end[pid] = end
            track = self._track_of(pid, _STEP_TRACK, {_STEP_TRACK: _STEP_TRACK_NAME})
            self._write_span(f"step {span.args['step']}", STEP, (pid, track), start, end, span.args)

    def _note_action(self, node: str, pid: int, span: TraceSpan, end: int) -> None:
        if "step" not in span.args:
            return
        action = Action(_OPS[span.name], span.args["stage"], span.args["microbatch"])
        if len(self._actions) < _PREDICTED_STEPS or span.args["step"] in self._actions:
            of_step = self._actions.setdefault(span.args["step"], {})
            of_step.setdefault(node, []).append((action, span.start, span.end - span.start))
        change = {"F": 1, "B": -1, "I": -1}.get(action.op, 0)
        if change:
            count = self._stashed[pid] = max(0, self._stashed.get(pid, 0) + change)
            self._write({"ph": "C", "name": "stashed", "pid": pid, "ts": end / 1e3, "args": {"microbatches": count}})

    def _predicted(self) -> Iterable[tuple[int, Timeline, float]]:
        """Yield each complete step, its timeline (the same actions without any delay), and its begin."""
        began = {step: when for steps in self._steps.values() for step, when in steps.items()}
        for step, by_node in sorted(self._actions.items()):
            if step not in began:
                continue
            try:
                yield step, _without_delays(by_node), began[step]
            except (ValueError, KeyError):  # replicas, or a step of which a part is missing: not one whole schedule
                continue

    def _write_timeline(self, step: int, timeline: Timeline, began: float) -> None:
        if _PREDICTED not in self._pids.values():
            self._pids["predicted"] = _PREDICTED
            self._write_name("process_name", _PREDICTED, 0, "predicted")
            for worker in range(len(timeline.spans)):
                self._write_name("thread_name", _PREDICTED, worker, f"worker {worker}")
        for worker, spans in enumerate(timeline.spans):
            for action, start_s, end_s in spans:
                start, end = (round((began + one) * 1e9) for one in (start_s, end_s))
                args = {"stage": action.stage, "microbatch": action.microbatch, "step": step}
                self._write_span(WORDS[action.op], "predicted", (_PREDICTED, worker), start, end, args)

    def _write_span(
        self, name: str, category: str, place: tuple[int, int], start: int, end: int, args: dict[str, Any]
    ) -> None:
        event: dict[str, Any] = {"ph": "X", "name": name, "cat": category, "pid": place[0], "tid": place[1]}
        event |= {"ts": start / 1e3, "dur": (end - start) / 1e3}
        self._write({**event, "args": args} if args else event)

    def _write_flow(self, span: TraceSpan, pid: int, track: int, start: int, end: int) -> None:
        is_start = span.name == "send"
        when = start if is_start else max(start, end - 1)  # inside of the span, and the arrow goes forwards
        event: dict[str, Any] = {"ph": "s" if is_start else "f", "name": "transfer", "cat": TRANSFER}
        event |= {"pid": pid, "tid": track, "ts": when / 1e3}
        other = self._half_flows.pop(span.flow, None)
        if other is None or other["ph"] == event["ph"]:
            self._half_flows[span.flow] = event  # the other end may be in a later batch, or before the trace
            return
        number = {"id": next(self._flow_numbers)}  # Perfetto takes no names
        self._write((event if is_start else other) | number)
        self._write((other if is_start else event) | number | {"bp": "e"})

    def _pid_of(self, node: str) -> int:
        if node not in self._pids:
            pid = self._pids[node] = len(self._pids) + 1
            self._write_name("process_name", pid, 0, node)
        return self._pids[node]

    def _track_of(self, pid: int, thread: int, names: dict[int, str]) -> int:
        if (pid, thread) not in self._threads:
            track = self._threads[pid, thread] = sum(one == pid for one, _ in self._threads) + 1
            self._write_name("thread_name", pid, track, names.get(thread, f"thread {thread}"))
        return self._threads[pid, thread]

    def _write_name(self, kind: str, pid: int, tid: int, name: str) -> None:
        self._write({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}})

    def _write(self, event: dict[str, Any]) -> None:
        line = json.dumps(event, separators=(",", ":"))
        self._size += self._file.write(f"{'' if self._is_first else ','}\n{line}".encode())
        self._is_first = False


def _without_delays(by_node: dict[str, list[tuple[Action, float, float]]]) -> Timeline:
    """Return the timeline of these actions, in the same order, each with the median time of its stage and kind.

    Raises:
        ValueError: the actions are no complete schedule.
    """
    rows = [sorted(actions, key=lambda one: one[1]) for _, actions in sorted(by_node.items())]
    schedule = Schedule("traced", tuple(tuple(action for action, _, _ in row) for row in rows))
    costs = measured_costs(
        ((action.op, action.stage, took) for row in rows for action, _, took in row), schedule.stages
    )
    return simulate(schedule, costs)
