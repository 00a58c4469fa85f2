"""The output of nodes is passed on, and a reader who takes nothing holds no node up for ever."""

import os
import selectors
import threading
from queue import SimpleQueue

import pytest

from lp_pipe.telemetry import log_pump
from lp_pipe.telemetry.log_pump import LogPump
from lp_pipe.telemetry.terminal_lines import Unfinished

WITHIN_S = 20.0


class Output:
    """Takes lines while `is_read`, as a terminal does."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.shown: SimpleQueue[Unfinished] = SimpleQueue()
        self.is_read = threading.Event()
        self.is_blocked = threading.Event()
        self.is_closed = threading.Event()

    def write(self, node_id: str, is_stderr: bool, lines: list[bytes]) -> None:
        self.is_blocked.set()
        assert self.is_read.wait(WITHIN_S)
        self.lines += lines

    def show(self, node_id: str, is_stderr: bool, unfinished: Unfinished) -> None:
        self.shown.put(unfinished)

    def flush(self) -> None: ...

    def close(self) -> None:
        self.is_closed.set()


def test_lines_of_both_streams_are_passed_on_up_to_the_end() -> None:
    output = Output()
    output.is_read.set()
    pump = LogPump(output, selectors.DefaultSelector())
    pump.start()
    stdout, stderr = pump.add_node("node/0")
    os.write(stdout, b"said\nhalf")
    os.write(stderr, b"complained\n")
    os.close(stdout)
    os.close(stderr)
    pump.close()
    assert sorted(output.lines) == [b"complained", b"half", b"said"]
    assert output.is_closed.is_set()


def test_a_line_without_its_end_is_shown_then_settles_and_a_bar_is_passed_on_in_its_last_state() -> None:
    output = Output()
    output.is_read.set()
    pump = LogPump(output, selectors.DefaultSelector())
    pump.start()
    stdout, stderr = pump.add_node("node/0")
    os.write(stdout, b"downloading ... ")
    assert output.shown.get(timeout=WITHIN_S) == Unfinished(b"downloading ... ", False)
    assert output.shown.get(timeout=WITHIN_S) == Unfinished(b"downloading ... ", True)
    os.write(stderr, b"\rstep 1\rstep 2")
    assert output.shown.get(timeout=WITHIN_S) == Unfinished(b"step 2", False)
    os.write(stderr, b"\rstep 3\n")
    os.write(stdout, b"ok\n")
    os.close(stdout)
    os.close(stderr)
    pump.close()
    assert sorted(output.lines) == [b"downloading ... ok", b"step 3"]
    assert pump.last_lines("node/0", 0.0)[-2:] in ([*map(bytes.decode, output.lines)],)


def test_closing_waits_for_a_reader_no_longer_than_told_and_the_rest_is_written_when_he_reads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """wait() and stop() never returned, and said nothing."""
    monkeypatch.setattr(log_pump, "_WRITING_PATIENCE_S", 0.1)
    output = Output()
    pump = LogPump(output, selectors.DefaultSelector())
    pump.start()
    stdout, stderr = pump.add_node("node/0")
    os.write(stdout, b"first\n")
    assert output.is_blocked.wait(WITHIN_S)
    os.write(stdout, b"last\n")
    os.close(stdout)
    os.close(stderr)

    pump.close(patience_s=0.1)

    assert "lp_pipe.telemetry.log_pump" in [record.name for record in caplog.records]
    assert not output.is_closed.is_set()
    output.is_read.set()
    assert output.is_closed.wait(WITHIN_S)
    assert output.lines == [b"first", b"last"]
