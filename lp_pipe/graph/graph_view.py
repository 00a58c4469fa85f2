"""A program's graph as plain data, for code that draws, prints or stores it."""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from lp_pipe.channels import kinds
from lp_pipe.nodes import Colocation, Node
from lp_pipe.program import Edge, Program
from lp_pipe.resources import Resources


@dataclasses.dataclass(frozen=True)
class NodeView:
    """A node of the graph. kind: its class (CourierNode, PyNode, ...); runs: the user's class or function inside.

    notes: short lines that say more, such as which layers a stage has.
    """

    label: str
    index: int
    kind: str
    runs: str
    resources: Mapping[str, Any]  # those that differ from the defaults
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.label}/{self.index}"


@dataclasses.dataclass(frozen=True)
class GraphView:
    """The nodes in the order of their groups, and the edges from each node to the nodes that it holds handles of."""

    program: str
    nodes: tuple[NodeView, ...]
    edges: tuple[Edge, ...]

    @classmethod
    def of(cls, program: Program, mode: str = "process") -> "GraphView":
        """Return the graph of `program` as it is now; `mode`, in which it will run, decides what "auto" channels are.

        Raises:
            ValueError: a node holds a handle of a node that is not in the program.
        """
        nodes = tuple(
            NodeView(
                label,
                node.index,
                type(node).__name__,
                _runs(node),
                _differing(program.options(label).resources),
                node.notes,
            )
            for label, members in program.groups.items()
            for node in members
        )
        return cls(program.name, nodes, tuple(_chosen(edge, mode) for edge in program.edges()))

    @functools.cached_property
    def groups(self) -> dict[str, list[NodeView]]:
        """The nodes by label, in order."""
        table: dict[str, list[NodeView]] = {}
        for node in self.nodes:
            table.setdefault(node.label, []).append(node)
        return table

    def servers_of(self, users: Iterable[NodeView]) -> list[str]:
        """Return the names of the nodes that any of `users` holds a handle of, in the program's order."""
        return self._in_order({edge.server for edge in self._edges_from(users)})

    def channels_of(self, users: Iterable[NodeView]) -> dict[str, list[str]]:
        """Return, by kind of channel, the nodes to which any of `users` sends tensors, in the program's order."""
        table: dict[str, set[str]] = {}
        for edge in self._edges_from(users):
            if edge.channel:
                table.setdefault(edge.channel, set()).add(edge.server)
        return {kind: self._in_order(table[kind]) for kind in sorted(table)}

    @functools.cached_property
    def _by_user(self) -> dict[str, list[Edge]]:
        table: dict[str, list[Edge]] = {}
        for edge in self.edges:
            table.setdefault(edge.user, []).append(edge)
        return table

    @functools.cached_property
    def _places(self) -> dict[str, int]:
        return {node.name: place for place, node in enumerate(self.nodes)}

    def _edges_from(self, users: Iterable[NodeView]) -> Iterator[Edge]:
        for user in users:
            yield from self._by_user.get(user.name, ())

    def _in_order(self, names: Iterable[str]) -> list[str]:
        return sorted(names, key=self._places.__getitem__)

    def to_dict(self) -> dict[str, Any]:
        """Return `{"program", "groups": {label: [node names]}, "nodes": [...], "edges": [{"user", "server"}]}`.

        An edge that tensors travel along also has a "channel", and a node with notes also has "notes".
        """
        return {
            "program": self.program,
            "groups": {label: [node.name for node in members] for label, members in self.groups.items()},
            "nodes": [_as_dict(node) for node in self.nodes],
            "edges": [
                {name: value for name, value in dataclasses.asdict(edge).items() if value} for edge in self.edges
            ],
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> "GraphView":
        """Return the graph that `to_dict` has written.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: `found` is something else.
        """
        nodes = tuple(
            NodeView(
                str(one["label"]),
                int(one["index"]),
                str(one["kind"]),
                str(one["runs"]),
                dict(one["resources"]),
                tuple(map(str, one.get("notes", ()))),
            )
            for one in found["nodes"]
        )
        known = {node.name for node in nodes}
        edges = tuple(Edge(str(one["user"]), str(one["server"]), str(one.get("channel", ""))) for one in found["edges"])
        return cls(str(found["program"]), nodes, tuple(edge for edge in edges if {edge.user, edge.server} <= known))

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"


def _as_dict(node: NodeView) -> dict[str, Any]:
    fields = {"name": node.name, **dataclasses.asdict(node), "resources": dict(node.resources)}
    notes = list(fields.pop("notes"))
    return {**fields, "notes": notes} if notes else fields


def _chosen(edge: Edge, mode: str) -> Edge:
    if not edge.channel or mode == "multi_host":  # then it depends on the hosts: `lp_pipe launch --dry-run` shows it
        return edge
    return dataclasses.replace(edge, channel=kinds.preview(edge.channel, same_process=mode == "thread"))


def count(number: int, noun: str) -> str:
    """Return "1 node", "3 nodes"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _runs(node: Node[Any]) -> str:
    if isinstance(node, Colocation):
        return _inside(node)
    _, function = node.launch_parts()[-1]
    return _bare_name(function)


def _inside(colocation: Colocation) -> str:
    """Return "Stage x 2 + train" for a colocation, with inner colocations in parentheses."""
    names = [f"({_runs(child)})" if isinstance(child, Colocation) else _runs(child) for child in colocation.children]
    runs = [(name, len(list(same))) for name, same in itertools.groupby(names)]
    return " + ".join(name if number == 1 else f"{name} x {number}" for name, number in runs) or "nothing"


def _bare_name(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]


def _differing(resources: Resources) -> dict[str, Any]:
    default = Resources()
    values = {field.name: getattr(resources, field.name) for field in dataclasses.fields(resources)}
    values["env"] = dict(resources.env)
    return {name: value for name, value in values.items() if value != getattr(default, name)}
