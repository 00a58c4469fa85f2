"""What the page asks about one run: its record, the states of its nodes, its graph, logs, hangs, checkpoints, timeline.

Everything is read from the run's folder. Names that come from the page are looked up in a listing of the folder, and
never become a part of a path.
"""

import json
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from lp_pipe.checkpoint import checkpoints_in
from lp_pipe.checkpoint.folder import open_checkpoint
from lp_pipe.dashboard.metrics_index import MetricsIndex
from lp_pipe.errors import CheckpointError, ScheduleError
from lp_pipe.graph import GraphView
from lp_pipe.graph.scene import Scene, make_scene
from lp_pipe.launch.run_records import RunRecord, record_in
from lp_pipe.pipeline.schedule.ir import WORDS
from lp_pipe.pipeline.schedule.prediction import EVENT as SCHEDULE_EVENT
from lp_pipe.pipeline.schedule.prediction import Prediction
from lp_pipe.pipeline.schedule.simulate import Span
from lp_pipe.process_tree import start_time
from lp_pipe.telemetry.plain_files import AppendedLines, open_plain, read_plain
from lp_pipe.telemetry.run_folder import RunFolder

MAX_LOG_LINES = 2000
FOLD_ABOVE = 8  # a larger group is one box
_KEPT_EVENTS = 1000
_LOG_BYTES = 256 << 10
_HANG_BYTES = 256 << 10
_FAILURE_BYTES = 256 << 10
_MAX_SPANS = 20_000
_TRACE_BYTES = 256 << 20
_WORST_FIRST = ("dead", "failed", "restarting", "starting", "waiting", "stopped", "running", "finished", "unknown")


class RunView:
    """One run's folder. Any thread may call the methods; each reads the files anew, or what was appended to them.

    is_read_only: whether nothing may be written into the folder, which the next server would read faster.
    """

    def __init__(self, folder: Path, *, is_read_only: bool = False) -> None:
        self.folder = RunFolder(folder)
        self.metrics = MetricsIndex(self.folder.metrics, None if is_read_only else self.folder.metrics_index)
        self._lock = threading.Lock()
        self._new_events = AppendedLines(self.folder.events)
        self._events: deque[dict[str, Any]] = deque(maxlen=_KEPT_EVENTS)
        self._num_events = 0
        self._states: dict[str, dict[str, Any]] = {}
        self._predictions: dict[str, dict[str, Any]] = {}  # events of pipelines, by their first node

    def record(self) -> RunRecord | None:
        """Return the run's record as it is now; None if the folder was removed."""
        return record_in(self.folder.path)

    def events_after(self, number: int) -> tuple[int, list[dict[str, Any]]]:
        """Return how many events there are so far, and those after the first `number`, of the newest 1,000."""
        with self._lock:
            for event in self._new_events.new():
                if event.get("event") == SCHEDULE_EVENT:
                    self._predictions[str(event.get("node"))] = event
                    continue
                self._events.append(event)
                self._num_events += 1
                _apply(self._states, event)
            new = min(self._num_events - number, len(self._events))
            return self._num_events, list(self._events)[len(self._events) - new :] if new > 0 else []

    def states(self, record: RunRecord | None) -> dict[str, dict[str, Any]]:
        """Return the state of every node, as the events say; nodes of a launcher that was killed are "dead"."""
        self.events_after(0)
        is_dead = record is not None and state_of(record) == "dead"
        with self._lock:
            found = {name: dict(row) for name, row in self._states.items()}
        for name in self.graph_names:
            found.setdefault(name, {"state": "starting"})
        for row in found.values():
            if is_dead and row["state"] in ("running", "starting", "restarting"):
                row["state"] = "dead"
        return found

    @cached_property
    def graph(self) -> GraphView | None:
        """The program's graph; None if the run has no readable graph.json."""
        try:
            return GraphView.from_dict(json.loads(read_plain(self.folder.graph)))
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    @property
    def graph_names(self) -> list[str]:
        return [node.name for node in self.graph.nodes] if self.graph is not None else []

    @cached_property
    def scene(self) -> dict[str, Any] | None:
        """The graph's picture as data: boxes, cards and arrows with coordinates."""
        return None if self.graph is None else _as_data(make_scene(self.graph, FOLD_ABOVE))

    def log(self, node: str, start: int | None, end: int | None) -> dict[str, Any] | None:
        """Return lines of a node's log: the last ones, those from the offset `start` on, or those before `end`.

        Returns {"start", "end", "size", "lines"}; None for a node that there is not. At most 2,000 lines.
        """
        path = self.folder.node_logs().get(node)
        if path is None:
            return {"start": 0, "end": 0, "size": 0, "lines": []} if node in self.graph_names else None
        try:
            with open_plain(path) as file:
                size = os.fstat(file.fileno()).st_size
                last = size if end is None else min(end, size)
                first = max(0, last - _LOG_BYTES) if start is None or start > size else max(start, last - _LOG_BYTES)
                file.seek(first)
                data = file.read(last - first)
        except OSError:
            return None
        if first and start != first:  # in the middle of a line
            cut = data.find(b"\n") + 1
            first, data = first + cut, data[cut:]
        if end is None:
            data = data[: data.rfind(b"\n") + 1]
        lines = data.split(b"\n")[:-1] if data.endswith(b"\n") else data.split(b"\n") if data else []
        skipped = max(0, len(lines) - MAX_LOG_LINES)
        lines = lines[skipped:]
        begun = first + len(data) - sum(len(line) + 1 for line in lines)
        return {
            "start": max(first, begun),
            "end": first + len(data),
            "size": size,
            "lines": [line.decode(errors="replace") for line in lines],
        }

    def failure(self) -> str:
        """Return the run's failures with their tracebacks; empty if none was written."""
        return read_plain(self.folder.failures, _FAILURE_BYTES).decode(errors="replace")

    def hangs(self) -> dict[str, Any]:
        """Return the events of hangs, and the end of hangs.log, which has the stacks at that moment."""
        found = [event for event in self.events_after(0)[1] if event.get("event") == "hang"]
        text = b""
        try:
            with open_plain(self.folder.hangs) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _HANG_BYTES))
                text = file.read(_HANG_BYTES)
        except OSError:
            pass
        return {"hangs": found[-200:], "text": text.decode(errors="replace")}

    def checkpoints(self) -> list[dict[str, Any]]:
        """Return what the manifests of the checkpoints in the usual place say, the newest first."""
        if self.folder.checkpoints.is_symlink():
            return [{"name": self.folder.checkpoints.name, "error": "a link, which is not followed"}]
        found = []
        for path in reversed(checkpoints_in(self.folder.checkpoints)):
            row: dict[str, Any] = {"name": path.name}
            if path.is_symlink():
                row["error"] = "a link, which is not followed"
            else:
                try:
                    one = open_checkpoint(path)
                    row |= {"step": one.step, "saved": one.saved, "parts": one.parts, "bytes": one.size}
                    row |= {"files": len(one.files), "metrics": {k: _json_number(v) for k, v in one.metrics.items()}}
                except (CheckpointError, OSError, ValueError, KeyError) as error:
                    row["error"] = str(error)
            found.append(row)
        return found

    def traces(self) -> list[str]:
        """Return the names of the traces in the folder, the newest first."""
        files = [path for path in self.folder.path.glob("trace*.json") if path.is_file() and not path.is_symlink()]
        return [path.name for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)]

    def timeline(self, name: str | None) -> dict[str, Any]:
        """Return the spans of a trace, of each track: {"traces", "name", "tracks": [{"process", "track", "spans"}]}.

        The tracks of processes "predicted…" show how a step should run; they need no trace.
        """
        traces = self.traces()
        chosen = name if name in traces else next(iter(traces), None)
        if chosen is None:
            return {"traces": [], "name": None, "tracks": self._predicted_tracks()}
        try:
            found = json.loads(read_plain(self.folder.path / chosen, _TRACE_BYTES))
            events = found["traceEvents"] if isinstance(found, dict) else found
            tracks = list(_tracks(events))
        except (ValueError, KeyError, TypeError):
            return {"traces": traces, "name": chosen, "tracks": [], "error": "is no trace, or is being written"}
        if not any(track["process"].startswith("predicted") for track in tracks):  # such as of stages with replicas
            tracks += self._predicted_tracks()
        return {"traces": traces, "name": chosen, "tracks": tracks}

    def _predicted_tracks(self) -> list[dict[str, Any]]:
        """Return the tracks of one step of each pipeline, as the schedule and the logged seconds say."""
        self.events_after(0)
        with self._lock:
            events = dict(self._predictions)
        tracks = []
        for node, event in sorted(events.items()):
            try:
                prediction = Prediction.from_facts(event)
                timeline = prediction.timeline()
            except (ScheduleError, KeyError, ValueError, TypeError, OverflowError):  # written by another version
                continue
            of_one = f" {node.rpartition('/')[0]}" if len(events) > 1 else ""
            process = f"predicted{of_one} ({prediction.schedule.name}, {prediction.source})"
            for worker, spans in enumerate(timeline.spans):
                tracks.append({"process": process, "track": f"worker {worker}", "spans": list(map(_as_span, spans))})
        return tracks


def state_of(record: RunRecord) -> str:
    """Return running, done, stopped, failed, interrupted, dead (no end was recorded), or unknown (another host)."""
    if record.ended is not None:
        return record.outcome or "done"
    if not record.is_here:
        return "unknown"
    return "running" if start_time(record.pid) == record.pid_started else "dead"


def summary_of(key: str, record: RunRecord) -> dict[str, Any]:
    """Return what the page shows of a run in a list."""
    facts = ("program", "mode", "run_dir", "host", "pid", "started", "ended", "exit_status", "failure", "name")
    more = {"argv": list(record.argv), "git": record.git, "versions": dict(record.versions)}
    return {"key": key, "state": state_of(record), **{fact: getattr(record, fact) for fact in facts}, **more}


def _apply(states: dict[str, dict[str, Any]], event: Mapping[str, Any]) -> None:
    """Change the states of nodes as one event says."""
    node, kind = event.get("node"), event.get("event")
    if node is None:
        if kind == "start":  # of the run; a resumed one begins anew
            states.clear()
        return
    row = states.setdefault(str(node), {"state": "starting"})
    if kind == "start":
        row.update(state="running", pid=event.get("pid"), since=event.get("time"))
    elif kind == "ready":
        row["state"] = "running"
    elif kind == "death":
        row.update(state="failed", error=event.get("how"))
    elif kind == "restart":
        row.update(state="restarting", restarts=event.get("restarts"))
    elif kind == "end":
        row["state"] = event.get("state", "stopped")


def worst_of(states: list[str]) -> str:
    """Return the state that a folded group shows: the worst of its nodes."""
    return min(states, key=lambda one: _WORST_FIRST.index(one) if one in _WORST_FIRST else 0, default="unknown")


def _as_data(scene: Scene) -> dict[str, Any]:
    boxes = [
        {
            "label": box.label,
            "rect": _rounded(box.rect),
            "is_stack": box.is_stack,
            "nodes": [node.name for node in box.nodes],
            "cards": [
                {
                    "rect": _rounded(card),
                    "nodes": [one.name for one in (box.nodes if box.is_stack else [node])],
                    "kind": node.kind,
                    "runs": node.runs,
                    "notes": list(node.notes),
                }
                for card, node in zip(box.cards, box.nodes, strict=False)
            ],
        }
        for box in scene.boxes
    ]
    curves = [
        {
            "path": curve.path,
            "is_mutual": curve.arrow.is_mutual,
            "channels": curve.arrow.channels,
            "edges": [[edge.user, edge.server] for edge in curve.arrow.edges[:1000]],
        }
        for curve in scene.curves
    ]
    return {"boxes": boxes, "curves": curves, "width": round(scene.width), "height": round(scene.height)}


def _rounded(rect: tuple[float, ...]) -> list[float]:
    return [round(one, 1) for one in rect]


def _json_number(number: Any) -> Any:
    return number if isinstance(number, int) or (isinstance(number, float) and number - number == 0) else str(number)


def _as_span(span: Span) -> list[Any]:
    """Return a predicted action as `_tracks` has it, in microseconds."""
    action, start_s, end_s = span
    args = {"stage": action.stage, "microbatch": action.microbatch}
    return [start_s * 1e6, (end_s - start_s) * 1e6, WORDS[action.op], args]


def _tracks(events: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the tracks of a trace in trace-event format, each with its complete spans, in microseconds."""
    processes: dict[Any, str] = {}
    threads: dict[Any, str] = {}
    spans: dict[tuple[Any, Any], list[list[Any]]] = {}
    for event in events:
        if event.get("ph") == "M" and event.get("name") == "process_name":
            processes[event.get("pid")] = str(event["args"]["name"])
        elif event.get("ph") == "M" and event.get("name") == "thread_name":
            threads[event.get("pid"), event.get("tid")] = str(event["args"]["name"])
        elif event.get("ph") == "X":
            one = [float(event["ts"]), float(event["dur"]), str(event["name"]), event.get("args", {})]
            spans.setdefault((event.get("pid"), event.get("tid")), []).append(one)
    left = _MAX_SPANS
    for (process, thread), found in sorted(spans.items(), key=lambda item: str(processes.get(item[0][0], item[0]))):
        found.sort(key=lambda one: (one[0], -one[1]))
        yield {
            "process": processes.get(process, str(process)),
            "track": threads.get((process, thread), str(thread)),
            "spans": found[-left:] if left else [],
        }
        left = max(0, left - len(found))
