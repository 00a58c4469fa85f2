"""Disks that are full, broken or read-only: real file systems, seen by one thread and those that it starts.

A thread may have mounts of its own; they go with the last thread that sees them.
"""

import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_CLONE_NEWNS = 0x20000
_MS_RDONLY, _MS_REMOUNT, _MS_REC, _MS_PRIVATE = 1, 32, 1 << 14, 1 << 18
_EXT4_IOC_SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32)
_NO_LOG_FLUSH = 2
_libc = ctypes.CDLL(None, use_errno=True)


def why_not() -> str:
    """Return why there can be no such disks here, or an empty string."""
    try:
        with_own_mounts(lambda: None)
    except OSError as error:
        return f"mounts of one's own: {error}"
    return ""


def why_no_image() -> str:
    """The same of `mount_image`, which needs more."""
    missing = [name for name in ("mkfs.ext4", "mount") if shutil.which(name) is None]
    if missing or why_not():
        return why_not() or f"not installed: {', '.join(missing)}"
    return "" if os.path.exists("/dev/loop-control") else "this system has no loop devices"


def with_own_mounts(body: Callable[[], T]) -> T:
    """Run it in a thread whose mounts are invisible to all other processes.

    Raises:
        OSError: not permitted (it takes root).
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            _check(_libc.unshare(_CLONE_NEWNS))
            _mount("none", Path("/"), None, _MS_REC | _MS_PRIVATE)
            results.append(body())
        except BaseException as error:  # belongs to the caller
            errors.append(error)

    thread = threading.Thread(target=run, name="own mounts")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def mount_small(folder: Path, size: str = "512k") -> None:
    """A memory file system with room for so much."""
    folder.mkdir(exist_ok=True)
    _mount("tmpfs", folder, "tmpfs", 0, f"size={size}")


def make_read_only(folder: Path) -> None:
    """Make the disk read-only that `mount_small` mounted."""
    _mount("tmpfs", folder, "tmpfs", _MS_REMOUNT | _MS_RDONLY)


def mount_image(folder: Path, below: Path, room: str = "32m") -> None:
    """Mount an ext4 whose blocks are in a file in `below`; `room` may be more than there is.

    Such a disk takes what is written to it, and fails when it is to be flushed.
    """
    image = below / "image"
    folder.mkdir(exist_ok=True)
    _run("truncate", "-s", room, str(image))
    _run("mkfs.ext4", "-q", "-O", "^has_journal", str(image))
    _run("mount", "-n", "-o", "loop", str(image), str(folder))


def unmount(folder: Path) -> None:
    """A loop device ends with its mount."""
    _check(_libc.umount2(os.fsencode(folder), 0))


def break_down(folder: Path) -> None:
    """Make every later access to this ext4 an Input/output error, as after the loss of its disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, _EXT4_IOC_SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
    finally:
        os.close(descriptor)


def _mount(source: str, folder: Path, kind: str | None, flags: int, options: str = "") -> None:
    kind_bytes = kind.encode() if kind is not None else None
    _check(_libc.mount(source.encode(), os.fsencode(folder), kind_bytes, flags, options.encode()))


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
