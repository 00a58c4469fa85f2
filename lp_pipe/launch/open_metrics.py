"""The state of a run as OpenMetrics text, for Prometheus and its like, at http://127.0.0.1:PORT/metrics.

Source: OpenMetrics 1.0.0, text format.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from lp_pipe.errors import LaunchError
from lp_pipe.launch.coordination.coordinator import Coordinator
from lp_pipe.launch.edge_traffic import Traffic, traffic_of
from lp_pipe.launch.hangs.hang_watch import HangWatch
from lp_pipe.telemetry.sink_threads import MetricsRecord

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_HOST = "127.0.0.1"
_ANSWERS_S = 0.1  # for processes to say what they have counted


class LatestMetrics:
    """A sink that keeps the last value of each metric of each node."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()

    def __call__(self, record: MetricsRecord) -> None:
        with self._lock:
            self._values.update({(record.node, name): value for name, value in record.values.items()})

    def values(self) -> dict[tuple[str, str], float]:
        """Return the values by (node, name)."""
        with self._lock:
            return dict(self._values)


def open_metrics_text(
    status: Mapping[str, list[dict[str, Any]]], traffic: Iterable[Traffic], metrics: Mapping[tuple[str, str], float]
) -> str:
    """Return the text. status: as of Run.status(). metrics: by (node, name)."""
    traffic = list(traffic)
    nodes = [(f"{label}/{index}", row) for label, rows in status.items() for index, row in enumerate(rows)]
    families: list[tuple[str, str, str, Iterable[tuple[str, dict[str, str], float]]]] = [
        (
            "lp_pipe_node_up",
            "gauge",
            "Whether the node runs.",
            [("", {"node": node}, float(row["state"] == "running")) for node, row in nodes],
        ),
        (
            "lp_pipe_restarts",
            "counter",
            "How often the node was restarted.",
            [("_total", {"node": node}, float(row.get("restarts") or 0)) for node, row in nodes],
        ),
        (
            "lp_pipe_calls",
            "counter",
            "Calls from one node to another since the calling process started.",
            [("_total", {"user": one.user, "server": one.server}, float(one.calls)) for one in traffic if one.calls],
        ),
        (
            "lp_pipe_edge_bytes",
            "counter",
            "Bytes of arguments and tensors that one node has sent to another since its process started.",
            [("_total", {"user": one.user, "server": one.server}, float(one.bytes_sent)) for one in traffic],
        ),
        (
            "lp_pipe_metric",
            "gauge",
            "The last value that the node has logged under this name.",
            [("", {"name": name, "node": node}, value) for (node, name), value in sorted(metrics.items())],
        ),
    ]
    return "\n".join([*(line for family in families for line in _lines(*family)), "# EOF", ""])


def _lines(name: str, kind: str, text: str, samples: Iterable[tuple[str, dict[str, str], float]]) -> Iterator[str]:
    yield f"# TYPE {name} {kind}"
    yield f"# HELP {name} {text}"
    for ending, labels, value in samples:
        shown = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
        yield f"{name}{ending}{{{shown}}} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(str(value), repr(value))


class OpenMetricsServer:
    """Answers on loopback for a run, in threads of its own, until `close`. It is a sink of the run's metrics.

    Raises:
        LaunchError: the port is taken.
    """

    def __init__(self, port: int) -> None:
        self.latest = LatestMetrics()
        self._text: Callable[[], str] = lambda: "# EOF\n"
        handler = type("_Handler", (_MetricsHandler,), {"text": lambda _: self._text()})
        try:
            self._server = ThreadingHTTPServer((_HOST, port), handler)
        except OSError as error:
            raise LaunchError(
                f"metrics_port={port}: cannot listen on {_HOST} ({error.strerror}): give another one"
            ) from None
        self._server.daemon_threads = True
        self.url = f"http://{_HOST}:{self._server.server_port}/metrics"
        self._is_over = False
        self._thread = threading.Thread(target=self._serve, name="metrics port", daemon=True)
        self._thread.start()

    def show(self, coordinator: Coordinator, hangs: HangWatch) -> None:
        """Answer with the state of this run from now on."""

        def text() -> str:
            hangs.views()  # asks the processes, which have counted more than they said last
            time.sleep(_ANSWERS_S)
            traffic = traffic_of(hangs.views(), coordinator.plan.owners)
            return open_metrics_text(coordinator.status(), traffic, self.latest.values())

        self.answer(text)

    def answer(self, text: Callable[[], str]) -> None:
        """Answer with what the function returns from now on."""
        self._text = text

    def _serve(self) -> None:
        while not self._is_over:  # not serve_forever, which wakes up twice a second
            self._server.handle_request()

    def close(self) -> None:
        """Close the port; idempotent."""
        self._is_over = True
        with contextlib.suppress(OSError), socket.create_connection((_HOST, self._server.server_port), timeout=1.0):
            self._thread.join()
        self._server.server_close()


class _MetricsHandler(BaseHTTPRequestHandler):
    text: Callable[[Any], str]

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host not in (_HOST, "localhost"):  # a page of another site, by a name that leads here
            self.send_error(403)
        elif self.path.partition("?")[0] != "/metrics":
            self.send_error(404)
        else:
            body = type(self).text(self).encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a scrape every few seconds is no news."""
