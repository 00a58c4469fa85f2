"""Agents that join one after another, as far as the launcher can tell: here they are connections of the test."""

import os
import threading
from collections.abc import Callable, Sequence

from lp_pipe.connections import Connection, Frame, frames, tls
from lp_pipe.connections.credentials import Credentials, generate_credentials
from lp_pipe.connections.tcp_endpoint import TLS
from lp_pipe.launch.engines.base import Invitation, StartedAgent
from lp_pipe.launch.engines.local import LocalEngine
from lp_pipe.launch.hosts import handshake
from lp_pipe.launch.hosts.agent_messages import Alive
from lp_pipe.launch.hosts.handshake import Joining, Versions
from lp_pipe.launch.hosts.host_join import HostJoin, MultiHostOptions, Patience
from lp_pipe.launch.plan.hardware import this_host
from lp_pipe.rpc import codec


class OneAfterTheOther(LocalEngine):
    """The second host joins once the first has heard that the launcher is alive."""

    def __init__(self) -> None:
        super().__init__("first,second")
        self.connections: list[Connection] = []
        self._second = threading.Thread(target=self._join_second)
        self._is_alive = threading.Event()

    def start(self, invitation: Invitation) -> Sequence[StartedAgent]:
        self._invitation = invitation
        self._join("first", lambda frame: self._is_alive.set() if _is_alive(frame) else None)
        self._second.start()
        return []

    def close(self) -> None:
        self._is_alive.set()
        self._second.join()
        for connection in self.connections:
            connection.close()

    def _join_second(self) -> None:
        self._is_alive.wait()
        self._join("second", lambda frame: None)

    def _join(self, host: str, on_frame: Callable[[Frame], None]) -> None:
        credentials = Credentials.from_bytes(self._invitation.secret)
        connection = tls.connect(f"{TLS}{self._invitation.addresses[0]}", None, credentials)
        self.connections.append(connection)
        connection.start(on_frame, lambda reason: None)
        joining = Joining(host, "127.0.0.1", os.getpid(), Versions.here(), this_host())
        connection.send(Frame(frames.SUPERVISION, name=handshake.JOIN, body=joining.to_bytes()))


def _is_alive(frame: Frame) -> bool:
    return frame.name != handshake.WELCOME and codec.decode(frame.body) == Alive()


def test_who_has_joined_hears_of_the_launcher_while_it_waits_for_others() -> None:
    """An agent that hears nothing for eight seconds takes the launcher for dead; the last host may need a minute."""
    options = MultiHostOptions(OneAfterTheOther(), patience=Patience(join_s=30.0, silence_s=60.0))
    host_join = HostJoin(options, generate_credentials())
    try:
        assert list(host_join.start_and_wait("", needs_torch=False)) == ["first", "second"]
    finally:
        host_join.close(patience_s=1.0)
