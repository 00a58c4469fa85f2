"""An index of a run's metrics.jsonl: for each series at most 700 buckets, however long the file grows.

A bucket keeps the least and the greatest value of a fixed number of neighbouring points, so no spike is lost. When a
series has more buckets than that, each becomes twice as wide. A query for a small part of a series reads that part of
the file again, because a run writes its file in the order of time.
"""

import bisect
import itertools
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lp_pipe.dashboard.index_file import IndexState, SeriesState, load_index, save_index
from lp_pipe.dashboard.metric_lines import BLOCK_BYTES, SeriesKey, columns, points_of
from lp_pipe.telemetry.plain_files import open_plain

MAX_BUCKETS = 700
_MAX_PENDING = 256  # points of a series that wait to be put into buckets
_PARTS_AT_ONCE = 32  # the points of so many parts are put into buckets together
_INDEX_BYTES = 1 << 20
_LONGEST_LINE = 16 << 20
_WORTH_SAVING = 8 << 20  # bytes of lines
_FEW_BUCKETS = 250  # a query that finds fewer reads the file, if that is no more than:
_READ_AT_MOST = 24 << 20

Array = NDArray[np.float64]

# The columns of a bucket: its first point, the least value and where it was, the greatest value and where it was.
_STEP, _TIME, _LOW, _LOW_STEP, _LOW_TIME, _HIGH, _HIGH_STEP, _HIGH_TIME = range(8)
# The rows of an array of points, of which each bucket of one point, and each extreme, is made.
_VALUE = 2
_AS_BUCKET = [0, 1, _VALUE, 0, 1, _VALUE, 0, 1]
_AS_EXTREME = [_VALUE, 0, 1]
AXES = {"step": (_STEP, _LOW_STEP, _HIGH_STEP), "time": (_TIME, _LOW_TIME, _HIGH_TIME)}


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
        self._pending = np.empty((3, _MAX_PENDING))  # steps, times and values that wait to be put into buckets
        self._num_pending = 0

    @property
    def rows(self) -> Array:
        return self._rows[: self._used]

    def state(self) -> SeriesState:
        """Return all that `restored` needs; `settle` must have been called."""
        rows = self.rows if self.width > 1 else self.rows[:, : _VALUE + 1]
        return SeriesState(self.count, self.width, self.last, self.odd, self.has_steps, rows)

    @classmethod
    def restored(cls, state: SeriesState) -> "Series":
        """Return the series whose `state` this was."""
        one = cls()
        one.count, one.width, one.last, one.odd, one.has_steps, rows = state
        one._rows = rows.copy() if one.width > 1 else rows[:, _AS_BUCKET]
        one._used = len(rows)
        return one

    def extend(self, steps: Array, times: Array, values: Array) -> None:
        """Add points, which are put into buckets by `settle`, or once there are many."""
        start, end = self._num_pending, self._num_pending + len(values)
        if end <= _MAX_PENDING:
            for row, column in enumerate((steps, times, values)):
                self._pending[row, start:end] = column
            self._num_pending = end
            return
        self.settle()
        self._put(np.array([steps, times, values]))

    def settle(self) -> None:
        """Put the pending points into buckets."""
        if self._num_pending:
            self._put(self._pending[:, : self._num_pending].copy())
            self._num_pending = 0

    def _put(self, points: Array) -> None:
        num_points = points.shape[1]
        self.last = float(points[_VALUE, -1])
        is_odd = ~np.isfinite(points[_VALUE])
        self.odd += int(is_odd.sum())
        points[_VALUE, is_odd] = math.nan
        self.has_steps = self.has_steps or bool(np.isfinite(points[0]).any())
        while self.count + num_points > MAX_BUCKETS * self.width:
            self.width *= 2
            merged = _in_pairs(self.rows)
            self._rows[: len(merged)] = merged
            self._used = len(merged)
        begun = self.count % self.width  # points in the last bucket, which is not full
        self.count += num_points
        if not begun:
            self._append(_buckets(points, self.width))
            return
        # The extremes of the last bucket stand for its points.
        self._used -= 1
        last = self._rows[self._used].copy()
        head = np.full((3, begun), math.nan)
        head[:, -1] = last[[_HIGH_STEP, _HIGH_TIME, _HIGH]]
        head[:, 0] = last[[_LOW_STEP, _LOW_TIME, _LOW]]
        rows = _buckets(np.concatenate([head, points], axis=1), self.width)
        rows[0, :_LOW] = last[:_LOW]
        self._append(rows)

    def _append(self, rows: Array) -> None:
        needed = self._used + len(rows)
        if needed > len(self._rows):
            room = np.empty((max(needed, min(2 * len(self._rows), MAX_BUCKETS)), 8))
            room[: self._used] = self.rows
            self._rows = room
        self._rows[self._used : needed] = rows
        self._used = needed


def _buckets(points: Array, width: int) -> Array:
    """Return the buckets of `width` points each; the last may have fewer."""
    if width == 1:
        return points[_AS_BUCKET].T
    num_buckets = -(-points.shape[1] // width)
    values = np.full(num_buckets * width, math.nan)
    values[: points.shape[1]] = points[_VALUE]
    is_nan = np.isnan(values)
    firsts = np.arange(num_buckets) * width
    rows = np.empty((num_buckets, 8))
    rows[:, :_LOW] = points[:_VALUE, firsts].T
    for at, best, worst in ((_LOW, np.argmin, math.inf), (_HIGH, np.argmax, -math.inf)):
        places = firsts + best(np.where(is_nan, worst, values).reshape(num_buckets, width), axis=1)
        rows[:, at : at + 3] = points[_AS_EXTREME][:, places].T
    return rows


def _in_pairs(rows: Array) -> Array:
    """Merge each two neighbouring buckets; the last may stay alone."""
    merged, second = rows[::2].copy(), rows[1::2]
    for at, is_better in ((_LOW, np.less), (_HIGH, np.greater)):
        first = merged[: len(second), at]
        takes = is_better(second[:, at], first) | np.isnan(first)
        merged[: len(second), at : at + 3][takes] = second[takes, at : at + 3]
    return merged


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
    """The series of one metrics.jsonl; any thread may ask. The file is read only by a call.

    saved: the file that keeps what was read of a large metrics.jsonl; None to keep nothing.
    """

    def __init__(self, path: Path, saved: Path | None = None) -> None:
        self._path = path
        self._saved = saved
        self._lock = threading.Lock()
        self._forget()
        self._is_new = True

    def _forget(self) -> None:
        self._series: dict[SeriesKey, Series] = {}
        self._end = 0
        self._saved_end = 0
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
                if self._saved is not None and self._is_new:
                    self._restore(self._saved)
                self._is_new = False
            if found.st_size > self._end:
                parts = _parts(self._path, self._end, found.st_size)
                while self._add(itertools.islice(parts, _PARTS_AT_ONCE)):
                    pass
                self._save()
            return self._end

    def _restore(self, saved: Path) -> None:
        """Begin with what another server has read."""
        found = load_index(saved, self._path)
        if found is not None:
            self._end = self._saved_end = found.end
            self._chunks = found.chunks
            self._series = {key: Series.restored(state) for key, state in found.series.items()}

    def _save(self) -> None:
        """Keep what was read, if that is much more than what was kept before."""
        if self._saved is None or self._end - self._saved_end < max(_WORTH_SAVING, self._end // 4):
            return
        for one in self._series.values():
            one.settle()
        state = IndexState(self._end, self._chunks, {key: one.state() for key, one in self._series.items()})
        save_index(self._saved, self._path, state)
        self._saved_end = self._end

    def names(self) -> list[dict[str, Any]]:
        """Return what is known of every series, about in the order of the file."""
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
            for one in columns(lines for _, lines in _parts(self._path, offset, end)):
                if (one.node, one.name) in keys:
                    values = map(_plain, one.values.tolist())
                    found[one.node, one.name] = list(zip(one.steps.tolist(), one.times.tolist(), values, strict=True))
        return end, found

    def _add(self, parts: Iterator[tuple[int, bytes]]) -> bool:
        """Add the points of parts of the file, which follow each other; return whether there were any parts."""
        heads: list[tuple[int, bytes]] = []
        end = self._end

        def read() -> Iterator[bytes]:
            nonlocal end
            for offset, lines in parts:
                heads.append((offset, lines[: lines.find(b"\n") + 1]))
                end = offset + len(lines)
                yield lines

        for node, name, steps, times, values in columns(read()):
            one = self._series.get((node, name))
            if one is None:
                one = self._series[node, name] = Series()
            one.extend(steps, times, values)
        for offset, line in heads:
            self._note_time(offset, line)
        self._end = end
        return bool(heads)

    def _note_time(self, offset: int, line: bytes) -> None:
        """Keep the time of about every millionth byte, by which `_read` finds a part of the file."""
        if self._chunks and offset < self._chunks[-1][1] + _INDEX_BYTES // 2:
            return
        for _, _, time, _ in points_of(line):
            self._chunks.append((max(time, self._chunks[-1][0] if self._chunks else time), offset))
            break

    def _read(self, key: SeriesKey, since: float, until: float, otherwise: Array) -> Array:
        """Return a series' points of a time from the file; `otherwise` if that is too much to read."""
        first = max(0, bisect.bisect_left(self._chunks, (since, -1)) - 1)
        last = bisect.bisect_right(self._chunks, (until, self._end))
        start = self._chunks[first][1]
        end = self._chunks[last][1] if last < len(self._chunks) else self._end
        if end - start > _READ_AT_MOST:
            return otherwise
        found = columns(lines for _, lines in _parts(self._path, start, end))
        one = next((one for one in found if (one.node, one.name) == key), None)
        if one is None:
            return otherwise
        points = np.array([one.steps, one.times, one.values])
        points[_VALUE, ~np.isfinite(points[_VALUE])] = math.nan
        return _buckets(points[:, (points[1] >= since) & (points[1] <= until)], 1)


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


def _parts(path: Path, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, lines) of the finished lines between the offsets, about a megabyte at a time.

    Larger parts take longer: malloc gets their memory from the system and returns it, each time.
    """
    try:
        with open_plain(path) as file:
            file.seek(start)
            left = b""
            while data := file.read(min(BLOCK_BYTES, end - start - len(left))):
                whole = data.rfind(b"\n") + 1
                if whole:
                    lines = left + data[:whole]
                    yield start, lines
                    start += len(lines)
                    left = data[whole:]
                elif len(left) > _LONGEST_LINE:
                    return
                else:
                    left += data
    except OSError:
        return
