"""Liveness of the hosts of TCP peers: their kernels acknowledge data, and keep-alive probes in between.

This says nothing about processes: the kernel also acknowledges for one that a debugger holds, or that has no time to
    read.
"""

import contextlib
import errno
import functools
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

from lp_pipe.connections import io_thread
from lp_pipe.private_python import release_if_held_here

IS_SUPPORTED = hasattr(socket, "TCP_INFO") and hasattr(socket, "TCP_KEEPIDLE")

_PROBES_SHARE, _LIMIT_SHARE = 0.125, 1.2
_MANY_PROBES = 127  # so that the number of probes does not decide
_TCP_RTO_MAX_MS = 44  # since Linux 6.15
_NUMBER = struct.Struct("I")
_SINCE_ACK_MS, _WINDOW = 56, 228  # their offsets in tcp_info
_INFO_BYTES = 232


def is_unreachable(error: BaseException | None) -> bool:
    """Return whether a connection failed on its way to a host; else the host itself has refused it."""
    unreachable = isinstance(error, OSError) and error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH)
    return unreachable or isinstance(error, TimeoutError)


class _WatchedSocket(NamedTuple):
    """A socket, and when it counts as lost.

    is_probed: whether probes are also sent while the peer's window is full; without TCP_RTO_MAX_MS they get ever rarer.
    """

    sock: "weakref.ref[socket.socket]"
    limit_ms: float
    is_probed: bool
    on_silence: "weakref.WeakMethod[Callable[[], object]]"


class TcpLiveness:
    """The checks of all connections, each from time to time in the I/O thread."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._watched: dict[int, _WatchedSocket] = {}

    def recover(self) -> None:
        """Release the lock if an exception interrupted the calling thread while it held it."""
        release_if_held_here(self._lock)

    def watch(self, sock: socket.socket, silence_s: float, on_silence: Callable[[], object]) -> None:
        """Call `on_silence` once when nothing was acknowledged for a fifth to a third more than `silence_s`.

        sock; on_silence, a bound method: they are not kept alive. Call `forget` before the socket is closed.
        """
        if not IS_SUPPORTED:
            return
        pause_s = silence_s * _PROBES_SHARE
        is_probed, limit_ms = _probe(sock, pause_s), 1000 * silence_s * _LIMIT_SHARE
        one = _WatchedSocket(weakref.ref(sock), limit_ms, is_probed, weakref.WeakMethod(on_silence))
        self._check_later(pause_s, id(sock), one)
        with self._lock:
            self._watched[id(sock)] = one

    def forget(self, sock: socket.socket) -> None:
        """Stop watching."""
        with self._lock:
            self._watched.pop(id(sock), None)

    def _check_later(self, pause_s: float, key: int, one: _WatchedSocket) -> None:
        check = functools.partial(self._check, pause_s, key, one)
        io_thread.shared.at(time.monotonic() + pause_s, check, lambda: self._watched.get(key) is one)

    def _check(self, pause_s: float, key: int, one: _WatchedSocket) -> None:
        if not self._is_lost(key, one):
            if self._watched.get(key) is one:
                self._check_later(pause_s, key, one)
        elif (on_silence := one.on_silence()) is not None:
            on_silence()

    def _is_lost(self, key: int, one: _WatchedSocket) -> bool:
        """Return whether the peer's host was silent for too long, and stop watching it then."""
        with self._lock:  # the socket is not closed while the lock is held
            if self._watched.get(key) is not one:
                return False
            sock = one.sock()
            if sock is None:  # freed without being closed
                del self._watched[key]
                return False
            with contextlib.suppress(OSError):
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
                is_full = len(info) >= _INFO_BYTES and not _NUMBER.unpack_from(info, _WINDOW)[0]
                if _NUMBER.unpack_from(info, _SINCE_ACK_MS)[0] <= one.limit_ms or (is_full and not one.is_probed):
                    return False
            del self._watched[key]
            return True


def _probe(sock: socket.socket, pause_s: float) -> bool:
    """Make the kernel send probes this often; return False if a peer with a full window is probed less often."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = max(1, round(pause_s))
    for option, value in (
        (socket.TCP_KEEPIDLE, seconds),
        (socket.TCP_KEEPINTVL, seconds),
        (socket.TCP_KEEPCNT, _MANY_PROBES),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, 1000 * seconds)
    except OSError:
        return False
    return True


shared = TcpLiveness()
