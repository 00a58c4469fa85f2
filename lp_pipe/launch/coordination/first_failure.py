"""Which failure was the first: the cause, and not its echo in the nodes that called the dead one."""

import time

from lp_pipe.errors import NodeError
from lp_pipe.launch.plan.spec import NodeSpec
from lp_pipe.launch.supervision.messages import Failure

# An Unavailable is mostly the echo of another node's death, whose news may come a moment later: wait so long for it.
# A killed process is reported after 1 s at the latest (its last frames, its last lines).
ECHO_PATIENCE_S = 2.0


class FirstFailure:
    """Judges failures as they come in. Not thread-safe: the coordinator holds its lock."""

    def __init__(self) -> None:
        self.first: tuple[NodeSpec, Failure] | None = None
        self.later: list[tuple[NodeSpec, Failure]] = []
        self._echo: tuple[float, NodeSpec, Failure] | None = None

    @property
    def due_at(self) -> float | None:
        """When `settle` has something to decide (time.monotonic)."""
        return self._echo[0] if self._echo is not None and self.first is None else None

    def errors(self) -> list[NodeError]:
        """The first failure, as `wait()` raises it, and the later ones; empty while there is no first one."""
        failed = [self.first, *self.later] if self.first is not None else []
        return [
            NodeError(spec.label, spec.index, failure.type_name, failure.message, failure.traceback)
            for spec, failure in failed
        ]

    def judge(self, spec: NodeSpec, failure: Failure, is_stopping: bool) -> bool:
        """Take a failure in; True when it is the first, and the program must stop."""
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
        """Believe an echo whose cause did not show up in time; True when it has become the first failure."""
        if self._echo is None or self.first is not None:
            return False
        when, spec, failure = self._echo
        if not is_final and time.monotonic() < when:
            return False
        self._echo = None
        self.first = (spec, failure)
        return True
