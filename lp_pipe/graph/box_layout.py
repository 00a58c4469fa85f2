"""Positions for boxes: users above the servers that they call, neighbours near each other."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lp_pipe.graph.layering import (
    DummyVertex,
    Vertex,
    break_cycles,
    fewest_crossings,
    longest_path_layers,
    neighbours_of,
    with_dummy_vertices,
)

LAYER_GAP = 72.0
BOX_GAP = 48.0
ROUTE_WIDTH = 14.0
_ROUNDS = 12


class Rect(NamedTuple):
    """A rectangle: x and y of the upper left corner; y grows downwards."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


Size = tuple[float, float]


@dataclass(frozen=True)
class BoxLayout:
    """The places of boxes and, for every edge that passes layers, the gaps it runs through (from user to server)."""

    boxes: Mapping[str, Rect]
    routes: Mapping[tuple[str, str], Sequence[Rect]]
    width: float
    height: float


def lay_out(sizes: Mapping[str, Size], edges: Iterable[tuple[str, str]]) -> BoxLayout:
    """Place boxes of the given sizes so that most edges point down."""
    wanted = [(user, server) for user, server in dict.fromkeys(edges) if user != server]
    downward = break_cycles(list(sizes), wanted)
    layer_of = longest_path_layers(list(sizes), downward)
    rows, links = with_dummy_vertices(layer_of, downward)
    rows = fewest_crossings(rows, links)
    extents = {
        vertex: sizes[vertex] if isinstance(vertex, str) else (ROUTE_WIDTH, 0.0) for row in rows for vertex in row
    }
    placed = _place(rows, links, extents)
    routes = {edge: _route_rects(edge, edge in downward, layer_of, placed) for edge in wanted}
    boxes = {label: placed[label] for label in sizes}
    right = max((rect.x + rect.width for rect in placed.values()), default=0.0)
    bottom = max((rect.y + rect.height for rect in placed.values()), default=0.0)
    return BoxLayout(boxes, routes, right, bottom)


def _place(
    rows: list[list[Vertex]], links: list[tuple[Vertex, Vertex]], extents: Mapping[Vertex, Size]
) -> dict[Vertex, Rect]:
    neighbours = neighbours_of(links)
    centre = {vertex: index * 100.0 for row in rows for index, vertex in enumerate(row)}
    for round_number in range(_ROUNDS):
        for row in rows if round_number % 2 else reversed(rows):
            wishes = [_mean([centre[other] for other in neighbours.get(v, ())], centre[v]) for v in row]
            centre.update(zip(row, _keep_apart(wishes, [extents[vertex][0] for vertex in row]), strict=True))
    left = min((centre[vertex] - extents[vertex][0] / 2 for vertex in centre), default=0.0)
    placed: dict[Vertex, Rect] = {}
    top = 0.0
    for row in rows:
        height = max(extents[vertex][1] for vertex in row)
        for vertex in row:
            width, own_height = extents[vertex]
            own_height = own_height or height  # a route is as high as its layer
            placed[vertex] = Rect(centre[vertex] - width / 2 - left, top + (height - own_height) / 2, width, own_height)
        top += height + LAYER_GAP
    return placed


def _keep_apart(wishes: list[float], widths: list[float]) -> list[float]:
    """Return centres near the wishes, in order, without overlap: the mean of packing from the left and the right."""
    from_left = _pushed(wishes, widths)
    mirrored = _pushed([-wish for wish in reversed(wishes)], widths[::-1])
    return [(one - other) / 2 for one, other in zip(from_left, reversed(mirrored), strict=True)]


def _pushed(wishes: list[float], widths: list[float]) -> list[float]:
    centres: list[float] = []
    for index, wish in enumerate(wishes):
        if index:
            wish = max(wish, centres[-1] + (widths[index - 1] + widths[index]) / 2 + BOX_GAP)
        centres.append(wish)
    return centres


def _mean(values: list[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def _route_rects(
    edge: tuple[str, str], is_downward: bool, layer_of: Mapping[str, int], placed: Mapping[Vertex, Rect]
) -> list[Rect]:
    upper, lower = edge if is_downward else edge[::-1]
    rects = [placed[DummyVertex(upper, lower, number)] for number in range(layer_of[upper] + 1, layer_of[lower])]
    return rects if is_downward else rects[::-1]
