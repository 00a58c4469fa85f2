"""Sockets and shared memory that this process holds, from /proc; empty where there is no /proc."""

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_MAPPED = re.compile(r"(?:/memfd:|/dev/shm/)\S+(?: \(deleted\))?$", re.MULTILINE)


def open_sockets() -> dict[str, int]:
    """The descriptor of every socket, by the kernel's name for it: descriptors are used again, names are not."""
    return {target: number for number, target in _descriptors() if target.startswith("socket:")}


def shared_memory() -> set[str]:
    """Segments that are open or mapped here."""
    opened = {target for _, target in _descriptors() if target.startswith(("/memfd:", "/dev/shm/"))}
    try:
        mapped = set(_MAPPED.findall(Path("/proc/self/maps").read_text(errors="replace")))
    except OSError:
        mapped = set()
    return opened | mapped


def named_segments() -> set[Path]:
    """All in /dev/shm that is this user's, also what no process has open any more."""
    found = set()
    for path in _SHARED_MEMORY.glob("*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.getuid():
                found.add(path)
    return found


def is_left(path: Path, ours: set[int]) -> bool:
    """Whether a segment is there, and mapped by no process but `ours`.

    By the file's number: glibc maps a new semaphore under another name, which it then takes away.
    """
    try:
        mapped = re.compile(rf" {path.stat().st_ino} +{re.escape(str(_SHARED_MEMORY))}/")
    except OSError:
        return False
    return not any(mapped.search(_maps_of(pid)) for pid in _all_pids() - ours)


def describe_socket(number: int) -> str:
    """What a descriptor is connected to."""
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
