"""Numbers that nodes log: appended to a file, one JSON object a line, and passed on to displays."""

import contextlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MetricsRecord:
    """What one `log_metrics` call said; `time` is in seconds since the epoch."""

    time: float
    node: str
    step: int | None
    values: Mapping[str, float]


Sink = Callable[[MetricsRecord], None]


class MetricsLog:
    """Writes metrics.jsonl and calls the sinks, from whichever thread the record comes in."""

    def __init__(self, path: Path, sinks: tuple[Sink, ...] = ()) -> None:
        self._path = path
        self._sinks = sinks
        self._file: TextIO | None = None
        self._lock = threading.Lock()
        self._has_warned = False

    def record(self, node: str, values: Mapping[str, float], step: int | None) -> None:
        """Append one record. The file is flushed line by line, so that a killed run keeps its history.

        A file that cannot be written (a full disk, a removed folder) costs the record, and not the node.
        """
        record = MetricsRecord(time.time(), node, step, dict(values))
        with self._lock:
            try:
                self._append(_to_json(record))
            except OSError as error:
                self._give_up_file(error)
        for sink in self._sinks:
            sink(record)

    def _append(self, line: str) -> None:
        if self._file is None:
            self._file = self._path.open("a", encoding="utf-8")
        self._file.write(line + "\n")
        self._file.flush()

    def _give_up_file(self, error: OSError) -> None:
        """The next record tries again: the disk may have room by then."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
        if not self._has_warned:
            self._has_warned = True
            _log.warning("metrics are lost, the program goes on: cannot write %s: %s", self._path, error.strerror)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


def _to_json(record: MetricsRecord) -> str:
    # JSON has no NaN or infinity; as strings they survive every reader.
    values = {key: value if math.isfinite(value) else str(value) for key, value in record.values.items()}
    return json.dumps({"time": round(record.time, 3), "node": record.node, "step": record.step, **values})
