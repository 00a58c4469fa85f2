"""A timeline as an SVG picture."""

from collections.abc import Iterator, Sequence
from typing import Any
from xml.etree import ElementTree as ET

from lp_pipe.graph.svg_elements import FAINT_INK, INK, add, add_heading, make_picture, to_text, written
from lp_pipe.pipeline.schedule.ir import WORDS, Op
from lp_pipe.pipeline.schedule.simulate import Span, Timeline
from lp_pipe.pipeline.schedule.timeline_text import TINY_S

_LINE = "#e3e8ee"
_MARGIN, _HEADER_HEIGHT, _NAMES_WIDTH, _AXIS_HEIGHT = 24, 50, 68, 38
_ROW_HEIGHT, _BOX_HEIGHT = 32, 26
_LETTER_WIDTH, _PADDING = 6.8, 4.4  # pixels
_MAX_WIDTH = 1400
_NARROW, _JOINT_WIDTH = 0.4, 6  # pixels of boxes too narrow to see, and of one in their place
# For each op a worker's first stage, and its second one (the third looks like the first).
_SHADES: dict[Op, tuple[str, str]] = {
    "F": ("#b9d2fb", "#8ab2f5"),
    "B": ("#fbbdb6", "#f29b91"),
    "I": ("#f9c89b", "#f2a765"),
    "W": ("#bfe5cb", "#8fd0a4"),
}


def to_svg(timeline: Timeline, name: str) -> str:
    """Draw a row per worker, time from left to right; hover over a box for its action and seconds.

    A box says 2F0 (stage, op, micro-batch) where workers have several stages, else F0, or nothing where it is narrow.
    Boxes that would be narrower than a pixel are drawn as one: millions of them could neither be seen nor opened.
    """
    with_stage = any(len({span.action.stage for span in spans}) > 1 for spans in timeline.spans)
    pixels_per_s = _pixels_per_s(timeline, with_stage)
    chart = timeline.makespan * pixels_per_s
    width = max(chart + _NAMES_WIDTH, 560) + 2 * _MARGIN
    height = _HEADER_HEIGHT + _ROW_HEIGHT * len(timeline.spans) + _AXIS_HEIGHT + 2 * _MARGIN
    root = make_picture(f"Schedule {name}", width, height)
    _add(root, "style", _style())
    add_heading(root, name, _summary(timeline), _MARGIN)
    _add_legend(root, timeline, width - _MARGIN)
    chart_at = f"translate({_MARGIN + _NAMES_WIDTH} {_MARGIN + _HEADER_HEIGHT})"
    _add_chart(_add(root, "g", transform=chart_at), timeline, pixels_per_s, with_stage)
    return to_text(root, indent="")


def _summary(timeline: Timeline) -> str:
    peaks = " ".join(map(str, timeline.peak_activations))
    return f"{timeline.makespan:g} s · bubble {timeline.bubble:.1%} · peak activations {peaks}"


def _style() -> str:
    colors = (f".{op}{odd}{{fill:{shades[odd]}}}" for op, shades in _SHADES.items() for odd in (0, 1))
    return f"{''.join(colors)}.t{{font-size:10.5px;text-anchor:middle;fill:{INK}}}"


def _pixels_per_s(timeline: Timeline, with_stage: bool) -> float:
    """Return as many as the longest label wants in the shortest box, if the picture does not become too wide."""
    spans = [span for row in timeline.spans for span in row if span.end_s > span.start_s]
    if not spans or timeline.makespan < TINY_S:
        return 0.0
    shortest = min(span.end_s - span.start_s for span in spans)
    wanted = _label_width(max((_label(span, with_stage) for span in spans), key=len)) / shortest
    return min(wanted, _MAX_WIDTH / timeline.makespan)


def _add_chart(chart: ET.Element, timeline: Timeline, pixels_per_s: float, with_stage: bool) -> None:
    bottom = _ROW_HEIGHT * len(timeline.spans)
    step = _tick_step(pixels_per_s)
    for tick in range(int(timeline.makespan / step * (1 + 1e-9)) + 1 if step else 0):
        x = tick * step * pixels_per_s
        _add(chart, "path", d=f"M{written(x, 1)} -4V{bottom + 4}", stroke=_LINE)
        _add(chart, "text", f"{tick * step:g}", x=x, y=bottom + 18, **{"class": "t"})
    _add(chart, "text", "seconds", x=0, y=bottom + 34, font_size=10.5, fill=FAINT_INK)
    for worker, spans in enumerate(timeline.spans):
        row = _add(chart, "g", transform=f"translate(0 {worker * _ROW_HEIGHT})")
        _add(row, "text", f"worker {worker}", x=-_NAMES_WIDTH, y=_BOX_HEIGHT - 8, font_size=12, fill=INK)
        chunk_of = {stage: chunk for chunk, stage in enumerate(sorted({span.action.stage for span in spans}))}
        for together in _seen_together(spans, pixels_per_s):
            if len(together) == 1:
                _add_box(row, together[0], chunk_of[together[0].action.stage], pixels_per_s, with_stage)
            else:
                _add_joint_box(row, together, pixels_per_s)


def _seen_together(spans: Sequence[Span], pixels_per_s: float) -> Iterator[list[Span]]:
    """Yield the spans of each box.

    A span that is wide enough has a box of its own; of those too narrow to be seen, neighbours share one.
    """
    together: list[Span] = []
    for span in spans:
        if together:
            is_seen = max(span.end_s - span.start_s, span.start_s - together[-1].end_s) * pixels_per_s >= _NARROW
            was_seen = (together[0].end_s - together[0].start_s) * pixels_per_s >= _NARROW
            is_enough = (span.end_s - together[0].start_s) * pixels_per_s > _JOINT_WIDTH
            if is_seen or was_seen or is_enough or not pixels_per_s:
                yield together
                together = []
        together.append(span)
    if together:
        yield together


def _add_joint_box(row: ET.Element, spans: Sequence[Span], pixels_per_s: float) -> None:
    """Draw one box for several spans, with the color of the op that takes most of it."""
    first, last = spans[0], spans[-1]
    seconds = {op: sum(span.end_s - span.start_s for span in spans if span.action.op == op) for op in _SHADES}
    x, width = first.start_s * pixels_per_s, (last.end_s - first.start_s) * pixels_per_s
    color = {"class": f"{max(seconds, key=lambda op: seconds[op])}0"}
    box = _add(row, "rect", x=x, width=width, height=_BOX_HEIGHT, **color)
    _add(box, "title", f"{first.action} to {last.action} {first.start_s:g}–{last.end_s:g} s")


def _add_box(row: ET.Element, span: Span, chunk: int, pixels_per_s: float, with_stage: bool) -> None:
    x, width = span.start_s * pixels_per_s, (span.end_s - span.start_s) * pixels_per_s
    # A little narrower than it is, so that neighbours stay apart.
    color = {"class": f"{span.action.op}{chunk % 2}"}
    box = _add(row, "rect", x=x, width=max(width - 1, width / 2), height=_BOX_HEIGHT, rx=3, **color)
    _add(box, "title", f"{span.action} {span.start_s:g}–{span.end_s:g} s")
    label = _label(span, with_stage)
    if _label_width(label) <= width + 1e-6:
        _add(row, "text", label, x=x + width / 2, y=_BOX_HEIGHT - 9, **{"class": "t"})


def _label(span: Span, with_stage: bool) -> str:
    return str(span.action) if with_stage else f"{span.action.op}{span.action.microbatch}"


def _label_width(label: str) -> float:
    return _LETTER_WIDTH * len(label) + _PADDING


def _add_legend(root: ET.Element, timeline: Timeline, right: float) -> None:
    used = {span.action.op for spans in timeline.spans for span in spans}
    for op in reversed([op for op in _SHADES if op in used]):
        text = f"{op} {WORDS[op]}"
        right -= 6.2 * len(text)
        _add(root, "text", text, x=right, y=_MARGIN + 12, font_size=11, fill=FAINT_INK)
        _add(root, "rect", x=right - 16, y=_MARGIN + 3, width=11, height=11, rx=3, **{"class": f"{op}0"})
        right -= 30


def _tick_step(pixels_per_s: float) -> float:
    """Return 1, 2 or 5 times a power of ten, so that ticks are at least 50 pixels apart.

    The step is 0 where time has no width.
    """
    if not pixels_per_s:
        return 0.0
    power = 10.0**-12
    while power * pixels_per_s * 10 < 50:
        power *= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor * pixels_per_s >= 50)


def _add(parent: ET.Element, tag: str, text: str | None = None, **attributes: Any) -> ET.Element:
    """Add an element with one decimal at most: a schedule has many boxes."""
    return add(parent, tag, text, **{name: written(value, 1) for name, value in attributes.items()})
