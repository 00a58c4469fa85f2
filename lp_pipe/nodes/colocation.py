"""Several nodes as one entry of the program, in threads of one process (Launchpad's MultiThreadingColocation)."""

import dataclasses
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

from lp_pipe.address import Address
from lp_pipe.context import NodeContext, StopSignal, context, entered
from lp_pipe.handles import Handle, NoClientHandle
from lp_pipe.nodes.base import HandleT, Node
from lp_pipe.nodes.execution import is_echo, run_to_end

_log = logging.getLogger(__name__)


class MultiThreadingColocation(Node[NoClientHandle]):
    """Runs `nodes` as threads of one node: one process, one entry in groups, status and errors.

    Any nodes may be inside, colocations too; their handles work as if they were outside. An inner failure is the
    colocation's failure: the other inner nodes get a stop, and the grace period to end.

    return_on_first_completed: end (with a stop for the others) when the first inner node has ended.
    """

    def __init__(self, nodes: Iterable[Node[Any]] = (), return_on_first_completed: bool = False) -> None:
        super().__init__(type(self))  # the base class wants a function; nothing here calls it
        self._children: list[Node[Any]] = []
        self._return_on_first_completed = return_on_first_completed
        for node in nodes:
            self._take(node)

    def add_node(self, node: Node[HandleT]) -> HandleT:
        """Take `node` in and return a handle of it.

        Raises:
            TypeError: not a node.
            ValueError: the node is in a program or colocation already.
        """
        self._take(node)
        return node.create_handle()

    @property
    def addresses(self) -> list[Address]:
        for child in self._children:
            self._addresses += [address for address in child.addresses if address not in self._addresses]
        return self._addresses

    def placed(self, label: str, index: int) -> None:
        super().placed(label, index)
        for child in self._children:
            child.placed(label, index)

    def input_handles(self) -> Iterator[Handle[Any]]:
        for child in self._children:
            yield from child.input_handles()

    def launch_parts(self) -> list[tuple[str, Any]]:
        named = [(index, part) for index, child in enumerate(self._children) for part in child.launch_parts()]
        return [(f"nodes[{index}] ({self._children[index]!r}): {name}", part) for index, (name, part) in named]

    def execute(self) -> None:
        if not self._children:
            raise ValueError(f"{self.name}: a colocation needs at least one node")
        _Threads(self._children, context(), self._return_on_first_completed).run()

    def _take(self, node: Node[Any]) -> None:
        if not isinstance(node, Node):
            raise TypeError(f"a colocation takes nodes such as PyNode(f), not {node!r} of type {type(node).__name__}")
        if node.label or node.is_colocated:
            raise ValueError(f"{node!r} is already in a program or colocation; make a second node")
        node.is_colocated = True
        self._children.append(node)
        if self.label:
            node.placed(self.label, self.index)

    def _new_handle(self) -> NoClientHandle:
        return NoClientHandle()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._children})"


class _Threads:
    """The inner nodes while they run. Each has a stop signal of its own, which the outer node's stop sets too."""

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
        """Until all have ended, or one has failed and the others had their grace.

        Raises:
            BaseException: the first inner failure that is not the echo of another.
        """
        for thread in self._threads:
            thread.start()
        self._outer.stop_signal.add(self._stop)
        with self._changed:
            self._changed.wait_for(self._is_enough)
        is_early = not self._outer.is_stopping
        self._stop()
        self._join(time.monotonic() + self._outer.grace_s if is_early else None)
        causes = [error for error in self._errors if not is_echo(error)]
        for error in [*causes, *self._errors][:1]:
            raise error

    def _run_child(self, child: Node[Any], node: NodeContext) -> None:
        with entered(node):
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
                frame = sys._current_frames().get(thread.ident or 0)
                _log.warning(
                    "%s did not end within %.1f s after the stop and is left behind. It is at:\n%s",
                    thread.name,
                    self._outer.grace_s,
                    "".join(traceback.format_stack(frame)),
                )
