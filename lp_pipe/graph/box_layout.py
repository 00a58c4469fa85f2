"""Positions for boxes: users above the servers that they call, neighbours near each other."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# The layers of a drawing, and the order within each. Pure graph theory, no coordinates.
#
# Longest path after breaking cycles, then barycentre sweeps. Source: Sugiyama, Tagawa, Toda, 1981.

_SWEEPS = 12

Vertex = Hashable


class DummyVertex(NamedTuple):
    """An invisible vertex that keeps room where the edge user -> server passes `layer`."""

    user: str
    server: str
    layer: int


def break_cycles(vertices: Sequence[str], edges: Sequence[tuple[str, str]]) -> dict[tuple[str, str], None]:
    """Return the edges, with those that close a cycle reversed; vertices without users are visited first."""
    called = {server for _, server in edges}
    outgoing: dict[str, list[str]] = {vertex: [] for vertex in vertices}
    for user, server in edges:
        outgoing[user].append(server)
    downward: dict[tuple[str, str], None] = {}
    seen: set[str] = set()
    for first in sorted(vertices, key=lambda vertex: vertex in called):
        path = {first: iter(outgoing[first])} if first not in seen else {}  # no recursion, because chains may be long
        seen.add(first)
        while path:
            vertex, servers = next(reversed(path.items()))
            below = next(servers, None)
            if below is None:
                del path[vertex]
                continue
            downward[(below, vertex) if below in path else (vertex, below)] = None
            if below not in seen:
                seen.add(below)
                path[below] = iter(outgoing[below])
    return downward


def longest_path_layers(vertices: Sequence[str], edges: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Place every vertex one layer below the lowest of its users; layer 0 is the top."""
    users: dict[str, list[str]] = {vertex: [] for vertex in vertices}
    for user, server in edges:
        users[server].append(user)
    layers: dict[str, int] = {}
    waiting = list(reversed(vertices))
    while waiting:
        missing = [user for user in users[waiting[-1]] if user not in layers]
        if missing:
            waiting += reversed(missing)
            continue
        vertex = waiting.pop()
        if vertex not in layers:
            layers[vertex] = 1 + max((layers[user] for user in users[vertex]), default=-1)
    return layers


def with_dummy_vertices(
    layer_of: Mapping[str, int], edges: Iterable[tuple[str, str]]
) -> tuple[list[list[Vertex]], list[tuple[Vertex, Vertex]]]:
    """Return the layers as rows, and the edges as links between neighbouring rows, through dummy vertices."""
    rows: list[list[Vertex]] = [[] for _ in range(1 + max(layer_of.values(), default=-1))]
    for vertex, number in layer_of.items():
        rows[number].append(vertex)
    links: list[tuple[Vertex, Vertex]] = []
    for user, server in edges:
        routes: list[Vertex] = [
            DummyVertex(user, server, number) for number in range(layer_of[user] + 1, layer_of[server])
        ]
        for route, number in zip(routes, range(layer_of[user] + 1, layer_of[server]), strict=True):
            rows[number].append(route)
        links += list(zip([user, *routes], [*routes, server], strict=True))
    return rows, links


def neighbours_of(links: Iterable[tuple[Vertex, Vertex]]) -> dict[Vertex, list[Vertex]]:
    table: dict[Vertex, list[Vertex]] = {}
    for upper, lower in links:
        table.setdefault(upper, []).append(lower)
        table.setdefault(lower, []).append(upper)
    return table


def fewest_crossings(rows: list[list[Vertex]], links: list[tuple[Vertex, Vertex]]) -> list[list[Vertex]]:
    """Sort every row by the mean position of its neighbours in the row before, down and up in turns."""
    neighbours = neighbours_of(links)
    best, best_crossings = rows, _crossings(rows, links)
    for round_number in range(_SWEEPS):
        order = range(1, len(rows)) if round_number % 2 == 0 else range(len(rows) - 2, -1, -1)
        rows = [list(row) for row in rows]
        for number in order:
            before = rows[number - 1 if round_number % 2 == 0 else number + 1]
            rows[number] = _by_barycentre(rows[number], before, neighbours)
        crossings = _crossings(rows, links)
        if crossings < best_crossings:
            best, best_crossings = rows, crossings
    return best


def _by_barycentre(row: list[Vertex], before: list[Vertex], neighbours: Mapping[Vertex, list[Vertex]]) -> list[Vertex]:
    place = {vertex: index for index, vertex in enumerate(before)}

    def barycentre(vertex: Vertex) -> float:
        known = [place[other] for other in neighbours.get(vertex, ()) if other in place]
        return sum(known) / len(known) if known else row.index(vertex)

    return sorted(row, key=barycentre)


def _crossings(rows: list[list[Vertex]], links: list[tuple[Vertex, Vertex]]) -> int:
    place = {vertex: (number, index) for number, row in enumerate(rows) for index, vertex in enumerate(row)}
    spans: list[list[tuple[int, int]]] = [[] for _ in rows]  # by upper row
    for upper, lower in links:
        spans[place[upper][0]].append((place[upper][1], place[lower][1]))
    return sum(one[0] < other[0] and one[1] > other[1] for row in spans for one in row for other in row)


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
