"""One node's life as the coordinator sees it, over all its restarts."""

from dataclasses import dataclass

from lp_pipe.launch.plan import NodeSpec

_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 5.0


@dataclass(frozen=True)
class Failure:
    """How a node failed. `is_unavailable`: maybe only the echo of another node's end."""

    type_name: str
    message: str
    traceback: str = ""
    is_unavailable: bool = False

    @property
    def summary(self) -> str:
        return f"{self.type_name}: {self.message}"


@dataclass
class NodeRecord:
    """starting -> running -> finished | failed | stopped; or -> restarting -> starting, when its group restarts.

    error: the last failure, also of a node that runs again.
    """

    spec: NodeSpec
    state: str = "starting"
    pid: int = 0
    error: Failure | None = None
    started_at: float = 0.0
    restarts: int = 0
    is_down: bool = False

    @property
    def is_alive(self) -> bool:
        """Whether its code runs, or is about to."""
        return self.state in ("starting", "running")

    @property
    def may_register(self) -> bool:
        """Whether who waits for its server may go on waiting."""
        return self.is_alive or self.state == "restarting"

    @property
    def may_restart(self) -> bool:
        return self.spec.on_failure == "restart" and self.restarts < self.spec.max_restarts

    @property
    def backoff_s(self) -> float:
        """How long a node stays down before the restart that is due: 0.1 s, doubled each time, at most 5 s."""
        return min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(self.restarts - 1, 10))

    @property
    def why_gone(self) -> str:
        """For those who would call it."""
        name = self.spec.node_id
        if self.error is not None and self.state == "failed":
            return f"node {name} failed: {self.error.summary}"
        return f"node {name} has {self.state}: it serves no more"
