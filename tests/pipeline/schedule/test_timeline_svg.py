from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from lp_pipe.pipeline.schedule import Costs, make_schedule, schedules, simulate, to_svg

EQUAL = Costs(forward=1, backward_input=1, backward_weight=1)
PICTURES = Path(__file__).parents[3] / "docs" / "schedules"
SVG = "{http://www.w3.org/2000/svg}"


def boxes(svg: str) -> list[ET.Element]:
    return [each for each in ET.fromstring(svg).iter(f"{SVG}rect") if each.find(f"{SVG}title") is not None]


def texts(svg: str) -> list[str]:
    return [str(each.text) for each in ET.fromstring(svg).iter(f"{SVG}text")]


def test_each_action_is_a_box_as_wide_as_it_is_long() -> None:
    svg = to_svg(simulate(make_schedule("1f1b", stages=2, microbatches=2), EQUAL), "1f1b")
    assert [str(box.findtext(f"{SVG}title")) for box in boxes(svg)[:4]] == [
        "0F0 0–1 s",
        "0F1 1–2 s",
        "0B0 4–6 s",
        "0B1 7–9 s",
    ]
    forward, _, backward = boxes(svg)[:3]
    assert float(backward.attrib["x"]) == pytest.approx(4 * float(forward.attrib["width"]) + 4, abs=0.5)
    assert {"worker 0", "worker 1", "F0", "B1", "9 s · bubble 33.3% · peak activations 2 1"} <= set(texts(svg))


def test_boxes_name_the_stage_where_workers_have_several() -> None:
    svg = to_svg(simulate(make_schedule("zbv", stages=2, microbatches=3), EQUAL), "zbv")
    assert {"0F0", "3I1", "W backward for weights"} <= set(texts(svg))


def test_long_timelines_stay_as_wide_as_a_page_and_leave_labels_out() -> None:
    svg = to_svg(simulate(make_schedule("1f1b", stages=4, microbatches=300), EQUAL), "1f1b")
    assert float(ET.fromstring(svg).attrib["width"]) <= 1600
    assert "F0" not in texts(svg)
    assert len(boxes(svg)) == 4 * 300 * 2


def test_actions_that_nobody_could_see_are_drawn_together() -> None:
    """512 stages with 2,048 micro-batches were 218 MB, and took 3 GiB."""
    svg = to_svg(simulate(make_schedule("1f1b", stages=3, microbatches=4000), EQUAL), "1f1b")
    found = boxes(svg)
    assert len(found) < 3 * 1400 / 4
    titles = [str(box.findtext(f"{SVG}title")) for box in found]
    assert (titles[0], titles[-1]) == ("0F0 to 0F2 0–3 s", "2F3995 to 2B3999 11987–12002 s")
    assert {box.attrib["class"] for box in found} == {"F0", "B0"}  # of what takes most of the time


def test_a_timeline_without_time_is_drawn() -> None:
    nothing = Costs(forward=0, backward_input=0, backward_weight=0)
    assert len(boxes(to_svg(simulate(make_schedule("1f1b", 1, 1), nothing), "1f1b"))) == 2


@pytest.mark.parametrize("name", schedules())
def test_the_pictures_in_the_docs_are_what_the_tool_draws(name: str) -> None:
    """Else: lp_pipe schedule NAME --stages 4 --microbatches 8 -o docs/schedules/NAME.svg."""
    drawn = to_svg(simulate(make_schedule(name, 4, 8), EQUAL), name)
    assert (PICTURES / f"{name}.svg").read_text(encoding="utf-8") == drawn
    assert len(drawn) < 40_000
