"""The cores, GPUs, memory and host that each node gets, and the requests that are refused."""

import dataclasses
import os
import socket
import sys
from typing import Any

import pytest

import lp_pipe as lp
from lp_pipe.launch.plan import hardware
from lp_pipe.launch.plan.hardware import Hardware
from lp_pipe.launch.plan.launch_plan import make_plan
from lp_pipe.launch.plan.placement import Placement, place_all, place_with_room

GIB = 1 << 30
HOST = Hardware(frozenset({"localhost", "here"}), cpus=(0, 2, 4, 6), memory_bytes=8 * GIB, gpus=("4", "5", "7"))


class Probe:
    """Runs small functions inside its node."""

    def ask(self, function: Any, *args: Any) -> Any:
        return function(*args)


def program_of(**groups: tuple[int, lp.Resources]) -> lp.Program:
    program = lp.Program("probes")
    for label, (count, resources) in groups.items():
        with program.group(label, resources=resources):
            for _ in range(count):
                program.add_node(lp.CourierNode(Probe))
    return program


def places(tmp_path: Any, **groups: tuple[int, lp.Resources]) -> dict[str, Placement]:
    return place_all(make_plan(program_of(**groups), tmp_path, 5.0).nodes, HOST)


def test_cores_and_gpus_are_handed_out_in_order(tmp_path: Any) -> None:
    assert places(
        tmp_path,
        actor=(2, lp.Resources(cpus=1)),
        trainer=(2, lp.Resources(cpus=2, gpus=1)),
        logger=(1, lp.Resources()),
    ) == {
        "actor/0": Placement((0,)),
        "actor/1": Placement((2,)),
        "trainer/0": Placement((4, 6), ("4",)),
        "trainer/1": Placement((0, 2), ("5",)),  # all are taken: again from the first
        "logger/0": Placement(),
    }


def test_a_fraction_of_a_core_leaves_its_rest_to_others(tmp_path: Any) -> None:
    assert places(
        tmp_path,
        large=(2, lp.Resources(cpus=1.5)),
        small=(2, lp.Resources(cpus=0.5)),
    ) == {
        "large/0": Placement((0, 2)),
        "large/1": Placement((4, 6)),
        "small/0": Placement((2,)),  # of which a half is left, as of 6
        "small/1": Placement((6,)),
    }
    with pytest.raises(ValueError, match=r"4\.5 cores"):
        places(tmp_path, greedy=(1, lp.Resources(cpus=4.5)))


def test_the_processes_of_a_colocation_share_its_place(tmp_path: Any) -> None:
    program = lp.Program("probes")
    with program.group("both", lp.Resources(cpus=2, gpus=2, memory=5 * GIB)):
        program.add_node(lp.MultiProcessingColocation([lp.CourierNode(Probe), lp.CourierNode(Probe)]))
    with program.group("other", lp.Resources(gpus=1)):
        program.add_node(lp.CourierNode(Probe))
    assert place_all(make_plan(program, tmp_path, 5.0).nodes, HOST) == {
        "both/0.0": Placement((0, 2), ("4", "5")),
        "both/0.1": Placement((0, 2), ("4", "5")),
        "other/0": Placement((), ("7",)),
    }


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        (lp.Resources(cpus=5), r"'greedy' wants 5 cores.* has 4"),
        (lp.Resources(gpus=2), r"'greedy' wants 2 GPUs for each of its 2 nodes.* 4 or more.* has 3 \(4, 5, 7\)"),
        (lp.Resources(memory=5 * GIB), r"'greedy' wants 5.0 GiB of memory.* 10.0 GiB or more.* has 8.0 GiB"),
        (lp.Resources(host="elsewhere"), r"'greedy' must run on host 'elsewhere'.*here, localhost"),
    ],
)
def test_what_the_host_does_not_have_is_refused(tmp_path: Any, resources: lp.Resources, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        places(tmp_path, modest=(1, lp.Resources()), greedy=(2, resources))


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [("0,1", ("0", "1")), (" 3 , GPU-abc", ("3", "GPU-abc")), ("", ()), ("-1", ()), ("0,-1,1", ("0",))],
)
def test_gpus_are_those_that_the_launcher_may_see(
    monkeypatch: pytest.MonkeyPatch, visible: str, gpus: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert hardware.this_host().gpus == gpus


def test_a_host_knows_its_names_and_sizes() -> None:
    host = hardware.this_host()
    assert {"localhost", socket.gethostname()} <= host.names
    assert host.cpus
    assert host.memory_bytes > GIB // 4


def test_a_gpu_named_by_uuid_has_no_number() -> None:
    place = Placement(gpus=("GPU-abc", "1"))
    assert (place.devices, place.environment) == ((1,), {"CUDA_VISIBLE_DEVICES": "GPU-abc,1"})


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux pins processes to cores")
@pytest.mark.parametrize("fresh_interpreter", [False, True])
def test_nodes_are_pinned_with_all_their_threads(fresh_interpreter: bool) -> None:
    def affinities() -> set[frozenset[int]]:
        return {frozenset(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")}

    cores = sorted(os.sched_getaffinity(0))
    count = len(cores) + 1
    resources = lp.Resources(cpus=1, fresh_interpreter=fresh_interpreter)
    with lp.launch(program_of(probe=(count, resources), free=(1, lp.Resources())), "process") as run:
        got = [run.client("probe", index).ask(affinities) for index in range(count)]
        assert got == [{frozenset({core})} for core in [*cores, cores[0]]]
        assert run.client("free").ask(affinities) == {frozenset(cores)}


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("fresh_interpreter", [False, True])
def test_nodes_see_their_own_gpus(monkeypatch: pytest.MonkeyPatch, fresh_interpreter: bool) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5")
    program = program_of(
        one=(1, lp.Resources(gpus=1, fresh_interpreter=fresh_interpreter)),
        two=(1, lp.Resources(gpus=2)),
        none=(1, lp.Resources()),
    )

    def seen() -> tuple[Any, ...]:
        return os.environ["CUDA_VISIBLE_DEVICES"], lp.context().devices

    with lp.launch(program, "process") as run:
        assert run.client("one").ask(seen) == ("2", (2,))
        assert run.client("two").ask(seen) == ("3,5", (3, 5))
        assert run.client("none").ask(seen) == ("2,3,5", ())


@pytest.mark.usefixtures("no_leaks")
def test_launch_refuses_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match="group 'probe' wants 1 GPU"):
        lp.launch(program_of(probe=(1, lp.Resources(gpus=1))), "process")
    with pytest.raises(ValueError, match=f"group 'probe' wants {10**6} cores"):
        lp.launch(program_of(probe=(1, lp.Resources(cpus=10**6))), "process")


@pytest.mark.usefixtures("no_leaks")
def test_a_node_may_name_this_host() -> None:
    for name in ("localhost", socket.gethostname()):
        with lp.launch(program_of(probe=(1, lp.Resources(host=name))), "process") as run:
            assert run.client("probe").ask(socket.gethostname) == socket.gethostname()


@pytest.mark.usefixtures("no_leaks")
def test_torch_that_is_first_imported_inside_the_node_computes_with_the_nodes_threads() -> None:
    def torch_threads() -> int:
        import torch

        return torch.get_num_threads()

    def is_loaded() -> bool:
        return "torch" in sys.modules

    # Fresh interpreters: a forked node has torch from the start where this process has imported it.
    options = {"fresh_interpreter": True}
    program = program_of(one=(1, lp.Resources(threads=1, **options)), three=(1, lp.Resources(threads=3, **options)))
    with lp.launch(program, "process") as run:
        assert not run.client("three").ask(is_loaded)
        assert run.client("three").ask(torch_threads) == 3
        assert run.client("one").ask(torch_threads) == 1


def test_nodes_that_may_wait_are_left_out_where_there_is_no_room(tmp_path: Any) -> None:
    program = program_of(first=(1, lp.Resources(gpus=1)))
    with program.group("workers", resources=lp.Resources(gpus=1), least_started=2):
        for _ in range(5):
            program.add_node(lp.CourierNode(Probe))
    nodes = make_plan(program, tmp_path, 5.0).nodes

    def found(hardware: Hardware) -> list[str]:
        return list(place_with_room(nodes, lambda spec: spec.may_wait, lambda some: place_all(some, hardware)))

    assert found(HOST) == ["first/0", "workers/0", "workers/1"]
    assert len(found(dataclasses.replace(HOST, gpus=tuple("01234")))) == 5
    assert len(found(dataclasses.replace(HOST, gpus=tuple("0123456")))) == 6
    with pytest.raises(ValueError, match=r"'workers' wants 1 GPUs .* all 3 .*2 \("):
        found(dataclasses.replace(HOST, gpus=("0", "1")))
