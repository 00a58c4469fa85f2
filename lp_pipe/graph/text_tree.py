"""A program's graph as text for the terminal: one line per node, or one line for a large group."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from lp_pipe.graph.graph_view import GraphView, NodeView, count

MAX_LINES_PER_GROUP = 6


class _TextRow(NamedTuple):
    """A row of text: aligned columns before the arrow, servers after it. notes: lines below."""

    columns: list[str]
    servers: str = ""
    notes: tuple[str, ...] = ()


def to_text(view: GraphView) -> str:
    """Return a tree of groups and nodes.

    `→` names the nodes that a node holds handles of; behind `;` are those to which it sends tensors, by kind of channel
    (`; shm: stages/1`).

    char_gpt: 4 nodes in 3 groups (→ holds a handle of)
      feeder   CourierNode  Feeder
      stages
      ├─ 0     CourierNode  Stage    → feeder, stages/1
      └─ 1     CourierNode  Stage    → feeder, stages/0
      trainer  PyClassNode  Trainer  → feeder, stages/0..1
    """
    rows = [row for label, nodes in view.groups.items() for row in _group_rows(view, label, nodes)]
    widths = [max(len(row.columns[place]) for row in rows) for place in range(3)] if rows else []
    title = f"{view.program}: {count(len(view.nodes), 'node')} in {count(len(view.groups), 'group')}"
    return "\n".join([f"{title} (→ holds a handle of)", *(_lines(row, widths) for row in rows)]) + "\n"


def short_names(names: Sequence[str], sizes: dict[str, int]) -> str:
    """Return `feeder, stages/0..3`: runs of indices are joined, and the only node of a group goes by its label."""
    parts = []
    for label, members in groupby(names, key=lambda name: name.rpartition("/")[0]):
        indices = [int(name.rpartition("/")[2]) for name in members]
        parts += [label] if sizes[label] == 1 else [f"{label}/{piece}" for piece in _runs_of(indices)]
    return ", ".join(parts)


def _group_rows(view: GraphView, label: str, nodes: list[NodeView]) -> list[_TextRow]:
    if len(nodes) == 1:
        return [_row(view, label, nodes)]
    if len(nodes) > MAX_LINES_PER_GROUP:
        return _large_group_rows(view, label, nodes)
    branches = ["├─"] * (len(nodes) - 1) + ["└─"]
    members = [_row(view, f"{branch} {node.index}", [node]) for branch, node in zip(branches, nodes, strict=True)]
    return [_TextRow([label, "", ""]), *members]


def _large_group_rows(view: GraphView, label: str, nodes: list[NodeView]) -> list[_TextRow]:
    """Return one row for each run of nodes that run the same thing."""
    stretches = [list(part) for _, part in groupby(nodes, key=lambda node: (node.kind, node.runs, node.notes))]
    if len(stretches) == 1:
        return [_row(view, f"{label} x {len(nodes)}", nodes)]
    named = [(f"{label}/{_runs_of([node.index for node in part])[0]}", part) for part in stretches]
    return [_row(view, name, part) for name, part in named]


def _row(view: GraphView, name: str, nodes: list[NodeView]) -> _TextRow:
    first = nodes[0]
    resources = " ".join(f"{key}={value}" for key, value in first.resources.items())
    sizes = {label: len(members) for label, members in view.groups.items()}
    servers = short_names(view.servers_of(nodes), sizes)
    for kind, names in view.channels_of(nodes).items():
        servers += f"; {kind}: {short_names(names, sizes)}"
    return _TextRow([name, first.kind, f"{first.runs}  {resources}".rstrip()], servers, first.notes)


def _lines(row: _TextRow, widths: list[int]) -> str:
    padded = "  ".join(text.ljust(width) for text, width in zip(row.columns, widths, strict=True))
    first = f"  {padded}{f'  → {row.servers}' if row.servers else ''}".rstrip()
    return "\n".join([first, *(f"  {' ' * widths[0]}  · {note}" for note in row.notes)])


def _runs_of(indices: list[int]) -> list[str]:
    """Return [0, 1, 2, 5] as ["0..2", "5"]."""
    pieces = []
    for _, run in groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        numbers = [index for _, index in run]
        pieces.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}..{numbers[-1]}")
    return pieces
