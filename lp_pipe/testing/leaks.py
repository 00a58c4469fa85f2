"""Detect what a test leaves behind: threads, processes, sockets, shared memory, temporary files."""

import contextlib
import gc
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from lp_pipe.connections import io_thread
from lp_pipe.private_python import is_foreign, target_of
from lp_pipe.process_tree import start_time, tree_of
from lp_pipe.testing import temp_dir

PATIENCE_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1
# One of each per process, started by the first program that needs it.
_LIVE_AS_LONG_AS_THE_PROCESS = (
    io_thread.NAME,
    "return buffers",
    "call callbacks",
    "close dropped streams",
    "close dropped clients",
)


@contextmanager
def assert_no_leaks(patience: float = PATIENCE_S, ignore_threads: Collection[str] = ()) -> Iterator[None]:
    """Assert that the body leaves no thread, process, socket, shared memory or temporary file behind.

    After the body these have `patience` seconds to disappear. To find temporary files, the body and the processes that
    it starts get their own temporary folder ($TMPDIR). Only sockets and shared memory of this process are checked.

    ignore_threads: beginnings of names of threads that may stay.

    Raises:
        AssertionError: names each leak. Not raised if the body itself raises.
    """
    with temp_dir.private_temp_dir():
        before = LeakSnapshot(ignore_threads)
        yield
        before.assert_nothing_new(patience)


class LeakSnapshot:
    """The threads, processes, sockets, shared memory and temporary files at one time, to compare with later ones."""

    def __init__(self, ignore_threads: Collection[str] = ()) -> None:
        self._ignored = (*_LIVE_AS_LONG_AS_THE_PROCESS, *ignore_threads)
        self._threads = set(threading.enumerate())
        self._processes = _processes()
        self._sockets = open_sockets()
        self._memory = shared_memory()
        self._segments = named_segments()
        self._files = temp_dir.entries()

    def assert_nothing_new(self, patience_s: float) -> None:
        """Wait until nothing is left that was not in this snapshot.

        Raises:
            AssertionError: names each leak that remains after `patience_s`.
        """
        leaks = self._wait_until_gone(patience_s)
        if leaks:  # not `assert`, which pytest would rewrite with another text
            raise AssertionError("\n".join([f"{len(leaks)} leaked:", *(f"- {leak}" for leak in leaks)]))

    def _wait_until_gone(self, patience_s: float) -> list[str]:
        deadline = time.monotonic() + patience_s
        pause_s = _FIRST_PAUSE_S
        while self._new():
            is_late = time.monotonic() >= deadline
            gc.collect()  # an object held only by a reference cycle is no leak; this may take long
            if is_late:
                return self._new()
            time.sleep(pause_s)  # there is no common event for the ends of processes, sockets and files
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return []

    def _new(self) -> list[str]:
        return [
            *self._new_threads(),
            *self._new_processes(),
            *self._new_sockets(),
            *self._new_memory(),
            *self._new_files(),
        ]

    def _new_threads(self) -> list[str]:
        new = [thread for thread in threading.enumerate() if thread not in self._threads and thread.ident is not None]
        return [_describe_thread(thread) for thread in new if not self._may_stay(thread)]

    def _may_stay(self, thread: threading.Thread) -> bool:
        return is_foreign(thread) or thread.name.startswith(self._ignored)

    def _new_processes(self) -> list[str]:
        return [f"process {pid}: {_command_of(pid)}" for pid, _ in sorted(_processes() - self._processes)]

    def _new_sockets(self) -> list[str]:
        now = open_sockets()
        new = [number for name, number in now.items() if name not in self._sockets]
        return [f"socket {number}: {describe_socket(number)}" for number in new]

    def _new_memory(self) -> list[str]:
        open_here = shared_memory() - self._memory
        found = [f"shared memory: {name}" for name in sorted(open_here)]
        ours = {os.getpid(), *(pid for pid, _ in _processes())}
        for path in sorted(named_segments() - self._segments):
            if str(path) not in open_here and is_left(path, ours):
                found.append(f"shared memory: {path}, which no process uses")
        return found

    def _new_files(self) -> list[str]:
        return [f"temporary file: {name}" for name in sorted(temp_dir.entries() - self._files)]


def _processes() -> set[tuple[int, int]]:
    """Return the living descendants with their start times, because pids are reused."""
    return {(pid, start_time(pid)) for pid in tree_of(os.getpid())}


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200].strip()
    except OSError:
        return "(it has just ended)"


def _describe_thread(thread: threading.Thread) -> str:
    function = getattr(target_of(thread), "__qualname__", "")
    runs = f", runs {function}" if function else ""
    frame = sys._current_frames().get(thread.ident or 0)
    at = traceback.format_stack(frame)[-1].strip() if frame is not None else "(it has just ended)"
    return f"thread {thread.name!r}{runs}, at {at}"


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
