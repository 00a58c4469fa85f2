"""The interface between a run and the launch mode in which its nodes run."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path

from lp_pipe.context import NodeServices
from lp_pipe.launch.supervision.messages import Gone, RequestStop, View
from lp_pipe.launch.supervision.node_api import NodeApi
from lp_pipe.protos import supervision_pb2 as wire


def give_up(coordinator: NodeApi, node_ids: Iterable[str]) -> None:
    """Report that these nodes will not start, and request the program's stop."""
    coordinator.tell("", RequestStop())
    for node_id in node_ids:
        coordinator.tell(node_id, Gone())


class Host(ABC):
    """Starts the nodes of a plan, takes them down, and reports their starts and ends to the coordinator.

    Every method is abstract: a default that does nothing would be wrong for some host, without an error.

    socket_dir: the run's private folder, once the host has started; "" for a host without sockets.
    mark: the value of LP_PIPE_TEMPLATE in the environment of each process that the host has started; "" for a host
        without processes.
    """

    socket_dir = ""
    mark = ""

    @abstractmethod
    def start(self) -> None:
        """Start every node.

        Raises:
            LaunchError, OSError, RuntimeError: something could not be started. `give_up` was called; `close` must be,
                once the nodes that did start are down.
        """

    @abstractmethod
    def give_up(self) -> None:
        """Report that the nodes that have not started will not, and request the program's stop."""

    @abstractmethod
    def restart(self, node_id: str) -> None:
        """Start a node again, of which nothing is left; returns at once."""

    @abstractmethod
    def stop_nodes(self, node_ids: Iterable[str]) -> None:
        """Set these nodes' stop events; returns at once."""

    @abstractmethod
    def terminate(self, node_ids: Iterable[str]) -> None:
        """Send SIGTERM to the processes of these nodes; no effect on threads."""

    @abstractmethod
    def kill(self, node_ids: Iterable[str]) -> None:
        """Kill these nodes with everything that they started; threads are left behind."""

    @abstractmethod
    def suspend(self) -> Callable[[], object] | None:
        """Stop the nodes' processes, because this process is about to be stopped; returns what lets them go on.

        Returns None if this process must not be stopped; the nodes then run on.
        """

    @abstractmethod
    def close(self) -> None:
        """Free everything; called once all nodes are down."""

    @abstractmethod
    def stacks(self) -> str:
        """Return the Python stacks of every running node, as text."""

    @abstractmethod
    def dying(self) -> Mapping[str, int]:
        """Return the pids, by node_id, of the processes that have ended without a report so far."""

    @abstractmethod
    def look(self, old_s: float) -> list[View]:
        """Return which servers and clients each process waits for, as it said last; returns at once.

        old_s: the age from which activities say where the user's code is.
        """

    @abstractmethod
    def nodes_here(self) -> Mapping[NodeServices, str]:
        """Return the node_ids of the nodes that are threads of this process, by their NodeServices."""

    @abstractmethod
    def inject(self, fault: wire.Fault) -> "Mapping[str, Future[int]]":
        """Pass a fault (lp_pipe.testing) to every process of the nodes; returns by node how often it has struck."""

    @abstractmethod
    def set_tracing(self, is_on: bool) -> None:
        """Let every process record spans, or end that; also those that start later."""

    @abstractmethod
    def clock_offset(self, host: str) -> float:
        """Return the seconds to add to time.monotonic() of a host (`where`) for that of this one."""

    @abstractmethod
    def where(self, node_id: str) -> str:
        """Return the name of the host that the node is on."""

    @abstractmethod
    def last_lines(self, node_id: str) -> list[str]:
        """Return the last lines that the node printed; empty where the launcher does not see them."""

    @abstractmethod
    def log_path(self, node_id: str) -> Path | None:
        """Return the file with everything that the node printed; None where there is no such file."""
