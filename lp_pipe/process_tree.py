"""Look up processes and their descendants in /proc, and send them signals."""

import contextlib
import os
import signal
from collections.abc import Iterable

_PF_EXITING = 0x4  # of the flags in /proc/PID/stat


def tree_of(pid: int) -> list[int]:
    """Return all living descendants of a process, parents before children; empty if there is no /proc."""
    found: list[int] = []
    stack = [pid]
    while stack:
        for child in _children_of(stack.pop()):
            found.append(child)
            stack.append(child)
    return [process for process in found if not _is_zombie(process)]


def marked(variable: str, value: str) -> list[int]:
    """Return the processes of this user that were started with `variable=value` in their environment."""
    needle = f"{variable}={value}".encode()
    found = []
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as file:
                if needle in file.read().split(b"\0"):
                    found.append(int(entry))
    return found


def start_time(pid: int) -> int:
    """Return when a process began, in the system's ticks, which tells it from a later process with the same pid.

    0 if it has ended (also for a zombie). 1 for every living process if there is no /proc.
    """
    if not os.path.isdir("/proc/self"):
        return int(_exists(pid))
    fields = _stat_of(pid)
    return 0 if not fields or fields[0] in b"ZX" else int(fields[19])


def is_dying(pid: int) -> bool:
    """Return whether a process ends or has ended. The kernel shows this before it closes the process's connections."""
    if not os.path.isdir("/proc/self"):
        return False
    fields = _stat_of(pid)
    if not fields or fields[0] in b"ZX" or int(fields[6]) & _PF_EXITING:
        return True
    return bool(int(fields[28]) & 1 << signal.SIGKILL - 1)  # killed, but on a busy host it has not run since


def state_of(pid: int) -> str:
    """Return the kernel's letter for the state of a process, such as "T" for stopped; "" if there is no /proc."""
    return b"".join(_stat_of(pid)[:1]).decode()


def owner_of(pid: int) -> int | None:
    """Return the user of a process; None if it has ended, or if there is no /proc."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def session_of(pid: int) -> int:
    """Return the session of a process; 0 if it has ended."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def terminal_of(pid: int) -> str:
    """Return an identifier of a process's terminal, also different from a later one of the same name; "" for none."""
    fields = _stat_of(pid)
    return f"session {int(fields[3])}, device {int(fields[4])}" if fields and int(fields[4]) else ""


def kill_all(pids: Iterable[int]) -> None:
    """Send SIGKILL to each process."""
    signal_all(pids, signal.SIGKILL)


def signal_all(pids: Iterable[int], number: int) -> None:
    """Send the signal to each process. Those that have ended are skipped."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _children_of(pid: int) -> list[int]:
    children: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return children
    for thread in threads:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
            children += [int(child) for child in file.read().split()]
    return children


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _is_zombie(pid: int) -> bool:
    """Return whether the process is a zombie or has ended."""
    return _stat_of(pid)[:1] in ([], [b"Z"])


def _stat_of(pid: int) -> list[bytes]:
    """Return the fields after the process's name, from its state on; empty if it has ended. Bytes, as names may be."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []
