"""Read many lines of metrics.jsonl at a time, without a Python object for each.

Lines as `MetricsLog` writes them are read by numpy, a block at a time, with any number of metrics each. Lines of
another form are read by `json`, which takes five times as long.
"""

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_Bytes = NDArray[np.uint8]
_Places = NDArray[np.intp]
_Words = NDArray[np.uint64]
_Floats = NDArray[np.float64]
SeriesKey = tuple[str, str]  # node, name

BLOCK_BYTES = 1 << 20  # what numpy makes of a block fits into a core's cache
_MARGIN = 64  # bytes before and after a block, so that words at its borders can be read
_LONGEST_NAME = 64
_LONGEST_NUMBER = 32
_NEWLINE, _QUOTE, _MINUS = 10, 34, 45
# The quotes of a line: "time", "node", the node, "step", "values", and each metric's name.
_QUOTES_BEFORE_NAMES = 10
# _KEEP_FIRST[n] keeps the first n bytes of a word, _KEEP_LAST[n] the last n; both are little-endian.
_KEEP_FIRST = np.array([(1 << 8 * kept) - 1 for kept in range(9)], "<u8")
_KEEP_LAST = ~_KEEP_FIRST[::-1]
_TENS = 10.0 ** np.arange(23)  # exact
_INTEGER_TENS = np.array([10**power for power in range(20)], np.uint64)


# Series by the number of words of the node, and the words of node and name.
_Known = dict[tuple[int, bytes], int]


class Column(NamedTuple):
    """The points of one series, in the order of the lines; a step of null is NaN."""

    node: str
    name: str
    steps: _Floats
    times: _Floats
    values: _Floats


class _Points(NamedTuple):
    """Points of many series: the number of each one's series, the number of its line, and what the line says."""

    series: _Places
    lines: _Places
    steps: _Floats
    times: _Floats
    values: _Floats


def columns(blocks: Iterable[bytes]) -> list[Column]:
    """Return the points of each series in blocks of whole lines, each of about BLOCK_BYTES."""
    numbers: dict[SeriesKey, int] = {}
    known: _Known = {}
    parts = [_block(lines, numbers, known) for lines in blocks]
    if not numbers:
        return []
    points = _joined(parts)
    # Numbers of 16 bits are sorted by radix.
    series = points.series.astype(np.uint16) if len(numbers) <= 1 << 16 else points.series
    order = np.argsort(series, kind="stable")
    steps, times, values = points.steps[order], points.times[order], points.values[order]
    ends = np.cumsum(np.bincount(points.series, minlength=len(numbers))).tolist()
    return [
        Column(node, name, steps[begin:end], times[begin:end], values[begin:end])
        for (node, name), begin, end in zip(numbers, [0, *ends], ends, strict=False)
    ]


def _block(lines: bytes, numbers: dict[SeriesKey, int], known: _Known) -> _Points:
    """Return the points of a block of lines, in their order; enter new series into `numbers`."""
    block = _Block(lines, numbers, known)
    is_read = block.read()
    parts = block.parts
    others = np.flatnonzero(~is_read)
    if len(others):
        parts.append(_by_json(lines, block, others, numbers))
    if len(parts) == 1:
        return parts[0]
    if not parts:
        nothing = np.empty(0)
        return _Points(nothing.astype(np.intp), nothing.astype(np.intp), nothing, nothing, nothing)
    points = _joined(parts)
    order = np.argsort(points.lines, kind="stable")
    return _Points(*(column[order] for column in points))  # type: ignore[arg-type]  # each keeps its type


def _joined(parts: list[_Points]) -> _Points:
    return _Points(*(np.concatenate(one) for one in zip(*parts, strict=True)))


class _Block:
    """One block of lines, whose fields are found by the places of its quotes."""

    def __init__(self, lines: bytes, numbers: dict[SeriesKey, int], known: _Known) -> None:
        self._numbers = numbers
        self._known = known
        self.parts: list[_Points] = []
        if not lines.endswith(b"\n"):
            lines += b"\n"
        self._text: _Bytes = np.zeros(len(lines) + 2 * _MARGIN, np.uint8)
        self._text[_MARGIN:-_MARGIN] = np.frombuffer(lines, np.uint8)
        text = self._text
        self._marks = np.flatnonzero((text == _QUOTE) | (text == _NEWLINE))
        self._last = np.flatnonzero(text[self._marks] == _NEWLINE)  # of each line's marks
        self.ends: _Places = self._marks[self._last]
        self.starts: _Places = np.concatenate([[_MARGIN], self.ends[:-1] + 1])
        self._has_escapes = b"\\" in lines

    def read(self) -> "NDArray[np.bool_]":
        """Put the points of all usual lines into `parts`; return which lines these are."""
        sizes = np.diff(self._last, prepend=-1)
        is_read = np.zeros(len(sizes), bool)
        least, most = int(sizes.min()), int(sizes.max())
        for size in [least] if least == most else np.unique(sizes).tolist():
            if size <= _QUOTES_BEFORE_NAMES + 1 or not size % 2:
                continue
            which = np.flatnonzero(sizes == size)
            at = self._marks[(self._last[which] - size + 1)[:, None] + np.arange(size)]
            is_ok = self._is_usual(np.ascontiguousarray(at.T), self.starts[which])
            which = which[is_ok]
            if len(which):
                is_ok = self._take(np.ascontiguousarray(at[is_ok].T), which)
                is_read[which[is_ok]] = True
        return is_read

    def _is_usual(self, at: _Places, starts: _Places) -> "NDArray[np.bool_]":
        """Return which lines have the expected text between what varies; at[n] are the places of quote n."""
        is_ok = self._has(starts, b'{"time": ') & (at[0] == starts + 1)
        is_ok &= self._has(at[2] - 2, b', "node": "') & self._has(at[5], b'", "step": ')
        is_ok &= self._has(at[8] - 2, b', "values": {"') & self._has(at[-1] - 2, b"}}\n")
        for place in range(_QUOTES_BEFORE_NAMES, len(at) - 1, 2):
            is_ok &= self._has(at[place + 1], b'": ')
            if place > _QUOTES_BEFORE_NAMES:
                is_ok &= self._has(at[place] - 2, b', "')
            is_ok &= at[place + 1] - at[place] <= _LONGEST_NAME
        is_ok &= at[5] - at[4] <= _LONGEST_NAME
        if self._has_escapes:
            escapes = np.flatnonzero(self._text == ord("\\"))
            is_ok &= np.searchsorted(escapes, starts) == np.searchsorted(escapes, at[-1])
        return np.asarray(is_ok)

    def _take(self, at: _Places, which: _Places) -> "NDArray[np.bool_]":
        """Put the points of lines of one form into `parts`; return which lines have numbers."""
        times, is_ok = self._decimals(at[1] + 3, at[2] - 2)
        steps, have_steps = self._decimals(at[7] + 3, at[8] - 2)
        is_ok &= have_steps
        nodes = self._words(at[4] + 1, at[5])
        found = []
        for place in range(_QUOTES_BEFORE_NAMES, len(at) - 1, 2):
            stops = at[place + 2] - 2
            values, have_values = self._decimals(at[place + 1] + 3, stops)
            is_ok &= have_values
            found.append((self._words(at[place] + 1, at[place + 1]), values))
        if not is_ok.any():
            return is_ok
        for names, values in found:
            series = self._series_of([word[is_ok] for word in nodes], [word[is_ok] for word in names])
            self.parts.append(_Points(series, which[is_ok], steps[is_ok], times[is_ok], values[is_ok]))
        return is_ok

    def _has(self, places: _Places, expected: bytes) -> "NDArray[np.bool_]":
        """Return at which places the text is this."""
        words = -(-len(expected) // 8)
        rows = self._pieces(places, 8 * words).view("<u8").reshape(-1, words)
        wanted = np.frombuffer(expected.ljust(8 * words, b"\0"), "<u8")
        is_equal = rows[:, 0] & _KEEP_FIRST[min(8, len(expected))] == wanted[0]
        for place in range(1, words):
            is_equal &= rows[:, place] & _KEEP_FIRST[min(8, len(expected) - 8 * place)] == wanted[place]
        return np.asarray(is_equal)

    def _pieces(self, places: _Places, width: int) -> "NDArray[Any]":
        """Return the pieces of `width` bytes that begin at the places."""
        text = self._text
        return np.ndarray((len(text) - width + 1,), f"S{width}", text, strides=(1,))[places]

    def _words(self, begins: _Places, ends: _Places) -> list[_Words]:
        """Return the pieces of the text as columns of words of 8 bytes, filled up with zeros."""
        lengths = ends - begins
        width = 8 * max(1, -(-int(lengths.max()) // 8))
        rows = self._pieces(begins, width).view("<u8").reshape(-1, width // 8)
        return [rows[:, place] & _KEEP_FIRST[np.clip(lengths - 8 * place, 0, 8)] for place in range(width // 8)]

    def _series_of(self, nodes: list[_Words], names: list[_Words]) -> _Places:
        """Return the numbers of the series whose nodes and names these are."""
        words = nodes + names
        digest = np.zeros(len(words[0]), np.uint64)
        for word in words:
            digest = (digest ^ word) * np.uint64(0x9E3779B97F4A7C15)
            digest ^= digest >> np.uint64(29)
        _, firsts, groups = np.unique(digest, return_index=True, return_inverse=True)
        if any((word != word[firsts][groups]).any() for word in words):  # two series of one digest
            _, firsts, groups = np.unique(np.stack(words, 1), return_index=True, return_inverse=True, axis=0)
        keys = np.stack(words, 1)[firsts]
        numbers = np.empty(len(firsts), np.intp)
        for place in np.argsort(firsts).tolist():  # in the order of the file
            key = len(nodes), keys[place].tobytes()
            number = self._known.get(key)
            if number is None:
                node, name = key[1][: 8 * len(nodes)], key[1][8 * len(nodes) :]
                number = self._numbers.setdefault((_text(node), _text(name)), len(self._numbers))
                self._known[key] = number
            numbers[place] = number
        return numbers[groups.ravel()]

    def _decimals(self, begins: _Places, ends: _Places) -> tuple[_Floats, "NDArray[np.bool_]"]:
        """Return the numbers between the places, and which are numbers; null is NaN.

        Numbers of at most 22 digits after the point, without an exponent, are made of their digits, and are the
        nearest float64, as of `float`. `float` itself takes others.
        """
        is_negative = self._text[begins] == _MINUS
        firsts = begins + is_negative
        lengths = ends - firsts
        points = np.minimum(_place_of_point(self._pieces(firsts, 16).view("<u8").reshape(-1, 2)), lengths)
        fractions = np.maximum(lengths - points - 1, 0)  # digits after the point
        is_plain = (points > 0) & ((points < 16) | (lengths <= 16)) & (fractions <= 22)
        wholes, is_number = self._digits(firsts + points, np.clip(points, 0, 16))
        is_plain &= is_number
        if fractions.any():
            low, is_number = self._digits(ends, np.minimum(fractions, 16))
            is_plain &= is_number
            high = np.zeros_like(low)
            if int(fractions.max()) > 16:
                high, is_number = self._digits(ends - 16, np.clip(fractions - 16, 0, 6))
                is_plain &= is_number
            # The digits together must fit into 63 bits.
            is_plain &= np.where(wholes == 0, high < 900, points + fractions <= 18)
            mantissa = wholes * _INTEGER_TENS[np.minimum(fractions, 19)] + high * _INTEGER_TENS[16] + low
            numbers = _quotient(np.where(is_plain, mantissa, np.uint64(0)), _TENS[np.minimum(fractions, 22)])
        else:
            numbers = wholes.astype(np.float64)  # the nearest, as all conversions are
        if is_negative.any():
            numbers[is_negative] *= -1
        others = np.flatnonzero(~is_plain)
        if len(others):
            numbers[others], is_plain[others] = self._other_numbers(begins[others], ends[others])
        return numbers, is_plain

    def _digits(self, ends: _Places, counts: _Places) -> tuple[_Words, "NDArray[np.bool_]"]:
        """Return the integers of at most 16 digits that end at the places, and which consist of digits."""
        total, is_number = _digits_of(self._pieces(ends - 8, 8).view("<u8"), np.minimum(counts, 8))
        if int(counts.max()) > 8:
            more, is_more = _digits_of(self._pieces(ends - 16, 8).view("<u8"), np.maximum(counts - 8, 0))
            total = total + more * _INTEGER_TENS[8]
            is_number = is_number & is_more
        return total, is_number

    def _other_numbers(self, begins: _Places, ends: _Places) -> tuple[_Floats, "NDArray[np.bool_]"]:
        """Return the numbers between the places, as of `float`, and which are numbers or null."""
        lengths = ends - begins
        is_ok = (lengths > 0) & (lengths <= _LONGEST_NUMBER)
        rows = self._pieces(begins, _LONGEST_NUMBER).view(np.uint8).reshape(-1, _LONGEST_NUMBER)
        rows[np.arange(_LONGEST_NUMBER) >= lengths[:, None]] = 0
        texts = rows.view(f"S{_LONGEST_NUMBER}").ravel()
        is_null = texts == b"null"
        texts = np.where(is_null | ~is_ok, b"nan", texts)
        try:
            return texts.astype(np.float64), is_ok
        except ValueError:  # at least one is no number: `json` says which
            return np.full(len(begins), np.nan), is_null & is_ok


def _text(word: bytes) -> str:
    return word.rstrip(b"\0").decode(errors="replace")


def _place_of_point(words: _Words) -> _Places:
    """Return the place of the first point in each row of two words; 16 where there is none."""
    found = words ^ np.uint64(0x2E2E2E2E2E2E2E2E)
    zeros = (found - np.uint64(0x0101010101010101)) & ~found & np.uint64(0x8080808080808080)
    places = np.bitwise_count((zeros & (~zeros + np.uint64(1))) - np.uint64(1)).astype(np.intp) >> 3
    return np.where(places[:, 0] < 8, places[:, 0], 8 + places[:, 1])


def _digits_of(words: _Words, counts: _Places) -> tuple[_Words, "NDArray[np.bool_]"]:
    """Return the integers that the last digits of each word are, and whether they are digits.

    Source: "Fast numeric string to int", Johnny Lee, 2016: eight digits in three multiplications.
    """
    word = (words ^ np.uint64(0x3030303030303030)) & _KEEP_LAST[counts]
    is_number = ((word + np.uint64(0x7676767676767676)) | word) & np.uint64(0x8080808080808080) == 0
    word = (word * np.uint64(10) + (word >> np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
    word = (word * np.uint64(100) + (word >> np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    return (word * np.uint64(10000) + (word >> np.uint64(32))) & np.uint64(0xFFFFFFFF), np.asarray(is_number)


def _quotient(mantissa: _Words, tens: _Floats) -> _Floats:
    """Return the float64 nearest to mantissa / tens.

    The mantissa may have 63 bits, so the quotient of its nearest float64 is corrected by what is left.
    Source: Dekker, "A floating-point technique for extending the available precision", 1971.
    """
    high = mantissa.astype(np.float64)
    if not len(mantissa) or int(mantissa.max()) <= 1 << 53:
        return high / tens
    low = (mantissa.astype(np.int64) - high.astype(np.int64)).astype(np.float64)
    first = high / tens
    product = first * tens
    first_high, first_low = _halves(first)
    tens_high, tens_low = _halves(tens)
    error = ((first_high * tens_high - product) + first_high * tens_low + first_low * tens_high) + first_low * tens_low
    return np.asarray(first + ((high - product) - error + low) / tens)


def _halves(numbers: _Floats) -> tuple[_Floats, _Floats]:
    """Return two numbers of 26 bits, whose sum each number is."""
    scaled = numbers * 134217729.0  # 2 ** 27 + 1
    high = scaled - (scaled - numbers)
    return high, numbers - high


# Lines of other forms.


def _by_json(lines: bytes, block: _Block, which: _Places, numbers: dict[SeriesKey, int]) -> _Points:
    """Return the points of single lines of a block."""
    found: list[tuple[int, int, float, float, float]] = []
    for number in which.tolist():
        line = lines[block.starts[number] - _MARGIN : block.ends[number] - _MARGIN]
        for key, step, time, value in points_of(line):
            found.append((numbers.setdefault(key, len(numbers)), number, step, time, value))
    series, places, steps, times, values = zip(*found, strict=True) if found else ((),) * 5
    floats = (np.array(column, np.float64) for column in (steps, times, values))
    return _Points(np.array(series, np.intp), np.array(places, np.intp), *floats)


def points_of(line: bytes) -> Iterator[tuple[SeriesKey, float, float, float]]:
    """Yield the series, step, time and value of every number in a line; nothing for a line of another kind."""
    try:
        record = json.loads(line.decode(errors="replace"))
        node, time, step = record["node"], float(record["time"]), as_number(record["step"])
        for name, value in record["values"].items():
            yield (node, name), step, time, as_number(value)
    except (KeyError, TypeError, ValueError, AttributeError):
        return  # cut off by a full disk, or no line of ours


def as_number(found: Any) -> float:
    """Return a number, or the name of an infinity, as a float; NaN for anything else."""
    try:
        return float(found)
    except (TypeError, ValueError):
        return math.nan
