"""Log files of nodes, read as they grow."""

import contextlib
import os
import re
import stat
from pathlib import Path

from lp_pipe.cli.errors import UsageError
from lp_pipe.telemetry.run_folder import RunFolder


class LogFile:
    """One node's file; `new_lines` gives each line once.

    node: its node_id, "label/index"; of a process inside a colocation "label/index.place".
    """

    def __init__(self, path: Path, node: str) -> None:
        self.path = path
        self.node = node
        self.label, _, self._index = node.rpartition("/")
        self._place = 0
        self._unfinished = b""

    @property
    def order(self) -> tuple[str, list[int]]:
        """stage/2 before stage/10."""
        return self.label, [int(part) for part in self._index.split(".") if part.isdecimal()]

    def is_of(self, node: str) -> bool:
        """Whether `node` is its node, the colocation around it, or its group."""
        return node in (self.node, self.label) or self.node.startswith(f"{node}.")

    def new_lines(self, with_unfinished: bool = False) -> list[str]:
        """What has come since the last call, whole lines only; `with_unfinished`: no more will come."""
        with os.fdopen(_open_plain(self.path), "rb") as file:
            file.seek(self._place)
            data = file.read()
        self._place += len(data)
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        if with_unfinished and self._unfinished:
            lines, self._unfinished = [*lines, self._unfinished], b""
        return [line.decode(errors="replace") for line in lines]


def log_files(folder: RunFolder) -> list[LogFile]:
    """Return the files of all nodes that have printed something."""
    return sorted((LogFile(path, node) for node, path in folder.node_logs().items()), key=lambda file: file.order)


# All control characters but tabs; colors are let through.
_CONTROL = re.compile(r"(\x1b\[[0-9;]*m)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def without_control(line: str) -> str:
    """Return the line as it may be shown on a terminal: what a node printed must not move the cursor or rename it."""
    return _CONTROL.sub(lambda found: found[1] or f"\\x{ord(found[0]):02x}", line)


def _open_plain(path: Path) -> int:
    """Open a file of a run's logs, following no link: the folder may be another user's, who would have any file shown.

    Raises:
        UsageError: it, or the folder that it is in, is a link or no plain file.
    """
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, folder)
            file = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError as error:
        raise UsageError(f"{path} cannot be read as a log: {error.strerror} (links are not followed)") from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise UsageError(f"{path} cannot be read as a log: it is no plain file")
    return file
