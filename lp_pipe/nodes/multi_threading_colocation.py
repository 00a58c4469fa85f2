"""Several nodes as one entry of the program, in threads of one process (Launchpad's MultiThreadingColocation)."""

import dataclasses
import logging
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from lp_pipe.context import NodeContext, StopSignal, context, entered
from lp_pipe.nodes.base import Node
from lp_pipe.nodes.colocation import Colocation
from lp_pipe.nodes.run_node import is_caused_by_peer, run_to_end
from lp_pipe.telemetry import waits
from lp_pipe.telemetry.tracebacks import stack_of

_log = logging.getLogger(__name__)


class MultiThreadingColocation(Colocation):
    """Runs `nodes` as threads of one node: one process, one entry in groups, status and errors.

    Any nodes may be inside, colocations too; their handles work as if they were outside. An inner failure is the
    colocation's failure: the other inner nodes get a stop, and the grace period to end.

    return_on_first_completed: end (with a stop for the others) when the first inner node has ended.
    """

    def __init__(self, nodes: Iterable[Node[Any]] = (), return_on_first_completed: bool = False) -> None:
        super().__init__(nodes)
        self._return_on_first_completed = return_on_first_completed

    def execute(self) -> None:
        self.check()
        _Threads(self.children, context(), self._return_on_first_completed).run()


class _Threads:
    """The inner nodes while they run. Each has a stop signal of its own, which the outer node's stop also sets."""

    def __init__(self, children: list[Node[Any]], outer: NodeContext, return_on_first_completed: bool) -> None:
        self._outer = outer
        self._return_on_first_completed = return_on_first_completed
        self._contexts = [
            dataclasses.replace(outer, stop_signal=StopSignal(), exit_stack=ExitStack()) for _ in children
        ]
        self._threads = [
            threading.Thread(target=self._run_child, args=pair, name=f"{outer.name}, {pair[0]!r}", daemon=True)
            for pair in zip(children, self._contexts, strict=True)
        ]
        self._changed = threading.Condition()
        self._ended = 0
        self._errors: list[BaseException] = []

    def run(self) -> None:
        """Run until all have ended, or one has failed and the others had their grace.

        Raises:
            BaseException: the first inner failure that another one did not cause.
        """
        for thread in self._threads:
            thread.start()
        self._outer.stop_signal.add(self._stop)
        with self._changed, waits.waiting(waits.IDLE, waits.Target(), node=self._outer):
            self._changed.wait_for(self._is_enough)
        is_early = not self._outer.is_stopping
        self._stop()
        self._join(time.monotonic() + self._outer.grace_s if is_early else None)
        causes = [error for error in self._errors if not is_caused_by_peer(error)]
        for error in [*causes, *self._errors][:1]:
            raise error

    def _run_child(self, child: Node[Any], node: NodeContext) -> None:
        with entered(node):
            node.prepare_thread()
            error = run_to_end(child, node)
        with self._changed:
            self._ended += 1
            if error is not None:
                self._errors.append(error)
            self._changed.notify_all()

    def _is_enough(self) -> bool:
        is_first_enough = self._return_on_first_completed and self._ended > 0
        return bool(self._errors) or is_first_enough or self._ended == len(self._threads)

    def _stop(self) -> None:
        for node in self._contexts:
            node.stop_signal.set()

    def _join(self, deadline: float | None) -> None:
        """Wait for the threads; those that do not end in time are left behind, as the launcher does in thread mode."""
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _log.warning(
                    "%s did not end within %.1f s after the stop and is left behind. It is at:\n%s",
                    thread.name,
                    self._outer.grace_s,
                    stack_of(thread),
                )
