"""Read many lines of metrics.jsonl at a time, without a Python object for each.

That works for lines as `MetricsLog` writes them, with the same number of metrics each. For others `columns` returns
None, and the caller reads them by `json`, which takes twice as long.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_Bytes = NDArray[np.uint8]
_Places = NDArray[np.intp]
_LONGEST_NAME = 64
_LONGEST_NUMBER = 26
_EXACT_DIGITS = 16  # with the point
_NEWLINE, _QUOTE = 10, 34
# The quotes of a line: "time", "node", the node, "step", "values", and each metric's name.
_QUOTES_BEFORE_NAMES = 10


class Column(NamedTuple):
    """The points of one series, in the order of the lines; a step of null is NaN."""

    node: str
    name: str
    steps: NDArray[np.float64]
    times: NDArray[np.float64]
    values: NDArray[np.float64]


def columns(lines: bytes) -> list[Column] | None:
    """Return the points of each series in these whole lines; None if a line is not as expected."""
    text = np.frombuffer(lines, np.uint8)
    ends = np.flatnonzero(text == _NEWLINE)
    quotes = np.flatnonzero(text == _QUOTE)
    if not len(ends) or len(quotes) % len(ends) or b"\\" in lines:
        return None
    at = quotes.reshape(len(ends), -1).T
    starts = np.concatenate([[0], ends[:-1] + 1])
    num_names = (len(at) - _QUOTES_BEFORE_NAMES) // 2
    if num_names < 1 or len(at) % 2 or (at[0] != starts + 1).any() or (at[-1] >= ends).any():
        return None
    is_expected = (
        _has(text, starts, b'{"time": ')
        and _has(text, at[2] - 2, b', "node": "')
        and _has(text, at[5], b'", "step": ')
        and _has(text, at[8] - 2, b', "values": {"')
        and _has(text, ends - 2, b"}}")
    )
    names = [(at[place], at[place + 1]) for place in range(_QUOTES_BEFORE_NAMES, len(at), 2)]
    after = [begin - 2 for begin, _ in names[1:]] + [ends - 2]
    if not is_expected or not all(_has(text, end, b'": ') for _, end in names):
        return None
    if not all(_has(text, place, b", ") for place in after[:-1]):
        return None
    try:
        times = _decimals(text, at[1] + 3, at[2] - 2)
        steps = _decimals(text, at[7] + 3, at[8] - 2)
        nodes = _rows(text, at[4] + 1, at[5], _LONGEST_NAME, 8)
        found: list[Column] = []
        for (begin, end), stop in zip(names, after, strict=True):
            values = _numbers(text, end + 3, stop)
            found += _grouped(nodes, _rows(text, begin + 1, end, _LONGEST_NAME, 8), steps, times, values)
    except ValueError:  # no number, or a name that is too long
        return None
    return found


def _has(text: _Bytes, places: _Places, expected: bytes) -> bool:
    """Return whether the text has these bytes at all places."""
    if places[0] < 0 or places[-1] + len(expected) > len(text):
        return False
    return all(bool((text[places + shift] == byte).all()) for shift, byte in enumerate(expected))


def _rows(text: _Bytes, begins: _Places, ends: _Places, most: int, multiple: int = 1) -> _Bytes:
    """Return the pieces of the text as rows of bytes, filled up with zeros to a multiple of some width.

    Raises:
        ValueError: one is too long.
    """
    lengths = ends - begins
    longest = int(lengths.max())
    if longest > most:
        raise ValueError("a long piece")
    width = max(multiple, -(-longest // multiple) * multiple)
    shifts = np.arange(width)
    rows: _Bytes = text[np.minimum(begins[:, None] + shifts, len(text) - 1)]
    rows[shifts >= lengths[:, None]] = 0
    return rows


def _decimals(text: _Bytes, begins: _Places, ends: _Places) -> "NDArray[np.float64]":
    """Return numbers of at most 15 digits without an exponent; others as `_numbers`, which takes longer."""
    rows = _rows(text, begins, ends, _LONGEST_NUMBER)
    is_digit = (rows >= ord("0")) & (rows <= ord("9"))
    is_point = rows == ord(".")
    if rows.shape[1] > _EXACT_DIGITS or not (is_digit | is_point | (rows == 0)).all() or (rows[:, 0] == 0).any():
        return _numbers(text, begins, ends)
    whole = np.zeros(len(rows))
    places = np.zeros(len(rows), np.intp)  # digits after the point
    is_after = np.zeros(len(rows), bool)
    for column, digit, point in zip(rows.T, is_digit.T, is_point.T, strict=True):
        whole = np.where(digit, whole * 10 + (column - ord("0")), whole)
        places += digit & is_after
        is_after |= point
    return np.asarray(whole / 10.0**places)  # both are exact, so the quotient is the nearest number


def _numbers(text: _Bytes, begins: _Places, ends: _Places) -> "NDArray[np.float64]":
    """Return the numbers between the places; null is NaN.

    Raises:
        ValueError: there is something else.
    """
    rows = _rows(text, begins, ends, _LONGEST_NUMBER)
    if (rows[:, 0] == 0).any():
        raise ValueError("no number")
    is_null = rows[:, 0] == ord("n")
    if is_null.any():
        if rows.shape[1] < 4 or not (rows[is_null, :4] == np.frombuffer(b"null", np.uint8)).all():
            raise ValueError("no number")
        rows[is_null, :3] = np.frombuffer(b"nan", np.uint8)
        rows[is_null, 3] = 0
    return np.ascontiguousarray(rows).view(f"S{rows.shape[1]}").ravel().astype(np.float64)


def _grouped(
    nodes: "NDArray[Any]",
    names: "NDArray[Any]",
    steps: "NDArray[np.float64]",
    times: "NDArray[np.float64]",
    values: "NDArray[np.float64]",
) -> list[Column]:
    """Return a column for each pair of node and name."""
    keys = np.concatenate([nodes, names], axis=1)
    digest = np.zeros(len(keys), np.uint64)
    for word in np.ascontiguousarray(keys).view(np.uint64).T:
        digest = (digest ^ word) * np.uint64(0x9E3779B97F4A7C15)
        digest ^= digest >> np.uint64(29)
    _, firsts, groups = np.unique(digest, return_index=True, return_inverse=True)
    if (keys != keys[firsts[groups]]).any():  # two keys of one digest
        raise ValueError("a collision")
    order = np.argsort(groups, kind="stable")
    cuts = np.cumsum(np.bincount(groups))[:-1]
    parts = np.split(order, cuts)
    return [
        Column(_text(nodes[part[0]]), _text(names[part[0]]), steps[part], times[part], values[part]) for part in parts
    ]


def _text(row: "NDArray[Any]") -> str:
    return bytes(row).rstrip(b"\0").decode(errors="replace")
