"""A program: the graph of nodes that a user declares once and launches anywhere."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from numbers import Integral
from typing import Any

from lp_pipe.handles import Handle
from lp_pipe.nodes import Node
from lp_pipe.nodes.base import HandleT
from lp_pipe.resources import Resources

FAILURE_POLICIES = ("stop", "restart", "ignore")
HANG_POLICIES = ("report", "restart", "stop")


@dataclass(frozen=True)
class GroupOptions:
    """The options that hold for every node of a group."""

    resources: Resources = field(default_factory=Resources)
    on_failure: str = "stop"
    max_restarts: int | None = 3
    on_hang: str = "report"
    least_nodes: int = 0
    least_started: int = 0

    def check(self, label: str) -> None:
        """Refuse what no launcher could follow; errors name the group."""
        if not isinstance(self.resources, Resources):
            raise TypeError(f"group {label!r}: resources must be lp.Resources(cpus=1, …), got {self.resources!r}")
        if self.on_failure not in FAILURE_POLICIES:
            known = ", ".join(FAILURE_POLICIES)
            raise ValueError(f"group {label!r}: on_failure must be one of {known}, got {self.on_failure!r}")
        if self.on_hang not in HANG_POLICIES:
            raise ValueError(f"group {label!r}: on_hang must be one of {HANG_POLICIES}, got {self.on_hang!r}")
        limit = self.max_restarts
        if limit is not None and (not isinstance(limit, Integral) or limit < 0):
            raise ValueError(f"group {label!r}: max_restarts must be a whole number from 0 on, or None, got {limit!r}")


@dataclass(frozen=True)
class Edge:
    """A handle that `user` holds of `server`; both are `label/index`.

    channel: the kind of channel by which `user` also sends tensors to `server`, if it does.
    """

    user: str
    server: str
    channel: str = ""


class Program:
    """Nodes in labelled groups, connected by handles. Pure data: nothing runs before `launch`.

    program = Program("train")
    with program.group("feeder"):
        batches = program.add_node(CourierNode(Feeder, "text/"))
    program.add_node(PyNode(train, batches), label="trainer")
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._groups: dict[str, list[Node[Any]]] = {}
        self._options: dict[str, GroupOptions] = {}
        self._current: str | None = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def groups(self) -> dict[str, list[Node[Any]]]:
        """The nodes of every group, in the order in which they were added."""
        return self._groups

    def get_all_nodes(self) -> list[Node[Any]]:
        """Return every node, group by group."""
        return list(itertools.chain.from_iterable(self._groups.values()))

    def options(self, label: str) -> GroupOptions:
        """Return the options of a group."""
        return self._options.get(label, GroupOptions())

    @contextmanager
    def group(
        self,
        label: str,
        resources: Resources | None = None,
        on_failure: str = "stop",
        max_restarts: int | None = 3,
        on_hang: str = "report",
        least_nodes: int = 0,
        least_started: int = 0,
    ) -> Iterator[None]:
        """Put nodes that are added in the body into the group `label`, which may be reopened with equal options.

        on_failure: what a node's failure (exception, exit, kill) means.
            "stop": the program ends, and `wait()` raises it.
            "restart": the node starts from its constructor again after 0.1 s, doubled each time, at most 5 s (from
                0.1 s again once it had served for longer than that, or was up for 5 s); at most `max_restarts` times,
                or without limit if that is None, then as with "stop". Calls in progress raise Unavailable, new ones
                wait for it.
            "ignore": noted in status and log; the others go on, and calls to the node raise Unavailable.
            A colocation fails, restarts and ends as a whole.
        on_hang: what happens to a node that has made no progress for `launch(hang_after=…)` seconds: its process does
            not answer, it is part of a deadlock, or another node waits for it while it waits for none itself.
            "report": the launcher logs it. "restart": the node is killed and started again, as after a failure, within
                the same `max_restarts`. "stop": the node is killed, and this is the program's failure. In thread mode
                the node's thread cannot be killed: it is left behind as a daemon.
        least_nodes: if not 0, a node that fails and has no restart left is ignored as long as so many others of the
            group are left; then its failure ends the program.
        least_started: if not 0, so many nodes must have room at the start, and the others wait for hosts that join the
            run later (mode="multi_host"). There nodes are started, too, that have failed, or whose host was lost.

        Raises:
            ValueError: there is no label, a group is inside a group, or options differ from earlier ones of the same
                label.
            TypeError: resources are no Resources.
        """
        if not label:
            raise ValueError("a group needs a label: program.group('feeder')")
        if self._current is not None:
            raise ValueError(f"groups cannot be nested: {label!r} inside {self._current!r}; close the outer one first")
        options = GroupOptions(resources or Resources(), on_failure, max_restarts, on_hang, least_nodes, least_started)
        options.check(label)
        if self._options.setdefault(label, options) != options:
            raise ValueError(f"group label {label!r} was opened before with other options: {self._options[label]}")
        self._current = label
        try:
            yield
        finally:
            self._current = None

    def add_node(self, node: Node[HandleT], label: str | None = None) -> HandleT:
        """Take `node` into the current group (or the group `label`) and return a handle of it.

        Raises:
            ValueError: there is no label outside a group, the label is not the current group's, or the node was added
                before.
            TypeError: it is no node.
        """
        if not isinstance(node, Node):
            raise TypeError(
                f"add_node takes a node such as CourierNode(MyClass, ...), not {node!r} of type {type(node).__name__}"
            )
        if self._current is not None and label is not None and label != self._current:
            raise ValueError(f"label {label!r} differs from the current group's label {self._current!r}")
        label = self._current or label
        if not label:
            raise ValueError("a node needs a label: add_node(node, label='feeder'), or use `with program.group(...)`")
        if node.is_colocated:
            raise ValueError(f"{node!r} is inside a colocation: add that to the program instead")
        if node.label:  # in another program it would lose its name and index here
            raise ValueError(f"{node!r} is already in a program as label {node.label!r}; make a second node")
        nodes = self._groups.setdefault(label, [])
        node.placed(label, len(nodes))
        nodes.append(node)
        return node.create_handle()

    def edges(self) -> list[Edge]:
        """Return the handles that nodes hold of others, found in the nodes' arguments; each pair once.

        Raises:
            ValueError: a node holds a handle of a node that is not in this program.
        """
        owners = {address.id: node.name for node in self.get_all_nodes() for address in node.addresses}
        found: dict[tuple[str, str], str] = {}
        for node in self.get_all_nodes():
            for handle in node.input_handles():
                for server in _owners_of(handle, owners, node.name, self._name):
                    found[node.name, server] = handle.channel or found.get((node.name, server), "")
        return [Edge(user, server, channel) for (user, server), channel in found.items()]

    def __repr__(self) -> str:
        groups = ", ".join(f"{label} x {len(nodes)}" for label, nodes in self._groups.items())
        return f"Program({self._name!r}: {groups})"

    def _repr_svg_(self) -> str | None:
        """Return the picture of `lp_pipe graph`, which notebooks show; None if the graph is not valid yet."""
        graph = import_module("lp_pipe.graph")  # by its name: it is made of programs, and imports this module
        try:
            return str(graph.to_svg(graph.GraphView.of(self)))
        except ValueError:
            return None


def _owners_of(handle: Handle[Any], owners: dict[str, str], user: str, program: str) -> list[str]:
    servers = []
    for address in handle.addresses:
        if address.id not in owners:
            raise ValueError(
                f"node {user} holds a handle of {handle.node_name}, which is not in program {program!r}; "
                "handles only work between nodes of one program"
            )
        servers.append(owners[address.id])
    return servers
