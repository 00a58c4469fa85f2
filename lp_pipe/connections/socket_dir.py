"""The private folder for the unix sockets of one run, which names the processes that use it."""

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lp_pipe.process_tree import start_time

PREFIX = "lp-"
_PROCESSES = "processes"  # a file with one line for each process that will remove the folder
_MAX_TEMP_DIR_BYTES = 70  # + "/lp-xxxxxxxx/coordinator"; a unix socket's path has 107 bytes at most (103 on macOS)


def make_socket_dir() -> str:
    """Make a folder of mode 0700, so that only this user can connect to its sockets. The caller must remove it."""
    folder = tempfile.mkdtemp(prefix=PREFIX, dir=_parent())
    register_process(folder)
    return folder


def fits(folder: str) -> bool:
    """Return whether paths of sockets in this temporary folder are short enough."""
    return len(os.fsencode(folder)) <= _MAX_TEMP_DIR_BYTES


def register_process(folder: str) -> None:
    """Name this process in the folder, as one that will remove it."""
    with contextlib.suppress(OSError), open(f"{folder}/{_PROCESSES}", "a", encoding="utf-8") as file:
        file.write(f"{os.getpid()} {start_time(os.getpid())} {_pid_namespace()}\n")


def abandoned_socket_dirs() -> Iterator[Path]:
    """Yield this user's socket folders that no living process will remove, because all were killed."""
    with contextlib.suppress(OSError), os.scandir(_parent()) as found:
        yield from (Path(one.path) for one in found if one.name.startswith(PREFIX) and _is_abandoned(one))


def _parent() -> str:
    usual = tempfile.gettempdir()
    return usual if fits(usual) else "/tmp"


def _is_abandoned(entry: "os.DirEntry[str]") -> bool:
    with contextlib.suppress(OSError, ValueError):
        status = entry.stat(follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            return False
        lines = Path(entry.path, _PROCESSES).read_text(encoding="utf-8").splitlines()
        return bool(lines) and not any(_may_live(*line.split()) for line in lines)
    return False  # another process has just removed it, or it is not one of ours


def _may_live(pid: str, started: str, namespace: str) -> bool:
    """Return whether a named process lives. A pid of another container or host says nothing, so it may."""
    return namespace != _pid_namespace() or start_time(int(pid)) == int(started)


def _pid_namespace() -> str:
    """Return an identifier of the host and the pid namespace of this process."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    return "unknown"
