"""Memory for what a peer has announced, and may never send."""

import mmap

_BELIEVED_BYTES = 1 << 26  # of more only what has come takes memory, whatever was announced


def memory_for(size: int) -> bytearray | memoryview:
    """To be filled as the bytes come; of its own, so that what is built on it stays writable.

    Raises:
        MemoryError: there is not so much on this machine.
    """
    if size <= _BELIEVED_BYTES:
        return bytearray(size)
    try:
        return memoryview(mmap.mmap(-1, size))  # the kernel gives each page when it is written to
    except OSError as error:
        raise MemoryError(f"{size} bytes") from error
