"""The messages between the launcher and an agent: frozen types, of which a `Peer` sends each with rpc/codec.py.

Both ends are of the same version and have authenticated each other, so any class may be in a message.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lp_pipe.launch.hosts.source_tree import SourceTree
from lp_pipe.launch.plan.launch_plan import LaunchPlan
from lp_pipe.launch.plan.placement import Placement
from lp_pipe.launch.plan.spec import NodeSpec
from lp_pipe.launch.plan.surroundings import Surroundings
from lp_pipe.launch.supervision.messages import Notice, Question, View
from lp_pipe.nodes import PyNode

R = TypeVar("R")


@dataclass(frozen=True)
class Alive(Notice):
    """Show that the sender lives; sent by both sides every second."""


# To an agent; also ReservePort, Stacks and InjectFault of supervision/messages.py.


@dataclass(frozen=True)
class StartNodes(Question[str]):
    """The nodes of the agent's host, and their surroundings; answered with the mark of their processes.

    payloads: of each node, by node_id; an agent does not look into them.
    run, silence_s: what its processes are members of, see run_endpoints.RunMember. preload, orphan_s: see Template.
    """

    run: str
    program: str
    nodes: tuple[NodeSpec, ...]
    payloads: Mapping[str, bytes]
    places: Mapping[str, Placement]
    run_dir: str
    grace_s: float
    surroundings: Surroundings
    preload: tuple[str, ...]
    orphan_s: float
    silence_s: float

    def plan(self, run_dir: Path) -> LaunchPlan:
        """Return the part of the program that runs on one host, in its folder there."""
        return LaunchPlan(self.program, self.nodes, (), {}, run_dir, self.grace_s)


@dataclass(frozen=True)
class RestartNode(Question[None]):
    node_id: str


@dataclass(frozen=True)
class TakeOverNode(Question[None]):
    """Start a node of a host that is lost."""

    spec: NodeSpec
    payload: bytes
    place: Placement


@dataclass(frozen=True)
class StopNodes(Notice):
    node_ids: list[str]


@dataclass(frozen=True)
class TerminateNodes(Notice):
    node_ids: list[str]


@dataclass(frozen=True)
class KillNodes(Notice):
    node_ids: list[str]


@dataclass(frozen=True)
class LookAtNodes(Question[list[View]]):
    """Ask for what each process of the host does, as Host.look."""

    old_s: float


@dataclass(frozen=True)
class ReadClock(Question[float]):
    """Ask for time.monotonic() of the host."""


@dataclass(frozen=True)
class CloseNodes(Question[dict[str, int]]):
    """All nodes are down: free everything, for the end or another program. The answer: the hits of a test's faults."""


@dataclass(frozen=True)
class MissingContents(Question[list[str]]):
    """The digests of those contents of a source tree that the host does not have."""

    tree: SourceTree


@dataclass(frozen=True)
class KeepContents(Question[None]):
    contents: list[bytes]


@dataclass(frozen=True)
class LayOutTree(Question[None]):
    """All contents are there: the nodes that start from now on find the tree."""

    tree: SourceTree


@dataclass(frozen=True)
class SeesFile(Question[bool]):
    path: str


@dataclass(frozen=True)
class LinesWritten(Notice):
    """Credit for lines of nodes (shipped_logs.py): the launcher has written so many bytes."""

    size: int


# To the launcher.


@dataclass(frozen=True)
class NodeNotice(Notice):
    """A notice of a node's process, or about it."""

    node_id: str
    notice: Notice


@dataclass(frozen=True)
class NodeQuestion(Question[R]):
    """A question of a node's process."""

    node_id: str
    question: Question[R]


@dataclass(frozen=True)
class FindAll(Question[list[Any]]):
    """Answered with the endpoint of each address, or the exception."""

    addresses: list[str]


@dataclass(frozen=True)
class CallsOfNodes(Notice):
    """The number of calls that the servers of each node (by node_id) have taken since it started."""

    calls: dict[str, int]


@dataclass(frozen=True)
class NodeLines(Notice):
    """Whole lines that a node has printed, without the last newline."""

    node_id: str
    is_stderr: bool
    text: bytes


@dataclass(frozen=True)
class NodeUnfinishedLine(Notice):
    """A line that is not complete yet; see telemetry/terminal_lines.py."""

    node_id: str
    is_stderr: bool
    text: bytes
    is_settled: bool


def without_code(nodes: Iterable[NodeSpec]) -> tuple[NodeSpec, ...]:
    """Return the specs without the nodes themselves, which are only unpickled in their own processes."""
    return tuple(dataclasses.replace(spec, node=PyNode(_elsewhere)) for spec in nodes)


def _elsewhere() -> None:
    raise AssertionError("an agent runs no node itself")
