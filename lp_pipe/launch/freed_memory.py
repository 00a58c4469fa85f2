"""What the process of a node does with memory that it has freed: it keeps it, because every step takes it again."""

import ctypes
import os
from collections.abc import Callable

# glibc's malloc.h
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8

_KEPT_BYTES = 1 << 29
_GROWTH_BYTES = 1 << 26
_LARGEST_BYTES = 1 << 25  # the most that every glibc takes; what is larger goes back to the kernel at once


def keep_freed_memory() -> None:
    """Let malloc keep half a GiB of what is freed, where it is glibc's and the user has not set it up himself.

    By default activations of a step go back to the kernel, which clears their pages when the next step touches them.
    One arena for all threads, because what was freed in one is of no use to another: called before there are any.
    """
    mallopt = _mallopt()
    if mallopt is None or _is_set_up():
        return
    mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES)
    mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
    mallopt(_TOP_PAD, _GROWTH_BYTES)
    mallopt(_ARENA_MAX, 1)


def _mallopt() -> Callable[[int, int], int] | None:
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018  # others have a mallopt that does nothing, or something else
        found: Callable[[int, int], int] = libc.mallopt
    except (OSError, AttributeError):
        return None
    return found


def _is_set_up() -> bool:
    is_named = any(name.startswith("MALLOC_") for name in os.environ)
    return is_named or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or "LD_PRELOAD" in os.environ
