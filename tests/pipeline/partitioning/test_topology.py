from pathlib import Path

import pytest

import lp_pipe.pipeline as pp

GOOD = '[[levels]]\nname = "device"\ncount = 4\nbandwidth = 1e10\n'


def test_a_topology_is_saved_and_loaded(tmp_path: Path) -> None:
    speeds = (1.0, 1.0, 0.5, 0.25)
    levels = [pp.Level("device", count=4, bandwidth=1.6e10, speeds=speeds), pp.Level('"host"', 2, 1e9, latency=1e-5)]
    for topology in (pp.Topology(levels=levels), pp.Topology(levels=levels, memory=16e9)):
        topology.save(tmp_path / "topology.toml")
        assert pp.Topology.load(tmp_path / "topology.toml") == topology
    assert topology.devices == 8


def test_latency_may_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "topology.toml").write_text(GOOD)
    assert pp.Topology.load(tmp_path / "topology.toml").levels == (pp.Level("device", 4, 1e10, 0.0),)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "levels is missing"),
        ("levels = 3", "write each level as"),
        ("levels = []", "levels"),
        (GOOD.replace("4", "0"), r"levels\[0\].count \(level 'device'\): .*0"),
        (GOOD.replace("1e10", "0"), r"levels\[0\].bandwidth \(level 'device'\): .*0"),
        (GOOD.replace("1e10", "'fast'"), r"bandwidth \(level 'device'\): .*'fast'"),
        (GOOD.replace("1e10", "1e-300"), r"bandwidth \(level 'device'\): 1e-300 is too small"),
        (GOOD + "latency = -1", r"latency \(level 'device'\): .*-1"),
        (GOOD + GOOD.replace("bandwidth", "speed"), r"levels\[1\]: bandwidth is missing"),
        (GOOD + "speeds = [1.0]", r"levels\[0\].speeds \(level 'device'\): a list of 4 numbers is needed, .* \[1.0\]"),
        (GOOD + "speeds = 2", r"levels\[0\].speeds .*: a list of 4 numbers is needed, one for each device, not 2"),
        (GOOD + "speeds = [1, 1, 0, 1]", r"levels\[0\].speeds\[2\] \(level 'device'\): .*0"),
        (GOOD + GOOD + "speeds = [1, 1, 1, 1]", r"levels\[1\].speeds .*: only the devices of the first level"),
        ("memory = 0\n" + GOOD, "memory: .*0"),
        ("levels = }", "not TOML: .*line 1"),
    ],
)
def test_a_bad_file_is_one_error_with_file_and_field(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(pp.PartitionError, match=f"bad.toml: .*{said}"):
        pp.Topology.load(tmp_path / "bad.toml")
