"""Layers and order of a layered drawing."""

from lp_pipe.graph.box_layout import (
    DummyVertex,
    break_cycles,
    fewest_crossings,
    longest_path_layers,
    with_dummy_vertices,
)


def test_servers_lie_below_all_their_users() -> None:
    edges = [("trainer", "stages"), ("trainer", "feeder"), ("stages", "feeder")]
    layers = longest_path_layers(["feeder", "stages", "trainer"], edges)
    assert layers == {"trainer": 0, "stages": 1, "feeder": 2}


def test_the_edge_that_closes_a_cycle_is_turned_round() -> None:
    edges = [("a", "b"), ("b", "c"), ("c", "a")]
    assert list(break_cycles(["a", "b", "c"], edges)) == [("a", "b"), ("b", "c"), ("a", "c")]


def test_two_that_call_each_other_count_once() -> None:
    assert list(break_cycles(["a", "b"], [("a", "b"), ("b", "a")])) == [("a", "b")]


def test_an_edge_over_a_layer_gets_a_way_through_it() -> None:
    rows, links = with_dummy_vertices({"a": 0, "b": 1, "c": 2}, [("a", "b"), ("b", "c"), ("a", "c")])
    way = DummyVertex("a", "c", 1)
    assert rows == [["a"], ["b", way], ["c"]]
    assert links == [("a", "b"), ("b", "c"), ("a", way), (way, "c")]


def test_crossings_are_sorted_away() -> None:
    rows = fewest_crossings([["a", "b"], ["x", "y"]], [("a", "y"), ("b", "x")])
    assert rows in ([["a", "b"], ["y", "x"]], [["b", "a"], ["x", "y"]])


def test_a_chain_may_be_longer_than_python_recurses() -> None:
    labels = [f"g{number}" for number in range(2000)]
    chain = list(zip(labels[1:], labels, strict=False))
    assert list(break_cycles(labels, chain)) == chain[::-1]
    assert longest_path_layers(labels, chain)["g0"] == 1999
