"""Memory for what a peer has announced, and may never send."""

import mmap

# From here on malloc maps memory anew for each piece, and the kernel fills it page by page while the bytes come: in
# small pages that takes eight times as long as to copy the bytes.
_LARGE_BYTES = 1 << 24


def memory_for(size: int) -> bytearray | memoryview:
    """To be filled as the bytes come; of its own, so that what is built on it stays writable.

    Large memory is taken as it is filled, whatever was announced.

    Raises:
        MemoryError: there is not so much on this machine.
    """
    if size < _LARGE_BYTES:
        return bytearray(size)
    try:
        return memoryview(fresh_memory(size))
    except OSError as error:
        raise MemoryError(f"{size} bytes") from error


def fresh_memory(size: int) -> mmap.mmap:
    """This process's own, in large pages where the system has them.

    Raises:
        OSError: there is not so much on this machine.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
