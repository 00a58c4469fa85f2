"""The methods of a launcher that its agents may call."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future

from lp_pipe.launch.coordination.coordinator import Coordinator
from lp_pipe.launch.hosts.agent_link import AgentLink
from lp_pipe.launch.hosts.host_join import RemoteAgent
from lp_pipe.launch.hosts.shipped_logs import ReceivedLogs
from lp_pipe.launch.plan.launch_plan import LaunchPlan
from lp_pipe.telemetry.terminal_lines import Unfinished


class PortsElsewhere:
    """The ports of other hosts: the agent of the host that has the node of the address reserves them."""

    def __init__(self, plan: LaunchPlan, agents: Mapping[str, RemoteAgent], host_of: Callable[[str], str]) -> None:
        self._plan = plan
        self._agents = agents
        self._host_of = host_of

    def ask(self, address: str) -> "Future[str]":
        host = self._host_of(self._plan.owner_of(address))
        return self._agents[host].link.ask("reserve", address)


class FromAgent:
    """The methods that one agent may call over its link: of the coordinator, and for its nodes' output."""

    def __init__(self, coordinator: Coordinator, logs: ReceivedLogs, link: AgentLink) -> None:
        self.tell = coordinator.tell
        self.ask = coordinator.ask
        self.find_all = coordinator.find_all
        self.calls = coordinator.calls_of_nodes
        self._logs = logs
        self._link = link

    def log(self, node_id: str, is_stderr: bool, text: bytes) -> None:
        self._logs.put(self._link, node_id, is_stderr, text)

    def unfinished(self, node_id: str, is_stderr: bool, text: bytes, is_settled: bool) -> None:
        self._logs.put(self._link, node_id, is_stderr, Unfinished(text, is_settled))
