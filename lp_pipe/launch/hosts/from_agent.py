"""What the agents of a run may ask of its launcher."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future

from lp_pipe.launch.coordination.coordinator import Coordinator
from lp_pipe.launch.hosts.agent_link import AgentLink
from lp_pipe.launch.hosts.host_join import RemoteAgent
from lp_pipe.launch.hosts.shipped_logs import ReceivedLogs
from lp_pipe.launch.plan.launch_plan import LaunchPlan
from lp_pipe.telemetry.terminal_lines import Unfinished

_PORT_PATIENCE_S = 10.0
_PASSED_ON = (
    *("node_started", "node_ended", "node_ends_unasked", "node_down", "register", "withdraw", "hear", "find_all"),
    *("resolve", "inner_nodes_ended", "stop_inner_nodes", "request_stop", "log_metrics", "log_event"),
    *("watch_state", "has_lost_state"),
)


class PortsElsewhere:
    """Ports are of the host of the node that will listen there, so its agent is asked."""

    def __init__(self, plan: LaunchPlan, agents: Mapping[str, RemoteAgent], host_of: Callable[[str], str]) -> None:
        self._plan = plan
        self._agents = agents
        self._host_of = host_of

    def ask(self, address: str) -> "Future[str]":
        host = self._host_of(self._plan.owner_of(address))
        return self._agents[host].link.ask("reserve", address)

    def reserve(self, address: str) -> str:
        """For the launcher itself: waits for the answer."""
        return self.ask(address).result(_PORT_PATIENCE_S)


class FromAgent:
    """What an agent may ask of its launcher: the coordinator, ports, and what to do with the lines of its nodes."""

    def __init__(self, coordinator: Coordinator, logs: ReceivedLogs, link: AgentLink, ports: PortsElsewhere) -> None:
        for name in _PASSED_ON:
            setattr(self, name, getattr(coordinator, name))
        self._logs = logs
        self._link = link
        self.reserve_port = ports.ask
        self.calls = coordinator.calls_of_nodes

    def log(self, node_id: str, is_stderr: bool, text: bytes) -> None:
        self._logs.put(self._link, node_id, is_stderr, text)

    def unfinished(self, node_id: str, is_stderr: bool, text: bytes, is_settled: bool) -> None:
        self._logs.put(self._link, node_id, is_stderr, Unfinished(text, is_settled))
