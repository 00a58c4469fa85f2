"""The coordinator's end of one node process's supervision stream."""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from lp_pipe.connections import Connection, Frame, frames
from lp_pipe.errors import Unavailable
from lp_pipe.launch.coordination.record import Failure
from lp_pipe.launch.coordination.supervisor import Supervisor
from lp_pipe.launch.coordination.view import View, from_wire
from lp_pipe.protos import supervision_pb2 as wire

_MENTION_BYTES = 64  # at most

OnHello = Callable[["NodeStream", wire.Hello], None]


class NodeStream:
    """on_hello(stream, hello): the process has said which node it is."""

    def __init__(self, connection: Connection, coordinator: Supervisor, on_hello: OnHello) -> None:
        self.connection = connection
        self.closed = threading.Event()
        self._say_hello = on_hello
        self._coordinator = coordinator
        self._node_id = ""
        self._stacks: dict[int, Future[str]] = {}
        self._answered_at = time.monotonic()
        self._view = View([], [], [])
        self._faults: dict[int, tuple[str, Future[int]]] = {}
        self.last_hits: dict[str, int] = {}  # of each fault, when the process has ended
        self._actions: dict[str, Callable[[Any], object]] = {
            "hello": self._on_hello,
            "register": self._on_register,
            "resolve": self._on_resolve,
            "kept_state": self._on_kept_state,
            "reserve_port": self._on_reserve_port,
            "inner_nodes": self._on_inner_nodes,
            "ping": lambda message: self._coordinator.node_calls(self._node_id, message.calls),
            "metrics": self._on_metrics,
            "stop_request": lambda message: self._coordinator.request_stop(),
            "hear": self._on_hear,
            "ended": self._on_ended,
            "stacks": self._on_stacks,
            "waits": self._on_waits,
            "fault_report": self._on_fault_report,
        }

    def send(self, payload: bytes | None = None, **message: Any) -> None:
        """Send one Supervision message; nothing happens when the process has ended."""
        body = wire.Supervision(**message).SerializeToString()
        buffers = () if payload is None else (payload,)
        with contextlib.suppress(Unavailable):  # the process has just ended; its exit is reported by the template
            self.connection.send(Frame(frames.SUPERVISION, body=body, buffers=buffers))

    def mention(self, **message: Any) -> None:
        """Send what is said again and again, unless the process has not read the last ones.

        One that is frozen must hold up neither who tells all the others, nor the stop.
        """
        if self.connection.has_room_for(_MENTION_BYTES):
            self.send(**message)

    def ask_stacks(self) -> "Future[str] | None":
        """Where its threads are, once it answers, which it may never do; None: it has ended."""
        if self.closed.is_set():
            return None
        answer: Future[str] = Future()
        self._stacks[id(answer)] = answer
        self.send(stacks=wire.Stacks(id=id(answer)))
        return answer

    def look(self, old_s: float) -> View:
        """What the process is at, as it said last; and ask again."""
        self.mention(waits=wire.Waits(old_s=old_s))
        return self._view._replace(silence_s=time.monotonic() - self._answered_at)

    def ask_fault(self, fault: wire.Fault) -> "Future[int]":
        """Done with how often the fault has struck in the node's process."""
        answer: Future[int] = Future()
        question = wire.Fault()
        question.CopyFrom(fault)
        question.id = id(answer)
        self._faults[question.id] = fault.rule, answer
        self.send(fault=question)
        if self.closed.is_set():
            self._forget_faults()
        return answer

    def on_frame(self, frame: Frame) -> None:
        message = wire.Supervision.FromString(bytes(frame.body))
        kind = message.WhichOneof("message")
        if kind in self._actions and (self._node_id or kind == "hello"):
            self._actions[kind](getattr(message, kind))

    def on_close(self, reason: str) -> None:
        self.closed.set()
        self._forget_faults()

    def _on_hello(self, message: wire.Hello) -> None:
        self._node_id = message.node_id
        self._view = View([], [], [], self._node_id)  # it may never say what it is at
        self._say_hello(self, message)

    def _on_register(self, message: wire.Register) -> None:
        if message.endpoint:
            self._coordinator.register(message.address, message.endpoint)
        else:
            self._coordinator.withdraw(message.address, message.failing)

    def _on_hear(self, message: wire.Hear) -> None:
        self._answer(message.id, self._coordinator.hear())

    def _on_resolve(self, message: wire.Resolve) -> None:
        ask = self._coordinator.find if message.now else self._coordinator.resolve
        self._answer(message.id, ask(message.address))

    def _on_kept_state(self, message: wire.KeptState) -> None:
        if message.watch:
            self._answer(message.id, self._coordinator.watch_state(list(message.addresses)))
        else:
            self._answer(message.id, self._coordinator.has_lost_state(message.addresses[0]))

    def _on_reserve_port(self, message: wire.ReservePort) -> None:
        try:
            answer = wire.Resolved(id=message.id, endpoint=self._coordinator.reserve_port(message.address))
        except RuntimeError as error:
            answer = wire.Resolved(id=message.id, unavailable=str(error), not_in_program=True)
        self.send(resolved=answer)

    def _on_inner_nodes(self, message: wire.InnerNodes) -> None:
        if message.stop:
            self._coordinator.stop_inner_nodes(message.colocation)
            return
        self._answer(message.id, self._coordinator.inner_nodes_ended(message.colocation))

    def _answer(self, number: int, outcome: "Future[str]") -> None:
        outcome.add_done_callback(lambda done: self.send(resolved=_resolved(number, done)))

    def _on_metrics(self, message: wire.Metrics) -> None:
        if message.event:
            self._coordinator.log_event(self._node_id, message.event, message.step)
            return
        step = message.step if message.has_step else None
        values = dict(zip(message.names, message.values, strict=True))
        self._coordinator.log_metrics(self._node_id, values, step)

    def _on_ended(self, message: wire.Ended) -> None:
        failure = None
        if message.type_name:
            failure = Failure(
                message.type_name, message.message, message.traceback, message.is_unavailable, message.is_plain_echo
            )
        self._coordinator.node_ended(self._node_id, failure)

    def _on_waits(self, message: wire.Waits) -> None:
        self._view = from_wire(message, self._node_id)
        self._answered_at = time.monotonic()

    def _on_stacks(self, message: wire.Stacks) -> None:
        answer = self._stacks.pop(message.id, None)
        if answer is not None:
            answer.set_result(message.text)

    def _on_fault_report(self, message: wire.FaultReport) -> None:
        if message.rule:
            self.last_hits[message.rule] = message.hits
        else:
            self._answer_fault(message.id, message.hits)

    def _forget_faults(self) -> None:
        for number, (rule, _) in list(self._faults.items()):
            self._answer_fault(number, self.last_hits.get(rule, 0))

    def _answer_fault(self, number: int, hits: int) -> None:
        _, answer = self._faults.pop(number, ("", None))
        if answer is not None:
            answer.set_result(hits)


def _resolved(number: int, done: "Future[str]") -> wire.Resolved:
    error = done.exception()
    if error is None:
        return wire.Resolved(id=number, endpoint=done.result())
    return wire.Resolved(id=number, unavailable=str(error), not_in_program=not isinstance(error, Unavailable))
