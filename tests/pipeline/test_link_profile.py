"""The links between hosts become a topology."""

from pathlib import Path

import pytest

import lp_pipe.pipeline as pp
from lp_pipe.cli.main import main
from lp_pipe.pipeline.link_profile import Link


def test_the_slowest_link_of_each_level_decides() -> None:
    links = [Link("a", "a", 1e-6, 4e9), Link("b", "b", 2e-6, 3e9), Link("a", "b", 1e-4, 1e8), Link("b", "c", 3e-4, 2e8)]
    topology = pp.topology_of(links, devices_per_host=4)
    assert topology.levels == (pp.Level("device", 4, 3e9, 2e-6), pp.Level("host", 2, 1e8, 3e-4))
    assert pp.topology_of(links[:1], 2).levels == (pp.Level("device", 2, 4e9, 1e-6),)


def test_without_links_or_devices_there_is_no_topology() -> None:
    with pytest.raises(pp.PartitionError, match="no link was measured"):
        pp.topology_of([], 1)
    with pytest.raises(pp.PartitionError, match=r"levels\[0\].count"):
        pp.topology_of([Link("a", "a", 1e-6, 4e9)], 0)


@pytest.mark.slow
@pytest.mark.usefixtures("no_leaks")
def test_links_of_hosts_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two agents of this host stand for two hosts."""
    file = tmp_path / "topology.toml"
    assert main(["profile", "--links", "--hosts=2", "-o", str(file), "--devices-per-host=3"]) == 0
    assert "local0  local1" in capsys.readouterr().out
    inside, between = pp.Topology.load(file).levels
    assert (inside.count, between.count) == (3, 2)
    assert 0 < between.latency < 1
    assert min(inside.bandwidth, between.bandwidth) > 1e6


def test_a_host_without_devices_is_refused_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--links", "--devices-per-host=0"]) == 2
    assert "--devices-per-host=0: a host has at least 1" in capsys.readouterr().err


def test_a_profile_needs_a_target_or_links(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile"]) == 2
    assert "TARGET (or --links)" in capsys.readouterr().err
