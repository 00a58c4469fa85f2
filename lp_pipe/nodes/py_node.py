"""Nodes that only run: a function, or an object with a run() method."""

from lp_pipe.handles import NoClientHandle
from lp_pipe.nodes import user_code
from lp_pipe.nodes.base import Node


class PyNode(Node[NoClientHandle]):
    """Calls `fn(*args, **kwargs)`; ends when it returns."""

    def execute(self) -> None:
        self._construct()

    def _new_handle(self) -> NoClientHandle:
        return NoClientHandle()


class PyClassNode(Node[NoClientHandle]):
    """Calls `ctor(*args, **kwargs)`, then `.run()` of the result if it has one; ends when that returns."""

    def execute(self) -> None:
        run = getattr(self._construct(), "run", None)
        if callable(run) and self._run_enabled:
            user_code.call(run)

    def _new_handle(self) -> NoClientHandle:
        return NoClientHandle()
