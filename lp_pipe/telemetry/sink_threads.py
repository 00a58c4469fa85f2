"""The thread and the bounded queue of a metrics sink, so that a slow sink delays no training."""

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lp_pipe.telemetry.run_folder import RunFolder

_log = logging.getLogger(__name__)

_WAITING_AT_MOST = 10_000  # records of one sink
_LAST_RECORDS_S = 5.0  # for all sinks together, at the end of the run


@dataclass(frozen=True)
class MetricsRecord:
    """The values of one `log_metrics` call; `time` is in seconds since the epoch."""

    time: float
    node: str
    step: int | None
    values: Mapping[str, float]


Sink = Callable[[MetricsRecord], object]


@dataclass(frozen=True)
class SinkRun:
    """The facts of a run that a sink is told.

    argv: the command that launched it; flags: those of the program. graph: returns the program's graph, as graph.json
    has it; empty if there is none.
    """

    folder: RunFolder = field(default_factory=lambda: RunFolder(Path()))
    program: str = ""
    argv: Sequence[str] = ()
    flags: Sequence[str] = ()
    graph: Callable[[], Mapping[str, Any]] = dict

    def hyperparameters(self) -> dict[str, str]:
        """Return the flags of the form --name=value."""
        pairs = (flag.lstrip("-").partition("=") for flag in self.flags if flag.startswith("--") and "=" in flag)
        return {name: value for name, _, value in pairs}


class RunSink(ABC):
    """The base class of sinks that open something for each run; a plain function of a record is a sink as well.

    Only the sink's own thread calls the methods. `begin` comes before the first record, and `close` after the last one
    of a run that has records.
    """

    @abstractmethod
    def begin(self, run: SinkRun) -> None:
        """Open what takes the records of this run."""

    @abstractmethod
    def __call__(self, record: MetricsRecord) -> None:
        """Take one record; an exception is logged, and the next record comes all the same."""

    @abstractmethod
    def close(self) -> None:
        """Write and close everything."""


class SinkThread:
    """Passes records to one sink, in order, in a thread that the first record starts. It sleeps while there is none."""

    def __init__(self, sink: Sink, run: SinkRun) -> None:
        self._sink = sink
        self._run = run
        # Its `put` may be interrupted by a signal handler that calls `put`.
        self._records: queue.SimpleQueue[MetricsRecord | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._has_begun = False
        self._is_given_up = False
        self._num_failed = 0
        self._num_too_many = 0

    def put(self, record: MetricsRecord) -> None:
        """Add a record; if the sink is 10,000 behind, leave it out. Not thread-safe."""
        if self._thread is None and not self._start():
            self._num_too_many += 1
        elif self._records.qsize() < _WAITING_AT_MOST:
            self._records.put(record)
        else:
            self._num_too_many += 1

    def end(self) -> None:
        """Ask the thread to end once it has passed on what waits."""
        if self._thread is not None:
            self._records.put(None)

    def join(self, deadline: float) -> None:
        """Wait for the thread until the deadline (of time.monotonic), and say in a warning how much was left out."""
        left = 0
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                self._is_given_up = True
                left = max(0, self._records.qsize() - 1) + 1  # with the one that the sink has not returned from
        reasons = {
            f"while {_WAITING_AT_MOST:,} others waited": self._num_too_many,
            "because it raised": self._num_failed,
            f"because it had not taken them {_LAST_RECORDS_S:g} s after the end": left,
        }
        if any(reasons.values()):
            told = ", ".join(f"{number:,} {why}" for why, number in reasons.items() if number)
            _log.warning(
                "metrics sink %r: %d records were left out: %s; %s has all of them",
                self._sink,
                sum(reasons.values()),
                told,
                self._run.folder.metrics,
            )

    def _start(self) -> bool:
        self._thread = threading.Thread(target=self._pass_on, name=f"metrics sink {_name(self._sink)}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads
            self._thread = None
        return self._thread is not None

    def _pass_on(self) -> None:
        while (record := self._records.get()) is not None and not self._is_given_up:
            try:
                if not self._has_begun and isinstance(self._sink, RunSink):
                    self._sink.begin(self._run)
                self._has_begun = True
                self._sink(record)
            except Exception as error:
                self._failed(error)
        if self._has_begun and isinstance(self._sink, RunSink) and not self._is_given_up:
            try:
                self._sink.close()
            except Exception as error:
                _log.warning("metrics sink %r could not be closed: %r", self._sink, error)

    def _failed(self, error: Exception) -> None:
        self._num_failed += 1
        if self._num_failed == 1:
            _log.warning("metrics sink %r raised %r; later errors of this sink are only counted", self._sink, error)


def end_all(threads: Iterable[SinkThread]) -> None:
    """Give all sinks together 5 s for what they have not taken yet."""
    threads = list(threads)
    deadline = time.monotonic() + _LAST_RECORDS_S
    for thread in threads:
        thread.end()
    for thread in threads:
        thread.join(deadline)


def _name(sink: Any) -> str:
    return str(getattr(sink, "__name__", None) or type(sink).__name__)
