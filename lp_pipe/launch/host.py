"""Where nodes run: the one interface between the run and a launch mode."""

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path

from lp_pipe.context import NodeServices
from lp_pipe.launch.coordination.supervisor import Supervisor
from lp_pipe.launch.coordination.view import View
from lp_pipe.protos import supervision_pb2 as wire


def give_up(coordinator: Supervisor, node_ids: Iterable[str]) -> None:
    """The program ends before these have started."""
    coordinator.request_stop()
    for node_id in node_ids:
        coordinator.node_down(node_id)


class Host(ABC):
    """Starts the nodes of a plan and takes them down; reports their lives to the coordinator.

    socket_dir: the run's private folder, once it has started; "" for a host without sockets.
    mark: what every process that it has started carries as LP_PIPE_TEMPLATE; "" for a host without processes.
    """

    socket_dir = ""
    mark = ""

    @abstractmethod
    def start(self) -> None:
        """Start every node.

        Raises:
            LaunchError, OSError, RuntimeError: something could not be started. What will not has been given up; the
                rest is taken down, and everything closed, as ever.
        """

    @abstractmethod
    def restart(self, node_id: str) -> None:
        """Start a node again, of which nothing is left; returns at once."""

    @abstractmethod
    def stop_nodes(self, node_ids: Iterable[str]) -> None:
        """Set these nodes' stop events; returns at once."""

    @abstractmethod
    def terminate(self, node_ids: Iterable[str]) -> None:
        """Ask them to end (SIGTERM); no effect on threads."""

    @abstractmethod
    def kill(self, node_ids: Iterable[str]) -> None:
        """End them at once, with everything that they started; threads are left behind."""

    def suspend(self) -> Callable[[], object] | None:
        """Stop the nodes, since this process is about to be; returns how they go on. None: it must not be stopped."""
        return lambda: None

    @abstractmethod
    def close(self) -> None:
        """Free everything; called once all nodes are down."""

    @abstractmethod
    def stacks(self) -> str:
        """The Python stacks of every running node, as text."""

    def dying(self) -> Mapping[str, int]:
        """The pids, by node_id, of those processes that have ended and whose ends nobody was told of yet."""
        return {}

    def look(self, old_s: float) -> list[View]:
        """Whom its processes wait for and serve; returns at once.

        old_s: from this age on activities say where the user's code is.
        """
        return []

    def nodes_here(self) -> Mapping[NodeServices, str]:
        """The node_ids of those that are threads of this process, by what speaks for them there."""
        return {}

    @abstractmethod
    def inject(self, fault: wire.Fault) -> "Mapping[str, Future[int]]":
        """Tell every process of the nodes of a fault (lp_pipe.testing); by node, how often it has struck there."""

    def where(self, node_id: str) -> str:
        """The name of the host that the node is on."""
        return socket.gethostname()

    def last_lines(self, node_id: str) -> list[str]:
        """The last lines that the node printed; empty where the launcher does not see them."""
        return []

    def log_path(self, node_id: str) -> Path | None:
        """The file with everything that the node printed."""
        return None
