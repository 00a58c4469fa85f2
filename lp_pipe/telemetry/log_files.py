"""Destinations of the lines that nodes print: a file per node, and the launcher's streams, with labels."""

import contextlib
import errno
import json
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from lp_pipe.telemetry.console import console
from lp_pipe.telemetry.file_names import log_names, node_of_log
from lp_pipe.telemetry.file_writing import AppendOnlyFile, write_atomically
from lp_pipe.telemetry.run_folder import RunFolder
from lp_pipe.telemetry.terminal_lines import Unfinished

_log = logging.getLogger(__name__)


class LogOutput(Protocol):
    """A destination for the nodes' lines. `write` blocks while it is full."""

    def write(self, node_id: str, is_stderr: bool, lines: list[bytes]) -> None: ...

    def show(self, node_id: str, is_stderr: bool, unfinished: Unfinished) -> None:
        """Take a line that has not ended. Each call repeats the whole line, until `write` gets the finished one."""

    def flush(self) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class NodeOutputStream(Protocol):
    """A replacement for sys.stdout or sys.stderr that is told which node printed each line."""

    def node_lines(self, node_id: str, lines: list[str]) -> None: ...

    def node_unfinished(self, node_id: str, unfinished: Unfinished) -> None: ...


class LogFiles:
    """A log file for each of the nodes `node_ids`; only one thread may write.

    A label that is not a valid file name, or differs from another label only in case, is replaced by a hash in the
    file's name. An index in the run's folder then maps file names to nodes.
    """

    def __init__(self, run_folder: RunFolder, node_ids: Iterable[str]) -> None:
        self._folder = run_folder.logs
        self._names = log_names(node_ids)
        self._files: dict[str, AppendOnlyFile] = {}
        self._begun: dict[str, tuple[bool, bytes]] = {}  # by node: is_stderr and text of a written line without end
        self._is_whole = True
        self._folder.mkdir(parents=True, exist_ok=True)
        _write_index(run_folder, self._names)

    def path(self, node_id: str) -> Path:
        """Return the file that holds all the node's output."""
        return self._folder / self._names[node_id]

    def write(self, node_id: str, is_stderr: bool, lines: list[bytes]) -> None:
        self._keep(node_id, is_stderr, b"".join(line + b"\n" for line in lines))
        self._begun.pop(node_id, None)
        texts = [line.decode(errors="replace") for line in lines]
        target = sys.stderr if is_stderr else sys.stdout
        if isinstance(target, NodeOutputStream):
            target.node_lines(node_id, texts)
        else:
            console.write(node_id, is_stderr, texts)

    def show(self, node_id: str, is_stderr: bool, unfinished: Unfinished) -> None:
        if unfinished.is_settled:
            self._keep(node_id, is_stderr, unfinished.text)
            self._begun[node_id] = is_stderr, unfinished.text
        target = sys.stderr if is_stderr else sys.stdout
        if isinstance(target, NodeOutputStream):
            target.node_unfinished(node_id, unfinished)
        else:
            console.show(node_id, is_stderr, unfinished.text.decode(errors="replace"), unfinished.is_settled)

    def _keep(self, node_id: str, is_stderr: bool, text: bytes) -> None:
        """Append to the node's file; if the line's beginning is there already, only the rest."""
        was_stderr, begun = self._begun.get(node_id, (is_stderr, b""))
        if begun:
            is_same = was_stderr == is_stderr and text.startswith(begun)
            text = text.removeprefix(begun) if is_same else b"\n" + text
        try:
            self._append(node_id, text)
        except OSError as error:  # the disk is full, the folder was removed
            # An exception here would end the log thread, and every node would block on its full pipe.
            if self._is_whole:
                _log.warning("log files in %s are incomplete from now on: %s", self._folder, error)
            self._is_whole = False

    def _append(self, node_id: str, data: bytes) -> None:
        file = self._files.get(node_id)
        if file is None:
            file = self._files[node_id] = AppendOnlyFile(self.path(node_id))
        if file.opened().write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path(node_id)))

    def flush(self) -> None:
        console.flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _write_index(folder: RunFolder, names: Mapping[str, str]) -> None:
    """Add the files that are not named after their node to the folder's index; entries of an earlier run stay."""
    unclear = {name: node_id for node_id, name in names.items() if node_of_log(name) != node_id}
    if unclear:
        with contextlib.suppress(OSError):  # the run goes on without the index, as without log lines
            index = {**folder.node_ids_of_logs(), **unclear}
            write_atomically(folder.log_index, json.dumps(index, indent=1) + "\n")
