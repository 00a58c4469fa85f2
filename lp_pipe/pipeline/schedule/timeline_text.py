"""A timeline as text, and as trace events for Perfetto and chrome://tracing."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from lp_pipe.pipeline.schedule.ir import WORDS, Action
from lp_pipe.pipeline.schedule.simulate import Span, Timeline

_WIDTH = 100
TINY_S = 1e-100  # too short a time to divide by


def to_text(timeline: Timeline) -> str:
    """Draw a line per worker, time from left to right, at most 100 columns wide.

        worker 0 |F0 F1       B0---    B1--- |
        worker 1 |   F0 B0--- F1 B1---       |
        9 s, bubble 33.3%, peak activations 2 1

    A box says 2F0 (stage, op, micro-batch) where workers have several stages, else F0, or F alone where it is narrow.
    """
    names = [f"worker {worker} |" for worker in range(len(timeline.spans))]
    indent = max(map(len, names), default=0)
    with_stage = any(len({span.action.stage for span in spans}) > 1 for spans in timeline.spans)
    columns_per_s = _columns_per_s(timeline, with_stage, _WIDTH - indent - 1)
    total = round(timeline.makespan * columns_per_s)
    rows = [_row(spans, columns_per_s, with_stage) for spans in timeline.spans]
    lines = [f"{name:>{indent}}{row:<{total}}|" for name, row in zip(names, rows, strict=True)]
    peaks = " ".join(map(str, timeline.peak_activations))
    return "\n".join([*lines, f"{timeline.makespan:g} s, bubble {timeline.bubble:.1%}, peak activations {peaks}", ""])


def _columns_per_s(timeline: Timeline, with_stage: bool, width: int) -> float:
    """Give the shortest box a whole number of columns, as many as the longest label wants and the width allows."""
    spans = [span for row in timeline.spans for span in row if span.end_s > span.start_s]
    if not spans or timeline.makespan < TINY_S:
        return 0.0
    shortest = min(span.end_s - span.start_s for span in spans)
    wanted = 1 + max(len(_labels(span.action, with_stage)[0]) for span in spans)
    allowed = int(width * shortest / timeline.makespan)
    return min(wanted, allowed) / shortest if allowed else width / timeline.makespan


def _row(spans: tuple[Span, ...], columns_per_s: float, with_stage: bool) -> str:
    row = ""
    for span in spans:
        start, end = round(span.start_s * columns_per_s), round(span.end_s * columns_per_s)
        row = row.ljust(start) + _box(_labels(span.action, with_stage), end - start)
    return row


def _labels(action: Action, with_stage: bool) -> tuple[str, ...]:
    """Return the labels that an action's box may have, best first."""
    short = f"{action.op}{action.microbatch}"
    return (str(action), short, action.op) if with_stage else (short, action.op)


def _box(labels: tuple[str, ...], width: int) -> str:
    """Return the label in a box of that width. F3 in six columns is `F3--- `: the blank keeps neighbours apart."""
    if width < 2:
        return labels[-1][:width]
    label = next(label for label in labels if len(label) < width)
    return f"{label:-<{width - 1}} "


def to_trace_events(timelines: Mapping[str, Timeline]) -> str:
    """Return Chrome's JSON: a process for each timeline, by name, with a thread for each worker, in microseconds.

    Source: the "Trace Event Format" document of the Chromium project; complete ("X") and metadata ("M") events.
    """
    events = [
        event
        for process, (name, timeline) in enumerate(timelines.items())
        for event in (*_names(process, name, timeline), *_actions(process, timeline))
    ]
    lines = ",\n".join(json.dumps(event) for event in events)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'


def _names(process: int, name: str, timeline: Timeline) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", process, 0, {"name": name})
    yield _metadata("process_sort_index", process, 0, {"sort_index": process})
    for worker in range(len(timeline.spans)):
        yield _metadata("thread_name", process, worker, {"name": f"worker {worker}"})
        yield _metadata("thread_sort_index", process, worker, {"sort_index": worker})


def _metadata(kind: str, process: int, thread: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": arguments}


def _actions(process: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    for worker, spans in enumerate(timeline.spans):
        for action, start_s, end_s in spans:
            yield {
                "name": str(action),
                "cat": WORDS[action.op],
                "ph": "X",
                "pid": process,
                "tid": worker,
                "ts": start_s * 1e6,
                "dur": (end_s - start_s) * 1e6,
                "args": {"stage": action.stage, "microbatch": action.microbatch},
            }
