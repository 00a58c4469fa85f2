"""Memory of another process's, seen from processes that are forked from this one, such as a data loader's workers.

All else that they have of their parent is a copy, made where they write. So that memory, too, has to be one: else what
they write in place is written for their parent and for each other.
"""

import ctypes
import itertools
import mmap
import os

from lp_pipe.connections.kernel_calls import most_descriptors
from lp_pipe.connections.when_gone import when_gone

_MAP_FIXED = 0x10  # in the place of what is mapped there; Linux's own number, as Python has no name for it

_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]

_numbers = itertools.count()
_shared: dict[int, tuple[int, int, int]] = {}  # address, bytes and descriptor


def private_when_forked(mapping: mmap.mmap, descriptor: int) -> None:
    """In a forked process `mapping` is its own. descriptor: of what is mapped; one more is kept as long as the mapping.

    Not where descriptors become few: forks are rarer than connections, which end without any.
    """
    if descriptor > most_descriptors() // 2:
        return
    number, address = next(_numbers), ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    _shared[number] = address, len(mapping), os.dup(descriptor)
    when_gone(mapping, _forget, number)


def _forget(number: int) -> None:
    known = _shared.pop(number, None)
    if known is not None:  # else this process was forked, and has closed it
        os.close(known[2])


def _make_private() -> None:
    for address, size, descriptor in _shared.values():
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
        _libc.mmap(address, size, protection, flags, descriptor, 0)
        os.close(descriptor)
    _shared.clear()


os.register_at_fork(after_in_child=_make_private)
