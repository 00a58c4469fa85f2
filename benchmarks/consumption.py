"""Read from /proc what processes hold now: memory, threads, file descriptors, shared memory (Linux only)."""

import contextlib
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_PAGE = os.sysconf("SC_PAGE_SIZE")
_MIB = 1 << 20


class Held(NamedTuple):
    """The figures of a process; zeros if it has ended."""

    rss_mib: float = 0.0
    threads: int = 0
    descriptors: int = 0


def held(pid: int) -> Held:
    with contextlib.suppress(OSError):
        pages = int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1])
        return Held(pages * _PAGE / _MIB, len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd")))
    return Held()


def shared_mib(pids: Iterable[int]) -> float:
    """Anonymous files in memory that any of them has open, each counted once, and what is in /dev/shm."""
    sizes: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                path = f"/proc/{pid}/fd/{name}"
                with contextlib.suppress(OSError):
                    if os.readlink(path).startswith("/memfd:"):
                        found = os.stat(path)
                        sizes[found.st_ino] = found.st_blocks * 512
    return (sum(sizes.values()) + bytes_in(pathlib.Path("/dev/shm"))) / _MIB


def bytes_in(folder: pathlib.Path) -> int:
    """Return the size of all files below a folder, without those that disappear meanwhile."""
    total = 0
    for path in _files_in(folder):
        with contextlib.suppress(OSError):
            total += os.lstat(path).st_blocks * 512
    return total


def files_in(folder: pathlib.Path) -> int:
    return sum(1 for _ in _files_in(folder))


def _files_in(folder: pathlib.Path) -> Iterator[str]:
    for parent, _, names in os.walk(folder):  # unlike rglob, it bears with folders that go away
        yield from (os.path.join(parent, name) for name in names)
