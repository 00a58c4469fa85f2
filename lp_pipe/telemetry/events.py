"""The events of a run, appended to its events.jsonl: one JSON object a line."""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from lp_pipe.telemetry.file_writing import AppendOnlyFile


class EventLog:
    """Appends {"time", "event", "node", ...}; several processes may append to one file.

    Each line is one write, so that a run that is killed keeps its history. A line that cannot be written (full disk,
    deleted folder) is left out: the run goes on.
    """

    def __init__(self, path: Path) -> None:
        self._file = AppendOnlyFile(path)

    def write(self, event: str, node: str | None = None, **facts: Any) -> None:
        """Append one event; `node` is None for the run as a whole."""
        line = json.dumps({"time": round(time.time(), 3), "event": event, "node": node, **facts})
        with contextlib.suppress(OSError):
            os.write(self._file.opened().fileno(), f"{line}\n".encode())

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()
