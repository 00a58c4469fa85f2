"""The records of a node's processes or threads, and of the node with all of them, as its user sees it."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lp_pipe.launch.plan.spec import NodeSpec
from lp_pipe.launch.supervision.lifecycle import TRANSITIONS, Backoff, NodeState
from lp_pipe.launch.supervision.messages import Failure

_WINDOW_S = 1.0


class CallRate:
    """The mean over the last one to three seconds, computed from totals that are counted now and then.

    ask: returns the total where the servers are in this process, or None if there is no server.
    """

    def __init__(self, ask: Callable[[], int | None] | None = None) -> None:
        self._ask = ask
        self._totals = deque([(time.monotonic(), 0)], maxlen=3)

    def count(self, calls: int) -> None:
        """calls: the total by now."""
        now = time.monotonic()
        if len(self._totals) > 1 and now - self._totals[-2][0] < _WINDOW_S:
            self._totals.pop()
        self._totals.append((now, calls))

    @property
    def per_second(self) -> float | None:
        """The rate; None for a node without servers, and before the first report."""
        if self._ask is not None:
            calls = self._ask()
            if calls is None:
                return None
            self.count(calls)
        (began, first), (ended, last) = self._totals[0], self._totals[-1]
        return round((last - first) / (ended - began), 1) if ended > began else None


@dataclass
class NodeRecord:
    """The coordinator's record of one process or thread of a node, over all its restarts.

    error: the last failure, also of a node that runs again.
    restarts: how often it was started again on its own; retries_left: how often it still may be.
    waiting: what it has waited for longer than the program's limit.
    started_at, serves_since: by time.monotonic; 0.0: not yet. It serves from the registration of its first server on.
    is_told_to_end: it was told to end, and is not gone.
    ends_unasked: it had begun to end before it was told to, or the program's stop was requested. If it turns out to
        have failed, that failure comes before the stop.
    """

    spec: NodeSpec
    state: NodeState = NodeState.STARTING
    pid: int = 0
    error: Failure | None = None
    started_at: float = 0.0
    serves_since: float = 0.0
    restarts: int = 0
    retries_left: int = field(init=False)
    backoff: Backoff = field(default_factory=Backoff)
    waiting: str | None = None
    is_told_to_end: bool = False
    ends_unasked: bool = False
    call_rate: CallRate = field(default_factory=CallRate)

    def __post_init__(self) -> None:
        self.retries_left = self.spec.retries

    @property
    def is_down(self) -> bool:
        """Whether nothing is left of it, and nothing will come."""
        return self.state.is_gone and not self.state.will_restart

    @property
    def may_register(self) -> bool:
        """Whether its servers listen, or may do so later."""
        return self.state.is_alive or self.state.will_restart

    def back_off_s(self, backoff: Backoff) -> float:
        """Return how long to wait before its restart, after its failure now."""
        up_s, served_s = (time.monotonic() - since if since else 0.0 for since in (self.started_at, self.serves_since))
        return backoff.after(up_s, served_s)

    @property
    def why_gone(self) -> str:
        """Why calls to its servers fail, for the error of such a call."""
        name = self.spec.node_id
        if self.state is NodeState.WAITING:
            return f"node {name} waits for a host with room for it"
        if self.error is not None and self.state.word == "failed":
            return f"node {name} failed: {self.error.summary}"
        return f"node {name} has {self.state.word}: it serves no more"

    def become(self, state: NodeState) -> None:
        """Change the state; what is gone gets the state that follows `state` then."""
        if self.state.is_gone:
            state = state.when_gone
        if state is not self.state:
            assert state in TRANSITIONS[self.state], f"{self.spec.node_id}: from {self.state.name} to {state.name}"
            self.state = state

    def leave(self) -> None:
        """Note that nothing is left of it for now or for ever, as its state says."""
        self.become(self.state.when_gone)
        self.is_told_to_end, self.pid = False, 0

    def start_again(self) -> None:
        """Note that it is started again from now on."""
        self.become(NodeState.STARTING)
        self.ends_unasked, self.started_at, self.serves_since = False, 0.0, 0.0

    def put_down(self) -> None:
        """Note that nothing is left of it, and that it will not be started again."""
        if self.may_register or self.state is NodeState.WAITING:
            self.become(NodeState.STOPPING)
        self.become(self.state.when_gone)
        self.is_told_to_end = False


# The state of a row with several parts: the first of these that any of them is in.
_STATES = ("failed", "running", "starting", "restarting", "waiting", "stopped", "finished")


@dataclass
class NodeGroup:
    """The parts of one node. There is usually one; the processes of a MultiProcessingColocation start again together.

    restarts: of the whole, by the policy of its group; those of single parts (their retries) come on top.
    is_restarting: its parts end, to be started again when all are gone.
    """

    parts: list[NodeRecord]
    restarts: int = 0
    is_restarting: bool = False
    backoff: Backoff = field(default_factory=Backoff)

    @property
    def spec(self) -> NodeSpec:
        return self.parts[0].spec

    def policy_for(self, failure: Failure) -> str:
        """Return what the node's group asks for after this failure: "stop", "restart" or "ignore"."""
        policy = self.spec.on_hang if failure.is_hang else self.spec.on_failure
        return "stop" if failure.is_final and policy == "restart" else policy

    def may_restart(self, policy: str) -> bool:
        """Return whether the policy is to start the node again, and the node has restarts left."""
        limit = self.spec.max_restarts
        return policy == "restart" and (limit is None or self.restarts < limit)

    def fails_to_load_again(self, record: NodeRecord, failure: Failure) -> bool:
        """Return whether a part that restarts without limit could not be loaded, twice in a row.

        Its group has no limit for what its code does; a module that is missing stays missing, and an object whose
        loading crashes the process does so again.
        """
        before = record.error
        is_repeated = failure.is_loading and before is not None and before.is_loading
        return is_repeated and not failure.is_unavailable and self.spec.max_restarts is None

    def is_vital(self, record: NodeRecord) -> bool:
        """Return whether a failure of this part ends the program, because it is neither restarted nor ignored."""
        return not (record.retries_left or self.may_restart(self.spec.on_failure) or self.spec.on_failure == "ignore")

    def news_of(self, record: NodeRecord, failure: Failure, can_restart: bool) -> str:
        """Note that a part has failed, decide whether it restarts, and return what the log should say of that."""
        news = f"node {record.spec.node_id} failed: {failure.summary}"
        policy = self.policy_for(failure)
        may_retry = not failure.is_final and not (failure.is_hang and policy == "stop")
        if can_restart and record.retries_left and may_retry:
            record.retries_left -= 1
            record.restarts += 1
            record.become(NodeState.RESTARTING)
            done, limit = record.spec.retries - record.retries_left, record.spec.retries
            return f"{news}; retry {done} of {limit} in {record.back_off_s(record.backoff):g} s"
        if can_restart and self.may_restart(policy):
            self.restarts += 1
            self.is_restarting = True
            record.become(NodeState.RESTARTING)
            wait_s = record.back_off_s(self.backoff)
            of = "" if self.spec.max_restarts is None else f" of {self.spec.max_restarts}"
            return f"{news}; restart {self.restarts}{of} in {wait_s:g} s"
        record.become(NodeState.FAILING)
        if policy == "ignore":
            return f"{news}; the program goes on without it (on_failure='ignore')"
        return ""

    def due_with(self, record: NodeRecord) -> tuple[list[NodeRecord], float]:
        """Return the parts that are to be started now that nothing is left of `record`, and in how many seconds."""
        if not self.is_restarting:
            return [record], record.backoff.wait_s
        if not all(part.state.is_gone for part in self.parts):
            return [], 0.0
        self.is_restarting = False
        for part in self.parts:
            part.become(NodeState.RESTARTING)  # also after its own restart had been given up
            part.retries_left, part.backoff = part.spec.retries, Backoff()
        return self.parts, self.backoff.wait_s

    def row(self) -> dict[str, Any]:
        """Return the node's entry in `Run.status()`."""
        words = [part.state.word for part in self.parts]
        state = "restarting" if self.is_restarting else next(known for known in _STATES if known in words)
        running = [part for part in self.parts if part.state is NodeState.RUNNING]
        since = min(part.started_at for part in running) if state == "running" else None
        failures = sorted((part.error for part in self.parts if part.error), key=lambda error: error.is_unavailable)
        rates = [rate for part in running if (rate := part.call_rate.per_second) is not None]
        return {
            "state": state,
            "pid": next((part.pid for part in [*running, *self.parts] if part.pid), 0),
            "error": failures[0].summary if failures else None,
            "uptime_s": None if since is None else round(time.monotonic() - since, 1),
            "waiting": next((part.waiting for part in running if part.waiting), None),
            "restarts": self.restarts + sum(part.restarts for part in self.parts),
            "calls_per_s": sum(rates) if rates else None,
        }
