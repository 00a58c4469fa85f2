"""Memory for data that a peer has announced and may never send."""

import mmap

# From this size on, malloc maps new memory for each piece, and the kernel fills it page by page as bytes arrive: with
# small pages that takes eight times as long as copying the bytes.
_LARGE_BYTES = 1 << 24


def memory_for(size: int) -> bytearray | memoryview:
    """Return new, writable memory of `size` bytes, to be filled as they arrive.

    Large memory is taken from the system only as it is filled, whatever size was announced.

    Raises:
        MemoryError: this machine does not have so much.
    """
    if size < _LARGE_BYTES:
        return bytearray(size)
    try:
        return memoryview(fresh_memory(size))
    except OSError as error:
        raise MemoryError(f"{size} bytes") from error


def fresh_memory(size: int) -> mmap.mmap:
    """Map private memory of this process, in large pages where the system has them.

    Raises:
        OSError: this machine does not have so much.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
