"""The SVG picture."""

import re
from xml.etree import ElementTree as ET

import pytest

import lp_pipe as lp
from lp_pipe.graph import GraphView, to_svg

SVG = "{http://www.w3.org/2000/svg}"


class Server:
    """Serves."""

    def __init__(self, *others: object) -> None: ...


def use(*handles: object) -> None:
    """Calls."""


def ring(size: int) -> lp.Program:
    """Return a program in which every node calls the next one, and the trainer calls the first and serves no node."""
    program = lp.Program("ring & <friends>")
    nodes = [lp.CourierNode(Server) for _ in range(size)]
    with program.group("ring"):
        handles = [program.add_node(node) for node in nodes]
    for index, node in enumerate(nodes):
        node.configure(handles[(index + 1) % size])
    program.add_node(lp.PyNode(use, handles[0]), label="trainer")
    return program


def cycle() -> lp.Program:
    program = lp.Program("cycle")
    nodes = {label: lp.CourierNode(Server) for label in ("alice", "bob", "carol")}
    handles = {label: program.add_node(node, label=label) for label, node in nodes.items()}
    nodes["alice"].configure(handles["bob"], handles["alice"])
    nodes["bob"].configure(handles["carol"])
    nodes["carol"].configure(handles["alice"])
    return program


def noted(size: int) -> lp.Program:
    """Return the ring whose nodes have two lines each, the second one too long for a card."""
    program = ring(size)
    for index, node in enumerate(program.groups["ring"]):
        node.notes = (f"number {index}", "and much more that nobody can read on a card")
    return program


PROGRAMS = [ring(1), ring(2), ring(5), ring(32), noted(3), cycle(), lp.Program("empty")]


@pytest.mark.parametrize("program", PROGRAMS, ids=repr)
def test_every_node_and_every_edge_is_in_the_picture(program: lp.Program) -> None:
    view = GraphView.of(program)
    root = ET.fromstring(to_svg(view))
    drawn = [name for shape in root.iter(f"{SVG}rect") for name in shape.get("data-node", "").split()]
    assert sorted(drawn) == sorted(node.name for node in view.nodes)
    arrows = [path for path in root.iter(f"{SVG}path") if path.get("class") == "edge"]
    told = {line for path in arrows for line in path.findtext(f"{SVG}title", "").splitlines()}
    assert told == {f"{edge.user} → {edge.server}" for edge in view.edges}
    assert all(path.get("marker-end", "").startswith("url(#arrow-") for path in arrows)


@pytest.mark.parametrize("program", PROGRAMS, ids=repr)
def test_everything_lies_inside_the_view_box(program: lp.Program) -> None:
    root = ET.fromstring(to_svg(GraphView.of(program)))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    stage = root.find(f"{SVG}g")
    assert stage is not None
    left, top = map(float, re.findall(r"[\d.]+", stage.attrib["transform"]))
    for rect in stage.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.attrib[key]) for key in ("x", "y", "width", "height"))
        assert left + x >= 0 and left + x + w <= width
        assert top + y >= 0 and top + y + h <= height


def test_a_large_group_is_one_stack_with_its_size() -> None:
    root = ET.fromstring(to_svg(GraphView.of(ring(32))))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "ring × 32" in texts
    assert sum(shape.get("class") == "node" for shape in root.iter(f"{SVG}rect")) == 2


def test_what_nodes_have_to_say_is_on_their_cards_which_are_then_not_stacked() -> None:
    root = ET.fromstring(to_svg(GraphView.of(noted(8))))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert [text for text in texts if text and text.startswith("number")] == [f"number {index}" for index in range(8)]
    assert texts.count("and much more that nobod…") == 8
    cards = [shape for shape in root.iter(f"{SVG}rect") if "ring/" in shape.get("data-node", "")]
    lowest = max(float(text.get("y", "")) for text in root.iter(f"{SVG}text") if text.text == "number 7")
    assert all(float(card.get("y", "")) + float(card.get("height", "")) > lowest + 14 for card in cards)
    assert "and much more that nobody can read" in (cards[0].findtext(f"{SVG}title") or "")


def test_names_are_escaped() -> None:
    assert ET.fromstring(to_svg(GraphView.of(ring(1)))).findtext(f"{SVG}title") == "Program ring & <friends>"


def test_names_that_xml_cannot_hold_are_drawn_all_the_same() -> None:
    program = lp.Program("red \x1b[31m")
    program.add_node(lp.PyNode(use), label="lost \udcff byte")
    picture = ET.fromstring(to_svg(GraphView.of(program)).encode())
    titles = [title.text for title in picture.iter(f"{SVG}title")]
    assert titles == ["Program red \ufffd[31m", "lost \ufffd byte/0: PyNode(use)"]
