"""Numbers that nodes log: appended to a file, one JSON object a line, and passed on to sinks such as displays."""

import json
import logging
import math
import operator
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lp_pipe.telemetry.file_writing import AppendOnlyFile
from lp_pipe.telemetry.run_folder import RunFolder
from lp_pipe.telemetry.sink_threads import MetricsRecord, Sink, SinkRun, SinkThread, end_all

_log = logging.getLogger(__name__)


class MetricsLog:
    """The file metrics.jsonl, and the sinks, which have threads of their own.

    A line is {"time", "node", "step", "values": {name: number}}: a metric may have any name, also "step".

    A line that cannot be written is logged as a warning once; training goes on.
    """

    def __init__(self, path: Path, sinks: Sequence[Sink] = (), run: SinkRun | None = None) -> None:
        self._path = path
        self._file = AppendOnlyFile(path)
        self._lock = threading.RLock()  # code that interrupts a thread in `record` may record as well
        self._sinks = [SinkThread(sink, run or SinkRun(RunFolder(path.parent))) for sink in sinks]
        self._has_warned = False

    def record(self, node: str, values: Mapping[str, float], step: int | None) -> None:
        """Append one record. It is in the file when this returns, so a killed run keeps its history."""
        record = MetricsRecord(time.time(), node, step, dict(values))
        with self._lock:
            self._write(_to_json(record))
            for sink in self._sinks:
                sink.put(record)

    def record_event(self, node: str, event: str, step: int) -> None:
        """Append an event that happened at a step; sinks get only numbers, so not this."""
        self._write(json.dumps({"time": round(time.time(), 3), "node": node, "event": event, "step": step}))

    def close(self) -> None:
        """Close the file, and wait up to 5 s for the sinks."""
        with self._lock:
            self._file.close()
            sinks, self._sinks = self._sinks, []
        end_all(sinks)

    def _write(self, line: str) -> None:
        with self._lock:
            try:
                self._append(f"{line}\n".encode())
            except OSError as error:  # the disk is full, the folder was removed
                if not self._has_warned:
                    _log.warning("metrics cannot be written to %s and are dropped: %s", self._path, error)
                self._has_warned = True

    def _append(self, line: bytes) -> None:
        """Append the whole line, or nothing: half a line would make the file unreadable."""
        file = self._file.opened()
        end = os.fstat(file.fileno()).st_size
        try:
            written = file.write(line)
            if written < len(line):
                file.write(line[written:])  # raises the error that cut the first write short
        except OSError:
            file.truncate(end)
            raise


def _to_json(record: MetricsRecord) -> str:
    # JSON has no NaN or infinity; every reader takes strings.
    values = {key: value if math.isfinite(value) else str(value) for key, value in record.values.items()}
    return json.dumps({"time": round(record.time, 3), "node": record.node, "step": record.step, "values": values})


def as_numbers(metrics: Mapping[str, Any], step: Any) -> tuple[dict[str, float], int | None]:
    """Return the arguments of `log_metrics` with numpy's and torch's numbers as Python's.

    The conversion happens at the call, so that every launch mode takes the same values.

    Raises:
        TypeError: metrics is no dict, a value no single number, a name no str, or step no int.
        ValueError: a name cannot be encoded.
    """
    if not hasattr(metrics, "items"):
        raise TypeError(f"log_metrics({metrics!r}): metrics must be a dict of numbers by name, such as {{'loss': 0.5}}")
    return {_name(name): _number(name, value) for name, value in metrics.items()}, _step(step)


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"log_metrics: the metric name {name!r} is not a str")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"log_metrics: the metric name {name!r} cannot be encoded: it has half a surrogate pair"
        ) from error
    return str(name)


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, str | bytes):  # float() would parse some of them
            raise TypeError("a text")
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # RuntimeError: torch, of several elements
        raise TypeError(
            f"log_metrics: {name!r} is of type {type(value).__name__}, but must be one number ({error})"
        ) from error


def _step(step: Any) -> int | None:
    try:
        return None if step is None else operator.index(step)
    except TypeError:
        raise TypeError(f"log_metrics: step must be an int, got step={step!r}") from None
