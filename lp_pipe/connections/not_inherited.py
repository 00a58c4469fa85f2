"""Sockets that forked processes, such as a data loader's workers, do not keep open.

With a copy of them, a child that outlives its parent keeps the parent's connections: nobody would learn of its end, and
callers would wait at its listeners.
"""

import os
import socket
import weakref

_sockets: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def not_inherited(sock: socket.socket) -> None:
    """Let this socket be closed in processes that are forked from now on; over exec none is kept anyway."""
    _sockets.add(sock)


def _leave_to_the_parent() -> None:
    for sock in list(_sockets):
        descriptor = sock.detach()  # or it would close, in the end, whatever has its number by then
        if descriptor >= 0:
            os.close(descriptor)


os.register_at_fork(after_in_child=_leave_to_the_parent)
