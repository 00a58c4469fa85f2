r"""The lines of one output stream as a terminal shows them: "\r", erasing and cursor movements are applied.

A line is finished once the cursor has moved below it and is not expected back. Nested progress bars move down and up
again at once, so a line that was overwritten is held for 0.1 s. Lines of a program that redraws several lines, as rich
does while the cursor is hidden, are held for 1 s.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

SHOW_AFTER_S = 0.1
_SETTLED_AFTER_S = 1.0
_BAR_HELD_S, _DRAWING_HELD_S = 0.1, 1.0
_MAX_LINE_BYTES = 1 << 20
_MAX_SHOWN_BYTES = 4096
_COMPACT_BYTES = 1024
_MAX_ROWS = 64

_ROW_MOVES = re.compile(rb"\n|\x1b\[(?P<count>\d*)(?P<way>[AB])|\x1b\[\?25(?P<cursor>[hl])")
_ROW_ESCAPES = re.compile(rb"\x1b\[(?:\d*[AB]|\?25[hl])")
_INCOMPLETE = re.compile(rb"\x1b(?:\[[0-9;?]*)?\Z")
# Everything that moves the cursor in its row, or erases. Colors ("m") do neither.
_EDIT = re.compile(rb"[\r\x08]|\x1b\[[0-9;?]*[A-Za-ln-z]")
_TOKEN = re.compile(r"(?P<plain>[\r\x08])|\x1b\[(?P<number>[0-9;?]*)(?P<kind>[A-Za-z])")


class Unfinished(NamedTuple):
    """The unfinished part of a stream's output: one row, or the rows of several progress bars.

    is_settled: the row was only appended to, and not for 1 s; it is probably a prompt.
    """

    text: bytes
    is_settled: bool


def _is_edited(raw: bytes) -> bool:
    return b"\r" in raw or b"\x08" in raw or (b"\x1b" in raw and _EDIT.search(raw) is not None)


@dataclass
class _TerminalRow:
    raw: bytes = b""
    left_at: float = 0.0

    @property
    def is_edited(self) -> bool:
        return _is_edited(self.raw)


class TerminalLines:
    """A parser that takes bytes as they arrive and returns finished lines, and now and then the unfinished ones.

    The caller gives all times, in seconds. At the time `due` it should call `look`; None: not before the next `feed`.
    """

    def __init__(self) -> None:
        self._rows = [_TerminalRow()]
        self._cursor = 0
        self._is_drawing = False
        self._incomplete = b""  # the beginning of an escape sequence
        self._shown = Unfinished(b"", False)
        self._unshown_since: float | None = None
        self._heard_at = 0.0

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Return the lines that `data` finishes."""
        self._heard_at = now
        if self._unshown_since is None:
            self._unshown_since = now
        data, self._incomplete = self._incomplete + data, b""
        lines: list[bytes] = []
        if not (self._is_drawing or len(self._rows) > 1 or self._rows[0].is_edited):
            lines, data = self._take_plain(data)
        if data:
            lines += self._feed_edits(data, now)
        if lines:
            self._shown = Unfinished(b"", False)  # finished lines take the place of what was shown
            if len(self._rows) == 1 and not self._rows[0].raw:
                self._unshown_since = None
        return lines

    def close(self) -> list[bytes]:
        """Return the remaining lines; the last call, when the stream has ended."""
        self._rows[self._cursor].raw += self._incomplete
        lines = [_rendered(row.raw) for row in self._rows]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def look(self, now: float) -> tuple[list[bytes], Unfinished | None]:
        """Return held lines that are now finished, and the unfinished output if it should be shown now."""
        lines = self._take_finished(now)
        if lines:
            self._shown = Unfinished(b"", False)
        found = self._unfinished(now)
        if found == self._shown:
            self._unshown_since = None
        elif found.is_settled or (self._unshown_since is not None and now >= self._unshown_since + SHOW_AFTER_S):
            self._unshown_since = None
            self._shown = found
            return lines, found
        return lines, None

    @property
    def due(self) -> float | None:
        """The time for the next call of `look`, unless `feed` is called before."""
        times = [self._rows[0].left_at + self._held_s] if self._cursor else []
        if self._unshown_since is not None:
            times.append(self._unshown_since + SHOW_AFTER_S)
        if self._may_settle and not self._shown.is_settled:
            times.append(self._heard_at + _SETTLED_AFTER_S)
        return min(times, default=None)

    @property
    def _held_s(self) -> float:
        return _DRAWING_HELD_S if self._is_drawing else _BAR_HELD_S

    @property
    def _may_settle(self) -> bool:
        row = self._rows[0]
        return len(self._rows) == 1 and 0 < len(row.raw) <= _MAX_SHOWN_BYTES and not row.is_edited

    def _unfinished(self, now: float) -> Unfinished:
        if sum(len(row.raw) for row in self._rows) > _MAX_SHOWN_BYTES:
            return Unfinished(b"", False)
        rows = [text for row in self._rows if (text := _rendered(row.raw))]
        return Unfinished(b"\n".join(rows), self._may_settle and now >= self._heard_at + _SETTLED_AFTER_S)

    def _take_plain(self, data: bytes) -> tuple[list[bytes], bytes]:
        """Return the lines before the first edit, and the rest of the data. A fast path: most output has no edits."""
        row = self._rows[0]
        whole = row.raw + data
        if b"\x1b" in data and _ROW_ESCAPES.search(whole):
            return [], data
        *lines, last = whole.split(b"\n")
        has_edits = b"\r" in data or b"\x08" in data or b"\x1b" in data
        if has_edits:
            lines = [line.removesuffix(b"\r") for line in lines]
            edited = next((place for place, line in enumerate([*lines, last]) if _is_edited(line)), None)
            if edited is not None:
                row.raw = b""
                return lines[:edited], whole.split(b"\n", edited)[edited]
        row.raw = last
        if len(last) > _MAX_LINE_BYTES:
            lines, row.raw = [*lines, last], b""
        return lines, b""

    def _feed_edits(self, data: bytes, now: float) -> list[bytes]:
        if incomplete := _INCOMPLETE.search(data):
            data, self._incomplete = data[: incomplete.start()], incomplete[0]
        place = 0
        for move in _ROW_MOVES.finditer(data):
            self._add(data[place : move.start()])
            self._move(move, now)
            place = move.end()
        self._add(data[place:])
        if len(self._rows[self._cursor].raw) > _MAX_LINE_BYTES:
            self._go_down(now)
        return self._take_finished(now)

    def _add(self, text: bytes) -> None:
        row = self._rows[self._cursor]
        row.raw += text
        if len(row.raw) > _COMPACT_BYTES and row.is_edited:
            row.raw = _compacted(row.raw)

    def _move(self, move: re.Match[bytes], now: float) -> None:
        if move["cursor"]:
            self._is_drawing = move["cursor"] == b"l"
        elif not move["way"]:
            self._go_down(now)
        elif move["way"] == b"B":
            for _ in range(min(int(move["count"] or 1), _MAX_ROWS)):
                self._go_down(now)
        else:
            rows = int(move["count"] or 1)
            self._is_drawing |= rows > self._cursor  # these lines were finished too early: hold such lines from now on
            self._cursor = max(0, self._cursor - rows)
            self._rows[self._cursor].raw += b"\r"

    def _go_down(self, now: float) -> None:
        row = self._rows[self._cursor]
        row.raw, row.left_at = row.raw.removesuffix(b"\r"), now
        self._cursor += 1
        if self._cursor == len(self._rows):
            self._rows.append(_TerminalRow())
        else:
            below = self._rows[self._cursor]
            below.raw = below.raw + b"\r" if _rendered(below.raw) else b""

    def _take_finished(self, now: float) -> list[bytes]:
        count = 0
        while count < self._cursor:
            row = self._rows[count]
            is_held = row.is_edited or self._is_drawing
            if is_held and now < row.left_at + self._held_s and self._cursor - count < _MAX_ROWS:
                break
            count += 1
        lines = [_rendered(row.raw) for row in self._rows[:count]]
        del self._rows[:count]
        self._cursor -= count
        return lines


def _rendered(raw: bytes) -> bytes:
    """Return one row as a terminal shows it."""
    raw = raw.removesuffix(b"\r")
    if not _is_edited(raw):
        return raw
    return _drawn(raw)[0]


def _compacted(raw: bytes) -> bytes:
    """Return a shorter row that looks the same and has the cursor in the same column."""
    text, column, width = _drawn(raw)
    if column == width:
        return b"\r" + text
    return text + b"\r" + (b"\x1b[%dC" % column if column else b"")


def _drawn(raw: bytes) -> tuple[bytes, int, int]:
    """Return the row with its edits applied, the cursor's column, and the width. A letter counts as one column."""
    text = raw.decode(errors="surrogateescape")
    if "\x1b" not in text and "\x08" not in text:
        shown, part = "", ""
        for part in text.split("\r"):
            shown = part + shown[len(part) :]
        shown = shown.rstrip(" ")
        return shown.encode(errors="surrogateescape"), len(part), len(shown)
    text = text[max(0, text.rfind("\r\x1b[K"), text.rfind("\r\x1b[2K")) :]  # these erase everything before them
    cells: list[tuple[str, str]] = []  # letter and colors
    column, colors, place = 0, "", 0
    for token in [*_TOKEN.finditer(text), None]:
        for letter in text[place : token.start() if token else len(text)]:
            cells += [(" ", "")] * (column - len(cells))
            cells[column : column + 1] = [(letter, colors)]
            column += 1
        if token is None:
            break
        place = token.end()
        number, kind = token["number"] or "", token["kind"]
        if token["plain"]:
            column = 0 if token["plain"] == "\r" else max(0, column - 1)
        elif kind == "m":
            colors = "" if number.strip("0") == "" else colors + token[0]
        elif kind == "K":
            cells = _erased(cells, column, number)
        elif kind in "CDG" and (number.isdecimal() or not number):
            count = min(int(number or 1), _MAX_SHOWN_BYTES)
            column = {"C": column + count, "D": max(0, column - count), "G": max(0, count - 1)}[kind]
    shown = _with_colors(cells)  # removes blanks from the end of `cells`
    return shown.encode(errors="surrogateescape"), column, len(cells)


def _erased(cells: list[tuple[str, str]], column: int, what: str) -> list[tuple[str, str]]:
    if what == "2":
        return []
    if what == "1":
        return [(" ", "")] * min(column + 1, len(cells)) + cells[column + 1 :]
    return cells[:column]


def _with_colors(cells: list[tuple[str, str]]) -> str:
    while cells and cells[-1][0] == " ":
        cells.pop()
    parts, now = [], ""
    for letter, colors in cells:
        if colors != now:
            parts.append(("\x1b[0m" if now else "") + colors)
            now = colors
        parts.append(letter)
    return "".join(parts) + ("\x1b[0m" if now else "")
