"""The choice of a program's first failure: the cause, not its consequence in nodes that called the dead one."""

import time

from lp_pipe.errors import NodeError
from lp_pipe.launch.plan.spec import NodeSpec
from lp_pipe.launch.supervision.messages import Failure

# An Unavailable is mostly the echo of another node's death, whose news may come a moment later: wait so long for it.
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
        """Take a consequence whose cause did not show up in time as the first failure; return whether that happened."""
        if self._echo is None or self.first is not None:
            return False
        when, spec, failure = self._echo
        if not is_final and time.monotonic() < when:
            return False
        self._echo = None
        self.first = (spec, failure)
        return True
