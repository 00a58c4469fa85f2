"""Whether the hosts of TCP peers are within reach: their kernels acknowledge what is sent, and probes in between.

It is not about processes: one that a debugger holds, or that has no time to read, still acknowledges.
"""

import contextlib
import errno
import os
import socket
import struct
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

IS_SUPPORTED = hasattr(socket, "TCP_INFO") and hasattr(socket, "TCP_KEEPIDLE")

_PROBES_SHARE, _LIMIT_SHARE = 0.125, 1.2
_MANY_PROBES = 127  # it is not they that decide
_TCP_RTO_MAX_MS = 44  # since Linux 6.15
_NUMBER = struct.Struct("I")
_SINCE_ACK_MS, _WINDOW = 56, 228  # where they are in tcp_info
_INFO_BYTES = 232


def is_out_of_reach(error: BaseException | None) -> bool:
    """Whether a connection failed on its way to a host; else the host itself has refused it."""
    unreachable = isinstance(error, OSError) and error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH)
    return unreachable or isinstance(error, TimeoutError)


class _Watched(NamedTuple):
    """is_probed: also while the peer's window is full; without TCP_RTO_MAX_MS that gets ever rarer."""

    sock: "weakref.ref[socket.socket]"
    limit_ms: float
    is_probed: bool
    on_silence: "weakref.WeakMethod[Callable[[], object]]"


class Reach:
    """One thread per process looks at all connections."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)  # the child has no such thread

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._has_changed = threading.Condition(self._lock)
        self._watched: dict[int, _Watched] = {}
        self._pause_s = 1.0
        self._is_running = False

    def watch(self, sock: socket.socket, silence_s: float, on_silence: Callable[[], object]) -> None:
        """Call `on_silence` once when nothing was acknowledged for a fifth more than `silence_s`, or at most a third.

        sock; on_silence, a bound method: they are not kept alive. `forget` before the socket is closed.
        """
        if not IS_SUPPORTED:
            return
        pause_s = silence_s * _PROBES_SHARE
        is_probed = _probe(sock, pause_s)
        with self._lock:
            self._pause_s = min(self._pause_s, pause_s) if self._watched else pause_s
            limit_ms = 1000 * silence_s * _LIMIT_SHARE
            self._watched[id(sock)] = _Watched(weakref.ref(sock), limit_ms, is_probed, weakref.WeakMethod(on_silence))
            self._has_changed.notify()  # it may be about to sleep for longer
            if not self._is_running:
                threading.Thread(target=self._run, name="reach of other hosts", daemon=True).start()
                self._is_running = True  # not before: the system may have no more threads

    def forget(self, sock: socket.socket) -> None:
        """Watch no more."""
        with self._lock:
            self._watched.pop(id(sock), None)
            if not self._watched:
                self._has_changed.notify()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._has_changed.wait(self._pause_s)
                if not self._watched:
                    self._is_running = False
                    return
                watched = list(self._watched.items())
            for key, one in watched:
                if self._is_lost(key, one) and (on_silence := one.on_silence()) is not None:
                    on_silence()

    def _is_lost(self, key: int, one: _Watched) -> bool:
        """Asked once for each that is."""
        with self._lock:  # while it is held nobody closes the socket
            if self._watched.get(key) is not one:
                return False
            sock = one.sock()
            if sock is None:  # nobody has closed it, and nobody has it any more
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
    """Let the kernel ask for acknowledgements once in so many seconds; False if less often of a peer that is full."""
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


shared = Reach()
