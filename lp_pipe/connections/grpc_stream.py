"""Connections between any two processes over a gRPC bidirectional stream (protos/connection.proto), plain or with mTLS.

    endpoint                may be used by
    grpc:HOST:PORT          processes of this host that know the run's token
    grpc:HOST:PORT#TOKEN    processes of this host that know this token
    grpcs:HOST:PORT         processes that have a certificate of the run, and know its token

A listener proves that it knows the token as well; before that, nothing from it is read.

Each connection has a channel, and so a TCP connection, of its own: gRPC's flow control is also per TCP connection, and
a peer that does not read one connection must not stop the others.
"""

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from lp_pipe.connections import frames, grpc_channels, tcp_endpoint
from lp_pipe.connections.base import Connection, Listener, OnClose, OnConnection, OnFrame
from lp_pipe.connections.chunks import ChunkReader, Outbox, cut
from lp_pipe.connections.credentials import ADVICE, Credentials
from lp_pipe.connections.frames import Frame, FrameError
from lp_pipe.connections.grpc_channels import (
    METHOD,
    NONCE,
    SERVICE,
    SHOWN,
    SILENCE_S,
    WELCOME,
    ThreadPerCall,
    credentials_for,
    credentials_to_connect,
)
from lp_pipe.connections.io_thread import SilenceWatch
from lp_pipe.connections.refusals import Refusals
from lp_pipe.connections.resource_limits import describe_rejection
from lp_pipe.connections.tcp_endpoint import GONE, TcpEndpoint, parse_to_connect
from lp_pipe.errors import Unauthenticated, Unavailable

_CONNECT_PATIENCE_S = 5.0
_CLOSE_PATIENCE_S = 0.2
_LINGER_S = 5.0  # for a peer that is slow to read what was sent before the close
_FREE_WITHIN_S = 1.0  # how long a closed listener may still have its address
_LOOK_AGAIN_S = 1e-3


class GrpcConnection(Connection):
    """An end of a stream: a thread of its own reads `incoming`, and gRPC's thread reads `outbox`.

    call: ends the stream early when cancelled. release: called once nothing more will arrive.
    """

    def __init__(
        self,
        peer: str,
        incoming: Iterator[bytes],
        outbox: Outbox,
        call: grpc.RpcContext,
        release: Callable[[], object],
        idle_timeout_s: float | None = None,
    ) -> None:
        super().__init__(peer)
        self._incoming = incoming
        self._outbox = outbox
        self._call = call
        self._release = release
        self._idle_timeout_s = idle_timeout_s
        self._watch: SilenceWatch | None = None
        self._send_lock = threading.Lock()
        self._own_reason: str | None = None
        self._reader: threading.Thread | None = None
        self._reader_lock = threading.Lock()
        self._is_read = threading.Event()  # set at the peer's end of stream, which it sends once it has read ours
        self._is_over = threading.Event()
        if not call.add_callback(self._on_over):
            self._on_over()

    def start(self, on_frame: OnFrame, on_close: OnClose) -> None:
        self._attach(on_close)
        self._read(on_frame)

    def send(self, frame: Frame) -> None:
        pieces = frames.encode(frame)
        with self._send_lock:
            if self._closed_reason is None and all(map(self._outbox.put, cut(pieces))):
                return
        raise Unavailable(f"connection to {self.peer} is closed: {self._closed_reason or GONE}")

    def close(self, reason: str = "closed") -> None:
        if self._closed_reason is not None:
            return
        self._own_reason = reason  # the peer may answer by closing before this method is done
        # A sender that is stuck because the peer does not read must not keep us from closing.
        if self._send_lock.acquire(timeout=_CLOSE_PATIENCE_S):
            self._outbox.finish(b"".join(frames.encode(Frame(frames.CLOSE, name=reason[:1000]))))
            self._send_lock.release()
        self._mark_closed(reason)
        self._read(lambda frame: None)  # gRPC ends a stream only when it was read to its end
        if self._reader is not threading.current_thread():
            # then the peer knows, and sends what comes next over a new connection
            self._is_read.wait(_CLOSE_PATIENCE_S)
        self._outbox.end()
        self._linger()

    def _linger(self) -> None:
        """Give the peer time to read what was sent before the close, then cancel the stream."""
        if self._reader is threading.current_thread() or not self._is_over.wait(_CLOSE_PATIENCE_S):
            timer = threading.Timer(_LINGER_S, self._call.cancel)
            timer.name, timer.daemon = f"linger {self.peer}", True
            if self._call.add_callback(timer.cancel):
                timer.start()

    def _on_over(self) -> None:
        """Wake gRPC's thread, which reads the outbox, and a blocked `send`: the stream has ended on both sides."""
        self._outbox.end()
        self._is_over.set()

    def _read(self, on_frame: OnFrame) -> None:
        with self._reader_lock:
            if self._reader is not None:
                return
            if self._idle_timeout_s is not None:
                self._watch = SilenceWatch(self._idle_timeout_s, self._on_silence, self.peer)
            name = f"read {self.peer}"
            self._reader = threading.Thread(target=self._read_loop, args=(on_frame,), name=name, daemon=True)
            self._reader.start()

    def _on_silence(self) -> None:
        self._mark_closed(f"nothing heard for {self._idle_timeout_s} s")
        self._call.cancel()

    def _chunks(self) -> Iterator[bytes]:
        """Yield the incoming chunks, and tell the silence watch when a read begins and ends."""
        watch = self._watch
        if watch is None:
            yield from self._incoming
            return
        watch.listening()
        for chunk in self._incoming:
            watch.heard()
            yield chunk
            watch.listening()

    def _read_loop(self, on_frame: OnFrame) -> None:
        reader = ChunkReader(self._chunks())
        reason = GONE
        try:
            while (frame := reader.read_frame()) is not None:
                if frame.kind == frames.CLOSE:
                    self._mark_closed(frame.name)
                    break
                if self._closed_reason is None:
                    on_frame(frame)
        except grpc.RpcError as error:
            reason = _lost(error)
        except ConnectionError as error:
            reason = f"connection lost: {error}"
        except FrameError as error:
            reason = str(error)
        except MemoryError:
            reason = "a frame arrived that does not fit into memory"
        except BaseException as error:
            reason = f"a frame could not be handled: {type(error).__name__}: {error}"
            raise
        finally:
            self._end(self._own_reason or reason)

    def _end(self, reason: str) -> None:
        is_orderly = self._closed_reason is not None
        self._mark_closed(reason)
        self._is_read.set()
        self._outbox.end()
        if self._watch is not None:
            self._watch.end()
        if not is_orderly:
            self._call.cancel()
        self._release()


def connect(
    endpoint: str,
    idle_timeout_s: float | None = None,
    credentials: Credentials | None = None,
    silence_s: float = SILENCE_S,
) -> Connection:
    """Connect to a listener of a process of this run, on any host.

    credentials: of the run; None: those of this process (use_credentials).
    silence_s: the connection ends when the peer's process has answered no ping for a fifth to a third more than this.

    Raises:
        Unavailable: nothing listens there, or there is no answer within 5 s.
        Unauthenticated: the listener is not of this run, or does not accept this process as one of it.
    """
    where = parse_to_connect(endpoint)
    endpoint = str(where)  # so that messages do not show the token
    credentials = credentials or credentials_to_connect(where)
    channel = grpc_channels.open_channel(where, credentials, silence_s)
    outbox = Outbox()
    said = grpc_channels.greeting(credentials, where.port)
    call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(outbox, metadata=list(said.items()))
    patience = threading.Timer(_CONNECT_PATIENCE_S, call.cancel)  # the process that accepted may be any
    patience.name, patience.daemon = f"connect {endpoint}", True
    try:
        patience.start()
        welcome = dict(call.initial_metadata() or ()).get(WELCOME)
        if welcome is None:
            raise _refusal(endpoint, call)
        if not credentials.is_proof(welcome, grpc_channels.listener_at(where.port), said[NONCE]):
            raise Unauthenticated(f"{endpoint} is not of this run: it does not know the token; {ADVICE}")
    except BaseException:  # also Ctrl+C
        outbox.end()
        channel.close()
        raise
    finally:
        patience.cancel()
    return GrpcConnection(endpoint, call, outbox, call, channel.close, idle_timeout_s)


def listen(
    endpoint: str,
    on_connection: OnConnection,
    credentials: Credentials | None = None,
    silence_s: float = SILENCE_S,
) -> Listener:
    """Accept connections from processes of this run; with port 0, the listener's `endpoint` has the chosen port.

    credentials, silence_s: as for `connect`.

    Raises:
        ValueError: it is no endpoint, or a plain one that other hosts could reach.
        Unauthenticated: this process has no credentials.
        OSError: the address cannot be bound.
    """
    where = tcp_endpoint.parse(endpoint)
    return GrpcListener(where, credentials or credentials_for(where), on_connection, silence_s)


class GrpcListener(Listener):
    def __init__(
        self, where: TcpEndpoint, credentials: Credentials, on_connection: OnConnection, silence_s: float
    ) -> None:
        self._credentials = credentials
        self._on_connection = on_connection
        self._server = grpc_channels.new_server(ThreadPerCall(self._not_taken_in), silence_s)
        handlers = {METHOD: grpc.stream_stream_rpc_method_handler(self._accept)}
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
        self._port = grpc_channels.bind(self._server, where, credentials)
        self._where = where._replace(port=self._port)
        bound = self._where._replace(bind="")
        self.endpoint = bound.with_token
        self._label = str(bound)
        self.refusals = Refusals(self._label)
        self._server.start()

    def close(self, reason: str = "closed") -> None:
        # gRPC's stop() starts a thread that waits for the open streams. Started from a daemon, it is a daemon too, and
        # does not keep the interpreter from exiting.
        stop = threading.Thread(target=self._server.stop, args=(threading.TIMEOUT_MAX,), daemon=True)
        stop.start()
        stop.join()
        _wait_until_free(self._where)
        self.refusals.summarize()

    def _accept(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Start a connection for a new stream; gRPC calls this in a thread per stream and sends the outbox."""
        said = dict(context.invocation_metadata())
        nonce, shown = said.get(NONCE, ""), said.get(SHOWN, "")
        if not self._credentials.is_proof(shown, grpc_channels.client_of(self._port), nonce):
            text = "a wrong token" if shown else "no token"
            self.refusals.note(context.peer(), f"it showed {text}")
            context.abort(grpc.StatusCode.UNAUTHENTICATED, f"the peer showed {text}")
        outbox = Outbox()
        welcome = self._credentials.proof(grpc_channels.listener_at(self._port), nonce)
        context.send_initial_metadata([(WELCOME, welcome)])
        peer = f"client of {self._label} ({context.peer()})"
        self._on_connection(GrpcConnection(peer, requests, outbox, context, lambda: None))
        return outbox

    def _not_taken_in(self, error: Exception) -> None:
        self.refusals.note("a process", describe_rejection(error))


def _wait_until_free(where: TcpEndpoint) -> None:
    """Wait until the address can be listened at again: gRPC closes its socket some time after stop(), unannounced."""
    with contextlib.suppress(OSError):  # of the address's look-up: it is of another host
        family, _, _, _, address = socket.getaddrinfo(where.bind or where.host, where.port, type=socket.SOCK_STREAM)[0]
        deadline = time.monotonic() + _FREE_WITHIN_S
        while time.monotonic() < deadline:
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # else past connections are in the way
                try:
                    probe.bind(address)
                    return
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        return
            time.sleep(_LOOK_AGAIN_S)


def _refusal(endpoint: str, call: Any) -> Unavailable:
    """Return the error that says why the stream did not begin."""
    code, details = call.code(), call.details()
    if code == grpc.StatusCode.CANCELLED:
        return Unavailable(f"{endpoint} did not answer within {_CONNECT_PATIENCE_S:g} s")
    if code == grpc.StatusCode.UNAUTHENTICATED:
        return Unauthenticated(f"{endpoint} refused this process: {details}; {ADVICE}")
    if "handshake failed" in details:
        return Unauthenticated(f"{endpoint} is not of this run, or does not speak TLS: {details}; {ADVICE}")
    if "Socket closed" in details:
        why = f"it has just ended, or does not accept this process as one of its run ({ADVICE})"
        return Unavailable(f"{endpoint} closed the connection before it began: {why}")
    return Unavailable(f"nothing listens at {endpoint}: {details}")


def _lost(error: grpc.RpcError) -> str:
    details = error.details() if isinstance(error, grpc.Call) else None
    return f"{GONE}: {details}" if details else GONE
