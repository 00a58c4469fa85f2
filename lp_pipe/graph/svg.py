"""A program's graph as an SVG picture, written without any system package."""

from typing import Any, NamedTuple
from xml.etree import ElementTree as ET

from lp_pipe.graph.box_layout import Rect
from lp_pipe.graph.graph_view import GraphView, NodeView, count
from lp_pipe.graph.scene import NOTE_HEIGHT, Arrow, ArrowCurve, Box, Scene, make_scene
from lp_pipe.graph.svg_elements import FAINT_INK, INK, add, add_heading, make_picture, to_text
from lp_pipe.program import Edge

_MARGIN = 32.0
_HEADER_HEIGHT = 52.0
_MAX_LETTERS = 19  # that fit on a card
_MAX_SMALL_LETTERS = 25


class Colors(NamedTuple):
    """The colours of one group: inside and border of its box, and its title and arrows."""

    fill: str
    border: str
    ink: str


PALETTE = (
    Colors("#edf3ff", "#b4cbf5", "#2b5cb3"),
    Colors("#e9f7ee", "#a9d9b9", "#22774a"),
    Colors("#fff3e3", "#f0cd9b", "#a2620f"),
    Colors("#f4eeff", "#cdb9f0", "#6b45b3"),
    Colors("#ffedf2", "#f1b8ca", "#ab3560"),
    Colors("#e5f6f6", "#9ed3d4", "#1a7173"),
    Colors("#fbf7dd", "#e0d083", "#7c680f"),
    Colors("#f0f2f5", "#c5ccd6", "#4a586c"),
)


def to_svg(view: GraphView) -> str:
    """Return an SVG with groups as boxes, and arrows that point down from users to the servers that they call.

    A large group is one stack of cards. An arrow to or from a box stands for all of its members; hovering over an arrow
    shows which handles it stands for. Where tensors travel, the kind of channel is written along the arrow.
    """
    scene = make_scene(view)
    colors = {label: PALETTE[number % len(PALETTE)] for number, label in enumerate(view.groups)}
    width = max(scene.width, 9.0 * len(view.program), 330.0) + 2 * _MARGIN
    height = scene.height + _HEADER_HEIGHT + 2 * _MARGIN
    root = make_picture(f"Program {view.program}", width, height)
    _add_markers(root, colors)
    subtitle = f"{count(len(view.nodes), 'node')} · arrows point from user to server"
    add_heading(root, view.program, subtitle, _MARGIN)
    left = (width - scene.width) / 2
    stage = add(root, "g", transform=f"translate({left:.1f} {_MARGIN + _HEADER_HEIGHT:.1f})")
    _draw(stage, scene, colors)
    return to_text(root)


def _draw(stage: ET.Element, scene: Scene, colors: dict[str, Colors]) -> None:
    # Boxes are below arrows, arrows below cards and titles: an arrow may cross a box, never a text.
    for box in scene.boxes:
        _add_box(stage, box, colors[box.label])
    for curve in scene.curves:
        _add_curve(stage, curve, colors[curve.arrow.user.label])
    for box in scene.boxes:
        _add_title(stage, box, colors[box.label])
        _add_cards(stage, box, colors[box.label])


def _add_markers(root: ET.Element, colors: dict[str, Colors]) -> None:
    definitions = add(root, "defs")
    for ink in dict.fromkeys(color.ink for color in colors.values()):
        marker = add(definitions, "marker", id=_marker(ink), viewBox="0 0 10 10", refX=9, refY=5)
        marker.attrib.update({"markerWidth": "10", "markerHeight": "10", "markerUnits": "userSpaceOnUse"})
        marker.attrib["orient"] = "auto-start-reverse"
        add(marker, "path", d="M 0 0.8 L 10 5 L 0 9.2 L 2.4 5 z", fill=ink)


def _add_box(stage: ET.Element, box: Box, color: Colors) -> None:
    shape = _add_rect(stage, box.rect, rx=14, fill=color.fill, stroke=color.border, stroke_width=1.5)
    shape.attrib.update({"class": "group", "data-label": box.label})


def _add_title(stage: ET.Element, box: Box, color: Colors) -> None:
    text = f"{box.label} × {len(box.nodes)}" if len(box.nodes) > 1 else box.label
    title = add(stage, "text", text, x=box.rect.x + 16, y=box.rect.y + 21, font_size=14, font_weight=700)
    # A rim in the box's colour keeps the title readable where an arrow passes below it.
    title.attrib.update({"fill": color.ink, "stroke": color.fill, "stroke-width": "5", "paint-order": "stroke"})


def _add_cards(stage: ET.Element, box: Box, color: Colors) -> None:
    for number, (card, node) in enumerate(zip(box.cards, box.nodes, strict=False)):
        if box.is_stack:
            for shift in (8, 4):
                _add_card_shape(stage, card._replace(x=card.x + shift, y=card.y - shift), color)
        shape = _add_card_shape(stage, card, color)
        names = [member.name for member in (box.nodes if box.is_stack else [node])]
        shape.attrib.update({"class": "node", "data-node": " ".join(names)})
        add(shape, "title", _tooltip(node, names))
        index = None if len(box.nodes) == 1 or box.is_stack else number
        _add_card_text(stage, card, node, index, color)


def _add_card_shape(stage: ET.Element, card: Rect, color: Colors) -> ET.Element:
    return _add_rect(stage, card, rx=9, fill="#ffffff", stroke=color.border, stroke_width=1.2)


def _add_card_text(stage: ET.Element, card: Rect, node: NodeView, index: int | None, color: Colors) -> None:
    add(
        stage,
        "text",
        _short(node.runs, _MAX_LETTERS),
        x=card.x + 12,
        y=card.y + 20,
        font_size=12.5,
        font_weight=600,
        fill=INK,
    )
    resources = "".join(f" · {key} {value}" for key, value in node.resources.items() if isinstance(value, (int, str)))
    kind = (node.kind + resources)[: _MAX_LETTERS + 4]
    add(stage, "text", kind, x=card.x + 12, y=card.y + 36, font_size=10.5, fill=FAINT_INK)
    for number, note in enumerate(node.notes):
        place = {"x": card.x + 12, "y": card.y + 52 + NOTE_HEIGHT * number}
        add(stage, "text", _short(note, _MAX_SMALL_LETTERS), **place, font_size=10, fill=INK)
    if index is not None:
        place = {"x": card.x + card.width - 11, "y": card.y + 19}
        add(stage, "text", str(index), **place, font_size=12, font_weight=700, fill=color.ink, text_anchor="end")


def _add_curve(stage: ET.Element, curve: ArrowCurve, color: Colors) -> None:
    marker = f"url(#{_marker(color.ink)})"
    path = add(stage, "path", d=curve.path, fill="none", stroke=color.ink, stroke_width=1.6, stroke_opacity=0.85)
    path.attrib.update({"class": "edge", "marker-end": marker})
    if curve.arrow.is_mutual:
        path.attrib["marker-start"] = marker
    add(path, "title", "\n".join(_edge_text(edge) for edge in curve.arrow.edges))
    if curve.arrow.channels:
        _add_channels(stage, path, curve.arrow, color)


def _add_channels(stage: ET.Element, path: ET.Element, arrow: Arrow, color: Colors) -> None:
    """Write the kinds of channels along the arrow, in the middle of it."""
    path.attrib["id"] = f"edge-{len(stage)}"
    text = add(stage, "text", dy=-5, font_size=10, fill=color.ink, text_anchor="middle")
    text.attrib["class"] = "channel"
    along = add(text, "textPath", arrow.channels, href=f"#{path.attrib['id']}", startOffset="50%")
    along.attrib["data-edges"] = " ".join(f"{edge.user}>{edge.server}" for edge in arrow.edges if edge.channel)


def _edge_text(edge: Edge) -> str:
    return f"{edge.user} → {edge.server}" + (f" (tensors: {edge.channel})" if edge.channel else "")


def _add_rect(parent: ET.Element, rect: Rect, **attributes: Any) -> ET.Element:
    return add(parent, "rect", x=rect.x, y=rect.y, width=rect.width, height=rect.height, **attributes)


def _tooltip(node: NodeView, names: list[str]) -> str:
    shown = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
    return "\n".join([f"{shown}: {node.kind}({node.runs})", *node.notes])


def _short(text: str, letters: int) -> str:
    return text if len(text) <= letters else text[: letters - 1] + "…"


def _marker(ink: str) -> str:
    return f"arrow-{ink.removeprefix('#')}"
