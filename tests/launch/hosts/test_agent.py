"""An agent that cannot join gives up early where that is in vain."""

import os
import socket
import time

import pytest

from lp_pipe.connections.credentials import generate_credentials
from lp_pipe.errors import LaunchError
from lp_pipe.launch.hosts.agent import run_agent

PATIENCE_S = 20.0


def test_an_agent_gives_up_when_the_launchers_address_refuses_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    began = time.monotonic()
    with pytest.raises(LaunchError, match=address):
        run_agent([address], generate_credentials(), "h1", patience_s=PATIENCE_S)
    assert time.monotonic() - began < PATIENCE_S / 2


def test_an_agent_gives_up_when_its_parent_has_ended() -> None:
    parent = os.getpid()  # is the parent of none of its own threads
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(LaunchError, match=str(parent)):
        run_agent(
            [f"127.0.0.1:{silent.getsockname()[1]}"], generate_credentials(), "h1", patience_s=PATIENCE_S, parent=parent
        )
