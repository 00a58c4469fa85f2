"""Memory of large tensors that stay for the whole training: pages of their own, which go back when they are freed.

In a node's heap a shard that is allocated between gathered parameters and gradients splits the block that the next
ones would need. These take new memory, and a heap keeps its holes (docs/decisions/021).
"""

import contextlib
import ctypes
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from lp_pipe.connections.memory import fresh_memory

_LARGE_BYTES = 128 << 10  # smaller ones are in the heap: they would waste a part of their last page
_TOP_PAD, _MMAP_THRESHOLD = -2, -3  # of glibc's mallopt

_lock = threading.Lock()
_bodies = 0


def lasting_empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a new tensor in pages of its own, if it is large and in the host's memory.

    Raises:
        OSError: there is no memory for it.
    """
    if device.type != "cpu" or numel * dtype.itemsize < _LARGE_BYTES:
        return torch.empty(numel, dtype=dtype, device=device)
    return torch.frombuffer(fresh_memory(numel * dtype.itemsize), dtype=dtype)


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """Give most large tensors that are allocated in the body pages of their own; what is free in the heap goes back.

    Other threads' allocations are treated in the same way meanwhile. Does nothing where lp_pipe has not set up the
    heap: in the user's own process, and where the user has.
    """
    usual = _settings()
    if not usual:
        yield
        return
    _enter(1, usual)
    try:
        yield
    finally:
        _enter(-1, usual)


def keep_no_holes() -> None:
    """From now on treat all large tensors of this process as `lasting` does those of its body.

    For memory that is freed and allocated again all the time, such as gathered parameters: an aligned block does not
    fit into the hole that one of its size has left, so in the heap each keeps one of its own. Steps are slower, since
    the system clears the pages each time.
    """
    usual = _settings()
    if usual:
        _enter(1, usual)


def _enter(change: int, usual: dict[int, int]) -> None:
    global _bodies
    with _lock:
        was_inside, _bodies = _bodies > 0, _bodies + change
        if was_inside == (_bodies > 0):
            return
        libc = ctypes.CDLL(None)
        # A request that the top of the heap has room for is never given pages of its own.
        for option, value in ({_TOP_PAD: 0, _MMAP_THRESHOLD: _LARGE_BYTES} if _bodies else usual).items():
            libc.mallopt(option, value)
        libc.malloc_trim(0)


def _settings() -> dict[int, int]:
    """Return what the launcher has set for this process's heap, by option of mallopt; nothing if it has not."""
    try:
        environment = Path("/proc/self/environ").read_bytes()  # as the template process had it: glibc has cut it up
    except OSError:
        return {}
    found = {name.decode(): int(value) for name, value in re.findall(rb"glibc\.malloc\.(\w+)=(\d+)", environment)}
    if not {"top_pad", "mmap_threshold"} <= found.keys():
        return {}
    return {_TOP_PAD: found["top_pad"], _MMAP_THRESHOLD: found["mmap_threshold"]}
