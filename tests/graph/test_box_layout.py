"""Places for boxes."""

import itertools

from lp_pipe.graph.box_layout import Rect, lay_out


def overlap(one: Rect, other: Rect) -> bool:
    return (
        one.x < other.x + other.width
        and other.x < one.x + one.width
        and one.y < other.y + other.height
        and other.y < one.y + one.height
    )


def test_users_are_above_servers_and_nothing_overlaps() -> None:
    sizes = {"feeder": (150.0, 90.0), "stages": (400.0, 110.0), "evaluator": (150.0, 90.0), "trainer": (150.0, 90.0)}
    edges = [("trainer", name) for name in ("feeder", "stages", "evaluator")]
    edges += [("evaluator", "feeder"), ("evaluator", "stages"), ("stages", "feeder")]
    layout = lay_out(sizes, edges)
    assert all(layout.boxes[user].y < layout.boxes[server].y for user, server in edges)
    routes = [route for edge in edges for route in layout.routes[edge]]
    assert len(layout.routes["trainer", "feeder"]) == 2
    assert not any(overlap(one, other) for one, other in itertools.combinations([*layout.boxes.values(), *routes], 2))
    assert all(box.x >= 0 and box.x + box.width <= layout.width for box in layout.boxes.values())


def test_many_unconnected_boxes_stand_side_by_side() -> None:
    layout = lay_out({str(number): (100.0, 50.0) for number in range(20)}, [])
    assert not any(overlap(one, other) for one, other in itertools.combinations(layout.boxes.values(), 2))


def test_the_ways_of_a_call_against_the_layers_run_upwards() -> None:
    layout = lay_out(dict.fromkeys("abc", (100.0, 50.0)), [("a", "b"), ("b", "c"), ("c", "a")])
    (route,) = layout.routes["c", "a"]
    assert layout.boxes["a"].y < route.y < layout.boxes["c"].y
