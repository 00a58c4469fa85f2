"""A folder of a run as a launcher leaves it, and a client that speaks HTTP as a browser does."""

import http.client
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lp_pipe.dashboard.server import DashboardServer
from lp_pipe.launch.run_records import RunRecord
from lp_pipe.process_tree import start_time


def write_run(folder: Path, nodes: Mapping[str, int], ended: float | None = None, **facts: Any) -> RunRecord:
    """Make a run's folder with a graph of groups (label -> number of nodes), the first of which calls the others."""
    (folder / "logs").mkdir(parents=True)
    pid = os.getpid()
    record = RunRecord("demo", "process", str(folder), socket.gethostname(), pid, start_time(pid), time.time(), "", "")
    found = {**asdict(record), "ended": ended, **facts}
    (folder / "run.json").write_text(json.dumps(found))
    names = [(label, index) for label, count in nodes.items() for index in range(count)]
    first = next(iter(nodes))
    graph = {
        "program": "demo",
        "groups": {label: [f"{label}/{index}" for index in range(count)] for label, count in nodes.items()},
        "nodes": [
            {"name": f"{label}/{index}", "label": label, "index": index, "kind": "PyNode", "runs": "f", "resources": {}}
            for label, index in names
        ],
        "edges": [{"user": f"{first}/0", "server": f"{label}/{index}"} for label, index in names if label != first],
    }
    (folder / "graph.json").write_text(json.dumps(graph))
    write_events(folder, *({"event": "start", "node": f"{label}/{index}", "pid": 7} for label, index in names))
    return RunRecord(**found)


def write_events(folder: Path, *events: Mapping[str, Any]) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(json.dumps({"time": time.time(), **event}) + "\n" for event in events)


def metric_line(node: str, step: int | None, time_s: float, values: Mapping[str, Any]) -> str:
    return json.dumps({"time": time_s, "node": node, "step": step, "values": values}) + "\n"


class Browser:
    """A client with the cookie of the first URL."""

    def __init__(self, server: DashboardServer) -> None:
        self.port = server.server_port
        self.host = f"127.0.0.1:{self.port}"
        self.token = server.gatekeeper.token
        _, head, _ = self.ask(f"/?token={self.token}")
        self.cookie = head["Set-Cookie"].partition(";")[0]

    def ask(
        self, path: str, headers: Mapping[str, str] | None = None, method: str = "GET", body: bytes = b""
    ) -> tuple[int, Any, bytes]:
        """Send a request with exactly these headers; return status, headers and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in {"Host": self.host, **(headers or {}), "Content-Length": str(len(body))}.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        found = answer.status, answer.headers, answer.read()
        connection.close()
        return found

    def get(self, path: str, **asked: Any) -> Any:
        """Return the JSON answer to a query."""
        query = "&".join(f"{name}={quote(str(value))}" for name, value in asked.items())
        status, _, body = self.ask(f"{path}?{query}", {"Cookie": self.cookie})
        assert status == 200, body
        return json.loads(body)

    def post(self, path: str, said: Mapping[str, Any], **headers: str) -> tuple[int, Any]:
        head = {"Cookie": self.cookie, "Content-Type": "application/json", "Origin": f"http://{self.host}", **headers}
        status, _, body = self.ask(path, head, "POST", json.dumps(said).encode())
        return status, body
