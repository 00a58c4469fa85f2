"""A node with an object that answers calls from other nodes (Launchpad's CourierNode)."""

import inspect
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, Literal

from lp_pipe.address import Address
from lp_pipe.context import NodeContext, context
from lp_pipe.handles import CourierHandle
from lp_pipe.nodes import user_code
from lp_pipe.nodes.base import Node
from lp_pipe.rpc import Server, served_methods
from lp_pipe.rpc.batching import BatchedHandler
from lp_pipe.rpc.daemon_pool import CallerQueue
from lp_pipe.telemetry import waits


class CourierNode(Node[CourierHandle]):
    """Builds `ctor(*args, **kwargs)` and serves its public methods.

    With a `run()` method the node lives until that returns (handlers overlap it), otherwise until the program stops. A
    `run` that only a `__getattr__` would answer does not count.

    handlers: "pool": in threads of the server. "main": one after another in the thread that has built the object, for
        what belongs to one thread (sqlite3, OpenGL, signal): in process mode the process's main thread, otherwise the
        node's. Such an object has no `run()`, and no async or batched handlers; generators are allowed.
    courier_kwargs: thread_pool_size (handlers in parallel, 16 by default; 0: inline in the connection's thread).
    courier_client_kwargs: call_timeout (seconds; None by default), wait_for_ready (True) of the clients made from this
        node's handles.

    Raises:
        TypeError, ValueError: an option is unknown, a size is not a whole number from 0 on, or the handlers cannot run
            in one thread.
    """

    def __init__(
        self,
        ctor: Callable[..., Any],
        /,
        *args: Any,
        courier_kwargs: Mapping[str, Any] | None = None,
        courier_client_kwargs: Mapping[str, Any] | None = None,
        handlers: Literal["pool", "main"] = "pool",
        **kwargs: Any,
    ) -> None:
        super().__init__(ctor, *args, **kwargs)
        self._are_handlers_in_main = _is_main(handlers)
        if self._are_handlers_in_main:
            if courier_kwargs:
                raise ValueError(
                    f"CourierNode: courier_kwargs needs handlers='pool', got {courier_kwargs!r} with handlers='main'"
                )
            if isinstance(ctor, type):
                _refuse_other_threads(ctor)
        self._server_kwargs = _checked("courier_kwargs", courier_kwargs, "thread_pool_size")
        _check_pool_size(self._server_kwargs.get("thread_pool_size", 0))
        self._client_kwargs = _checked("courier_client_kwargs", courier_client_kwargs, "call_timeout", "wait_for_ready")
        self._address = Address("courier")
        self._address.assign(self)

    def execute(self) -> None:
        node = context()
        if self._are_handlers_in_main and isinstance(self._function, type):
            self._check_one_thread(self._function)
        served = self._construct()
        queue = None
        if self._are_handlers_in_main:
            self._check_one_thread(served)
            queue = CallerQueue()
            node.stop_signal.add(queue.wake)
        endpoint = node.services.endpoint_for(self._address.id)
        options = {**self._server_kwargs, "has_lost_state": node.services.has_lost_state(self._address.id)}
        server = Server(served, endpoint, name=node.name, caller_queue=queue, **options)
        node.servers.append(server)
        is_failing = True
        try:
            node.services.register(self._address.id, server.endpoint)
            if queue is not None:
                queue.run_while(lambda: not node.is_stopping)
            else:
                self._serve(served, node)
            is_failing = False
        finally:
            node.services.withdraw(self._address.id, is_failing)
            # a failure waits for no handler, since it must be reported now
            server.close(0.0 if is_failing else node.grace_s)
            node.servers.remove(server)

    def _serve(self, served: Any, node: NodeContext) -> None:
        run = user_code.optional_method(served, "run")
        if run is None or not self._run_enabled:
            with waits.waiting(waits.IDLE, waits.Target(), node=node):
                node.stop_signal.event.wait()
            return
        try:
            user_code.call(run)
        except SystemExit as error:
            if error.code not in (None, 0):
                raise

    def _check_one_thread(self, served: Any) -> None:
        """Refuse an object, or class, with methods that need other threads than the one that has built it.

        Raises:
            TypeError: it has a `run()`, or an async or batched handler.
        """
        if self._run_enabled and user_code.optional_method(served, "run") is not None:
            raise TypeError(
                f"CourierNode {self.name}: handlers='main' and run() both need the thread that builds the object: "
                "leave run() out, or call node.disable_run()"
            )
        _refuse_other_threads(served)

    def _new_handle(self) -> CourierHandle:
        return CourierHandle(self._address, self._client_kwargs)


def _checked(argument: str, options: Mapping[str, Any] | None, *known: str) -> dict[str, Any]:
    """Return the options as a dict, and refuse misspelt ones here, where they are written."""
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"CourierNode: {argument} must be a dict of options ({', '.join(known)}), got {options!r}")
    for name in options or {}:
        if name not in known:
            raise TypeError(f"CourierNode: {argument} has no option {name!r}; it takes {', '.join(known)}")
    return dict(options or {})


def _is_main(handlers: Any) -> bool:
    if handlers not in ("pool", "main"):
        raise ValueError(
            f"CourierNode: handlers must be 'pool' or 'main', got {handlers!r} (pass a constructor's own parameter of "
            "that name by position, or bind it by functools.partial)"
        )
    return bool(handlers == "main")


def _refuse_other_threads(served: Any) -> None:
    for name in served_methods.public_methods(served):
        found = inspect.getattr_static(served, name, None)
        function = getattr(found, "__func__", found)
        kind = ""
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            kind = "async: it runs in the thread of an event loop"
        elif isinstance(found, BatchedHandler):
            kind = "batched: it runs in threads of its own"
        if kind:
            raise TypeError(f"CourierNode: handlers='main' cannot run {name}(), which is {kind}; use handlers='pool'")


def _check_pool_size(size: Any) -> None:
    """Refuse a size with which no call would ever be answered."""
    if not isinstance(size, Integral) or size < 0:
        raise ValueError(
            "CourierNode: thread_pool_size must be a whole number of handlers that run at a time, or 0 (in the "
            f"connection's thread), got {size!r}"
        )
