"""A program's graph in Graphviz's language."""

from lp_pipe.graph.graph_view import GraphView


def to_dot(view: GraphView) -> str:
    """Return DOT text with a cluster for each group; arrows point from the user to the server that it calls."""
    lines = [
        f"digraph {_quoted(view.program)} {{",
        '  node [shape=box, style="rounded,filled", fillcolor=white, fontname="Helvetica"];',
    ]
    for number, (label, nodes) in enumerate(view.groups.items()):
        lines += [f"  subgraph cluster_{number} {{", f"    label={_quoted(label)};"]
        lines += [f"    {_quoted(node.name)} [label={_quoted(node.name, node.runs, *node.notes)}];" for node in nodes]
        lines.append("  }")
    lines += [f"  {_quoted(edge.user)} -> {_quoted(edge.server)}{_label(edge.channel)};" for edge in view.edges]
    return "\n".join([*lines, "}"]) + "\n"


def _label(channel: str) -> str:
    return f' [label={_quoted(channel)}, fontname="Helvetica", fontsize=10]' if channel else ""


def _quoted(*lines: str) -> str:
    escaped = [line.replace("\\", "\\\\").replace('"', '\\"') for line in lines]
    return '"' + "\\n".join(escaped) + '"'
