"""Curves over steps, as charts of an SVG picture or as text."""

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from lp_pipe.graph import svg_elements
from lp_pipe.graph.svg_elements import FAINT_INK, INK, add

Points = Sequence[tuple[float, float]]

_COLORS = ("#2f6fde", "#d9480f", "#2b8a3e", "#9c36b5", "#e8590c", "#0b7285", "#c2255c", "#5f6b7a")
_ANSI_COLORS = (34, 31, 32, 35, 33, 36)
_MARGIN, _HEAD, _CHART_WIDTH, _CHART_HEIGHT, _GAP = 28, 88, 460, 230, 24
_LEFT, _TOP, _BOTTOM = 56, 30, 26  # inside a chart
_LEGEND_LINE, _NAMED = 16, 12  # of more curves only so many are in the legend
_BUCKETS = 800
_TEXT_WIDTH, _TEXT_HEIGHT, _TEXT_AXIS = 72, 10, 11
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a Braille character, by row and column


@dataclass(frozen=True)
class Curve:
    """A series of (step, value), in the order of steps; values may be NaN or infinite, which leaves a gap."""

    name: str
    points: Points


@dataclass(frozen=True)
class Chart:
    """Curves with common axes."""

    title: str
    curves: Sequence[Curve]


def charts_to_svg(title: str, subtitle: str, charts: Sequence[Chart], *, is_log: bool = False) -> str:
    """Return a picture with two charts in a row. is_log: values are on a logarithmic axis, and only positive ones."""
    columns = min(2, len(charts)) or 1
    heights = [_CHART_HEIGHT + _LEGEND_LINE * (min(len(chart.curves), _NAMED + 1) + 1) for chart in charts]
    rows = [max(heights[at : at + columns]) for at in range(0, len(charts), columns)]
    width = 2 * _MARGIN + columns * _CHART_WIDTH + (columns - 1) * _GAP
    height = _HEAD + sum(rows) + len(rows) * _GAP + _MARGIN
    root = svg_elements.make_picture(f"{title}: {subtitle}", width, height)
    svg_elements.add_heading(root, title, subtitle, _MARGIN)
    top = float(_HEAD)
    for row, row_height in enumerate(rows):
        for column, chart in enumerate(charts[row * columns : (row + 1) * columns]):
            _add_chart(root, chart, _MARGIN + column * (_CHART_WIDTH + _GAP), top, is_log)
        top += row_height + _GAP
    return svg_elements.to_text(root)


def _add_chart(root: ET.Element, chart: Chart, left: float, top: float, is_log: bool) -> None:
    group = add(root, "g", transform=f"translate({left:.0f} {top:.0f})")
    add(group, "text", chart.title, x=0, y=14, font_size=14, font_weight=600, fill=INK)
    axes = _Axes.around(chart.curves, is_log)
    bottom = _CHART_HEIGHT - _BOTTOM
    for value, text in axes.value_ticks():
        y = bottom - axes.up(value) * (bottom - _TOP)
        add(group, "line", x1=_LEFT, x2=_CHART_WIDTH, y1=y, y2=y, stroke="#e4e8ee")
        add(group, "text", text, x=_LEFT - 6, y=y + 4, font_size=11, fill=FAINT_INK, text_anchor="end")
    for step, text in axes.step_ticks():
        x = _LEFT + axes.along(step) * (_CHART_WIDTH - _LEFT)
        add(group, "text", text, x=x, y=bottom + 16, font_size=11, fill=FAINT_INK, text_anchor="middle")
    for number, curve in enumerate(chart.curves):
        color = _COLORS[number % len(_COLORS)]
        for part in _parts(curve.points, is_log):
            places = [
                (_LEFT + axes.along(step) * (_CHART_WIDTH - _LEFT), bottom - axes.up(value) * (bottom - _TOP))
                for step, value in _extremes(part, axes)
            ]
            if len(places) == 1:
                add(group, "circle", cx=places[0][0], cy=places[0][1], r=2, fill=color)
                continue
            line = " ".join(f"{svg_elements.written(x, 1)},{svg_elements.written(y, 1)}" for x, y in places)
            add(group, "polyline", points=line, fill="none", stroke=color, stroke_width=1.5, stroke_linejoin="round")
        if number < _NAMED:
            y = _CHART_HEIGHT + _LEGEND_LINE * (number + 1)
            add(group, "rect", x=_LEFT, y=y - 8, width=10, height=3, fill=color)
            add(group, "text", f"{curve.name}  {summary(curve)}", x=_LEFT + 16, y=y, font_size=11, fill=FAINT_INK)
    if len(chart.curves) > _NAMED:
        y = _CHART_HEIGHT + _LEGEND_LINE * (_NAMED + 1)
        text = f"and {len(chart.curves) - _NAMED} more"
        add(group, "text", text, x=_LEFT + 16, y=y, font_size=11, fill=FAINT_INK)


def charts_to_text(
    charts: Iterable[Chart], *, width: int = _TEXT_WIDTH, is_log: bool = False, is_colored: bool = False
) -> Iterator[str]:
    """Yield the lines of a text with a chart below the other, drawn with Braille dots."""
    for chart in charts:
        yield chart.title
        yield from _text_chart(chart, max(20, width - _TEXT_AXIS - 1), is_log, is_colored)
        for number, curve in enumerate(chart.curves[:_NAMED]):
            mark = _colored("━", number, is_colored and len(chart.curves) > 1)
            yield f"{'':{_TEXT_AXIS}} {mark} {curve.name}  {summary(curve)}"
        if len(chart.curves) > _NAMED:
            yield f"{'':{_TEXT_AXIS}} and {len(chart.curves) - _NAMED} more"
        yield ""


def _text_chart(chart: Chart, width: int, is_log: bool, is_colored: bool) -> Iterator[str]:
    axes = _Axes.around(chart.curves, is_log)
    dots = [[0] * width for _ in range(_TEXT_HEIGHT)]
    owner = [[0] * width for _ in range(_TEXT_HEIGHT)]
    for number, curve in enumerate(chart.curves):
        for part in _parts(curve.points, is_log):
            places = [
                (round(axes.along(step) * (2 * width - 1)), round((1 - axes.up(value)) * (4 * _TEXT_HEIGHT - 1)))
                for step, value in _extremes(part, axes)
            ]
            for x, y in _joined(places):
                dots[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
                owner[y // 4][x // 2] = number
    top, bottom = _shown(axes.highest), _shown(axes.lowest)
    for row in range(_TEXT_HEIGHT):
        label = top if row == 0 else bottom if row == _TEXT_HEIGHT - 1 else ""
        cells = (
            _colored(chr(0x2800 + dot), of, is_colored and len(chart.curves) > 1) if dot else " "
            for dot, of in zip(dots[row], owner[row], strict=True)
        )
        yield f"{label:>{_TEXT_AXIS}} {'┤' if label else '│'}{''.join(cells)}".rstrip()
    first, last = _shown(axes.first), _shown(axes.last)
    yield f"{'':{_TEXT_AXIS}} └{first}{last:>{max(1, width - len(first))}}"


def _joined(places: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the dots of the lines between the places."""
    yield from places[:1]
    for (x0, y0), (x1, y1) in itertools.pairwise(places):
        count = max(abs(x1 - x0), abs(y1 - y0), 1)
        for at in range(1, count + 1):
            yield round(x0 + (x1 - x0) * at / count), round(y0 + (y1 - y0) * at / count)


def summary(curve: Curve) -> str:
    """Return "0.31 at step 99 (0.3 … 2.4)": the last value, and the least and greatest."""
    finite = [value for _, value in curve.points if math.isfinite(value)]
    if not finite:
        return "no number"
    step, value = curve.points[-1]
    return f"{_shown(value)} at step {_shown(step)} ({_shown(min(finite))} … {_shown(max(finite))})"


@dataclass(frozen=True)
class _Axes:
    """The part of the plane that a chart shows; values are logarithms if `is_log`."""

    first: float
    last: float
    lowest: float
    highest: float
    is_log: bool

    @classmethod
    def around(cls, curves: Iterable[Curve], is_log: bool) -> "_Axes":
        points = [point for curve in curves for part in _parts(curve.points, is_log) for point in part]
        steps, values = [step for step, _ in points] or [0.0], [value for _, value in points] or [1.0]
        lowest, highest = min(values), max(values)
        if lowest == highest and not is_log:
            margin = abs(lowest) / 2 or 0.5
            lowest, highest = lowest - margin, highest + margin
        if lowest == highest:
            lowest, highest = max(lowest / 2, 5e-324), min(highest * 2, sys.float_info.max)
        return cls(min(steps), max(max(steps), min(steps) + 1e-9), lowest, highest, is_log)

    def along(self, step: float) -> float:
        """Return the place of a step, from 0 to 1."""
        return (step - self.first) / (self.last - self.first)

    def up(self, value: float) -> float:
        """Return the place of a value, from 0 to 1."""
        if self.is_log:
            return (math.log(value) - math.log(self.lowest)) / (math.log(self.highest) - math.log(self.lowest))
        # Halves: the difference of the largest numbers is no number.
        return (value / 2 - self.lowest / 2) / (self.highest / 2 - self.lowest / 2)

    def value_ticks(self) -> list[tuple[float, str]]:
        if self.is_log:
            exponents = range(math.ceil(math.log10(self.lowest)), math.floor(math.log10(self.highest)) + 1)
            powers = [10.0**exponent for exponent in exponents]
            return [(value, _shown(value)) for value in powers or [self.lowest, self.highest]]
        return [(value, _shown(value)) for value in _round_numbers(self.lowest, self.highest, 4)]

    def step_ticks(self) -> list[tuple[float, str]]:
        if self.last - self.first < 1e-6:
            return [(self.first, _shown(self.first))]
        return [(step, _shown(step)) for step in _round_numbers(self.first, self.last, 5)]


def _round_numbers(low: float, high: float, about: int) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten between two numbers."""
    rough = (high / about - low / about) or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    unit = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / unit - 1e-9)
    return [number * unit for number in range(first, math.floor(high / unit + 1e-9) + 1)]


def _parts(points: Points, is_log: bool) -> list[list[tuple[float, float]]]:
    """Return the curve without the values that cannot be drawn, in pieces between them."""
    parts: list[list[tuple[float, float]]] = [[]]
    for step, value in points:
        if math.isfinite(value) and (value > 0 or not is_log):
            parts[-1].append((step, value))
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


def _extremes(part: list[tuple[float, float]], axes: _Axes) -> list[tuple[float, float]]:
    """Return at most two points for each of 800 buckets of steps, the least and the greatest: no spike is lost."""
    if len(part) <= 2 * _BUCKETS:
        return part
    found: list[tuple[float, float]] = []
    bucket: list[tuple[float, float]] = []
    current = -1
    for point in part:
        place = int(axes.along(point[0]) * _BUCKETS)
        if place != current and bucket:
            found += _ends_of(bucket)
            bucket = []
        current = place
        bucket.append(point)
    return found + _ends_of(bucket)


def _ends_of(bucket: list[tuple[float, float]]) -> list[tuple[float, float]]:
    low, high = min(bucket, key=lambda point: point[1]), max(bucket, key=lambda point: point[1])
    return sorted({low, high})


def _shown(value: float) -> str:
    if math.isfinite(value) and value == int(value) and abs(value) < 1e7:
        return str(int(value))
    return f"{value:.4g}"


def _colored(text: str, number: int, is_colored: bool) -> str:
    return f"\x1b[{_ANSI_COLORS[number % len(_ANSI_COLORS)]}m{text}\x1b[0m" if is_colored else text


def charts_to_png(path: str, title: str, charts: Sequence[Chart], *, is_log: bool = False) -> None:
    """Write the charts as a picture of pixels.

    Raises:
        ImportError: matplotlib, which draws it, is not installed.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a .png is drawn by matplotlib: pip install matplotlib, or write an .svg") from error
    columns = min(2, len(charts)) or 1
    rows = math.ceil(len(charts) / columns)
    figure = Figure(figsize=(6.4 * columns, 3.6 * rows), layout="constrained")
    figure.suptitle(title)
    for place, chart in enumerate(charts):
        axes = figure.add_subplot(rows, columns, place + 1)
        axes.set_title(chart.title)
        for number, curve in enumerate(chart.curves):
            steps, values = zip(*curve.points, strict=True) if curve.points else ((), ())
            axes.plot(steps, values, label=curve.name, color=_COLORS[number % len(_COLORS)])
        if is_log:
            axes.set_yscale("log")
        if len(chart.curves) <= _NAMED:
            axes.legend()
    figure.savefig(path, dpi=150)
