"""The host of each node: groups go over all hosts in blocks, and what does not fit is refused in words."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import lp_pipe as lp
from lp_pipe.launch.dry_run import describe_launch
from lp_pipe.launch.engines import HostOffer, KubernetesEngine
from lp_pipe.launch.options import LaunchOptions
from lp_pipe.launch.plan.hardware import Hardware
from lp_pipe.launch.plan.host_placement import offered, place_again, place_late, place_on_hosts
from lp_pipe.launch.plan.spec import NodeSpec

GIB = 1 << 30


def host(name: str, cpus: int = 8, gpus: int = 0, memory: int = 64 * GIB, labels: str = "") -> Hardware:
    gpu_names = tuple(map(str, range(gpus)))
    return Hardware(frozenset({name}), tuple(range(cpus)), memory, gpu_names, frozenset(labels.split()))


def hosts(*found: Hardware) -> dict[str, Hardware]:
    return {next(iter(one.names)): one for one in found}


def group(label: str, count: int, **resources: Any) -> list[NodeSpec]:
    node: lp.PyNode = lp.PyNode(print)
    asked = lp.Resources(**resources)
    return [NodeSpec(f"{label}/{index}", label, index, count, node, asked) for index in range(count)]


def names(nodes: list[NodeSpec], on: dict[str, Hardware]) -> list[str]:
    places = place_on_hosts(nodes, on)
    return [places[spec.node_id].host for spec in nodes]


def test_a_group_goes_over_the_hosts_in_blocks_so_that_neighbours_share_one() -> None:
    assert names(group("stages", 4), hosts(host("a"), host("b"))) == ["a", "a", "b", "b"]
    assert names(group("stages", 5), hosts(host("a"), host("b"))) == ["a", "a", "a", "b", "b"]
    assert names(group("stages", 2), hosts(host("a"), host("b"), host("c"))) == ["a", "b"]


def test_single_nodes_go_where_the_fewest_others_are() -> None:
    nodes = [*group("feeder", 1), *group("stages", 3), *group("trainer", 1)]
    assert names(nodes, hosts(host("a"), host("b"))) == ["a", "a", "a", "b", "b"]


def test_what_one_host_has_no_room_for_goes_to_the_next() -> None:
    both = hosts(host("a", gpus=1), host("b", gpus=4))
    assert names(group("stages", 5, gpus=1), both) == ["a", "b", "b", "b", "b"]
    places = place_on_hosts(group("stages", 5, gpus=1), both)
    assert [place.place.gpus for place in places.values()] == [("0",), ("0",), ("1",), ("2",), ("3",)]
    large = hosts(host("a", memory=10 * GIB), host("b", memory=30 * GIB))
    assert names(group("tables", 4, memory=8 * GIB), large) == ["a", "b", "b", "b"]


def test_cores_are_counted_on_each_host() -> None:
    places = place_on_hosts(group("workers", 4, cpus=2), hosts(host("a", cpus=4), host("b", cpus=4)))
    assert [(place.host, place.place.cpus) for place in places.values()] == [
        ("a", (0, 1)),
        ("a", (2, 3)),
        ("b", (0, 1)),
        ("b", (2, 3)),
    ]


def test_a_group_may_name_its_host() -> None:
    nodes = [*group("stages", 2, host="b"), *group("other", 1)]
    assert names(nodes, hosts(host("a"), host("b"))) == ["b", "b", "a"]
    with pytest.raises(ValueError, match="group 'stages' must run on host 'c', which is not one of a, b"):
        names(group("stages", 2, host="c"), hosts(host("a"), host("b")))


def planned_on(label: str, *wanted: int | str | None, **resources: Any) -> list[NodeSpec]:
    nodes = group(label, len(wanted), **resources)
    for spec, one in zip(nodes, wanted, strict=True):
        node: lp.PyNode = lp.PyNode(print)
        node.planned_host = one
        nodes[spec.index] = dataclasses.replace(spec, node=node)
    return nodes


def test_a_plan_may_name_the_host_of_each_node_or_its_place() -> None:
    two = hosts(host("a"), host("b"))
    assert names(planned_on("stages", 0, 1, 0, 1), two) == ["a", "b", "a", "b"]
    beside = group("logs", 4, colocate_with="stages")
    assert names([*beside, *planned_on("stages", "b", "b", "a", None)], two) == ["b", "b", "a", "a", "b", "b", "a", "a"]


def test_hosts_of_a_plan_that_are_not_there_are_all_named() -> None:
    nodes = planned_on("stages", 0, 2, "c", 2)
    with pytest.raises(ValueError, match=r"host 2 for stages/1, stages/3; host 'c' for stages/2.* 0: a, 1: b"):
        names(nodes, hosts(host("a"), host("b")))


def test_a_planned_host_without_room_is_refused() -> None:
    both = hosts(host("a", gpus=1), host("b", gpus=4))
    assert names(planned_on("stages", 1, 1, 0, gpus=1), both) == ["b", "b", "a"]
    with pytest.raises(ValueError, match=r"a: 0 of 1 GPUs.*\(the plan names host 'a' for stages/1\)"):
        names(planned_on("stages", 0, 0, gpus=1), both)


def test_what_a_program_says_of_hosts_comes_before_a_plan() -> None:
    both = hosts(host("a"), host("b"))
    assert names(planned_on("stages", 0, 7, host="b"), both) == ["b", "b"]
    assert names(planned_on("stages", 1, 1, placement="spread"), both) == ["a", "b"]


def test_when_a_host_is_lost_its_planned_nodes_go_where_there_is_room() -> None:
    both = hosts(host("a"), host("b"))
    assert again(planned_on("stages", 0, 1), both, "b") == [("a", ())]


def test_a_group_may_want_labels_of_its_hosts() -> None:
    three = hosts(host("a", labels="fast"), host("b", labels="fast ib"), host("c", labels="ib fast"))
    assert names(group("stages", 4, host_labels=["fast", "ib"]), three) == ["b", "b", "c", "c"]
    with pytest.raises(
        ValueError,
        match=r"group 'stages' must run on a host that is labelled 'large' and 'fast', .* a: fast; "
        "b: fast, ib; c: fast, ib",
    ):
        names(group("stages", 1, host_labels=["large", "fast"]), three)


def test_spread_gives_each_node_a_host_of_its_own() -> None:
    three = hosts(host("a"), host("b"), host("c"))
    nodes = [*group("trainer", 1), *group("replicas", 2, placement="spread")]
    assert names(nodes, three) == ["a", "b", "c"]
    assert names(group("replicas", 3, placement="spread"), three) == ["a", "b", "c"]
    with pytest.raises(ValueError, match="wants a host of its own for each of its 4 nodes, but only 3 of them fit"):
        names(group("replicas", 4, placement="spread"), three)


def test_pack_takes_as_few_hosts_as_have_room() -> None:
    three = hosts(host("a", gpus=1), host("b", gpus=4), host("c", gpus=2))
    assert names(group("stages", 4, gpus=1, placement="pack"), three) == ["b"] * 4
    assert names(group("stages", 5, gpus=1, placement="pack"), three) == ["a", "b", "b", "b", "b"]
    assert names(group("stages", 6, gpus=1, placement="pack"), three) == ["b", "b", "b", "b", "c", "c"]
    assert names(group("stages", 2, gpus=1, placement="pack"), three) == ["c", "c"]
    assert names(group("feeders", 3, placement="pack"), three) == ["a", "a", "a"]


def test_a_group_may_go_where_another_one_is() -> None:
    both = hosts(host("a", gpus=2), host("b", gpus=2))
    feeders = group("feeders", 2, colocate_with="stages")
    nodes = [*feeders, *group("caches", 1, colocate_with="feeders"), *group("stages", 4, gpus=1)]
    assert names(nodes, both) == ["a", "b", "a", "a", "a", "b", "b"]
    with pytest.raises(
        ValueError,
        match=r"group 'shadows' wants 1 GPUs for each of its 2 nodes, but only 0 of them fit .* b: 0 of 2 GPUs.*"
        r"group 'shadows' must go where group 'stages' is: 2 nodes to host 'b'",
    ):
        names([*group("stages", 2, gpus=1, host="b"), *group("shadows", 2, gpus=1, colocate_with="stages")], both)


def test_nodes_of_a_lost_host_stay_together_and_apart_as_they_were() -> None:
    three = hosts(host("a"), host("b"), host("c"))
    nodes = [*group("stages", 2, placement="spread"), *group("feeders", 2, colocate_with="stages")]
    assert names(nodes, three) == ["a", "b", "a", "b"]
    assert again(nodes, three, "b") == [("c", ()), ("c", ())]
    with pytest.raises(ValueError, match="group 'stages' wants a host of its own"):
        again(nodes, hosts(host("a"), host("b")), "b")


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"host_labels": "fast"}, r"host_labels .*\['fast'\], got 'fast'"),
        ({"placement": "wide"}, "placement .*'even', 'spread', 'pack', got 'wide'"),
        ({"colocate_with": "stages", "host": "a"}, "colocate_with='stages'.*leave placement and host out"),
    ],
)
def test_what_makes_no_sense_is_refused_where_it_is_written(wanted: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        lp.Resources(**wanted)


@pytest.mark.parametrize(
    ("bases", "why"),
    [
        ({"a": "nobody"}, r"group 'a' has Resources\(colocate_with='nobody'\).* groups a"),
        ({"a": "b", "b": "c", "c": "a"}, "in a ring: a with b with c with a"),
    ],
)
def test_groups_that_cannot_be_together_are_refused_in_every_mode(bases: dict[str, str], why: str) -> None:
    program = lp.Program("rings")
    for label, base in bases.items():
        with program.group(label, resources=lp.Resources(colocate_with=base)):
            program.add_node(lp.PyNode(print))
    with pytest.raises(ValueError, match=why):
        lp.launch(program, "thread")


def test_what_all_hosts_together_lack_is_said_with_what_they_have_left() -> None:
    both = hosts(host("a", gpus=2), host("b", gpus=1))
    nodes = [*group("first", 1, gpus=1), *group("stages", 3, gpus=1)]
    with pytest.raises(
        ValueError,
        match=r"group 'stages' wants 1 GPUs for each of its 3 nodes, but only 2 of them fit .*"
        r"a: 1 of 2 GPUs, 64.0 GiB, 8 cores; b: 1 of 1 GPUs",
    ):
        place_on_hosts(nodes, both)


def test_an_offer_limits_what_is_used_of_a_host_but_cannot_add_to_it() -> None:
    found = host("its-own-name", cpus=8, gpus=4, labels="fast")
    limited = offered(HostOffer("h1", cpus=2, gpus=1, memory=GIB, labels=frozenset({"ib"})), found)
    assert limited == Hardware(frozenset({"h1", "its-own-name"}), (0, 1), GIB, ("0",), frozenset({"fast", "ib"}))
    with pytest.raises(ValueError, match=r"host 'h1': .*gpus=5, but its agent has found 4"):
        offered(HostOffer("h1", gpus=5), found)


def test_parts_of_one_node_share_its_host() -> None:
    node: lp.PyNode = lp.PyNode(print)
    inner = [NodeSpec(f"both/0.{place}", "both", 0, 1, node, lp.Resources()) for place in range(2)]
    assert names([*group("first", 1), *inner], hosts(host("a"), host("b"))) == ["a", "b", "b"]


def again(nodes: list[NodeSpec], on: dict[str, Hardware], lost: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return the hosts and GPUs that the nodes of a lost host get."""
    places = place_on_hosts(nodes, on)
    moving = [spec for spec in nodes if places[spec.node_id].host == lost]
    staying = [spec for spec in nodes if spec not in moving]
    left = {name: hardware for name, hardware in on.items() if name != lost}
    new = place_again(moving, left, staying, places)
    return [(new[spec.node_id].host, new[spec.node_id].place.gpus) for spec in moving]


def test_a_spare_host_takes_all_nodes_of_a_lost_one() -> None:
    three = hosts(host("a", gpus=1), host("b", gpus=2), host("c", gpus=4))
    assert again(group("feeder", 1) + group("stages", 2, gpus=1), three, "a") == [("c", ()), ("c", ("0",))]
    assert again(group("stages", 2, gpus=1), three, "b") == [("c", ("0",))]


def test_without_a_spare_nodes_of_a_lost_host_get_what_the_others_have_left() -> None:
    both = hosts(host("a", gpus=3), host("b", gpus=2))
    assert again(group("stages", 3, gpus=1), both, "b") == [("a", ("2",))]
    cores = place_again(
        group("late", 1, cpus=2),
        hosts(host("a", cpus=4)),
        early := group("early", 1, cpus=2),
        place_on_hosts(early, hosts(host("a", cpus=4))),
    )
    assert cores["late/0"].place.cpus == (2, 3)


def test_a_lost_host_that_the_others_have_no_room_for_is_refused_with_what_is_missing() -> None:
    both = hosts(host("a", gpus=1), host("b", gpus=1))
    with pytest.raises(ValueError, match=r"group 'stages' wants 1 GPUs .* left: a: 0 of 1 GPUs"):
        again(group("stages", 2, gpus=1), both, "b")
    with pytest.raises(ValueError, match="must run on host 'b', which is not one of a"):
        again(group("stages", 1, host="b"), both, "b")
    with pytest.raises(ValueError, match="no host is left"):
        again(group("stages", 1), hosts(host("a")), "a")


def test_a_dry_run_takes_labels_of_hosts_that_are_still_to_come_for_granted(tmp_path: Path) -> None:
    program = lp.Program("labels")
    with program.group("tables", resources=lp.Resources(host_labels=["large"])):
        program.add_node(lp.PyNode(print))
    lines = describe_launch(
        program, "multi_host", tmp_path, LaunchOptions(engine=KubernetesEngine("2", image="train:1"))
    )
    assert lines[0].split() == ["tables/0", "host-0"]
    assert "labels that tables want" in lines[1]


def test_a_host_that_comes_late_gets_as_many_nodes_as_have_room_there() -> None:
    nodes = group("workers", 4, gpus=1)
    places = place_on_hosts(nodes[:1], hosts(host("a", gpus=1)))
    late = host("b", gpus=2)
    found = place_late(nodes[1:], "b", late, nodes[:1], places)
    assert [(node_id, one.host, one.place.gpus) for node_id, one in found.items()] == [
        ("workers/1", "b", ("0",)),
        ("workers/2", "b", ("1",)),
    ]
    assert place_late(nodes[3:], "b", late, nodes[:3], {**places, **found}) == {}
