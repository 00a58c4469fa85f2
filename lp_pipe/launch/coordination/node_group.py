"""A node of the program as its user sees it, with all processes and threads that are parts of it."""

import time
from dataclasses import dataclass, field
from typing import Any

from lp_pipe.launch.coordination.record import NodeRecord
from lp_pipe.launch.plan.spec import NodeSpec
from lp_pipe.launch.supervision.lifecycle import Backoff, NodeState
from lp_pipe.launch.supervision.messages import Failure

# The state of a row with several parts: the first of these that any of them is in.
_STATES = ("failed", "running", "starting", "restarting", "stopped", "finished")


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
            part.become(NodeState.RESTARTING)  # also one whose own restart had been given up
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
