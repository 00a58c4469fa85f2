"""Liveness of the hosts of peers that are within reach; test_tls.py has those that are not."""

import socket
import threading
from typing import NoReturn

import pytest

from lp_pipe.connections.tcp_liveness import TcpLiveness

NAME = "tcp liveness"


class Owner:
    def on_silence(self) -> None:
        """Fail: no host is silent here."""


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == NAME}


def test_once_there_are_threads_again_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    # After one connection that found no thread, silent hosts were noticed on none that came later.
    def full(thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    before, owner, some = threads(), Owner(), TcpLiveness()
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as first,
        socket.create_connection(listener.getsockname()) as second,
    ):
        with monkeypatch.context() as patch, pytest.raises(RuntimeError):
            patch.setattr(threading.Thread, "start", full)
            some.watch(first, 1.0, owner.on_silence)
        some.watch(second, 1.0, owner.on_silence)
        (looking,) = threads() - before
        for sock in (first, second):
            some.forget(sock)
        looking.join(10)
        assert not looking.is_alive()
