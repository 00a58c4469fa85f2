"""The states of one process or thread of a node, which state may follow which, and the times that they wait."""

from enum import Enum

_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 5.0
# A launcher that is silent for so long counts as dead, for the template and for its nodes. It pings every second.
LAUNCHER_PATIENCE_S = 8.0
# When the launcher has died, its nodes see their streams close and stop. Those that do not are killed after so long.
ORPHAN_S = 5.0


class NodeState(Enum):
    """A row for each state: the word for it in `Run.status()`, whether the code runs, whether the process is gone.

        STARTING ─► RUNNING ─┬─► FINISHING  ─► FINISHED
            ▲                ├─► FAILING    ─► FAILED
            │                ├─► STOPPING   ─► STOPPED
            │                └─► RESTARTING ─► DOWN ─┐
            └────────────────────────────────────────┘
                     the code ends ▲       ▲ the process (or thread) is gone

    STARTING and RUNNING count as code that runs: it does, or is about to. DOWN waits for its restart. WAITING has never
    started, and waits for a host with room; a node that is FAILED may get such a host, too (both: DOWN, STARTING).
    """

    STARTING = ("starting", True, False)
    RUNNING = ("running", True, False)
    FINISHING = ("finished", False, False)
    FAILING = ("failed", False, False)
    STOPPING = ("stopped", False, False)
    RESTARTING = ("restarting", False, False)
    FINISHED = ("finished", False, True)
    FAILED = ("failed", False, True)
    STOPPED = ("stopped", False, True)
    DOWN = ("restarting", False, True)
    WAITING = ("waiting", False, True)

    def __init__(self, word: str, is_alive: bool, is_gone: bool) -> None:
        self.word = word
        self.is_alive = is_alive
        self.is_gone = is_gone

    @property
    def will_restart(self) -> bool:
        """Whether it ends, or has ended, in order to be started again."""
        return self in (NodeState.RESTARTING, NodeState.DOWN)

    @property
    def when_gone(self) -> "NodeState":
        """The state that follows once nothing is left of the process; itself if that is so already."""
        return _WHEN_GONE.get(self, self)


_WHEN_GONE = {
    NodeState.FINISHING: NodeState.FINISHED,
    NodeState.FAILING: NodeState.FAILED,
    NodeState.STOPPING: NodeState.STOPPED,
    NodeState.RESTARTING: NodeState.DOWN,
}
_CODE_ENDS = frozenset(_WHEN_GONE)

# A part that has ended already starts again with the other parts of its node: hence RESTARTING and DOWN after each end.
# A restart that becomes impossible (the program stops, the template is lost) ends in STOPPED or FAILED.
TRANSITIONS: dict[NodeState, frozenset[NodeState]] = {
    NodeState.STARTING: _CODE_ENDS | {NodeState.RUNNING, NodeState.WAITING},
    NodeState.WAITING: frozenset({NodeState.DOWN, NodeState.STOPPED}),
    NodeState.RUNNING: _CODE_ENDS,
    NodeState.FINISHING: frozenset({NodeState.FINISHED, NodeState.RESTARTING}),
    NodeState.FAILING: frozenset({NodeState.FAILED, NodeState.RESTARTING}),
    NodeState.STOPPING: frozenset({NodeState.STOPPED, NodeState.RESTARTING}),
    NodeState.RESTARTING: frozenset({NodeState.DOWN, NodeState.STOPPING, NodeState.FAILING, NodeState.STOPPED}),
    NodeState.FINISHED: frozenset({NodeState.DOWN}),
    NodeState.FAILED: frozenset({NodeState.DOWN}),
    NodeState.STOPPED: frozenset({NodeState.DOWN}),
    NodeState.DOWN: frozenset({NodeState.STARTING, NodeState.STOPPED, NodeState.FAILED}),
}


class Backoff:
    """The seconds that a node stays down before each restart: 0.1, doubled for each further failure, at most 5.

    They begin anew once the node had served (its first server was registered) for longer than it was down before, or
    was up for more than 5 s. So a server that is killed now and then comes back at once. A node that takes a second to
    fail, whether in its constructor or in a function without a server, is started ever more rarely.
    """

    def __init__(self) -> None:
        self.wait_s = 0.0

    def after(self, uptime_s: float, served_s: float = 0.0) -> float:
        """Return how long to wait now, after a failure of a node that was up, and had served, for so long."""
        begins_anew = self.wait_s == 0.0 or served_s > self.wait_s or uptime_s > _LONGEST_BACKOFF_S
        self.wait_s = _FIRST_BACKOFF_S if begins_anew else min(_LONGEST_BACKOFF_S, 2 * self.wait_s)
        return self.wait_s
