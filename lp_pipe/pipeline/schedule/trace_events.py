"""Timelines as trace events, for Perfetto and chrome://tracing."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from lp_pipe.pipeline.schedule.ir import WORDS
from lp_pipe.pipeline.schedule.simulate import Timeline


def to_trace_events(timelines: Mapping[str, Timeline]) -> str:
    """Chrome's JSON: a process for each timeline, by name, with a thread for each worker, times in microseconds.

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
