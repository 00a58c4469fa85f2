"""A record of what the threads of this process do while a run is traced: spans, from `begin` to `end`.

While nothing is traced, `recorder` is None and the waits are not recorded at all.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any, NamedTuple

from lp_pipe.context import NodeContext, current_context
from lp_pipe.telemetry import waits

_log = logging.getLogger(__name__)

_SEND_EVERY_S = 0.25
_MOST_SPANS = 100_000  # between two sends: about 30 MB

COMPUTE, TRANSFER, STEP = "compute", "transfer", "step"  # categories of spans, beside those of waits
_NAMES = {
    waits.MAIN: ("run", "node"),
    waits.IDLE: ("idle", "node"),
    waits.DEBUGGER: ("debugger", "wait"),
    waits.HANDLER: ("{what}", "handler"),
    waits.CALL: ("{peer}.{what}", "call"),
    waits.RESOLVE: ("wait for {peer}", "wait"),
    waits.RECEIVE: ("wait for data", "wait"),
    waits.SEND: ("wait for room", "wait"),
    waits.RANKS: ("reduction", "reduction"),
    waits.OUTSIDE: ("{peer}", "outside"),
}
_WITH_WHAT = (waits.RECEIVE, waits.SEND, waits.RANKS, waits.DEBUGGER)


class TraceSpan(NamedTuple):
    """An action of a thread from `start` to `end` (time.monotonic).

    flow: of a transfer, the name that the two ends of it share.
    """

    name: str
    category: str
    thread: int
    start: float
    end: float
    args: dict[str, Any]
    flow: str = ""


class TraceBatch(NamedTuple):
    """Spans that were recorded since the last batch. num_lost: left out, because there were too many at a time."""

    spans: list[TraceSpan]
    threads: dict[int, str]
    num_lost: int = 0
    is_last: bool = False


Send = Callable[[dict[NodeContext | None, TraceBatch]], object]


class Recorder:
    """Keeps spans, and sends them, by node, four times a second, in a thread of its own."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._began = time.monotonic()
        self._spans: deque[tuple[NodeContext | None, TraceSpan]] = deque()
        self._waits: deque[tuple[waits.waiting, int, float, NodeContext | None]] = deque()
        self._num_lost = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)

    def add(self, name: str, category: str, start: float, end: float, /, **args: Any) -> None:
        """Record a span of the calling thread. args: what it was about; `flow` as of TraceSpan."""
        flow = args.pop("flow", "")
        if len(self._spans) < _MOST_SPANS:
            self._spans.append((current_context(), TraceSpan(name, category, get_ident(), start, end, args, flow)))
        else:
            self._num_lost += 1

    def add_wait(self, wait: waits.waiting) -> None:
        """Record a wait, or a handler, of the calling thread that ends now."""
        if len(self._waits) < _MOST_SPANS:
            self._waits.append((wait, get_ident(), time.monotonic(), wait.node or current_context()))
        else:
            self._num_lost += 1

    def _run(self) -> None:
        while not self._is_over.wait(_SEND_EVERY_S):
            self._send_all(is_last=False)

    def finish(self) -> None:
        """Send the rest, with what threads do at this moment."""
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()
        now = time.monotonic()
        for thread, wait in waits.open_waits():
            self._waits.append((wait, thread, now, wait.node or waits.node_of(thread)))
        self._send_all(is_last=True)

    def _send_all(self, *, is_last: bool) -> None:
        found: dict[NodeContext | None, list[TraceSpan]] = {}
        for node, span in self._taken():
            if span.end > self._began:
                start = max(span.start, self._began)  # what had begun before the trace
                found.setdefault(node, []).append(span if start == span.start else span._replace(start=start))
        names = {thread.ident: thread.name for thread in threading.enumerate() if thread.ident is not None}
        lost, self._num_lost = self._num_lost, 0
        try:
            if found or lost or is_last:
                batches = {node: TraceBatch(spans, _used(names, spans), 0, is_last) for node, spans in found.items()}
                first = next(iter(batches), None)
                batches[first] = batches.get(first, TraceBatch([], {}, 0, is_last))._replace(num_lost=lost)
                self._send(batches)
        except Exception as error:  # the launcher is gone, or its disk is full
            _log.debug("spans of a trace were not sent: %r", error)

    def _taken(self) -> Iterator[tuple[NodeContext | None, TraceSpan]]:
        while self._spans:
            yield self._spans.popleft()
        while self._waits:
            wait, thread, end, node = self._waits.popleft()
            yield node, _span_of(wait, thread, end)


recorder: Recorder | None = None


def begin(send: Send) -> bool:
    """Record from now on; return False if this process is traced already."""
    global recorder
    if recorder is not None:
        return False
    recorder = Recorder(send)
    waits.record_with(recorder.add_wait)
    recorder._thread.start()
    return True


def end() -> None:
    """Record no more, and send what is left. Idempotent."""
    global recorder
    found, recorder = recorder, None
    waits.record_with(None)
    if found is not None:
        found.finish()


def _span_of(wait: waits.waiting, thread: int, end: float) -> TraceSpan:
    name, category = _NAMES[wait.kind]
    args = {"what": wait.what} if wait.kind in _WITH_WHAT and wait.what else {}
    peer = wait.target.peer or "server"
    return TraceSpan(name.format(peer=peer, what=wait.what), category, thread, wait.since, end, args)


def _used(names: dict[int, str], spans: list[TraceSpan]) -> dict[int, str]:
    return {thread: names[thread] for thread in {span.thread for span in spans} if thread in names}
