"""The hosts of the replicas of a nested plan's stages."""

from pathlib import Path

import lp_pipe.pipeline as pp
from lp_pipe.pipeline.partitioning.dynamic_program import NestedStage
from lp_pipe.pipeline.partitioning.equal_speeds import hosts_of
from tests.pipeline.partitioning.test_partition import chain


def leaf(start: int, end: int, replicas: int = 1) -> NestedStage:
    return NestedStage(start, end, replicas, [])


def levels(*counts: int, names: str = "device host rack") -> list[pp.Level]:
    return [pp.Level(name, count, 1e9) for name, count in zip(names.split(), counts, strict=False)]


def pipeline_per_host() -> pp.Plan:
    topology = pp.Topology([pp.Level("device", 2, 8.0), pp.Level("host", 2, 100.0)])
    return pp.partition(chain([1, 1], activations=0.1, parameters=1.0), topology)


def test_a_pipeline_on_each_host_has_a_replica_of_each_stage_there() -> None:
    plan = pipeline_per_host()
    assert [(stage.replicas, stage.hosts) for stage in plan.stages] == [(2, (0, 1)), (2, (0, 1))]


def test_hosts_are_in_the_plans_file_where_a_person_may_name_them(tmp_path: Path) -> None:
    plan, file = pipeline_per_host(), tmp_path / "plan.toml"
    plan.save(file)
    text = file.read_text()
    assert pp.Plan.load(file) == plan and text.count("\nhosts = [0, 1]  # of each replica: a name") >= 2
    file.write_text(text.replace("hosts = [0, 1]", 'hosts = ["h1", "h 2"]'))
    named = pp.Plan.load(file)
    assert [stage.hosts for stage in named.stages] == [("h1", "h 2")] * 2
    named.save(file)
    assert pp.Plan.load(file) == named


def test_a_micro_batch_stays_in_its_group_whatever_the_replicas_inside() -> None:
    two = [NestedStage(0, 2, 2, [leaf(0, 1, 2), leaf(1, 2)])]
    assert hosts_of(two, levels(3, 2)) == [(0, 1, 0, 1), (0, 1)]
    for microbatch in range(8):  # which replica j mod r of each stage takes
        taken = {hosts[microbatch % len(hosts)] for hosts in hosts_of(two, levels(3, 2))}
        assert len(taken) == 1


def test_stages_on_several_hosts_come_one_host_after_the_other() -> None:
    parts = [NestedStage(0, 2, 1, [leaf(0, 1), leaf(1, 2)]), NestedStage(2, 3, 2, [leaf(2, 3, 2)])]
    assert hosts_of(parts, levels(2, 3)) == [(0,), (0,), (1, 2, 1, 2)]


def test_hosts_are_counted_through_all_racks() -> None:
    parts = [NestedStage(0, 2, 2, [NestedStage(0, 1, 1, [leaf(0, 1, 2)]), NestedStage(1, 2, 2, [leaf(1, 2)])])]
    assert hosts_of(parts, levels(2, 3, 2)) == [(0, 3, 0, 3), (1, 4, 2, 5)]
    # Of devices, sockets and hosts it is the third level that is hosts.
    assert hosts_of(parts, levels(2, 3, 2, names="gpu socket host")) == [(0, 1, 0, 1)] * 2


def test_one_level_of_devices_says_no_hosts_and_one_of_hosts_does() -> None:
    parts = [leaf(0, 1, 2), leaf(1, 2)]
    assert hosts_of(parts, levels(3)) == [(), ()]
    assert hosts_of(parts, levels(3, names="host")) == [(0, 1), (2,)]
    unequal = pp.Topology([pp.Level("host", 2, 1e9, speeds=(1.0, 0.5))])
    stages = pp.partition(chain([1, 2]), unequal, straight=True).stages
    assert [stage.hosts for stage in stages] == [(1,), (0,)]
