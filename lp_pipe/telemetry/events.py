"""The events of a run, appended to its events.jsonl: one JSON object a line."""

import contextlib
import json
import os
import time
from typing import Any

from lp_pipe.telemetry.file_writing import AppendOnlyFile


class EventLog(AppendOnlyFile):
    """A file of lines {"time", "event", "node", ...}; several processes may append to it.

    Each line is one write, so a killed run keeps its history. A line that cannot be written (full disk, deleted folder)
    is dropped: the run goes on.
    """

    def write(self, event: str, node: str | None = None, **facts: Any) -> None:
        """Append one event; `node` is None for the run as a whole."""
        line = json.dumps({"time": round(time.time(), 3), "event": event, "node": node, **facts})
        with contextlib.suppress(OSError):
            os.write(self.opened().fileno(), f"{line}\n".encode())
