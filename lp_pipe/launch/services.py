"""What is asked of a program in its coordinator's process: by nodes that are threads there, and by the launcher."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager

from lp_pipe.errors import Unavailable
from lp_pipe.launch.coordination.coordinator import Coordinator
from lp_pipe.launch.host import Host
from lp_pipe.rpc.fork_guard import ForkGuard, no_endpoint
from lp_pipe.telemetry.metrics import as_numbers


class _OutsideOfNodes:
    """What only nodes may ask for."""

    def register(self, address: str, endpoint: str) -> None:
        raise RuntimeError("only a node can serve an address of the program")

    def withdraw(self, address: str, is_failing: bool) -> None:
        raise RuntimeError("only a node can serve an address of the program")

    def has_lost_state(self, address: str) -> bool:
        raise RuntimeError("only a node can serve an address of the program")

    def inner_nodes_ended(self, colocation: str) -> "Future[str]":
        raise RuntimeError("only a colocation has inner nodes")

    def stop_inner_nodes(self, colocation: str) -> None:
        raise RuntimeError("only a colocation has inner nodes")


_COORDINATOR, _IN_THAT_PROCESS = "the coordinator of the program", "ask it there"


class _OfCoordinator:
    """What everybody in the coordinator's process may ask for; `name` is whose metrics are logged."""

    def __init__(self, coordinator: Coordinator, name: str) -> None:
        self._coordinator = coordinator
        self._name = name
        self._owner = ForkGuard()  # of the coordinator: a forked child has a copy, which hears of nothing any more

    def endpoint_for(self, address: str) -> str:
        return self._coordinator.endpoint_for(address)

    def resolve(self, address: str) -> "Future[str]":
        return self._coordinator.resolve(address) if self._owner.is_here else no_endpoint()

    def watch_state(self, addresses: Sequence[str]) -> "Future[str]":
        return self._coordinator.watch_state(addresses) if self._owner.is_here else Future()

    def reserve_port(self, address: str) -> str:
        self._owner.check(_COORDINATOR, _IN_THAT_PROCESS)
        return self._coordinator.reserve_port(address)

    def request_stop(self) -> None:
        self._owner.check(_COORDINATOR, _IN_THAT_PROCESS)
        self._coordinator.request_stop()

    def log_metrics(self, metrics: Mapping[str, float], step: int | None) -> None:
        self._owner.check(_COORDINATOR, _IN_THAT_PROCESS)
        self._coordinator.log_metrics(self._name, *as_numbers(metrics, step))

    def log_event(self, event: str, step: int) -> None:
        self._coordinator.log_event(self._name, event, step)


class LocalServices(_OfCoordinator):
    """NodeServices of a node that shares the coordinator's process; `name` is its node_id."""

    def register(self, address: str, endpoint: str) -> None:
        self._coordinator.register(address, endpoint)

    def withdraw(self, address: str, is_failing: bool) -> None:
        self._coordinator.withdraw(address, is_failing)

    def has_lost_state(self, address: str) -> bool:
        return bool(self._coordinator.has_lost_state(address).result())

    def first_failure(self) -> None:
        """Its launcher says it."""

    def inner_nodes_ended(self, colocation: str) -> "Future[str]":
        return self._coordinator.inner_nodes_ended(colocation)

    def stop_inner_nodes(self, colocation: str) -> None:
        self._coordinator.stop_inner_nodes(colocation)


class LauncherServices(_OfCoordinator, _OutsideOfNodes):
    """NodeServices for clients made in the launching process.

    deferring: keeps signals out of its body. One that is raised in the main thread as that takes the coordinator's
        lock, or gives it back, would leave it locked, and the stop needs it.
    """

    def __init__(
        self, coordinator: Coordinator, host: Host, deferring: Callable[[], AbstractContextManager[None]]
    ) -> None:
        super().__init__(coordinator, "launcher")
        self._host = host
        self._deferring = deferring

    def resolve(self, address: str) -> "Future[str]":
        with self._deferring():
            return super().resolve(address)

    def watch_state(self, addresses: Sequence[str]) -> "Future[str]":
        with self._deferring():
            return super().watch_state(addresses)

    def first_failure(self) -> Exception | None:
        with self._deferring():
            return self._coordinator.settled_failure(self._host.dying())


class EndedServices(_OutsideOfNodes):
    """NodeServices in the launching process once the program is over: says why each of its servers is gone."""

    def __init__(self, reasons: Mapping[str, str], failure: Exception | None) -> None:
        self._reasons = reasons
        self._failure = failure

    def first_failure(self) -> Exception | None:
        return self._failure

    def endpoint_for(self, address: str) -> str:
        raise Unavailable(self._reasons[address])

    def resolve(self, address: str) -> "Future[str]":
        future: Future[str] = Future()
        future.set_exception(Unavailable(self._reasons[address]))
        return future

    def watch_state(self, addresses: Sequence[str]) -> "Future[str]":
        return Future()  # nothing is started again any more

    def reserve_port(self, address: str) -> str:
        raise Unavailable(self._reasons[address])

    def request_stop(self) -> None:
        """It has stopped."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None) -> None:
        raise RuntimeError("the program has ended")

    def log_event(self, event: str, step: int) -> None:
        raise RuntimeError("the program has ended")
