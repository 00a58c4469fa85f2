"""A stream of what is new in a live run: states, events, metrics, waits and traffic.

It is a generator, so nothing of it runs in the launcher unless a client watches.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lp_pipe.launch.coordination.coordinator import Coordinator
from lp_pipe.launch.edge_traffic import Traffic, traffic_of
from lp_pipe.launch.hangs.hang_text import wait_text
from lp_pipe.launch.hangs.hang_watch import HangWatch
from lp_pipe.launch.hangs.wait_graph import WaitGraph
from lp_pipe.telemetry.plain_files import AppendedLines

_LOOK_EVERY_S = 0.2
_ASK_EVERY_S = 1.0
_LONG_WAIT_S = 2.0
_UNRESPONSIVE_AFTER_S = 5.0
_MOST_WAITS = 100

Message = dict[str, Any]


def watch(
    coordinator: Coordinator, hangs: HangWatch, wait_for_end: Callable[[float], bool], since: float | None
) -> Iterator[Message]:
    """Yield messages until the run is over; each has a "kind" and a "time".

    states: "states", by node, of those that have changed; the first message has all of them.
    event: what is in events.jsonl under "event", "node" and so on.
    metrics: "node", "step" and "values".
    live: "waits" that last longer than 2 s, each with "node", "waits_for", "age_s" and "text", and "edges" with "user",
        "server", "calls_per_s", "transfers_per_s", "bytes_per_s"; about once a second.
    end: the last message; nothing of the run is left.

    since: seconds since the epoch; events and metrics after that time come first. None: only what is new.
    wait_for_end: waits for the end of the run for so many seconds; returns whether it is over.
    """
    folder = coordinator.plan.folder
    events = AppendedLines(folder.events, _end_of(folder.events) if since is None else 0)
    metrics = AppendedLines(folder.metrics, _end_of(folder.metrics) if since is None else 0)
    after = -1.0 if since is None else since
    rates = _EdgeRates(coordinator, hangs)
    known: dict[str, Any] = {}
    asked, is_over = 0.0, False
    while True:
        states = _states(coordinator)
        changed = {name: row for name, row in states.items() if known.get(name) != row}
        if changed:
            known = states
            yield {"kind": "states", "time": time.time(), "states": changed}
        for line in events.new():
            if line.get("time", 0.0) > after:
                yield {**line, "kind": "event"}
        for line in metrics.new():
            if line.get("time", 0.0) > after and "values" in line:
                yield {**line, "kind": "metrics"}
        if is_over:
            yield {"kind": "end", "time": time.time()}
            return
        if time.monotonic() >= asked + _ASK_EVERY_S:
            asked = time.monotonic()
            yield {"kind": "live", "time": time.time(), **rates.look()}
        is_over = wait_for_end(_LOOK_EVERY_S)


def _end_of(path: Any) -> int:
    try:
        return int(path.stat().st_size)
    except OSError:
        return 0


def _states(coordinator: Coordinator) -> dict[str, Message]:
    """Return the rows of `Run.status` by node, without what changes all the time."""
    return {
        f"{label}/{index}": {name: row[name] for name in ("state", "pid", "error", "restarts", "waiting")}
        for label, rows in coordinator.status().items()
        for index, row in enumerate(rows)
    }


class _EdgeRates:
    """Waits and traffic of all nodes; rates are those since the look before."""

    def __init__(self, coordinator: Coordinator, hangs: HangWatch) -> None:
        self._coordinator = coordinator
        self._hangs = hangs
        self._names = {spec.node_id: spec.name for spec in coordinator.plan.nodes}
        self._totals: dict[tuple[str, str], Traffic] = {}
        self._looked = 0.0

    def look(self) -> Message:
        views = self._hangs.views()
        owners = self._coordinator.plan.owners
        graph = WaitGraph(views, owners, self._coordinator.states(), _LONG_WAIT_S, _UNRESPONSIVE_AFTER_S)
        waits = [
            {
                "node": self._names.get(wait.activity.node, "launcher"),
                "waits_for": self._names.get(graph.owner(wait.activity), ""),
                "age_s": round(wait.activity.age_s, 1),
                "text": wait_text(graph, wait, ()),
            }
            for wait in graph.waits[:_MOST_WAITS]
        ]
        return {"waits": waits, "edges": self._edges(traffic_of(views, owners))}

    def _edges(self, totals: list[Traffic]) -> list[Mapping[str, Any]]:
        now = time.monotonic()
        passed_s, self._looked = now - self._looked if self._looked else 0.0, now
        before, self._totals = self._totals, {(one.user, one.server): one for one in totals}
        if not passed_s:
            return []
        rates: list[Mapping[str, Any]] = []
        for key, one in self._totals.items():
            last = before.get(key)
            if last is None or last.calls > one.calls or last.bytes_sent > one.bytes_sent:  # a new process began anew
                last = one._replace(calls=0, transfers=0, bytes_sent=0)
            rates.append(
                {
                    "user": self._names.get(one.user, one.user),
                    "server": self._names.get(one.server, one.server),
                    "calls_per_s": round((one.calls - last.calls) / passed_s, 2),
                    "transfers_per_s": round((one.transfers - last.transfers) / passed_s, 2),
                    "bytes_per_s": round((one.bytes_sent - last.bytes_sent) / passed_s),
                }
            )
        return rates
