"""The geometry of a graph's picture: boxes, cards and curves, without colours or XML."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lp_pipe.graph.box_layout import BoxLayout, Rect, Size, lay_out
from lp_pipe.graph.graph_view import GraphView, NodeView
from lp_pipe.program import Edge


@dataclass(frozen=True)
class ArrowEnd:
    """The start or end of an arrow: a node, or (index None) a whole group."""

    label: str
    index: int | None


@dataclass(frozen=True)
class Arrow:
    """An arrow that stands for `edges`. is_mutual: it stands for edges of both directions."""

    user: ArrowEnd
    server: ArrowEnd
    edges: tuple[Edge, ...]
    is_mutual: bool = False

    @property
    def channels(self) -> str:
        """The kinds of the channels among its edges: "shm"."""
        return ", ".join(dict.fromkeys(edge.channel for edge in self.edges if edge.channel))


_Bundles = dict[tuple[ArrowEnd, ArrowEnd], list[Edge]]


def arrows_of(view: GraphView, collapsed: Collection[str]) -> list[Arrow]:
    """Return arrows between nodes, or between groups where all members do the same or the group is collapsed."""
    ends = {node.name: ArrowEnd(node.label, None if node.label in collapsed else node.index) for node in view.nodes}
    bundles: _Bundles = {}
    for edge in view.edges:
        bundles.setdefault((ends[edge.user], ends[edge.server]), []).append(edge)
    for label, nodes in view.groups.items():
        members = [ArrowEnd(label, node.index) for node in nodes]
        if len(members) > 1 and label not in collapsed:
            bundles = _join_members(bundles, ArrowEnd(label, None), members)
    return list(_merge_mutual(bundles))


def _join_members(bundles: _Bundles, group: ArrowEnd, members: list[ArrowEnd]) -> _Bundles:
    """Replace the arrows that all members of a group have in common by arrows of the group's box."""
    outside = {end: None for pair in bundles for end in pair if end.label != group.label}
    for end in outside:
        _replace(bundles, [(end, member) for member in members], (end, group))
        _replace(bundles, [(member, end) for member in members], (group, end))
    if len(members) > 2:  # two members that know each other need no loop around them
        _replace(bundles, [(one, other) for one in members for other in members if one != other], (group, group))
    return bundles


def _replace(bundles: _Bundles, pairs: list[tuple[ArrowEnd, ArrowEnd]], joint: tuple[ArrowEnd, ArrowEnd]) -> None:
    if all(pair in bundles for pair in pairs):
        bundles[joint] = [edge for pair in pairs for edge in bundles.pop(pair)]


def _merge_mutual(bundles: _Bundles) -> Iterator[Arrow]:
    done = set()
    for (user, server), edges in bundles.items():
        back = bundles.get((server, user)) if user != server else None
        if (server, user) not in done:
            yield Arrow(user, server, (*edges, *(back or ())), is_mutual=back is not None)
        if user != server:
            done.add((user, server))


MAX_CARDS = 6  # a larger group is drawn as one stack of cards, unless its nodes have different notes
CARD_WIDTH, CARD_HEIGHT = 150.0, 46.0
NOTE_HEIGHT = 14.0  # per line of notes on a card
TITLE_HEIGHT = 32.0
PADDING = 14.0
_ARROW_ROOM = 46.0  # between cards that an arrow connects
_PLAIN_GAP = 12.0
_ARC_ROOM = 26.0
_TITLE_LETTER = 8.0

Point = tuple[float, float]


@dataclass(frozen=True)
class Box:
    """A group: its members as cards, or one card for all when `is_stack`."""

    label: str
    nodes: Sequence[NodeView]
    rect: Rect
    cards: Sequence[Rect]
    is_stack: bool


@dataclass(frozen=True)
class ArrowCurve:
    """An arrow as SVG path data."""

    arrow: Arrow
    path: str


@dataclass(frozen=True)
class Scene:
    """All that is to be drawn, within width x height."""

    boxes: Sequence[Box]
    curves: Sequence[ArrowCurve]
    width: float
    height: float


def make_scene(view: GraphView, max_cards: int | None = None) -> Scene:
    """Place boxes, cards and arrows.

    max_cards: a group of more nodes is one stack of cards; default: of more than 6 that have the same notes.
    """
    if max_cards is None:
        stacked = {label for label, nodes in view.groups.items() if len(nodes) > MAX_CARDS and _are_alike(nodes)}
    else:
        stacked = {label for label, nodes in view.groups.items() if len(nodes) > max_cards}
    arrows = arrows_of(view, stacked)
    inner = [arrow for arrow in arrows if arrow.user.label == arrow.server.label]
    layout = lay_out(
        {label: _box_size(label, nodes, label in stacked, inner) for label, nodes in view.groups.items()},
        ((arrow.user.label, arrow.server.label) for arrow in arrows),
    )
    boxes = [_box(label, nodes, label in stacked, layout, inner) for label, nodes in view.groups.items()]
    rects = {ArrowEnd(box.label, None): box.rect for box in boxes}
    for box in boxes:
        rects.update({ArrowEnd(box.label, node.index): card for node, card in zip(box.nodes, box.cards, strict=False)})
    curves = [ArrowCurve(arrow, _inner_path(arrow, rects)) for arrow in inner]
    rects.update({ArrowEnd(box.label, box.nodes[0].index): box.rect for box in boxes if len(box.nodes) == 1})
    tops = {end: _right_of_title(rect, layout.boxes[end.label], end.label) for end, rect in rects.items()}
    curves += _outer_curves([arrow for arrow in arrows if arrow not in inner], rects, tops, layout)
    return Scene(boxes, curves, layout.width, layout.height)


def _are_alike(nodes: Sequence[NodeView]) -> bool:
    return len({node.notes for node in nodes}) == 1


def _card_height(nodes: Sequence[NodeView]) -> float:
    return CARD_HEIGHT + NOTE_HEIGHT * max(len(node.notes) for node in nodes)


def _box_size(label: str, nodes: Sequence[NodeView], is_stack: bool, inner: Sequence[Arrow]) -> Size:
    num_cards = 1 if is_stack else len(nodes)
    width = num_cards * CARD_WIDTH + (num_cards - 1) * _card_gap(label, inner) + 2 * PADDING
    title_width = (len(label) + 6) * _TITLE_LETTER + 2 * PADDING
    arcs = _ARC_ROOM if any(arrow.user.label == label and _distance(arrow) > 1 for arrow in inner) else 0.0
    return max(width, title_width), TITLE_HEIGHT + _card_height(nodes) + PADDING + arcs


def _card_gap(label: str, inner: Sequence[Arrow]) -> float:
    return _ARROW_ROOM if any(arrow.user.label == label for arrow in inner) else _PLAIN_GAP


def _box(label: str, nodes: Sequence[NodeView], is_stack: bool, layout: BoxLayout, inner: Sequence[Arrow]) -> Box:
    rect = layout.boxes[label]
    num_cards = 1 if is_stack else len(nodes)
    gap = _card_gap(label, inner)
    left = rect.middle - (num_cards * CARD_WIDTH + (num_cards - 1) * gap) / 2
    top = rect.y + TITLE_HEIGHT
    height = _card_height(nodes)
    cards = [Rect(left + i * (CARD_WIDTH + gap), top, CARD_WIDTH, height) for i in range(num_cards)]
    return Box(label, nodes, rect, cards, is_stack)


def _distance(arrow: Arrow) -> int:
    """Return how many cards of one group an arrow spans; 0 if it starts or ends at the whole group."""
    if arrow.user.index is None or arrow.server.index is None:
        return 0
    return abs(arrow.user.index - arrow.server.index)


def _inner_path(arrow: Arrow, rects: dict[ArrowEnd, Rect]) -> str:
    user, server = rects[arrow.user], rects[arrow.server]
    if arrow.user == arrow.server:
        return _loop_at_box(user) if arrow.user.index is None else _loop_at_card(user)
    side = 1 if server.x > user.x else -1
    if _distance(arrow) == 1:
        start = user.x + user.width if side == 1 else user.x
        end = server.x if side == 1 else server.x + server.width
        height = user.y + user.height / 2
        return f"M {start:.1f} {height:.1f} L {end:.1f} {height:.1f}"
    bottom = user.y + user.height
    start, end = user.middle + side * 24, server.middle - side * 24
    low = bottom + _ARC_ROOM + 4
    return f"M {start:.1f} {bottom:.1f} C {start:.1f} {low:.1f} {end:.1f} {low:.1f} {end:.1f} {bottom:.1f}"


def _loop_at_card(card: Rect) -> str:
    right, top = card.x + card.width, card.y
    return f"M {right - 38:.1f} {top:.1f} c -8 -26 32 -26 24 0"


def _loop_at_box(box: Rect) -> str:
    right, middle = box.x + box.width, box.y + box.height / 2
    return f"M {right:.1f} {middle - 12:.1f} c 34 -12 34 36 0 24"


def _right_of_title(rect: Rect, box: Rect, label: str) -> Rect:
    """Return the part of a card that an arrow reaches from above without crossing the title of its box."""
    if rect == box:
        return rect
    title_end = box.x + PADDING + (len(label) + 5) * _TITLE_LETTER
    left = max(rect.x, min(title_end, rect.x + 0.7 * rect.width))
    return rect._replace(x=left, width=rect.x + rect.width - left)


def _outer_curves(
    arrows: Sequence[Arrow], rects: Mapping[ArrowEnd, Rect], tops: Mapping[ArrowEnd, Rect], layout: BoxLayout
) -> list[ArrowCurve]:
    routes = [layout.routes[arrow.user.label, arrow.server.label] for arrow in arrows]
    ports = _spread_ports(arrows, rects, tops, routes, layout)
    curves = []
    for number, arrow in enumerate(arrows):
        is_down = _points_down(arrow, layout)
        points = [ports[number, True]]
        for route in routes[number]:
            ends = [(route.middle, route.y), (route.middle, route.y + route.height)]
            points += ends if is_down else ends[::-1]
        curves.append(ArrowCurve(arrow, _smooth([*points, ports[number, False]])))
    return curves


def _points_down(arrow: Arrow, layout: BoxLayout) -> bool:
    return layout.boxes[arrow.user.label].y < layout.boxes[arrow.server.label].y


def _spread_ports(
    arrows: Sequence[Arrow],
    rects: Mapping[ArrowEnd, Rect],
    tops: Mapping[ArrowEnd, Rect],
    routes: Sequence[Sequence[Rect]],
    layout: BoxLayout,
) -> dict[tuple[int, bool], Point]:
    """Return where each arrow starts (True) and ends (False): side by side, in the order of where they go."""
    sides: dict[tuple[ArrowEnd, bool], list[tuple[float, int, bool]]] = {}
    for number, arrow in enumerate(arrows):
        is_down = _points_down(arrow, layout)
        path = [rects[arrow.user], *routes[number], rects[arrow.server]]
        sides.setdefault((arrow.user, is_down), []).append((path[1].middle, number, True))
        sides.setdefault((arrow.server, not is_down), []).append((path[-2].middle, number, False))
    ports: dict[tuple[int, bool], Point] = {}
    for (end, is_bottom), users in sides.items():
        rect = rects[end] if is_bottom else tops[end]
        for place, (_, number, is_start) in enumerate(sorted(users), start=1):
            x = rect.x + rect.width * place / (len(users) + 1)
            ports[number, is_start] = (x, rect.y + rect.height if is_bottom else rect.y)
    return ports


def _smooth(points: Sequence[Point]) -> str:
    """Return SVG curves that leave and reach every point vertically."""
    parts = [f"M {points[0][0]:.1f} {points[0][1]:.1f}"]
    for (x0, y0), (x1, y1) in pairwise(points):
        bend = (y1 - y0) / 2
        parts.append(f"C {x0:.1f} {y0 + bend:.1f} {x1:.1f} {y1 - bend:.1f} {x1:.1f} {y1:.1f}")
    return " ".join(parts)
