"""A node whose object answers calls from other nodes (Launchpad's CourierNode)."""

from collections.abc import Callable, Mapping
from typing import Any

from lp_pipe.address import Address
from lp_pipe.context import NodeContext, context
from lp_pipe.handles import CourierHandle
from lp_pipe.nodes import user_code
from lp_pipe.nodes.base import Node
from lp_pipe.rpc import Server


class CourierNode(Node[CourierHandle]):
    """Builds `ctor(*args, **kwargs)` and serves its public methods.

    With a `run()` method the node lives until that returns (handlers overlap it), otherwise until the program stops.

    courier_kwargs: thread_pool_size (handlers in parallel, 16 by default; 0: inline in the connection's thread).
    courier_client_kwargs: call_timeout (seconds; None by default), wait_for_ready (True) of the clients made from this
        node's handles.
    """

    def __init__(
        self,
        ctor: Callable[..., Any],
        /,
        *args: Any,
        courier_kwargs: Mapping[str, Any] | None = None,
        courier_client_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(ctor, *args, **kwargs)
        self._server_kwargs = dict(courier_kwargs or {})
        self._client_kwargs = dict(courier_client_kwargs or {})
        self._address = Address("courier")
        self._address.assign(self)

    def execute(self) -> None:
        node = context()
        served = self._construct()
        endpoint = node.services.endpoint_for(self._address.id)
        server = Server(served, endpoint, name=node.name, **self._server_kwargs)
        node.servers.append(server)
        is_failing = True
        try:
            node.services.register(self._address.id, server.endpoint)
            self._serve(served, node)
            is_failing = False
        finally:
            node.services.withdraw(self._address.id, is_failing)
            server.close(0.0 if is_failing else node.grace_s)  # a failure waits for no handler: it is to be told now
            node.servers.remove(server)

    def _serve(self, served: Any, node: NodeContext) -> None:
        run = getattr(served, "run", None)
        if not callable(run) or not self._run_enabled:
            node.stop_signal.event.wait()
            return
        try:
            user_code.call(run)
        except SystemExit as error:
            if error.code not in (None, 0):
                raise

    def _new_handle(self) -> CourierHandle:
        return CourierHandle(self._address, self._client_kwargs)
