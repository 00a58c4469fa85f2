"""Read from /proc which sockets and shared memory this process holds; empty results if there is no /proc."""

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_MAPPED = re.compile(r"(?:/memfd:|/dev/shm/)\S+(?: \(deleted\))?$", re.MULTILINE)


def open_sockets() -> dict[str, int]:
    """Return the descriptor of every socket, by the kernel's name for it: descriptors are reused, names are not."""
    return {target: number for number, target in _descriptors() if target.startswith("socket:")}


def shared_memory() -> set[str]:
    """Return the names of segments that this process has open or mapped."""
    opened = {target for _, target in _descriptors() if target.startswith(("/memfd:", "/dev/shm/"))}
    try:
        mapped = set(_MAPPED.findall(Path("/proc/self/maps").read_text(errors="replace")))
    except OSError:
        mapped = set()
    return opened | mapped


def named_segments() -> set[Path]:
    """Return this user's files in /dev/shm, including those that no process has open."""
    found = set()
    for path in _SHARED_MEMORY.glob("*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.getuid():
                found.add(path)
    return found


def is_left(path: Path, ours: set[int]) -> bool:
    """Return whether a segment exists and no process other than `ours` maps it.

    Compares inode numbers, because glibc maps a new semaphore under a temporary name.
    """
    try:
        mapped = re.compile(rf" {path.stat().st_ino} +{re.escape(str(_SHARED_MEMORY))}/")
    except OSError:
        return False
    return not any(mapped.search(_maps_of(pid)) for pid in _all_pids() - ours)


def describe_socket(number: int) -> str:
    """Return the family, address and peer of a socket's descriptor."""
    try:
        with socket.socket(fileno=os.dup(number)) as copy:
            return f"{copy.family.name} at {_name_of(copy.getsockname)!r}, peer {_name_of(copy.getpeername)!r}"
    except OSError:
        return "of unknown kind"


def _name_of(ask: object) -> object:
    try:
        return ask()  # type: ignore[operator]
    except OSError:
        return None


def _descriptors() -> Iterator[tuple[int, str]]:
    for entry in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        with contextlib.suppress(OSError):
            yield int(entry), os.readlink(f"/proc/self/fd/{entry}")


def _all_pids() -> set[int]:
    return {int(entry) for entry in os.listdir("/proc") if entry.isdigit()}


def _maps_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return ""
