"""The record of one process or thread of a node."""

import time
from dataclasses import dataclass, field

from lp_pipe.launch.coordination.call_rate import CallRate
from lp_pipe.launch.plan.spec import NodeSpec
from lp_pipe.launch.supervision.lifecycle import TRANSITIONS, Backoff, NodeState
from lp_pipe.launch.supervision.messages import Failure


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
        if self.may_register:
            self.become(NodeState.STOPPING)
        self.become(self.state.when_gone)
        self.is_told_to_end = False
