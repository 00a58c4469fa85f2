"""Where the lines that nodes print go: to a file per node, and prefixed to the launcher's own streams."""

import contextlib
import errno
import logging
import os
import sys
from pathlib import Path
from typing import Protocol, TextIO

from lp_pipe.telemetry.appended_file import AppendedFile

_log = logging.getLogger(__name__)


class LogOutput(Protocol):
    """What takes the nodes' lines; `write` blocks while it cannot take more."""

    def write(self, node_id: str, is_stderr: bool, lines: list[bytes]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class LogFiles:
    """One thread writes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, AppendedFile] = {}
        self._is_whole = True
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, node_id: str) -> Path:
        """The file that holds all the node's output."""
        return log_path(self._folder, node_id)

    def write(self, node_id: str, is_stderr: bool, lines: list[bytes]) -> None:
        try:
            self._keep(node_id, b"".join(line + b"\n" for line in lines))
        except (OSError, ValueError) as error:  # disk full, folder removed, no name for a file
            # An end here would block every node.
            if self._is_whole:
                _log.warning("not all that the nodes print is in %s any more: %s", self._folder, error)
            self._is_whole = False
        target = sys.stderr if is_stderr else sys.stdout
        if target is None:  # the launcher was started without; the file has everything
            return
        texts = [line.decode(errors="replace") for line in lines]
        with contextlib.suppress(ValueError, OSError):  # the launcher has closed it; likewise
            _print("".join(f"[{node_id}] {text}\n" for text in texts), target)

    def _keep(self, node_id: str, data: bytes) -> None:
        file = self._files.get(node_id)
        if file is None:
            file = self._files[node_id] = AppendedFile(self.path(node_id))
        if file.opened().write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path(node_id)))

    def flush(self) -> None:
        for target in (sys.stdout, sys.stderr):
            with contextlib.suppress(ValueError, OSError):  # the launcher has closed it
                if target is not None:
                    target.flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _print(text: str, target: TextIO) -> None:
    """What the target's encoding does not have is escaped: the other lines must not be lost for it."""
    try:
        target.write(text)
    except UnicodeEncodeError as error:
        target.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))


def log_path(folder: Path, node_id: str) -> Path:
    """The file of a node in the folder of logs."""
    return folder / (node_id.replace("/", "-") + ".log")
