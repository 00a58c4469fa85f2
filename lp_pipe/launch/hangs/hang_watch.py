"""The launcher's thread that looks for waits that last too long, and reports them."""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterable
from typing import Any

from lp_pipe.launch.coordination.coordinator import Coordinator
from lp_pipe.launch.hangs import hang_text
from lp_pipe.launch.hangs.hang_detection import find_deadlocks, find_hung, find_suspects
from lp_pipe.launch.hangs.wait_graph import Wait, WaitGraph, WaitKey
from lp_pipe.launch.host import Host
from lp_pipe.launch.supervision.messages import Failure, View
from lp_pipe.launched import launcher_of
from lp_pipe.telemetry import waits
from lp_pipe.telemetry.edges import edge_counts
from lp_pipe.telemetry.positions import positions

_log = logging.getLogger(__name__)

_LOOKS_PER_LIMIT, _LONGEST_PAUSE_S = 5, 5.0
_UNRESPONSIVE_AFTER_S = 2.0  # a process on a busy machine may take so long to answer
_PATIENCE_GROWS = 4
_NAMED_AT_MOST = 16  # nodes in the event of a hang
_STACKS_OF_NODES = 64  # with more nodes, stacks are left to `lp_pipe stacks`
_WORTH_A_PLACE = 0.25  # share of the limit from which on places are looked up; handlers are younger than waits


class HangWatch:
    """Reports every wait that is older than `limit_s`, once. Repeated waits of one kind are reported ever more rarely.

    Waits of one group of nodes for the same thing make one report. The next one follows when a wait is four times as
    old. A certain deadlock is reported at once. Reports go to the log, and to hangs.log in the run's folder.

    limit_s: None for no reports and no thread.
    """

    def __init__(self, coordinator: Coordinator, host: Host, limit_s: float | None) -> None:
        self._coordinator = coordinator
        self._host = host
        self._limit_s = limit_s or 0.0
        self._pause_s = min(self._limit_s / _LOOKS_PER_LIMIT, _LONGEST_PAUSE_S)
        self._patience_s: dict[tuple[str, ...], float] = {}
        self._reported: dict[WaitKey, Wait] = {}
        self._reported_cycles: set[frozenset[WaitKey]] = set()
        self._reported_silent: set[str] = set()
        self._may_kill = {spec.node_id for spec in coordinator.plan.nodes if spec.on_hang != "report"}
        self._idle_since: float | None = math.inf  # None: reported already
        self._awake_since = -math.inf
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch for hangs", daemon=True)

    def start(self) -> None:
        if self._limit_s:
            self._thread.start()

    def close(self) -> None:
        """Report nothing from now on. Called when the program ends, which ends all waits."""
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._is_over.wait(self._pause_s):
            if time.monotonic() > looked + self._pause_s + _UNRESPONSIVE_AFTER_S:
                self._awake_since = time.monotonic()
            graph = self._look()
            waiting = {**_oldest_by_node(graph), **_silent_by_node(graph), **_debugged_by_node(graph)}
            self._coordinator.note_waits(waiting)
            reported = len(self._reported)
            self._report_waits(graph, self._report_cycles(graph))
            if len(self._reported) > reported:
                self._report_more(graph)
            self._report_ends(graph)
            self._report_silences(graph)
            self._end_hung(graph)
            self._report_idle(graph)
            looked = time.monotonic()

    def views(self) -> list[View]:
        """Return what all processes do, as they said last, and ask them to say it again."""
        return [self._look_here(), *self._host.look(self._limit_s * _WORTH_A_PLACE)]

    def _look(self) -> WaitGraph:
        return WaitGraph(
            self.views(),
            self._coordinator.plan.owners,
            self._coordinator.states(),
            self._limit_s,
            max(_UNRESPONSIVE_AFTER_S, 3 * self._pause_s),
        )

    def _look_here(self) -> View:
        """Return what the launcher's own threads do: those that wait for this program, and those that are its nodes."""
        names = self._host.nodes_here()
        owners = self._coordinator.plan.owners
        found = []
        for node, one in waits.look(self._limit_s * _WORTH_A_PLACE):
            name = names.get(node.services) if node is not None else None
            if name is not None:
                found.append(one._replace(node=name))
            elif one.address_id in owners and node is launcher_of(one.address_id):
                found.append(one)
        places = [text for node, text in positions() if node.services in names]
        edges = [one for one in edge_counts(None) if one.address_id in owners]
        edges += [one for node in names for one in edge_counts(node)]
        return View(found, waits.pools(), places, edges=edges)

    def _report_cycles(self, graph: WaitGraph) -> set[WaitKey]:
        """Report each cycle once. Return the waits of deadlocks, which need no further report."""
        sure = find_deadlocks(graph)
        keys = {wait.key for cycle in sure for wait in cycle}
        maybe = [cycle for cycle in find_suspects(graph) if not keys & {wait.key for wait in cycle}]
        for cycle in [*sure, *maybe]:
            name = frozenset([*(wait.key for wait in cycle), *([("sure", 0, 0.0)] if cycle in sure else [])])
            if name not in self._reported_cycles:
                self._reported_cycles.add(name)
                run = self._coordinator.plan.run_dir.name
                text = hang_text.cycle_text(graph, cycle, cycle in sure, run)
                self._report_hang([wait.node for wait in cycle], text, is_deadlock=cycle in sure)
                self._reported.update({wait.key: wait for wait in cycle})
        return keys

    def _report_waits(self, graph: WaitGraph, deadlocked: set[WaitKey]) -> None:
        groups: dict[tuple[str, ...], list[Wait]] = {}
        for wait in graph.waits:
            if wait.key not in deadlocked:
                groups.setdefault(_group(graph, wait), []).append(wait)
        for group, members in groups.items():
            oldest = members[0]  # they are sorted
            patience_s = self._patience_s.get(group, self._limit_s)
            # Time in which all processes were stopped (Ctrl+Z, Slurm's suspend) is not waiting time.
            age_s = min(oldest.activity.age_s, time.monotonic() - self._awake_since)
            if age_s < patience_s or self._is_reported(oldest, patience_s):
                continue
            self._patience_s[group] = max(patience_s, oldest.activity.age_s) * _PATIENCE_GROWS
            self._reported.update({wait.key: wait for wait in members})
            text = hang_text.wait_text(graph, oldest, members[1:])
            self._report_hang([wait.node for wait in members], text, is_deadlock=False)

    def _is_reported(self, wait: Wait, patience_s: float) -> bool:
        """Return whether the report of a cycle, which says more, contained this wait."""
        return (
            wait.key in self._reported
            and patience_s == self._limit_s
            and wait.activity.age_s < patience_s * _PATIENCE_GROWS
        )

    def _report_more(self, graph: WaitGraph) -> None:
        """Add where the stages of pipelines are and, in the file only, every stack."""
        if graph.positions:
            self._report(hang_text.positions_text(graph))
        if len(self._coordinator.plan.nodes) <= _STACKS_OF_NODES:
            self._write(f"stacks of all nodes:\n{self._host.stacks()}")

    def _report_ends(self, graph: WaitGraph) -> None:
        answering = {view.node for view in graph.views if view.silence_s < graph.unresponsive_after_s}
        now = {wait.key for wait in graph.waits}
        for key, wait in list(self._reported.items()):
            if key not in now and key[0] in answering:
                del self._reported[key]
                self._report(hang_text.ended_text(graph, wait), logging.INFO)

    def _report_silences(self, graph: WaitGraph) -> None:
        """Report each process that does not answer, once, also when no other node waits for it."""
        if self._has_just_slept():
            return
        silent = {view.node: view for view in graph.silent}
        for node in silent.keys() - self._reported_silent:
            self._report_hang([node], f"node {node}'s {hang_text.silence_text(silent[node])}", is_deadlock=False)
        for node in self._reported_silent - silent.keys():
            self._report(f"node {node}: its process answers again, or has ended", logging.INFO)
        self._reported_silent = set(silent)

    def _end_hung(self, graph: WaitGraph) -> None:
        """Kill the nodes without progress if their groups set `on_hang`, which also says what follows."""
        if not self._may_kill or self._has_just_slept():
            return
        for node, reason in find_hung(graph, self._may_kill).items():
            # A view may be of the process before: it has come from another host, and is one look old.
            if self._coordinator.uptime_s(node) >= self._limit_s:
                self._coordinator.node_ended(
                    node, Failure("Hung", f"no progress for {self._limit_s:g} s: {reason}", is_hang=True)
                )
                self._host.kill([node])

    def _report_idle(self, graph: WaitGraph) -> None:
        """Report once, after the limit, that only servers are left: the program may have forgotten its stop."""
        if self._idle_since is None:
            return
        if not _is_idle(graph) or any(row["calls_per_s"] for rows in self._rows() for row in rows):
            self._idle_since = math.inf
            return
        self._idle_since = min(self._idle_since, time.monotonic())
        if time.monotonic() >= max(self._idle_since, self._awake_since) + self._limit_s:
            self._idle_since = None
            self._report(f"note: {hang_text.idle_text(graph)}")

    def _rows(self) -> Iterable[list[dict[str, Any]]]:
        return self._coordinator.status().values()

    def _has_just_slept(self) -> bool:
        """Return whether all processes were stopped (Ctrl+Z, Slurm's suspend) at a time within the limit."""
        return time.monotonic() - self._awake_since < self._limit_s

    def _report_hang(self, nodes: list[str], text: str, is_deadlock: bool) -> None:
        self._coordinator.note_event("hang", nodes[0], nodes=nodes[:_NAMED_AT_MOST], text=text, is_deadlock=is_deadlock)
        self._report(text)

    def _report(self, text: str, level: int = logging.WARNING) -> None:
        if not self._is_over.is_set():
            self._write(text)
            _log.log(level, text)

    def _write(self, text: str) -> None:
        path = self._coordinator.plan.folder.hangs
        with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")


def _is_idle(graph: WaitGraph) -> bool:
    """Return whether some nodes have finished and all others only serve, without a running handler."""
    up = [node for node, state in graph.states.items() if state not in hang_text.ENDED]
    mains = [graph.mains(node) for node in up]
    return (
        bool(up)
        and "finished" in graph.states.values()
        and all(threads and all(thread.last.kind == waits.IDLE for thread in threads) for threads in mains)
        and not any(one.kind == waits.HANDLER for thread in graph.threads for one in thread.activities)
    )


def _group(graph: WaitGraph, wait: Wait) -> tuple[str, ...]:
    """Return the key of a report: waits of one group of nodes for the same thing share it."""
    activity = wait.activity
    what = activity.what if activity.kind == waits.CALL else ""
    return wait.node.rpartition("/")[0], activity.kind, graph.owner(activity) or activity.peer, what


def _silent_by_node(graph: WaitGraph) -> dict[str, str]:
    return {view.node: f"not answering for {hang_text.seconds(view.silence_s)}" for view in graph.silent}


def _debugged_by_node(graph: WaitGraph) -> dict[str, str]:
    last = [thread.last for thread in graph.threads if thread.last.kind == waits.DEBUGGER]
    return {one.node: f"in a debugger at {one.what}: lp_pipe attach" for one in last}


def _oldest_by_node(graph: WaitGraph) -> dict[str, str]:
    found: dict[str, str] = {}
    for wait in graph.waits:
        found.setdefault(wait.activity.node, hang_text.short_text(graph, wait))
    return found
