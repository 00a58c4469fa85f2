"""The arrows of a picture: edges, with equal ones drawn as one."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from lp_pipe.graph.graph_view import GraphView
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
