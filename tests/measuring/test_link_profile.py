"""The links between hosts become a topology."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import lp_pipe.pipeline as pp
from lp_pipe.cli.main import main
from lp_pipe.measuring import link_profile
from lp_pipe.measuring.link_profile import HostLink


def test_the_slowest_link_of_each_level_decides() -> None:
    links = [
        HostLink("a", "a", 1e-6, 4e9),
        HostLink("b", "b", 2e-6, 3e9),
        HostLink("a", "b", 1e-4, 1e8),
        HostLink("b", "c", 3e-4, 2e8),
    ]
    topology = pp.topology_of(links, devices_per_host=4)
    assert topology.levels == (pp.Level("device", 4, 3e9, 2e-6), pp.Level("host", 2, 1e8, 3e-4))
    assert pp.topology_of(links[:1], 2).levels == (pp.Level("device", 2, 4e9, 1e-6),)


def test_without_links_or_devices_there_is_no_topology() -> None:
    with pytest.raises(pp.PartitionError, match="no link was measured"):
        pp.topology_of([], 1)
    with pytest.raises(pp.PartitionError, match=r"levels\[0\].count"):
        pp.topology_of([HostLink("a", "a", 1e-6, 4e9)], 0)


class OtherProbe:
    """Its calls end only when one of each kind runs at the same time."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._both = threading.Barrier(2, timeout=10)
        self.moved = 0
        self.futures = self

    def take(self, data: Any) -> Any:
        return self._pool.submit(self._meet, data.nbytes) if data.nbytes > 1 else None

    def give(self, size: int) -> Any:
        return self._pool.submit(self._meet, size)

    def _meet(self, size: int) -> None:
        self._both.wait()
        self.moved += size


def test_bandwidth_is_that_of_both_ways_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # One way alone was measured, where the cost model counts what a device sends and receives together.
    monkeypatch.setattr(link_profile, "_median_s", lambda call, times: [call(), 0.5][-1])
    with ThreadPoolExecutor(2) as pool:
        other = OtherProbe(pool)
        latency, bandwidth = link_profile.Probe().measure(other)
    sizes = 2 * 16 * 2**20
    assert other.moved == 2 * sizes  # once to warm up, once measured
    assert (latency, bandwidth) == (0.25, sizes / 1e-9)  # all of the half second was latency


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
    assert "--devices-per-host must be at least 1, got 0" in capsys.readouterr().err


def test_a_profile_needs_a_target_or_links(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile"]) == 2
    assert "TARGET (or --links)" in capsys.readouterr().err
