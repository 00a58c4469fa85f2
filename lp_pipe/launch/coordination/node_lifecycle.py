"""The decisions about nodes that end (restart, stop, ignore), by the policies of their groups."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from lp_pipe.errors import NodeError
from lp_pipe.launch.coordination.node_group import NodeGroup, NodeRecord
from lp_pipe.launch.plan.spec import NodeSpec
from lp_pipe.launch.supervision.lifecycle import NodeState
from lp_pipe.launch.supervision.messages import Failure

# An Unavailable is mostly the echo of another node's death. News of it may come a moment later: wait so long for it.
# A killed process is reported after 1 s at the latest (its last frames, its last lines).
ECHO_PATIENCE_S = 2.0


class FirstFailure:
    """Chooses the first among the failures that are reported. Not thread-safe: the coordinator holds its lock."""

    def __init__(self) -> None:
        self.first: tuple[NodeSpec, Failure] | None = None
        self.later: list[tuple[NodeSpec, Failure]] = []
        self._echo: tuple[float, NodeSpec, Failure] | None = None

    @property
    def due_at(self) -> float | None:
        """The time (of time.monotonic) at which `settle` has something to decide, or None."""
        return self._echo[0] if self._echo is not None and self.first is None else None

    def errors(self) -> list[NodeError]:
        """Return the first failure, as `wait()` raises it, and the later ones; empty while there is no first one."""
        failed = [self.first, *self.later] if self.first is not None else []
        return [
            NodeError(spec.label, spec.index, failure.type_name, failure.message, failure.traceback)
            for spec, failure in failed
        ]

    def judge(self, spec: NodeSpec, failure: Failure, is_stopping: bool) -> bool:
        """Take a failure in; return whether it is the first, for which the program must stop."""
        if self.first is not None or is_stopping:
            self.later.append((spec, failure))
        elif not failure.is_unavailable:
            self.later += [self._echo[1:]] if self._echo is not None else []
            self.first = (spec, failure)
            return True
        elif self._echo is None:
            self._echo = (time.monotonic() + ECHO_PATIENCE_S, spec, failure)
        else:
            self.later.append((spec, failure))
        return False

    def settle(self, is_final: bool = False) -> bool:
        """Take a consequence as the first failure if its cause did not show up in time; return whether it did."""
        if self._echo is None or self.first is not None:
            return False
        when, spec, failure = self._echo
        if not is_final and time.monotonic() < when:
            return False
        self._echo = None
        self.first = (spec, failure)
        return True


class Order(NamedTuple):
    """An order to the supervising thread: start these nodes again (`is_restart`), or take them down."""

    is_restart: bool
    node_ids: list[str]


class NodeLifecycles:
    """The states of all nodes, and what is to be done about them. Not thread-safe: the coordinator holds its lock.

    nodes: by node_id; groups: what the program calls its nodes, by label/index.
    withdraw(record): called when the code of a node has ended, or nothing of it is left: its servers are gone.
    """

    def __init__(self, specs: Iterable[NodeSpec], withdraw: Callable[[NodeRecord], None]) -> None:
        self.nodes = {spec.node_id: NodeRecord(spec) for spec in specs}
        self.groups: dict[str, NodeGroup] = {}
        for record in self.nodes.values():
            self.groups.setdefault(record.spec.name, NodeGroup([])).parts.append(record)
        self.first_failure = FirstFailure()
        self.stop_requested = False
        self._withdraw = withdraw
        self._restart_at: dict[str, float] = {}  # by node_id: nodes that are down for now (time.monotonic)
        self._to_take_down: list[str] = []

    @property
    def must_go_on(self) -> bool:
        """Whether no stop was requested, and a node is up or will be."""
        return not (self.stop_requested or all(record.is_down for record in self.nodes.values()))

    def inner_nodes(self, colocation: str) -> list[NodeRecord]:
        """Return the inner nodes of a MultiProcessingColocation, by its inner_id."""
        return [record for node_id, record in self.nodes.items() if node_id.startswith(f"{colocation}.")]

    def why_gone(self, record: NodeRecord) -> str:
        """Return why calls to the node fail: its own reason, and the first failure if that is behind it."""
        if self.first_failure.first is None:
            return record.why_gone
        spec, failure = self.first_failure.first
        cause = f"node {spec.node_id} failed: {failure.summary}"
        if record.state.word == "stopped":
            return f"{record.why_gone}, because {cause}"
        is_echo = record.state.word == "failed" and record.error is not None and record.error.is_unavailable
        if is_echo and spec.node_id != record.spec.node_id:  # what it says itself is about a neighbour
            return f"{cause}; then node {record.spec.node_id} failed, too"
        return record.why_gone

    def ends_unasked(self, node_id: str) -> None:
        """Note that a node has begun to end; others may notice, and stop the program, before it reports how."""
        record = self.nodes[node_id]
        is_vital = self.groups[record.spec.name].is_vital(record)
        if record.spec.least_nodes:
            is_vital = is_vital and not self._has_enough_without(record)
        record.ends_unasked = record.state.is_alive and is_vital

    def are_settled(self, dying: Mapping[str, int]) -> bool:
        """Return whether it is known how these processes (pids by node_id) ended, and which failure was the first."""
        ends = [node for node_id, pid in dying.items() if (node := self.nodes[node_id]).pid == pid]
        ends += [node for node in self.nodes.values() if node.ends_unasked]
        return self.first_failure.due_at is None and not any(node.state.is_alive for node in ends)

    def started(self, node_id: str, pid: int) -> None:
        record = self.nodes[node_id]
        record.pid, record.started_at = pid, time.monotonic()
        if record.state is NodeState.STARTING:  # else the node's report of its end has come before the template's
            record.become(NodeState.RUNNING)

    def serves(self, node_id: str) -> bool:
        """Note that a server of the node listens; return whether it is the first one since the node's start."""
        record = self.nodes[node_id]
        is_first = not record.serves_since
        record.serves_since = record.serves_since or time.monotonic()
        return is_first

    def ended(self, node_id: str, failure: Failure | None, can_restart: bool) -> str:
        """Note the end of a node's code; return what the log should say of it. Only the first report counts."""
        record = self.nodes[node_id]
        if not record.state.is_alive and (can_restart or not record.state.will_restart):
            return ""
        news = self._conclude(record, failure, can_restart)
        self._withdraw(record)
        return news

    def gone(self, node_id: str) -> None:
        """Note that nothing of the node is left. One that was killed before its code ended has not failed."""
        record = self.nodes[node_id]
        group = self.groups[record.spec.name]
        if record.state.is_gone:
            return
        if record.state.is_alive:
            record.become(NodeState.RESTARTING if group.is_restarting else NodeState.STOPPING)
            self._withdraw(record)
        if not record.state.will_restart or self.stop_requested:
            self._put_down(record)
            return
        record.leave()
        due, wait_s = group.due_with(record)
        self._restart_at.update({part.spec.node_id: time.monotonic() + wait_s for part in due})

    def wait_for_room(self, node_ids: Iterable[str]) -> None:
        """Note, before the start, that there is no room for these nodes now."""
        for node_id in node_ids:
            self.nodes[node_id].become(NodeState.WAITING)

    def may_start_late(self, node_id: str) -> bool:
        """Return whether the node is down and would be started on a host that has just joined."""
        record = self.nodes[node_id]
        is_down = record.state in (NodeState.WAITING, NodeState.FAILED)
        if not record.spec.least_started or not is_down or not self.must_go_on:
            return False
        group = (other for other in self.nodes.values() if other.spec.label == record.spec.label)
        return all(other.state.word != "finished" for other in group)  # else its work is done

    def start_late(self, node_ids: Iterable[str]) -> None:
        """Order that these nodes, which `may_start_late`, are started."""
        for node_id in filter(self.may_start_late, node_ids):
            self.nodes[node_id].become(NodeState.DOWN)
            self._restart_at[node_id] = time.monotonic()

    def end_inner_nodes(self, colocation: str) -> None:
        """Order that the inner nodes of a MultiProcessingColocation are taken down for good."""
        inner = self.inner_nodes(colocation)
        if not self.groups[inner[0].spec.name].is_restarting:  # else they end already, and must start again
            self._end(inner)

    def end_all(self) -> None:
        """Order that everything is taken down for good, and that nothing starts any more."""
        self._restart_at.clear()
        for group in self.groups.values():
            group.is_restarting = False
            for part in group.parts:
                part.is_told_to_end = not part.state.is_gone
                if part.state.is_gone:
                    self._put_down(part)

    def next_order(self) -> Order | None:
        """Return what is to be done now, or None. Nodes that are to be started again count as starting."""
        if self._to_take_down:
            node_ids, self._to_take_down = self._to_take_down, []
            return Order(False, node_ids)
        due = min(self._restart_at, key=self._restart_at.__getitem__, default=None)
        if due is None or self._restart_at[due] > time.monotonic():
            return None
        del self._restart_at[due]
        self.nodes[due].start_again()
        return Order(True, [due])

    def until_next_decision(self) -> float | None:
        """Return in how many seconds a restart or a decision is due; None: not before the next report."""
        times = [
            *self._restart_at.values(),
            *([self.first_failure.due_at] if self.first_failure.due_at is not None else []),
        ]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _conclude(self, record: NodeRecord, failure: Failure | None, can_restart: bool) -> str:
        """Set the state after the end of a node's code, by its group's policy; return what the log should say of it."""
        group = self.groups[record.spec.name]
        if failure is not None and self._is_of_the_stop(record, failure):
            failure = None
        if failure is not None and group.fails_to_load_again(record, failure):
            failure = replace(failure, is_final=True)
        record.error = failure or record.error
        may_restart = can_restart and not self.stop_requested
        if group.is_restarting and may_restart:
            record.become(NodeState.RESTARTING)
        elif failure is None or (record.is_told_to_end and not self.stop_requested):
            is_stopped = self.stop_requested or record.is_told_to_end
            record.become(NodeState.STOPPING if is_stopped else NodeState.FINISHING)
        else:
            return self._fail(group, record, failure, may_restart)
        return ""

    def _is_of_the_stop(self, record: NodeRecord, failure: Failure) -> bool:
        """Return whether the ordered end of its neighbours has ended the node, and not a failure of its own."""
        return failure.is_plain_echo and self.first_failure.first is None and self._is_after_the_stop(record)

    def _is_after_the_stop(self, record: NodeRecord) -> bool:
        """Return whether the program's stop was requested before the node's code began to end."""
        return self.stop_requested and not record.ends_unasked

    def _fail(self, group: NodeGroup, record: NodeRecord, failure: Failure, may_restart: bool) -> str:
        news = group.news_of(record, failure, may_restart)
        others = [part for part in group.parts if part is not record]
        if record.state.will_restart:
            if group.is_restarting:
                self._restart_with(others)
            return news
        group.is_restarting = False
        self._restart_at.pop(record.spec.node_id, None)
        is_late = self._is_after_the_stop(record)
        is_ignored = group.policy_for(failure) == "ignore"
        if record.spec.least_nodes:
            is_ignored = not failure.is_final and self._has_enough_without(record)
            failure = failure if is_ignored else self._with_the_dead(record, failure)
            news = f"node {record.spec.node_id} failed: {failure.summary}" + "; its group goes on" * is_ignored
        if is_ignored:
            self._end(others)
        elif self.first_failure.judge(record.spec, failure, is_late):
            self.stop_requested = True
        elif self.first_failure.first is None and is_late:  # nothing else would tell: wait() is quiet
            news = f"node {record.spec.node_id} failed after the stop: {failure.summary}"
        return news

    def _with_the_dead(self, record: NodeRecord, failure: Failure) -> Failure:
        """Return the failure with which too few nodes of a group are left, with those before it."""
        group = [
            other for other in self.nodes.values() if other.spec.label == record.spec.label and other is not record
        ]
        dead = [
            f"{other.spec.node_id} ({other.error.summary})"
            for other in group
            if other.error is not None and not self._may_live(other)
        ]
        spec = record.spec
        text = f"{failure.message}\ngroup {spec.label!r} needs {spec.least_nodes} nodes"
        return replace(failure, message="; ".join([text, *(f"dead before: {', '.join(dead)}" for _ in dead[:1])]))

    def _may_live(self, record: NodeRecord) -> bool:
        return record.may_register or record.state.word == "finished"

    def _has_enough_without(self, record: NodeRecord) -> bool:
        """Return whether the node's group has as many other nodes left as it needs."""
        names = {other.spec.name for other in self.nodes.values() if other.spec.label == record.spec.label}
        left = [name for name in names - {record.spec.name} if self._is_left(self.groups[name])]
        return len(left) >= record.spec.least_nodes

    def _is_left(self, group: NodeGroup) -> bool:
        return all(map(self._may_live, group.parts))

    def _restart_with(self, others: list[NodeRecord]) -> None:
        """End the other parts of a failed node; those that have ended stay down until all can start."""
        self._end([part for part in others if not part.state.is_gone])
        for part in others:
            self._restart_at.pop(part.spec.node_id, None)
            if not part.state.is_alive:
                part.become(NodeState.RESTARTING)

    def _end(self, parts: Iterable[NodeRecord]) -> None:
        """Order that these are taken down, for good or until their node restarts as a whole."""
        for part in parts:
            if part.state.is_gone:
                self._restart_at.pop(part.spec.node_id, None)
                self._put_down(part)
            elif not part.is_told_to_end:
                part.is_told_to_end = True
                if part.state.will_restart:
                    part.become(NodeState.STOPPING)
                self._to_take_down.append(part.spec.node_id)

    def _put_down(self, record: NodeRecord) -> None:
        record.put_down()
        self._withdraw(record)
