"""A program as data, text and DOT."""

import functools
import json

import lp_pipe as lp
from lp_pipe.graph import GraphView, to_dot, to_text


class Feeder:
    """Serves batches."""


class Stage:
    """Knows the feeder and its neighbours."""

    def __init__(self, *others: object) -> None: ...


def train(*handles: object) -> None:
    """The user of everything."""


def pipeline(num_stages: int = 2) -> lp.Program:
    program = lp.Program("demo")
    feeder = program.add_node(lp.CourierNode(Feeder), label="feeder")
    nodes = [lp.CourierNode(Stage) for _ in range(num_stages)]
    with program.group("stages", lp.Resources(threads=2)):
        stages = [program.add_node(node) for node in nodes]
    for index, node in enumerate(nodes):
        node.configure(feeder, stages[(index + 1) % num_stages])
    program.add_node(lp.PyNode(functools.partial(train, stages), feeder), label="trainer")
    return program


def test_text_shows_groups_nodes_kinds_and_whose_handles_they_hold() -> None:
    assert to_text(GraphView.of(pipeline())) == (
        "demo: 4 nodes in 3 groups (→ holds a handle of)\n"
        "  feeder   CourierNode  Feeder\n"
        "  stages\n"
        "  ├─ 0     CourierNode  Stage  threads=2  → feeder, stages/1\n"
        "  └─ 1     CourierNode  Stage  threads=2  → feeder, stages/0\n"
        "  trainer  PyNode       train             → feeder, stages/0..1\n"
    )


def test_a_large_group_takes_one_line() -> None:
    assert to_text(GraphView.of(pipeline(200))) == (
        "demo: 202 nodes in 3 groups (→ holds a handle of)\n"
        "  feeder        CourierNode  Feeder\n"
        "  stages x 200  CourierNode  Stage  threads=2  → feeder, stages/0..199\n"
        "  trainer       PyNode       train             → feeder, stages/0..199\n"
    )


def test_a_large_group_of_several_kinds_takes_one_line_for_each_stretch() -> None:
    program = lp.Program("mixed")
    with program.group("nodes"):
        for _ in range(4):
            program.add_node(lp.CourierNode(Stage))
        for _ in range(4):
            program.add_node(lp.PyNode(train))
    assert to_text(GraphView.of(program)).splitlines()[1:] == [
        "  nodes/0..3  CourierNode  Stage",
        "  nodes/4..7  PyNode       train",
    ]


def test_an_empty_program_and_a_single_node_have_a_text_too() -> None:
    program = lp.Program("tiny")
    assert to_text(GraphView.of(program)) == "tiny: 0 nodes in 0 groups (→ holds a handle of)\n"
    program.add_node(lp.PyNode(lambda: None), label="one")
    assert to_text(GraphView.of(program)).splitlines()[1] == "  one  PyNode  <lambda>"


def test_json_holds_every_node_and_edge() -> None:
    graph = json.loads(GraphView.of(pipeline()).to_json())
    assert graph["program"] == "demo"
    assert graph["groups"] == {"feeder": ["feeder/0"], "stages": ["stages/0", "stages/1"], "trainer": ["trainer/0"]}
    assert graph["nodes"][1] == {
        "name": "stages/0",
        "label": "stages",
        "index": 0,
        "kind": "CourierNode",
        "runs": "Stage",
        "resources": {"threads": 2},
    }
    assert {(edge["user"], edge["server"]) for edge in graph["edges"]} == {
        ("stages/0", "feeder/0"),
        ("stages/0", "stages/1"),
        ("stages/1", "feeder/0"),
        ("stages/1", "stages/0"),
        ("trainer/0", "stages/0"),
        ("trainer/0", "stages/1"),
        ("trainer/0", "feeder/0"),
    }


def test_dot_has_a_cluster_for_each_group_and_quotes_names() -> None:
    program = lp.Program('a "quoted" name')
    server = program.add_node(lp.CourierNode(Feeder), label='fe"ed')
    program.add_node(lp.PyNode(train, server), label="trainer")
    lines = to_dot(GraphView.of(program)).splitlines()
    assert lines[0] == 'digraph "a \\"quoted\\" name" {'
    assert '    label="fe\\"ed";' in lines
    assert '    "trainer/0" [label="trainer/0\\ntrain"];' in lines
    assert '  "trainer/0" -> "fe\\"ed/0";' in lines


def test_a_colocation_shows_what_is_inside() -> None:
    program = lp.Program("colocations")
    program.add_node(lp.PyNode(train), label="trainer")
    threads = lp.MultiThreadingColocation([lp.CourierNode(Feeder), lp.PyNode(train)])
    nodes = [lp.CourierNode(Stage), lp.CourierNode(Stage), threads]
    program.add_node(lp.MultiProcessingColocation(nodes), label="both")
    program.add_node(lp.MultiProcessingColocation(), label="empty")
    assert to_text(GraphView.of(program)) == (
        "colocations: 3 nodes in 3 groups (→ holds a handle of)\n"
        "  trainer  PyNode                     train\n"
        "  both     MultiProcessingColocation  Stage x 2 + (Feeder + train)\n"
        "  empty    MultiProcessingColocation  nothing\n"
    )
