"""A client's connection, when it ends at an awkward moment."""

import threading
import time
from pathlib import Path
from typing import Any

import lp_pipe as lp
from lp_pipe.connections import Frame, frames, inproc, io_thread
from lp_pipe.rpc import Server
from lp_pipe.rpc.calls import Reply
from lp_pipe.rpc.client_connection import ClientConnection
from lp_pipe.rpc.codec import Payload

WITHIN_S = 20.0


class Pending:
    reply: Reply | None = None

    def deliver(self, reply: Reply) -> None:
        self.reply = reply


def test_a_client_may_go_wherever_the_collector_finds_it(socket_home: Path, no_leaks: None) -> None:
    # Its connection was closed on the spot. The collector may run while that very thread begins to watch for the end of
    # another connection, with the lock that closing takes: the thread waited for itself, and so did all others.
    server = Server([], f"unix:{socket_home}/server")
    clients = [lp.CourierClient(server.endpoint)]
    assert clients[0].copy() == []

    def drop() -> None:
        with io_thread.shared._lock:
            clients.clear()

    dropping = threading.Thread(target=drop, daemon=True)
    dropping.start()
    dropping.join(WITHIN_S)
    assert not dropping.is_alive()
    deadline = time.monotonic() + WITHIN_S
    while server._connections:
        assert time.monotonic() < deadline, "the connection is still open"
    server.close()


def test_a_stream_that_opens_while_its_connection_ends_has_an_end() -> None:
    # In one process the frame comes in the producer's thread, and the end in that of whoever closes: a consumer whose
    # inbox was made just after the others had been told waited for ever.
    near, far = inproc.pair()
    link = ClientConnection(near)
    far.start(lambda frame: None, lambda reason: None)
    call = Pending()
    number = link.start("count", Payload(b"", []), call)
    take = link._pending.take_arrived

    def take_as_it_ends(call_id: int) -> Any:
        taken = take(call_id)
        far.close("the server ended")
        return taken

    link._pending.take_arrived = take_as_it_ends  # type: ignore[method-assign]
    far.send(Frame(frames.STREAM_OPEN, number))
    assert not isinstance(call.reply, (Frame, Exception)) and call.reply is not None
    end = call.reply.inbox.take(WITHIN_S)
    assert isinstance(end, lp.Unavailable) and "the server ended" in str(end)
