"""Isolation of forked processes, such as a data loader's workers, from their parent's sockets and mapped memory.

A child that keeps a copy of its parent's sockets and outlives the parent keeps the connections open: peers would not
notice the parent's end, and callers would wait at its listeners.

A child has a private copy of all other memory, made where it writes. Memory that the parent has mapped from another
process has to become private too, or the child would write into what its parent and siblings read.
"""

import ctypes
import itertools
import mmap
import os
import socket
import weakref

from lp_pipe.connections.finalizer import add_finalizer
from lp_pipe.connections.kernel_calls import most_descriptors

_MAP_FIXED = 0x10  # map over what is mapped at the address; Linux's own number, as Python has no name for it

_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]

_sockets: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()
_numbers = itertools.count()
_mappings: dict[int, tuple[int, int, int]] = {}  # address, bytes and descriptor


def close_in_children(sock: socket.socket) -> None:
    """Close this socket in processes that are forked from now on; exec closes it anyway."""
    _sockets.add(sock)


def make_private_in_children(mapping: mmap.mmap, descriptor: int) -> None:
    """Give forked processes their own copy of `mapping`.

    descriptor: of the mapped file. A duplicate of it is kept as long as the mapping, unless this process is short of
        descriptors: forks are rarer than connections, which fail without any.
    """
    if descriptor > most_descriptors() // 2:
        return
    number, address = next(_numbers), ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    _mappings[number] = address, len(mapping), os.dup(descriptor)
    add_finalizer(mapping, _forget, number)


def _forget(number: int) -> None:
    known = _mappings.pop(number, None)
    if known is not None:  # else this process was forked, and has closed it
        os.close(known[2])


def _close_sockets() -> None:
    for sock in list(_sockets):
        descriptor = sock.detach()  # else the socket object would later close whatever has its number by then
        if descriptor >= 0:
            os.close(descriptor)


def _make_private() -> None:
    for address, size, descriptor in _mappings.values():
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
        _libc.mmap(address, size, protection, flags, descriptor, 0)
        os.close(descriptor)
    _mappings.clear()


os.register_at_fork(after_in_child=_close_sockets)
os.register_at_fork(after_in_child=_make_private)
