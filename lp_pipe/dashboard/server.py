"""The HTTP server of the page: static files, JSON answers, and streams of server-sent events.

A thread for each connection, which sleeps in the kernel while the browser asks for nothing. Nothing runs in between:
files are looked at only by a request, and by a stream while it is open.
"""

import contextlib
import gzip
import hashlib
import ipaddress
import json
import logging
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from lp_pipe.dashboard.gatekeeper import SECURITY_HEADERS, Gatekeeper
from lp_pipe.dashboard.routes import NotFound, Routes, WrongRequest

_log = logging.getLogger(__name__)

_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_FOR_EVER = "private, max-age=31536000, immutable"
_WORTH_GZIP = 1400
_IDLE_S = 60.0
_LARGEST_POST = 64 << 10
_LOOPBACK_NAMES = ["127.0.0.1", "localhost", "[::1]"]


class Certificate(NamedTuple):
    """A certificate and its key, as files in PEM."""

    cert: Path
    key: Path


class _StaticFile(NamedTuple):
    kind: str
    body: bytes
    packed: bytes
    head: Mapping[str, str]


def _static_files() -> dict[str, _StaticFile]:
    """Return the files of the page by their paths: what is not in this table is not served.

    All but the first are in a folder that is named after their contents, so that a browser asks for them only once.
    """
    files = [file for file in (resources.files("lp_pipe.dashboard") / "static").iterdir() if _kind(file.name)]
    bodies = {file.name: file.read_bytes() for file in sorted(files, key=lambda file: file.name)}
    version = hashlib.sha256(b"".join(bodies.values())).hexdigest()[:16]
    first = bodies.pop("index.html").replace(b"/VERSION/", f"/{version}/".encode())
    found = {"/": _static_file("index.html", first, {"Cache-Control": "no-cache"})}
    for name, body in bodies.items():
        found[f"/{version}/{name}"] = _static_file(name, body, {"Cache-Control": _FOR_EVER})
    return found


def _static_file(name: str, body: bytes, head: Mapping[str, str]) -> _StaticFile:
    return _StaticFile(f"{_kind(name)}; charset=utf-8", body, gzip.compress(body, 6), head)


def _kind(name: str) -> str | None:
    return _TYPES.get(Path(name).suffix)


class DashboardServer(ThreadingHTTPServer):
    """Serves the page on one address until `close`.

    Raises (constructor):
        OSError: the address or port cannot be used, or the certificate cannot be read.
        ValueError: another address than loopback without a certificate.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(
        self,
        routes: Routes,
        host: str = "127.0.0.1",
        port: int = 0,
        certificate: Certificate | None = None,
        *,
        is_read_only: bool = False,
        token: str | None = None,
    ) -> None:
        if certificate is None and not is_loopback(host):
            raise ValueError(f"--host {host} is not loopback: others could read along, so give --cert and --key")
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self.routes = routes
        names = [f"[{host}]" if ":" in host else host]
        names += [name for name in _LOOPBACK_NAMES if name not in names and is_loopback(host)]
        if not is_loopback(host):
            names += [socket.gethostname(), socket.getfqdn()]
        scheme = "http"
        if certificate is not None:
            scheme = "https"
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate.cert, certificate.key)
            # The handshake happens in the connection's own thread, with its first read.
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.gatekeeper = Gatekeeper(names, self.server_port, scheme, is_read_only=is_read_only, token=token)
        self.static = _static_files()
        self._is_closing = threading.Event()
        self.idle_s = None if is_loopback(host) else _IDLE_S

    def serve(self) -> None:
        """Answer until `close`, or an exception such as KeyboardInterrupt; sleeps while there is nothing to answer."""
        self.serve_forever(poll_interval=None)  # type: ignore[arg-type]  # None: sleep until a connection comes

    def close(self) -> None:
        """End `serve` in another thread, and all streams."""
        self._is_closing.set()
        threading.Thread(target=self.shutdown, daemon=True).start()
        with contextlib.suppress(OSError):  # one connection, because it looks for the end only after one
            host = str(self.server_address[0])
            socket.create_connection((host, self.server_port), 1.0).close()

    @property
    def is_closing(self) -> threading.Event:
        return self._is_closing

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what ended a connection: mostly the browser, which has left."""
        _log.debug("connection of %s ended", client_address, exc_info=True)


def is_loopback(host: str) -> bool:
    """Return whether only this host can connect to the address."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


class _Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection, in its thread."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "lp_pipe", ""
    disable_nagle_algorithm = True
    server: DashboardServer

    def setup(self) -> None:
        """Give connections of other hosts up that send nothing for a minute."""
        super().setup()
        self.connection.settimeout(self.server.idle_s)

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)

    def _answer(self, method: str) -> None:
        gatekeeper = self.server.gatekeeper
        refused = gatekeeper.refusal(method, self.path, self.headers)
        if refused is not None:
            self.close_connection = True
            return self._send(refused.status, "text/plain; charset=utf-8", f"{refused.why}\n".encode())
        address = urlsplit(self.path)
        asked = {name: values[-1] for name, values in parse_qs(address.query).items()}
        # No redirect: a browser that comes from another site's link would not send the new cookie with it.
        cookie = {"Set-Cookie": gatekeeper.set_cookie} if address.path == "/" and "token" in asked else {}
        try:
            if method == "POST":
                self._send_json(self.server.routes.post(address.path, self._posted()))
            elif address.path == "/api/stream":
                self._stream(self.server.routes.stream(asked, self.server.is_closing))
            elif address.path.startswith("/api/"):
                self._send_json(self.server.routes.get(address.path, asked))
            else:
                self._send_static(address.path, cookie)
        except NotFound as error:
            self._send_json({"error": str(error)}, 404)
        except WrongRequest as error:
            self._send_json({"error": str(error)}, 400)
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def _posted(self) -> Mapping[str, Any]:
        try:
            length = int(self.headers.get("Content-Length", "0"))
            if not 0 <= length <= _LARGEST_POST:
                raise ValueError(f"{length} bytes")
            found = json.loads(self.rfile.read(length) or b"{}")
        except ValueError as error:
            self.close_connection = True
            raise WrongRequest(f"the request's body is no JSON of a usual length: {error}") from None
        if not isinstance(found, dict):
            raise WrongRequest("the request's body must be a JSON object")
        return found

    def _send_static(self, path: str, cookie: Mapping[str, str]) -> None:
        file = self.server.static.get(path)
        if file is None:
            raise NotFound("there is no such page")
        head = {**file.head, **cookie}
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            return self._send(200, file.kind, file.packed, {**head, "Content-Encoding": "gzip"})
        self._send(200, file.kind, file.body, head)

    def _send_json(self, found: Any, status: int = 200) -> None:
        body = json.dumps(found, separators=(",", ":"), allow_nan=False, default=repr).encode()
        head = {"Cache-Control": "no-store"}
        if len(body) > _WORTH_GZIP and "gzip" in self.headers.get("Accept-Encoding", ""):
            body, head["Content-Encoding"] = gzip.compress(body, 3), "gzip"
        self._send(status, "application/json", body, head)

    def _send(self, status: int, kind: str, body: bytes, head: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in {**SECURITY_HEADERS, **(head or {})}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, messages: Iterator[Any]) -> None:
        """Send server-sent events until the browser leaves, which the next write notices."""
        with contextlib.closing(messages):  # type: ignore[type-var]
            first = next(messages)  # may be NotFound
            self.close_connection = True
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Cache-Control", "no-store")
            self.send_header("Connection", "close")
            for name, value in SECURITY_HEADERS.items():
                self.send_header(name, value)
            self.end_headers()
            self._send_event(first)
            for message in messages:
                self._send_event(message)

    def _send_event(self, message: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(message, separators=(",", ":"), default=repr).encode() + b"\n\n")
