"""Servers of the page, in threads of the test's process."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lp_pipe.dashboard.routes import Routes
from lp_pipe.dashboard.server import DashboardServer
from lp_pipe.launch.run_records import record_in

Serve = Callable[..., DashboardServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves the folders of runs, until the end of the test."""
    servers: list[tuple[DashboardServer, threading.Thread]] = []

    def begin(*folders: Path, is_read_only: bool = False) -> DashboardServer:
        def find() -> list[object]:
            return [record for folder in folders if (record := record_in(folder)) is not None]

        routes = Routes(find, lambda: list(folders), is_read_only=is_read_only)  # type: ignore[arg-type]
        server = DashboardServer(routes, is_read_only=is_read_only)
        thread = threading.Thread(target=server.serve, daemon=True)
        thread.start()
        servers.append((server, thread))
        return server

    yield begin
    for server, thread in servers:
        server.close()
        thread.join(10)
        assert not thread.is_alive()
        server.server_close()
