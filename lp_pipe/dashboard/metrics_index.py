"""An index of a run's metrics.jsonl: for each series at most 700 buckets, however long the file grows.

A bucket keeps the least and the greatest value of a fixed number of neighbouring points, so no spike is lost. When a
series has more buckets than that, each becomes twice as wide. A query for a small part of a series reads that part of
the file again, because a run writes its file in the order of time.
"""

import bisect
import contextlib
import gc
import json
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lp_pipe.dashboard.metric_lines import columns
from lp_pipe.telemetry.plain_files import open_plain

MAX_BUCKETS = 700
_MAX_PENDING = 256  # points of a series that wait to be put into buckets
_CHUNK_BYTES = 4 << 20
_INDEX_BYTES = 1 << 20
_LONGEST_LINE = 16 << 20
_FEW_BUCKETS = 250  # a query that finds fewer reads the file, if that is no more than:
_READ_AT_MOST = 24 << 20

Array = NDArray[np.float64]
SeriesKey = tuple[str, str]  # node, name

# The columns of a bucket: its first point, the least value and where it was, the greatest value and where it was.
_STEP, _TIME, _LOW, _LOW_STEP, _LOW_TIME, _HIGH, _HIGH_STEP, _HIGH_TIME = range(8)
AXES = {"step": (_STEP, _LOW_STEP, _HIGH_STEP), "time": (_TIME, _LOW_TIME, _HIGH_TIME)}


@dataclass
class _Points:
    """Points in the order of the file: arrays, and after them what single lines say."""

    parts: list[tuple[Array, Array, Array]] = field(default_factory=list)
    steps: list[Any] = field(default_factory=list)
    times: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    count: int = 0

    def add(self, step: Any, time: Any, value: Any) -> None:
        self.steps.append(step)
        self.times.append(time)
        self.values.append(value)
        self.count += 1

    def extend(self, steps: Array, times: Array, values: Array) -> None:
        self._pack()
        self.parts.append((steps, times, values))
        self.count += len(values)

    def rows(self) -> Array:
        """Return each point as a bucket of its own."""
        self._pack()
        step, time, value = (np.concatenate(columns) for columns in zip(*self.parts, strict=True))
        value = np.where(np.isfinite(value), value, np.nan)
        return np.column_stack([step, time, value, step, time, value, step, time])

    def _pack(self) -> None:
        if self.values:
            self.parts.append((_as_array(self.steps), _as_array(self.times), _as_array(self.values)))
            self.steps, self.times, self.values = [], [], []


def _as_array(column: list[Any]) -> Array:
    """Return numbers, None and the names of infinities as numbers."""
    try:
        return np.array(column, np.float64)
    except (TypeError, ValueError):
        return np.array([_as_number(one) for one in column])


def _as_number(found: Any) -> float:
    try:
        return float(found)
    except (TypeError, ValueError):
        return math.nan


class Series:
    """The buckets of one metric of one node.

    count: the points. width: how many are in a bucket. last: the newest value. odd: how many are NaN or infinite.
    """

    def __init__(self) -> None:
        self.count = 0
        self.width = 1
        self.last = math.nan
        self.odd = 0
        self.has_steps = False
        self._rows = np.empty((0, 8))
        self._used = 0
        self.pending = _Points()

    @property
    def rows(self) -> Array:
        return self._rows[: self._used]

    def settle(self) -> None:
        """Put the pending points into buckets."""
        if not self.pending.count:
            return
        points, self.pending = self.pending, _Points()
        new = points.rows()
        self.last = float(points.parts[-1][2][-1])
        self.odd += int(np.isnan(new[:, _LOW]).sum())
        self.has_steps = self.has_steps or bool(np.isfinite(new[:, _STEP]).any())
        begun = self.count % self.width  # points in the last bucket that is not full
        first = self.count - begun
        numbers = np.arange(self.count, self.count + len(new))
        if begun:
            self._used -= 1
            new = np.concatenate([self._rows[self._used : self._used + 1], new])
            numbers = np.concatenate([[first], numbers])
        self.count += points.count
        self._append(_merged(new, numbers // self.width))
        while self._used > MAX_BUCKETS:
            self.width *= 2
            merged = _merged(self.rows, np.arange(self._used) // 2)
            self._rows, self._used = merged.copy(), len(merged)

    def _append(self, rows: Array) -> None:
        needed = self._used + len(rows)
        if needed > len(self._rows):
            room = np.empty((max(needed, min(2 * len(self._rows), MAX_BUCKETS)), 8))
            room[: self._used] = self.rows
            self._rows = room
        self._rows[self._used : needed] = rows
        self._used = needed


def _merged(rows: Array, group: "NDArray[Any]") -> Array:
    """Merge neighbouring buckets of the same group."""
    starts = np.flatnonzero(np.diff(group, prepend=group[:1] - 1))
    if len(starts) == len(rows):
        return rows
    merged = rows[starts]
    sizes = np.diff(starts, append=len(rows))
    for at, best in ((_LOW, np.fmin), (_HIGH, np.fmax)):
        extremes = best.reduceat(rows[:, at], starts)
        holders = np.flatnonzero(rows[:, at] == np.repeat(extremes, sizes))
        groups, places = np.unique(np.searchsorted(starts, holders, side="right") - 1, return_index=True)
        merged[groups, at : at + 3] = rows[holders[places], at : at + 3]
    return merged


class MetricsIndex:
    """The series of one metrics.jsonl; any thread may ask. The file is read only by a call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._series: dict[SeriesKey, Series] = {}
        self._end = 0
        self._inode = 0
        self._chunks: list[tuple[float, int]] = []  # the first time and the offset of every part that was read

    def refresh(self) -> int:
        """Read what was appended; return the offset up to which the file is read."""
        with self._lock:
            try:
                found = self._path.lstat()
            except OSError:
                return self._end
            if found.st_ino != self._inode or found.st_size < self._end:  # another file
                self._forget()
                self._inode = found.st_ino
            if found.st_size > self._end:
                with _without_gc():
                    for offset, length, lines in _parts(self._path, self._end, found.st_size):
                        self._add(offset, lines)
                        self._end = offset + length
                    self._settle(above=_MAX_PENDING)
            return self._end

    def names(self) -> list[dict[str, Any]]:
        """Return what is known of every series, in the order of the file."""
        self.refresh()
        with self._lock:
            for one in self._series.values():
                one.settle()
            return [
                {"node": node, "name": name, "points": one.count, "last": _plain(one.last), "odd": one.odd}
                for (node, name), one in self._series.items()
            ]

    def query(
        self,
        key: SeriesKey,
        axis: str = "step",
        low: float = -math.inf,
        high: float = math.inf,
        buckets: int = MAX_BUCKETS,
    ) -> dict[str, Any]:
        """Return the points of a series between `low` and `high` of the axis: all, or two for each of the buckets.

        Returns {"x", "y", "points", "axis"}; y is None for NaN and infinities. A series without steps has the axis
        "time". Neighbours outside are included, so that a line reaches the border.
        """
        with self._lock:
            one = self._series.get(key)
            if one is None:
                return {"x": [], "y": [], "points": 0, "axis": axis}
            one.settle()
            axis = axis if one.has_steps else "time"
            rows, part = one.rows, _within(one.rows, axis, low, high)
            found = rows[part]
            if one.width > 1 and len(found) < _FEW_BUCKETS and len(found) < len(rows):
                after = rows[part.stop, _TIME] if part.stop < len(rows) else math.inf
                found = self._read(key, found[0, _TIME] if len(found) else 0.0, after, found)
                found = found[_within(found, axis, low, high)]
            count = one.count
        if len(found) > buckets:
            found = _merged(found, np.arange(len(found)) * buckets // len(found))
        return {**_as_columns(found, axis), "points": count, "axis": axis}

    def after(self, offset: int, keys: "set[SeriesKey]") -> tuple[int, dict[SeriesKey, list[tuple[float, float, Any]]]]:
        """Return the end of the file and, by series, the (step, time, value) of the points behind the offset."""
        end = self.refresh()
        found: dict[SeriesKey, list[tuple[float, float, Any]]] = {}
        if offset < end:
            for _, _, lines in _parts(self._path, offset, end):
                for key, step, time, value in _points_of(lines):
                    if key in keys:
                        found.setdefault(key, []).append((step, time, _plain(value)))
        return end, found

    def _add(self, offset: int, lines: bytes) -> None:
        """Add the points of a part of the file."""
        self._note_times(offset, lines)
        found = columns(lines)
        for node, name, steps, times, values in found or ():
            self._pending(node, name).extend(steps, times, values)
        if found is None:
            for key, step, time, value in _points_of(lines):
                self._pending(*key).add(step, time, value)
        self._settle(above=MAX_BUCKETS)

    def _settle(self, above: int) -> None:
        for one in self._series.values():
            if one.pending.count > above:
                one.settle()

    def _note_times(self, offset: int, lines: bytes) -> None:
        """Keep the time of about every millionth byte, by which `_read` finds a part of the file."""
        for shift in range(0, len(lines), _INDEX_BYTES):
            start = lines.find(b"\n", shift) + 1 if shift else 0
            for _, _, time, _ in _points_of(lines[start : lines.find(b"\n", start) + 1]):
                self._chunks.append((max(time, self._chunks[-1][0] if self._chunks else time), offset + start))
                break

    def _pending(self, node: str, name: str) -> _Points:
        one = self._series.get((node, name))
        if one is None:
            one = self._series[node, name] = Series()
        return one.pending

    def _read(self, key: SeriesKey, since: float, until: float, otherwise: Array) -> Array:
        """Return a series' points of a time from the file; `otherwise` if that is too much to read."""
        first = max(0, bisect.bisect_left(self._chunks, (since, -1)) - 1)
        last = bisect.bisect_right(self._chunks, (until, self._end))
        start = self._chunks[first][1]
        end = self._chunks[last][1] if last < len(self._chunks) else self._end
        if end - start > _READ_AT_MOST:
            return otherwise
        points = _Points()
        for _, _, lines in _parts(self._path, start, end):
            found = columns(lines)
            for column in found or ():
                if (column.node, column.name) == key:
                    points.extend(column.steps, column.times, column.values)
            if found is None:
                for other, step, time, value in _points_of(lines):
                    if other == key:
                        points.add(step, time, value)
        if not points.count:
            return otherwise
        rows = points.rows()
        return rows[(rows[:, _TIME] >= since) & (rows[:, _TIME] <= until)]


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    """Keep the garbage collector from looking at a million new objects, none of which is in a cycle."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _within(rows: Array, axis: str, low: float, high: float) -> slice:
    """Return the buckets that may have points between low and high, and one more on each side."""
    if not len(rows):
        return slice(0, 0)
    first, at_low, at_high = (rows[:, column] for column in AXES[axis])
    least = np.fmin(np.fmin(first, at_low), at_high)
    most = np.fmax(np.fmax(np.append(first[1:], first[-1:]), at_low), at_high)
    inside = np.flatnonzero((most >= low) & (least <= high))
    if not len(inside):
        return slice(0, 0)
    return slice(max(0, inside[0] - 1), min(len(rows), inside[-1] + 2))


def _as_columns(rows: Array, axis: str) -> dict[str, Any]:
    _, at_low, at_high = AXES[axis]
    x = np.column_stack([rows[:, at_low], rows[:, at_high]])
    y = np.column_stack([rows[:, _LOW], rows[:, _HIGH]])
    swap = x[:, 0] > x[:, 1]
    x[swap], y[swap] = x[swap, ::-1], y[swap, ::-1]
    keep = np.column_stack([np.ones(len(rows), bool), x[:, 0] != x[:, 1]])  # a bucket of one point is one point
    xs, ys = x[keep], y[keep]
    order = np.argsort(xs, kind="stable")
    xs, ys = xs[order], ys[order]
    known = np.isfinite(xs)
    return {"x": [_short(one) for one in xs[known].tolist()], "y": [_plain(one) for one in ys[known].tolist()]}


def _short(number: float) -> float | int:
    return int(number) if number == int(number) else round(number, 3)


def _plain(number: float) -> float | str | None:
    """Return a number with 7 digits, as JSON can have it."""
    return float(f"{number:.7g}") if math.isfinite(number) else None


def _points_of(lines: bytes) -> Iterator[tuple[SeriesKey, float, float, float]]:
    """Yield the series, step, time and value of every number in the lines; nothing for a line of another kind."""
    for record in _parsed(lines):
        try:
            node, time, step = record["node"], float(record["time"]), record["step"]
            for name, value in record["values"].items():
                yield (node, name), _as_number(step), time, _as_number(value)
        except (KeyError, TypeError, ValueError, AttributeError):
            continue


def _parts(path: Path, start: int, end: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield (offset, bytes, lines) of the finished lines between the offsets."""
    try:
        with open_plain(path) as file:
            file.seek(start)
            left = b""
            while start < end and (data := file.read(min(_CHUNK_BYTES, end - start - len(left)))):
                data = left + data
                whole = data.rfind(b"\n") + 1
                left = data[whole:]
                if whole:
                    yield start, whole, data[:whole]
                    start += whole
                elif len(left) > _LONGEST_LINE:
                    return
    except OSError:
        return


def _parsed(lines: bytes) -> list[Any]:
    text = lines.decode(errors="replace").strip("\n")
    try:
        found: list[Any] = json.loads(f"[{text.replace(chr(10), ',')}]")  # half the time of a call for each line
    except ValueError:
        found = []
        for line in text.split("\n"):
            try:
                found.append(json.loads(line))
            except ValueError:
                continue  # cut off by a full disk, or no line of ours
    return found
