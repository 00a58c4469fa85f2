"""Lines of several nodes, and their unfinished ones, on a terminal and elsewhere."""

import contextlib
import io
import os
import pty
from collections.abc import Iterator

import pytest

from lp_pipe.telemetry.console import Console, cut
from lp_pipe.telemetry.terminal_lines import TerminalLines
from tests.waiting import until


class Terminal:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERM", "xterm")
        self._ours, theirs = pty.openpty()
        self.stream = os.fdopen(theirs, "w", encoding="utf-8")
        self._lines = TerminalLines()
        self.finished: list[str] = []

    def row(self) -> str:
        """Return the last row; lines above it are `finished`."""
        os.set_blocking(self._ours, False)
        with contextlib.suppress(BlockingIOError):
            self.finished += [line.decode() for line in self._lines.feed(os.read(self._ours, 1 << 16), 0.0)]
        finished, _ = self._lines.look(1e9)
        self.finished += [line.decode() for line in finished]
        return self._lines._unfinished(0.0).text.decode()

    def shows(self, row: str) -> None:
        until(lambda: self.row() == row)

    def close(self) -> None:
        self.stream.close()
        os.close(self._ours)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    terminal = Terminal(monkeypatch)
    yield terminal
    terminal.close()


def test_on_a_terminal_a_bar_changes_in_place_below_the_lines_of_others(terminal: Terminal) -> None:
    console = Console(terminal.stream, terminal.stream)
    for step in range(3):
        console.show("a/0", True, f"step {step}", False)
        console.flush()
        terminal.shows(f"[a/0] step {step}")
        console.write("b/0", False, [f"line {step}"])
        console.flush()
        terminal.shows(f"[a/0] step {step}")
    console.write("a/0", True, ["step 3"])
    console.flush()
    terminal.shows("")
    assert terminal.finished == ["[b/0] line 0", "[b/0] line 1", "[b/0] line 2", "[a/0] step 3"]


def test_bars_of_several_nodes_share_the_row_and_those_without_room_are_counted(terminal: Terminal) -> None:
    console = Console(terminal.stream, terminal.stream)
    console.show("a/0", True, "one", False)
    console.show("b/0", True, "two", False)
    console.flush()
    terminal.shows("[a/0] one │ [b/0] two")
    for index in range(20):
        console.show(f"c/{index}", True, "x" * 200, False)
    console.flush()
    until(lambda: terminal.row().endswith(" +19"))
    assert len(terminal.row()) < 80


def test_elsewhere_a_settled_line_is_shown_and_continued_where_nothing_has_come_between() -> None:
    stream = io.StringIO()
    console = Console(stream, stream)
    console.show("a/0", False, "downloading ... ", False)
    assert stream.getvalue() == ""
    console.show("a/0", False, "downloading ... ", True)
    console.show("a/0", False, "downloading ... more ", True)
    console.write("a/0", False, ["downloading ... more ok", "next"])
    assert stream.getvalue() == "[a/0] downloading ... more ok\n[a/0] next\n"
    console.show("a/0", False, "Password: ", True)
    console.write("b/0", False, ["meanwhile"])
    console.write("a/0", False, ["Password: ok"])
    assert stream.getvalue().splitlines()[2:] == ["[a/0] Password: ", "[b/0] meanwhile", "[a/0] Password: ok"]


@pytest.mark.parametrize(
    ("text", "columns", "shown"),
    [("abcdef", 3, "abc"), ("日本語", 5, "日本"), ("\x1b[31mred\x1b[0m", 9, "red"), ("a\x00b\x9fc", 9, "a�b�c")],
)
def test_a_row_is_cut_by_columns_without_colors_and_controls(text: str, columns: int, shown: str) -> None:
    assert cut(text, columns) == shown
