"""One process's (or thread's) life as the coordinator sees it, over all its restarts."""

from dataclasses import dataclass, field

from lp_pipe.launch.coordination.call_rate import CallRate
from lp_pipe.launch.plan.spec import NodeSpec

_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 5.0


@dataclass(frozen=True)
class Failure:
    """How a node failed.

    is_unavailable: maybe only the echo of another node's end.
    is_plain_echo: not raised while that was dealt with either, as by a save on the way out: after a stop, no failure.
    is_hang: the launcher killed the node because it made no progress: its group's `on_hang` decides what follows.
    """

    type_name: str
    message: str
    traceback: str = ""
    is_unavailable: bool = False
    is_plain_echo: bool = False
    is_hang: bool = False

    @property
    def summary(self) -> str:
        return f"{self.type_name}: {self.message}"


@dataclass
class NodeRecord:
    """starting -> running -> finished | failed | stopped; or -> restarting -> starting, when it may start again.

    error: the last failure, also of a node that runs again.
    restarts: how often it was started again on its own; retries_left: how often it still may be.
    waiting: what it has waited for longer than the program's limit. started_at: of time.monotonic.
    is_gone: nothing is left of its process or thread.
    is_ending: it was told to end, and is not gone. is_ending_unasked: it had begun to before that, or to the
        program's stop; should it have failed, then that comes first.
    """

    spec: NodeSpec
    state: str = "starting"
    pid: int = 0
    error: Failure | None = None
    started_at: float = 0.0
    restarts: int = 0
    retries_left: int = field(init=False)
    waiting: str | None = None
    is_gone: bool = False
    is_ending: bool = False
    is_ending_unasked: bool = False
    call_rate: CallRate = field(default_factory=CallRate)

    def __post_init__(self) -> None:
        self.retries_left = self.spec.retries

    @property
    def is_alive(self) -> bool:
        """Whether its code runs, or is about to."""
        return self.state in ("starting", "running")

    @property
    def is_down(self) -> bool:
        """Whether nothing is left of it, and nothing will come."""
        return self.is_gone and self.state != "restarting"

    @property
    def may_register(self) -> bool:
        """Whether who waits for its server may go on waiting."""
        return self.is_alive or self.state == "restarting"

    @property
    def why_gone(self) -> str:
        """For those who would call it."""
        name = self.spec.node_id
        if self.error is not None and self.state == "failed":
            return f"node {name} failed: {self.error.summary}"
        return f"node {name} has {self.state}: it serves no more"

    def start_again(self) -> None:
        """It failed, and is due to be started again."""
        self.state = "starting"
        self.is_gone = self.is_ending_unasked = False

    def put_down(self) -> None:
        """Nothing is left of it, and it will not be started again."""
        if self.may_register:
            self.state = "stopped"
        self.is_gone = True
        self.is_ending = False


def backoff_s(restarts: int) -> float:
    """How long a node stays down before a restart: 0.1 s, doubled each time, at most 5 s."""
    return min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(restarts - 1, 10))
