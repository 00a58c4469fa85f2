"""The one object that knows the whole program: addresses, states, exits, the first failure, the stop."""

import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from lp_pipe.errors import NodeError, Unavailable
from lp_pipe.launch.coordination.directory import Directory, Settlement, SettlingLock
from lp_pipe.launch.coordination.meetings import Meetings
from lp_pipe.launch.coordination.node_group import CallRate, NodeRecord
from lp_pipe.launch.coordination.node_lifecycle import ECHO_PATIENCE_S, NodeLifecycles, Order
from lp_pipe.launch.coordination.ports import Ports
from lp_pipe.launch.plan.launch_plan import LaunchPlan
from lp_pipe.launch.supervision import messages
from lp_pipe.launch.supervision.messages import Failure, Notice, Question
from lp_pipe.membership import Membership
from lp_pipe.telemetry.events import EventLog
from lp_pipe.telemetry.metrics import MetricsLog
from lp_pipe.telemetry.names import name_list
from lp_pipe.telemetry.tracebacks import fold_traceback

M = TypeVar("M")
R = TypeVar("R")

_log = logging.getLogger(__name__)

_SHOWN_LINES = 6  # of the traceback of a failure that does not end the program


class Coordinator:
    """Thread-safe; every method returns at once, so that any thread of a connection may call it.

    endpoint_of: returns where the owner of an address listens. reserve_port: returns a free "host:port" for a user's
        own server; by default a port of this host.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        endpoint_of: Callable[[str], str],
        metrics: MetricsLog,
        reserve_port: "Callable[[str], str | Future[str]] | None" = None,
    ) -> None:
        self.plan = plan
        self._endpoint_of = endpoint_of
        self._metrics = metrics
        self._lifecycles = NodeLifecycles(plan.nodes, self._withdraw_all)
        self._directory = Directory()
        self._meetings = Meetings(self._lifecycles.nodes, self._why_stopping, self._tell_membership)
        self._inner_ended: list[tuple[str, Future[str]]] = []  # by colocation: what waits for its inner nodes
        self._reserve_port = reserve_port or Ports().reserve
        self._takers = self._table()
        self._settling = SettlingLock(self._settled_by_change)
        self._lock, self._changed = self._settling.lock, self._settling.changed
        self._changing = self._settling.changing
        self._hurry = False
        self._is_over = False
        self._events: EventLog | None = None
        self._told_ends: set[str] = set()
        self._take_spans: Callable[[str, messages.SpansRecorded], object] | None = None
        self.was_stopped_from_outside = False

    def keep_events(self, events: EventLog) -> None:
        """Write events there from now on."""
        self._events = events

    def spans_to(self, take: Callable[[str, messages.SpansRecorded], object] | None) -> None:
        """Give spans of a trace, with their node, to `take` from now on; None: drop them."""
        self._take_spans = take

    def note_event(self, event: str, node_id: str | None = None, **facts: Any) -> None:
        """Write an event, if the run keeps them."""
        if self._events is not None:
            self._events.write(event, node_id, **facts)

    # Messages of nodes and of what runs them (NodeApi).

    def tell(self, node_id: str, notice: Notice) -> None:
        self._takers[type(notice)](node_id, notice)

    def ask(self, node_id: str, question: Question[R]) -> "Future[R]":
        answer: Future[Any] = Future()
        try:
            found = self._takers[type(question)](node_id, question)
        except Exception as error:
            answer.set_exception(error)
            return answer
        if isinstance(found, Future):
            return found
        answer.set_result(found)
        return answer

    def _table(self) -> dict[type, Callable[[str, Any], object]]:
        """Return what takes each kind of message: its arguments are a node_id and the message."""
        table: dict[type, Callable[[str, Any], object]] = {}

        def on(kind: type[M], take: Callable[[str, M], object]) -> None:
            table[kind] = take

        on(messages.Register, lambda node_id, message: self.register(message.address, message.endpoint))
        on(messages.Withdraw, lambda node_id, message: self.withdraw(message.address, message.is_failing))
        on(messages.Find, lambda node_id, message: self.find(message.address))
        on(messages.Resolve, lambda node_id, message: self.resolve(message.address))
        on(messages.WatchState, lambda node_id, message: self.watch_state(message.addresses))
        on(messages.HasLostState, lambda node_id, message: self.has_lost_state(message.address))
        on(messages.ReservePort, lambda node_id, message: self.reserve_port(message.address))
        on(messages.InnerNodesEnded, lambda node_id, message: self.inner_nodes_ended(message.colocation))
        on(messages.StopInnerNodes, lambda node_id, message: self.stop_inner_nodes(message.colocation))
        on(messages.RequestStop, lambda node_id, message: self.request_stop())
        on(messages.Meet, self.meet)
        on(messages.WatchGeneration, lambda node_id, message: self.generation_over(message.group, message.generation))
        on(messages.Hear, lambda node_id, message: "")  # all messages of one node come in order
        on(messages.LogMetrics, lambda node_id, message: self.log_metrics(node_id, message.values, message.step))
        on(messages.LogEvent, lambda node_id, message: self.log_event(node_id, message.event, message.facts))
        on(messages.SpansRecorded, self._spans_recorded)
        on(messages.CallsTaken, lambda node_id, message: self.calls_of_nodes({node_id: message.calls}))
        on(messages.Started, lambda node_id, message: self.node_started(node_id, message.pid))
        on(
            messages.CodeEnded,
            lambda node_id, message: self.node_ended(node_id, message.failure, message.can_restart),
        )
        on(messages.EndsUnasked, lambda node_id, message: self.node_ends_unasked(node_id))
        on(messages.Gone, lambda node_id, message: self.node_down(node_id))
        return table

    # What nodes ask for.

    def endpoint_for(self, address: str) -> str:
        """Return where the owner of the address listens.

        Raises:
            RuntimeError: no node of this program owns it.
        """
        if address not in self.plan.owners:
            raise self._not_in_program()
        return self._endpoint_of(address)

    def register(self, address: str, endpoint: str) -> None:
        """Note that the server of an address listens, and settle the futures of `resolve`."""
        with self._changing():
            self._settling.settle(self._directory.register(address, endpoint))
            owner = self.plan.owners.get(address)
            if owner is not None and self._lifecycles.serves(owner):
                self.note_event("ready", owner)

    def withdraw(self, address: str, is_failing: bool) -> None:
        """Note that the server of an address has closed. is_failing: because its node fails, as it will report."""
        with self._lock:
            self._directory.withdraw([address])
            if is_failing and not self._lifecycles.stop_requested:
                self._lifecycles.ends_unasked(self.plan.owners[address])

    def resolve(self, address: str) -> "Future[str]":
        """Return a future of the endpoint; Unavailable once the owner's node cannot register any more."""
        future: Future[str] = Future()
        with self._changing():
            outcome = self._resolved(address)
            if outcome is None:
                self._directory.wait(address, future)
            else:
                self._settling.settle([Settlement(future, outcome)])
        return future

    def find(self, address: str) -> "Future[str]":
        """Return the endpoint as a settled future; Unavailable if no server is registered there."""
        future: Future[str] = Future()
        Settlement(future, self.find_all([address])[0]).carry_out()
        return future

    def find_all(self, addresses: Iterable[str]) -> list[str | Exception]:
        """Return for each address its endpoint or error. The lock is taken once: hundreds of agents ask at a time."""
        with self._lock:
            outcomes = [(address, self._resolved(address)) for address in addresses]
        return [outcome or Unavailable(f"no server listens yet at {address}") for address, outcome in outcomes]

    def watch_state(self, addresses: Sequence[str]) -> "Future[str]":
        """Note that servers of these addresses hold checkpointed state; done once the node of one is to restart."""
        loss: Future[str] = Future()
        with self._lock:
            self._directory.watch_state(addresses, loss)
        return loss

    def has_lost_state(self, address: str) -> bool:
        """Return whether the server that is about to listen there was started again without such state."""
        with self._lock:
            return self._directory.has_lost_state(address)

    def new_endpoint(self) -> str:
        """Return an endpoint of no address, for a node that tells the others itself where it listens."""
        return self._endpoint_of(uuid.uuid4().hex[:16])

    def meet(self, node_id: str, asked: messages.Meet) -> "Future[Membership]":
        """Return a future of the members of the node's group, once all its live nodes have asked."""
        future: Future[Membership] = Future()
        with self._changing():
            settlements = self._meetings.ask(node_id, asked.group, asked.generation, asked.endpoint, future)
            self._settling.settle(settlements)
        return future

    def generation_over(self, group: str, generation: int) -> "Future[str]":
        """Return a future of the reason for which this generation of the group is over, once it is."""
        over: Future[str] = Future()
        with self._changing():
            self._settling.settle(self._meetings.watch(group, generation, over))
        return over

    def inner_nodes_ended(self, colocation: str) -> "Future[str]":
        """Return a future that is done once all inner nodes of a MultiProcessingColocation are down."""
        future: Future[str] = Future()
        with self._changing():
            self._inner_ended.append((colocation, future))
        return future

    def stop_inner_nodes(self, colocation: str) -> None:
        """Take the inner nodes of a MultiProcessingColocation down, and not the program."""
        with self._changing():
            self._lifecycles.end_inner_nodes(colocation)

    def reserve_port(self, address: str) -> "str | Future[str]":
        """Return a free "host:port", the same for every question about the address."""
        self.plan.owner_of(address)  # raises for an address that no node owns, before a port is taken
        return self._reserve_port(address)

    def request_stop(self, hurry: bool = False, from_outside: bool = False) -> bool:
        """Begin an ordered stop; return whether the program was to go on. hurry: cut the grace period short.

        from_outside: the launcher or another terminal asks, and not a node.
        """
        with self._changing():
            is_first, self._lifecycles.stop_requested = self._lifecycles.must_go_on, True
            self._hurry = self._hurry or hurry
            self.was_stopped_from_outside |= is_first and from_outside
        return is_first

    def log_metrics(self, node_id: str, values: Mapping[str, float], step: int | None) -> None:
        """Record numbers under the name of the node, whichever part of it logged them."""
        self._metrics.record(self._name_of(node_id), values, step)

    def _spans_recorded(self, node_id: str, message: messages.SpansRecorded) -> None:
        take = self._take_spans
        if take is not None:
            take(node_id, message)

    def log_event(self, node_id: str, event: str, facts: Mapping[str, Any]) -> None:
        """Record what has happened, under the node's name; in the metrics, too, if their steps come again."""
        name = self._name_of(node_id)
        self.note_event(event, name, **facts)
        if event == "resumed":
            self._metrics.record_event(name, event, facts["step"])

    # What the hosts report.

    def node_started(self, node_id: str, pid: int, call_rate: CallRate | None = None) -> None:
        """Note that the process or thread has started. call_rate: of its servers, where these are in this process."""
        with self._changing():
            self._lifecycles.started(node_id, pid)
            self._lifecycles.nodes[node_id].call_rate = call_rate or CallRate()
            self.note_event("start", node_id, pid=pid)

    def calls_of_nodes(self, taken: Mapping[str, int]) -> None:
        """Note how many calls the servers of each node have taken since it started."""
        with self._lock:
            for node_id, calls in taken.items():
                self._lifecycles.nodes[node_id].call_rate.count(calls)

    def node_ended(self, node_id: str, failure: Failure | None, can_restart: bool = True) -> None:
        """Note that the node's code has ended. Only the first report counts, not the process's exit after it."""
        with self._changing():
            news = self._lifecycles.ended(node_id, failure, can_restart)
            if failure is not None and self._lifecycles.nodes[node_id].error is failure:
                self.note_event("death", node_id, how=failure.summary)
        if news and failure is not None:  # not with the lock held: a handler of the user's may ask for the status
            _log.warning("%s", "\n  ".join([news, *fold_traceback(failure.traceback)[-_SHOWN_LINES:]]))

    def node_ends_unasked(self, node_id: str) -> None:
        """Note that the node began to end before it was told to; `node_ended` will say how."""
        with self._lock:
            self._lifecycles.ends_unasked(node_id)

    def node_down(self, node_id: str) -> None:
        """Note that nothing of the node is left, or that it did not end in time and was left behind."""
        with self._changing():
            self._lifecycles.gone(node_id)

    # What the run asks.

    def wait_for_room(self, node_ids: Collection[str]) -> None:
        """Note, before the start, that there is no room for these nodes now."""
        if node_ids:
            _log.warning(
                "program %r begins without %s, for which there is no room: they wait for hosts that join it",
                self.plan.program,
                name_list(sorted(node_ids)),
            )
        with self._changing():
            self._lifecycles.wait_for_room(node_ids)

    def may_start_late(self, node_id: str) -> bool:
        """Return whether the node is down and would be started on a host that has just joined."""
        with self._lock:
            return self._lifecycles.may_start_late(node_id)

    def start_late(self, node_ids: Sequence[str]) -> None:
        """Let the supervising thread start these nodes, which `may_start_late`."""
        with self._changing():
            self._lifecycles.start_late(node_ids)
            self._told_ends.difference_update(node_ids)

    def status(self) -> dict[str, list[dict[str, Any]]]:
        """Return the state, pid, last error and restarts of every node, by label."""
        with self._lock:
            table: dict[str, list[dict[str, Any]]] = {}
            for group in self._lifecycles.groups.values():
                table.setdefault(group.spec.label, []).append(group.row())
            return table

    def states(self) -> dict[str, str]:
        """Return the state of every process and thread, by node_id, as a word of `status`."""
        with self._lock:
            return {node_id: record.state.word for node_id, record in self._lifecycles.nodes.items()}

    def note_waits(self, waiting: Mapping[str, str]) -> None:
        """Set, for `status`, what each node has waited for longer than the program's limit, by node_id."""
        with self._lock:
            for node_id, record in self._lifecycles.nodes.items():
                record.waiting = waiting.get(node_id)

    def nodes_up(self) -> list[str]:
        """Return the names of the nodes of which something is left."""
        with self._lock:
            return [
                name for name, group in self._lifecycles.groups.items() if not all(part.is_down for part in group.parts)
            ]

    def main_part(self, name: str) -> str:
        """Return the node_id of a node's part that failed first, or else of its first part."""
        with self._lock:
            first = self._lifecycles.first_failure.first
            if first is not None and first[0].name == name:
                return first[0].node_id
            return self._lifecycles.groups[name].spec.node_id

    def is_running(self, node_id: str) -> bool:
        """Return whether the node's code has not ended."""
        with self._lock:
            return self._lifecycles.nodes[node_id].state.is_alive

    def uptime_s(self, node_id: str) -> float:
        """Return for how long the node's process or thread has been up; 0 if its code has ended."""
        with self._lock:
            record = self._lifecycles.nodes[node_id]
            return time.monotonic() - record.started_at if record.started_at and record.state.is_alive else 0.0

    def is_gone(self, node_id: str) -> bool:
        """Return whether nothing is left of the node, also when it will start again."""
        with self._lock:
            return self._lifecycles.nodes[node_id].state.is_gone

    def must_end(self, node_id: str) -> bool:
        """Return whether the node was told to end, alone or with the whole program."""
        with self._lock:
            node = self._lifecycles.nodes[node_id]
            return (self._lifecycles.stop_requested or node.is_told_to_end) and not node.ends_unasked

    def still_ending(self, node_ids: Iterable[str]) -> list[str]:
        """Return which of the nodes were told to end and are not gone."""
        with self._lock:
            return [node_id for node_id in node_ids if self._lifecycles.nodes[node_id].is_told_to_end]

    def wait_for_end(self, node_ids: Sequence[str], patience_s: float | None = None) -> bool:
        """Wait until the nodes that were told to end are gone; False after the patience, and at once in a hurry."""
        with self._changed:
            nodes = [self._lifecycles.nodes[node_id] for node_id in node_ids]
            is_impatient = patience_s is not None

            def all_ended() -> bool:
                while nodes and not nodes[-1].is_told_to_end:  # never looked at again: ten thousand end one by one
                    nodes.pop()
                return not nodes

            self._changed.wait_for(lambda: (self._hurry and is_impatient) or all_ended(), patience_s)
            return all_ended()

    def next_order(self) -> Order | None:
        """Wait until something is to be done, and return it. Nodes that are to be started again count as starting.

        Returns None once the program must stop (a stop was requested, or a node failed) or all nodes are down; then
        all nodes are to be taken down.
        """
        with self._changing():
            while self._lifecycles.must_go_on:
                if (order := self._lifecycles.next_order()) is not None:
                    if order.is_restart:
                        self._tell_restarts(order.node_ids)
                    return order
                if self._lifecycles.first_failure.settle():
                    self._lifecycles.stop_requested = True
                else:
                    self._changed.wait(self._lifecycles.until_next_decision())
            self._lifecycles.end_all()
        return None

    def finish(self) -> None:
        """Note that the program is over, and give up all waits for its servers."""
        with self._changing():
            self._lifecycles.first_failure.settle(is_final=True)
            self._is_over = True
            self._settling.settle(self._directory.give_all_up(f"program {self.plan.program!r} has ended"))

    def why_gone(self) -> dict[str, str]:
        """Return for every address why no server listens there any more."""
        lifecycles, owners = self._lifecycles, self.plan.owners
        with self._lock:
            return {address: lifecycles.why_gone(lifecycles.nodes[owner]) for address, owner in owners.items()}

    def failure(self) -> NodeError | None:
        """Return the first failure, as `wait()` raises it."""
        return next(iter(self.failures()), None)

    def settled_failure(self, dying: Mapping[str, int]) -> NodeError | None:
        """Return the first failure, but wait for its cause while there is only a consequence of another one.

        dying: pids by node_id of processes that have ended without a report so far; wait for these, too.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._lifecycles.are_settled(dying), 2 * ECHO_PATIENCE_S)
        return self.failure()

    def failures(self) -> list[NodeError]:
        """Return the first failure and all that came after it."""
        with self._lock:
            return self._lifecycles.first_failure.errors()

    def _name_of(self, node_id: str) -> str:
        record = self._lifecycles.nodes.get(node_id)
        return record.spec.name if record is not None else node_id

    def _not_in_program(self) -> RuntimeError:
        return RuntimeError(f"this handle's node is not in program {self.plan.program!r}, so it cannot be reached")

    # With the lock held.

    def _resolved(self, address: str) -> str | Exception | None:
        owner = self.plan.owners.get(address)
        if owner is None:
            return self._not_in_program()
        if (endpoint := self._directory.find(address)) is not None:
            return endpoint
        record = self._lifecycles.nodes[owner]
        if not record.may_register or self._is_over:
            return Unavailable(self._lifecycles.why_gone(record))
        return None

    def _why_stopping(self) -> str:
        """Return why the program stops; "" while it goes on."""
        if not self._lifecycles.stop_requested and not self._is_over:
            return ""
        first = self._lifecycles.first_failure.first
        cause = "" if first is None else f", because node {first[0].node_id} failed: {first[1].summary}"
        return f"program {self.plan.program!r} stops{cause}"

    def _settled_by_change(self) -> list[Settlement]:
        return [*self._inner_settled(), *self._meetings.settled()]

    def _inner_settled(self) -> list[Settlement]:
        ended = [
            item
            for item in self._inner_ended
            if all(record.is_down for record in self._lifecycles.inner_nodes(item[0]))
        ]
        for item in ended:
            self._inner_ended.remove(item)
        return [Settlement(future, "") for _, future in ended]

    def _tell_restarts(self, node_ids: Iterable[str]) -> None:
        for node_id in node_ids:
            group = self._lifecycles.groups[self._lifecycles.nodes[node_id].spec.name]
            self.note_event("restart", node_id, restarts=group.row()["restarts"])

    def _tell_membership(self, group: str, generation: int, members: Sequence[str]) -> None:
        self.note_event("membership", None, group=group, generation=generation, members=members)

    def _withdraw_all(self, record: NodeRecord) -> None:
        """Forget where the node listened, and settle the futures that wait for it in vain."""
        node_id = record.spec.node_id
        if record.is_down and node_id not in self._told_ends:
            self._told_ends.add(node_id)
            self.note_event("end", node_id, state=record.state.word)
        self._directory.withdraw(record.spec.addresses)
        self._settling.settle(self._meetings.leave(record))
        if record.state.will_restart:
            self._settling.settle(self._directory.lose_state(record.spec.addresses, record.spec.node_id))
        if not record.may_register:
            self._settling.settle(self._directory.give_up(record.spec.addresses, self._lifecycles.why_gone(record)))
