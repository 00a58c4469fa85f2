"""The edges that are drawn as one arrow."""

import lp_pipe as lp
from lp_pipe.graph import GraphView
from lp_pipe.graph.scene import ArrowEnd, arrows_of


class Server:
    """Serves."""

    def __init__(self, *others: object) -> None: ...


def use(*handles: object) -> None:
    """Calls."""


def drawn(program: lp.Program, *collapsed: str) -> list[tuple[str, str]]:
    arrows = arrows_of(GraphView.of(program), collapsed)
    return [(written(arrow.user), written(arrow.server) + " mutual" * arrow.is_mutual) for arrow in arrows]


def written(end: ArrowEnd) -> str:
    return end.label if end.index is None else f"{end.label}/{end.index}"


def test_a_user_of_a_whole_group_gets_one_arrow_to_its_box() -> None:
    program = lp.Program("demo")
    with program.group("servers"):
        servers = [program.add_node(lp.CourierNode(Server)) for _ in range(3)]
    program.add_node(lp.PyNode(use, servers), label="all")
    program.add_node(lp.PyNode(use, servers[:2]), label="some")
    assert drawn(program) == [("some/0", "servers/0"), ("some/0", "servers/1"), ("all/0", "servers")]


def test_a_group_that_uses_all_of_another_gets_one_arrow() -> None:
    program = lp.Program("demo")
    with program.group("servers"):
        servers = [program.add_node(lp.CourierNode(Server)) for _ in range(2)]
    with program.group("workers"):
        for _ in range(3):
            program.add_node(lp.PyNode(use, servers))
    assert drawn(program) == [("workers", "servers")]
    assert len(arrows_of(GraphView.of(program), ())[0].edges) == 6


def test_calls_both_ways_are_one_arrow_with_two_heads() -> None:
    program = lp.Program("demo")
    nodes = [lp.CourierNode(Server), lp.CourierNode(Server)]
    handles = [program.add_node(node, label=label) for node, label in zip(nodes, "ab", strict=True)]
    nodes[0].configure(handles[1], handles[0])
    nodes[1].configure(handles[0])
    assert sorted(drawn(program)) == [("a/0", "a/0"), ("a/0", "b/0 mutual")]


def test_a_collapsed_group_keeps_all_its_edges_at_its_box() -> None:
    program = lp.Program("demo")
    server = program.add_node(lp.CourierNode(Server), label="server")
    with program.group("workers"):
        for _ in range(10):
            program.add_node(lp.PyNode(use, server))
    assert drawn(program, "workers") == [("workers", "server/0")]
