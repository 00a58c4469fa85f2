"""Curves are drawn with every extreme, gaps where there is no number, and one axis for all of a chart."""

import math
from xml.etree import ElementTree as ET

import pytest

from lp_pipe.graph.curves import Chart, Curve, charts_to_svg, charts_to_text

SVG = "{http://www.w3.org/2000/svg}"


def lines_of(svg: str) -> list[list[tuple[float, float]]]:
    found = ET.fromstring(svg).iter(f"{SVG}polyline")
    return [
        [(float(x), float(y)) for x, y in (one.split(",") for one in line.attrib["points"].split())] for line in found
    ]


def test_the_spike_of_one_point_in_a_hundred_thousand_is_in_the_picture() -> None:
    points = [(float(step), 1.0) for step in range(100_000)]
    points[77_777] = (77_777.0, 50.0)
    (line,) = lines_of(charts_to_svg("run", "loss", [Chart("loss", [Curve("a/0", points)])]))
    assert len(line) <= 1602
    x, top = min(line, key=lambda place: place[1])
    assert top == 30 and abs((x - 56) / (460 - 56) - 0.77777) < 0.002


def test_what_is_no_number_is_a_gap_and_one_point_a_dot() -> None:
    points = [(0.0, 1.0), (1.0, 2.0), (2.0, math.nan), (3.0, 3.0), (4.0, math.inf), (5.0, 2.0), (6.0, 1.0)]
    svg = charts_to_svg("run", "loss", [Chart("loss", [Curve("a/0", points)])])
    assert [len(line) for line in lines_of(svg)] == [2, 2]
    assert len(list(ET.fromstring(svg).iter(f"{SVG}circle"))) == 1


@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize(
    "values", [[], [math.nan], [0.0], [-5.0, -5.0], [1e308, -1e308], [1e-300, 2e-300], [3.0] * 3, [1e-3, 1e3]]
)
def test_any_values_can_be_drawn(values: list[float], is_log: bool) -> None:
    chart = Chart("<odd & name>", [Curve("a/0", list(enumerate(map(float, values)))), Curve("b/0", [])])
    svg = charts_to_svg("run", "", [chart] * 3, is_log=is_log)
    assert "nan" not in svg and all(-1 <= y <= 231 for line in lines_of(svg) for _, y in line)
    assert any("<odd & name>" in line for line in charts_to_text([chart], is_log=is_log))


def test_the_text_has_a_curve_and_its_last_value() -> None:
    lines = list(charts_to_text([Chart("loss", [Curve("a/0", [(0.0, 0.0), (9.0, 1.5)])])], width=40))
    assert lines[0] == "loss" and "a/0  1.5 at step 9 (0 … 1.5)" in lines[-2]
    dots = [any("\u2800" < character <= "\u28ff" for character in line) for line in lines]
    assert dots == [False, *[True] * 10, False, False, False]
    assert max(map(len, lines[:12])) <= 41
