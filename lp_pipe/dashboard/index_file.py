"""Keep what was read of a metrics.jsonl in a file beside it, so that the next server reads only what is new.

The file is a line of JSON and an array of float64. A file that does not belong to its metrics.jsonl is ignored.
"""

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lp_pipe.dashboard.metric_lines import SeriesKey
from lp_pipe.telemetry.file_writing import write_atomically
from lp_pipe.telemetry.plain_files import open_plain, read_plain

_VERSION = 1
_COMPARED_BYTES = 64 << 10  # of the beginning of metrics.jsonl, and before the offset up to which it was read
_LARGEST = 512 << 20
_COLUMNS, _COLUMNS_OF_POINTS = 8, 3

_Array = NDArray[np.float64]


class SeriesState(NamedTuple):
    """The points of one series, in short. rows: its buckets, of 8 columns; of 3 columns if each is a single point."""

    num_points: int
    width: int
    last: float
    odd: int
    has_steps: bool
    rows: _Array


class IndexState(NamedTuple):
    """The contents of a metrics.jsonl, in short, up to the offset `end`. chunks: times, and their offsets there."""

    end: int
    chunks: list[tuple[float, int]]
    series: dict[SeriesKey, SeriesState]


def save_index(path: Path, metrics: Path, state: IndexState) -> None:
    """Write the file, if the folder is this user's and has room for it."""
    facts = [[*key, *one[:-1], len(one.rows)] for key, one in state.series.items()]
    head = {"version": _VERSION, "end": state.end, "chunks": len(state.chunks), "series": facts}
    arrays = [np.array(state.chunks, np.float64), *(one.rows for one in state.series.values())]
    with contextlib.suppress(OSError):
        if os.stat(path.parent).st_uid == os.getuid():
            head["digest"] = _digest(metrics, state.end)
            line = json.dumps(head).encode()
            line += b" " * (-(len(line) + 1) % 8) + b"\n"  # the array begins at a multiple of its items' size
            write_atomically(path, _as_file(line, arrays))


def _as_file(line: bytes, arrays: list[_Array]) -> memoryview:
    """Return the contents of a file, in one piece of memory: small pieces would stay with malloc."""
    whole = np.empty(len(line) + 8 * sum(one.size for one in arrays), np.uint8)
    whole[: len(line)] = np.frombuffer(line, np.uint8)
    numbers, end = whole[len(line) :].view("<f8"), 0
    for one in arrays:
        numbers[end : end + one.size] = one.reshape(-1)
        end += one.size
    return whole.data


def load_index(path: Path, metrics: Path) -> IndexState | None:
    """Return what was saved; None if there is nothing, or it is of another metrics.jsonl."""
    data = read_plain(path, _LARGEST)
    start = data.find(b"\n") + 1
    try:
        head = json.loads(data[:start])
        if head["version"] != _VERSION or head["digest"] != _digest(metrics, head["end"]):
            return None
        return _state_of(head, np.frombuffer(data, "<f8", offset=start))
    except (OSError, ValueError, KeyError, TypeError):  # cut off, or made by another version
        return None


def _state_of(head: dict[str, Any], numbers: _Array) -> IndexState:
    """Return what the line and the array of a file say; ValueError if they do not fit to each other."""
    sizes = [(rows, _COLUMNS if width > 1 else _COLUMNS_OF_POINTS) for *_, width, _, _, _, rows in head["series"]]
    ends = np.cumsum([2 * head["chunks"], *(rows * columns for rows, columns in sizes)]).tolist()
    if len(numbers) != ends[-1] or min((rows for rows, _ in sizes), default=0) < 0:
        raise ValueError(f"{len(numbers)} numbers instead of {ends[-1]}")
    chunks = [(time, int(offset)) for time, offset in numbers[: ends[0]].reshape(-1, 2).tolist()]
    series = {}
    for place, ((node, name, num_points, width, last, odd, has_steps, _), size) in enumerate(
        zip(head["series"], sizes, strict=True)
    ):
        rows = numbers[ends[place] : ends[place + 1]].reshape(size)
        series[str(node), str(name)] = SeriesState(num_points, width, last, odd, has_steps, rows)
    return IndexState(head["end"], chunks, series)


def _digest(metrics: Path, end: int) -> str:
    """Return a digest of the lines before the offset: of the first and the last of them, if they are many.

    Raises:
        ValueError: the file is shorter.
    """
    digest = hashlib.sha256()
    with open_plain(metrics) as file:
        for start in (0, max(0, end - _COMPARED_BYTES)):
            file.seek(start)
            part = file.read(min(_COMPARED_BYTES, end - start))
            if len(part) < min(_COMPARED_BYTES, end - start):
                raise ValueError(f"{metrics} has less than {end} bytes")
            digest.update(part)
    return digest.hexdigest()
