"""The engine `local`: several agents on the launcher's own host, each as one host, for trials and tests."""

import sys
from collections.abc import Sequence
from typing import ClassVar

from lp_pipe.launch.engines.agent_process import AgentProcess, start_each
from lp_pipe.launch.engines.base import Engine, HostOffer, Invitation, StartedAgent
from lp_pipe.launch.engines.host_list import read_hosts


class LocalEngine(Engine):
    """Starts agents on this host.

    hosts: how many ("3"), or their names with limits ("a,b:gpus=2"); default: two.

    All of them have the same cores, memory and GPUs. Give limits where that matters.
    """

    is_local: ClassVar[bool] = True

    def __init__(self, hosts: str = "", **options: str) -> None:
        text = hosts or "2"
        if text.isdigit():
            if not int(text):
                raise ValueError(f"engine 'local': hosts must be at least 1, or host names, got hosts={text!r}")
            self._hosts = [HostOffer(f"local{index}") for index in range(int(text))]
        else:
            self._hosts = read_hosts(text)

    def hosts(self) -> Sequence[HostOffer]:
        return self._hosts

    def start(self, invitation: Invitation) -> Sequence[StartedAgent]:
        return start_each(self, self._hosts, invitation)

    def start_again(self, invitation: Invitation, name: str) -> StartedAgent:
        return AgentProcess([name], [sys.executable, *invitation.arguments(name)], invitation)
