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
        run = user_code.optional_method(self._construct(), "run")
        if run is not None and self._run_enabled:
            user_code.call(run)

    def _new_handle(self) -> NoClientHandle:
        return NoClientHandle()
