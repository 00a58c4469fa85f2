"""Declare a program: labels, groups, edges, and what is refused."""

import re
from typing import Any

import pytest

import lp_pipe as lp
from lp_pipe.program import Edge


class Server:
    def __init__(self, *peers: Any) -> None: ...


def test_a_program_is_nodes_in_labelled_groups() -> None:
    program = lp.Program("train")
    feeder, trainer = lp.CourierNode(Server), lp.PyNode(print)
    with program.group("feeder"):
        handle = program.add_node(feeder)
    program.add_node(trainer, label="trainer")
    assert isinstance(handle, lp.CourierHandle)
    assert program.name == "train"
    assert program.groups == {"feeder": [feeder], "trainer": [trainer]}
    assert program.get_all_nodes() == [feeder, trainer]
    assert repr(program) == "Program('train': feeder x 1, trainer x 1)"


def test_groups_keep_their_order_and_can_be_reopened() -> None:
    program = lp.Program("p")
    nodes = [lp.PyNode(print) for _ in range(4)]
    with program.group("b"):
        program.add_node(nodes[0])
        program.add_node(nodes[1], label="b")
    program.add_node(nodes[2], label="a")
    with program.group("b"):
        program.add_node(nodes[3])
    assert list(program.groups) == ["b", "a"]
    assert program.groups["b"] == [nodes[0], nodes[1], nodes[3]]
    assert [node.name for node in nodes] == ["b/0", "b/1", "a/0", "b/2"]


@pytest.mark.parametrize("label", ["", None])
def test_a_node_outside_of_groups_and_a_group_need_a_label(label: Any) -> None:
    program = lp.Program("p")
    with pytest.raises(ValueError, match="label"):
        program.add_node(lp.PyNode(print), label=label)
    with pytest.raises(ValueError, match="label"), program.group(label):
        pass


def test_a_label_that_differs_from_the_groups_is_refused_with_both_names() -> None:
    program = lp.Program("p")
    with program.group("mine"), pytest.raises(ValueError, match=r"label.*'other'.*'mine'"):
        program.add_node(lp.PyNode(print), label="other")


def test_groups_cannot_be_nested_and_a_failed_one_is_closed() -> None:
    program = lp.Program("p")
    with pytest.raises(ValueError, match="nest"), program.group("outer"), program.group("inner"):
        pass
    with program.group("inner"):
        program.add_node(lp.PyNode(print))
    assert list(program.groups) == ["inner"]


def test_a_label_is_reopened_with_the_same_options_only() -> None:
    program = lp.Program("p")
    with program.group("a", resources=lp.Resources(threads=2)):
        pass
    with program.group("a", resources=lp.Resources(threads=2)):
        pass
    with pytest.raises(ValueError, match="label 'a'"), program.group("a", resources=lp.Resources(threads=3)):
        pass


@pytest.mark.parametrize("thing", [Server, print, "node", None])
def test_what_is_no_node_is_refused(thing: Any) -> None:
    with pytest.raises(TypeError, match="CourierNode"):
        lp.Program("p").add_node(thing, label="a")


def test_a_node_belongs_to_one_place() -> None:
    program = lp.Program("p")
    node = lp.PyNode(print)
    program.add_node(node, label="a")
    for other in (program, lp.Program("other")):
        with pytest.raises(ValueError, match="already"):
            other.add_node(node, label="b")
    assert node.name == "a/0"


def test_edges_are_who_holds_a_handle_of_whom() -> None:
    program = lp.Program("p")
    server = program.add_node(lp.CourierNode(Server), label="server")
    program.add_node(lp.PyNode(print, [server, server]), label="user")
    program.add_node(lp.PyNode(lambda: server), label="closure")
    program.add_node(lp.PyNode(print, lp.Deferred(Server, server)), label="deferred")
    assert program.edges() == [
        Edge("user/0", "server/0"),
        Edge("closure/0", "server/0"),
        Edge("deferred/0", "server/0"),
    ]


def test_edges_of_a_handle_from_elsewhere_name_its_user() -> None:
    foreign = lp.Program("other").add_node(lp.CourierNode(Server), label="stranger")
    program = lp.Program("mine")
    program.add_node(lp.PyNode(print, foreign), label="user")
    with pytest.raises(ValueError, match=r"user/0.*stranger/0.*'mine'"):
        program.edges()


def test_a_groups_resources_are_resources() -> None:
    """A dict was taken, and failed the launch: it "has no attribute 'colocate_with'"."""
    program = lp.Program("mine")
    group = program.group("servers", resources={"cpus": 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"group 'servers': resources .*lp\.Resources\(.*got {'cpus': 1}"), group:
        pass


def test_resources_are_checked() -> None:
    assert lp.Resources() == lp.Resources(cpus=None, gpus=0, memory=None, threads=1, env={}, host=None)
    assert lp.Resources(cpus=1.5, gpus=2.0, memory=2e9) == lp.Resources(cpus=1.5, gpus=2, memory=2_000_000_000)
    wrongs: list[dict[str, Any]] = [
        *({"threads": 0}, {"gpus": -1}, {"cpus": 0}, {"cpus": -0.5}, {"cpus": float("nan")}, {"cpus": float("inf")}),
        *({"gpus": 0.5}, {"threads": 1.5}, {"memory": 0.5}, {"memory": float("nan")}),
    ]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="Resources"):
            lp.Resources(**wrong)
    # The launcher failed at these when the node's process asked for them, which then died "without reporting why".
    for of_wrong_type in (
        {"env": {"A": 1}},
        {"env": {"A": None}},
        {"env": ["A=1"]},
        {"memory": "1GiB"},
        {"threads": "2"},
    ):
        with pytest.raises(TypeError, match=r"Resources: .*(env|memory|threads)"):
            lp.Resources(**of_wrong_type)  # type: ignore[arg-type]
    for name, value in (("A=B", "1"), ("", "1"), ("A", "1\0")):
        with pytest.raises(ValueError, match=re.escape(f"{name!r}: {value!r}")):
            lp.Resources(env={name: value})
    for name in ("OMP_NUM_THREADS", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_LOGS"):
        assert lp.Resources(env={name: "1"}).needs_fresh_interpreter
    assert lp.Resources(fresh_interpreter=True).needs_fresh_interpreter
    assert not lp.Resources(env={"MINE": "1"}).needs_fresh_interpreter


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_failure": "retry"}, "stop, restart, ignore, got 'retry'"),
        ({"on_failure": "restart", "max_restarts": -1}, "max_restarts .*-1"),
    ],
)
def test_failure_policies_are_checked_at_setup(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"group 'g'.*{message}"), lp.Program("p").group("g", **options):
        pass


def test_a_group_is_reopened_with_the_same_failure_policy() -> None:
    program = lp.Program("p")
    for _ in range(2):
        with program.group("g", on_failure="restart", max_restarts=5):
            program.add_node(lp.PyNode(print))
    with pytest.raises(ValueError, match="other options"), program.group("g", on_failure="restart", max_restarts=6):
        pass
