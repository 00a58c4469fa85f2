"""Agents on the launcher's own host, each of which counts as a host: to try a program out, and for tests."""

import sys
from collections.abc import Sequence
from typing import ClassVar

from lp_pipe.launch.engines.agent_process import AgentProcess, start_each
from lp_pipe.launch.engines.base import Engine, HostOffer, Invitation, StartedAgent
from lp_pipe.launch.engines.host_list import read_hosts


class LocalEngine(Engine):
    """hosts: how many ("3"), or their names with limits ("a,b:gpus=2"); two if nothing is said.

    The cores, the memory and the GPUs are the same ones for all: give limits where that matters.
    """

    is_local: ClassVar[bool] = True

    def __init__(self, hosts: str = "", **options: str) -> None:
        text = hosts or "2"
        if text.isdigit():
            if not int(text):
                raise ValueError(f"hosts={text}: 1 or more, or their names")
            self._hosts = [HostOffer(f"local{index}") for index in range(int(text))]
        else:
            self._hosts = read_hosts(text)

    def hosts(self) -> Sequence[HostOffer]:
        return self._hosts

    def start(self, invitation: Invitation) -> Sequence[StartedAgent]:
        return start_each(self, self._hosts, invitation)

    def start_again(self, invitation: Invitation, name: str) -> StartedAgent:
        return AgentProcess([name], [sys.executable, *invitation.arguments(name)], invitation)
