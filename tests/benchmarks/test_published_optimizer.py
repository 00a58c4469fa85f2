"""Read what PipeDream's optimizer prints and writes: a script of the same name stands for it and writes that format.

How the real one searches is no test's business; docs/partitioning.md says how to run it.
"""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

import lp_pipe.pipeline as pp
from benchmarks import published_optimizer
from benchmarks.published_optimizer import Found
from benchmarks.published_plan import flat, nested, stages_of_layers
from tests.pipeline.partitioning.brute_force import Stage

REPOSITORY = Path(__file__).parents[2]
HEADER = "(Split start, split end) / compute time taken per stage / replication factor per stage:"

# The first layer alone, and all others on one device more, each time with the options that the real one has.
STAND_IN = f"""
import argparse, math, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("-n", nargs="+", type=int)
parser.add_argument("-b", nargs="+", type=float)
for option in ("-f", "-o", "-s", "--activation_compression_ratio"):
    parser.add_argument(option)
for option in ("--use_memory_constraint", "--use_fewer_machines"):
    parser.add_argument(option, action="store_true")
options = parser.parse_args()
assert len(options.n) == len(options.b) == 1
lines = pathlib.Path(options.f).read_text().splitlines()
layers = [line for line in lines if line[0] != chr(9)]
staged = [line + " -- stage_id=" + str(min(place, 1)) for place, line in enumerate(layers)]
written = chr(10).join(staged + lines[len(layers):])
pathlib.Path(options.o, "gpus=" + str(math.prod(options.n)) + ".txt").write_text(written)
print("Total number of states:", len(layers))
print("=" * 38, "Level 1", "=" * 38, "Number of machines used: 1...", sep=chr(10))
print("{HEADER}", (0, 1), sep=chr(10), end=" 3.0 1" + chr(10))
print((1, len(layers)), "7.0 1")
print("Time per stage in pipeline: 7.5")
"""


def chain(*seconds: float) -> pp.Profile:
    return pp.Profile(tuple(pp.LayerProfile(f"l{i}", s / 3, s * 2 / 3, 1.0, 0.0) for i, s in enumerate(seconds)))


def devices(count: int, memory: float | None = None) -> pp.Topology:
    return pp.Topology((pp.Level("device", count, bandwidth=1.0),), memory)


def checkout(folder: Path, script: str) -> Path:
    """A folder that has the script where PipeDream has its optimizer."""
    path = folder / published_optimizer.SCRIPT
    path.parent.mkdir()
    path.write_text(script)
    return folder


def found(checkout: Path, profile: pp.Profile, topology: pp.Topology) -> Found:
    profile.to_pipedream(checkout / "graph.txt")
    return published_optimizer.theirs(checkout, checkout, profile, topology)


def test_both_searches_plan_the_same_graph_and_have_one_price(tmp_path: Path) -> None:
    wanted = {"a chain": (chain(3, 3, 4), devices(2))}
    case = published_optimizer.figures(checkout(tmp_path, STAND_IN), wanted)["a chain"]
    assert case["layers"] == 3
    assert case["theirs"]["slowest_s"] == pytest.approx(7)  # l1 and l2
    assert case["theirs"]["says_s"] == 7.5
    assert case["ours"]["slowest_s"] == pytest.approx(5)  # two replicas of everything
    assert (case["theirs"]["stages"], case["theirs"]["devices"], case["theirs"]["note"]) == (2, 2, "")
    assert case["theirs"]["cpu_s"] > 0 and case["ours"]["cpu_s"] > 0


def test_a_plan_above_the_memory_limit_is_told(tmp_path: Path) -> None:
    profile = pp.Profile(tuple(pp.LayerProfile(f"l{i}", 1.0, 2.0, 0.0, 1e9) for i in range(3)))
    folder = checkout(tmp_path, STAND_IN)  # two layers on the last device: once, and twice that for the optimizer
    assert found(folder, profile, devices(3, memory=7e9)).note == ""
    assert found(folder, profile, devices(3, memory=5e9)).note == "needs 6.0 GB"


def test_a_search_that_starts_at_one_of_two_sources_is_told(tmp_path: Path) -> None:
    profile = pp.Profile(chain(1, 1, 1).layers, (("l0", "l2"), ("l1", "l2")))
    assert found(checkout(tmp_path, STAND_IN), profile, devices(2)).note == "explores 3 of 4 cuts"  # l0, l1, both, all


@pytest.mark.parametrize(
    ("script", "note"),
    [
        ("raise RecursionError('too deep')", "failed: RecursionError: too deep"),
        ("import os; os._exit(3)", "failed: it says nothing"),
        ("print('done')", "writes no plan"),
        (STAND_IN.replace("enumerate(layers)", "enumerate(layers[:-1])"), "1 layers in no stage"),
        (STAND_IN.replace("min(place, 1)", "1 - min(place, 1)"), "reads from a later stage"),
    ],
)
def test_without_a_plan_the_row_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], script: str, note: str
) -> None:
    their = found(checkout(tmp_path, script), chain(1, 2), devices(2))
    assert (their.slowest_s, their.note) == (None, note)
    published_optimizer.show({"a chain": {"layers": 2, "ours": asdict(Found(0.5, 1.5)), "theirs": asdict(their)}})
    assert note[:20] in capsys.readouterr().out


def test_a_search_is_ended_after_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published_optimizer, "TIMEOUT_S", 0.1)
    folder = checkout(tmp_path, "import threading; threading.Event().wait()")
    assert found(folder, chain(1, 2), devices(2)).note == "no plan in 0.1 s"


def test_stages_on_hosts_have_stages_on_their_devices() -> None:
    profile = chain(1, 1, 1)
    printed = f"""
Level 2
{HEADER}
(0, 2) 2.0 3
(2, 3) 1.0 1
Level 1
{HEADER}
(0, 1) 1.0 1
(1, 2) 1.0 2
{HEADER}
(2, 3) 1.0 4
"""
    graph = (
        "l0 -- l0 -- times -- stage_id=0\nl1 -- l1 -- times -- stage_id=1\nl2 -- l2 -- times -- stage_id=2\n\tl0 -- l1"
    )
    stages = nested(printed, stages_of_layers(graph), profile)
    none, first, both, every = (frozenset(range(count)) for count in range(4))
    assert stages == (
        Stage(none, both, 3, (Stage(none, first, 1, ()), Stage(first, both, 2, ()))),
        Stage(both, every, 1, (Stage(both, every, 4, ()),)),
    )
    planned = [(stage.layers, stage.replicas) for stage in flat(stages, profile, 0.0).stages]
    assert planned == [(("l0",), 3), (("l1",), 6), (("l2",), 4)]


@pytest.mark.slow
def test_the_benchmark_runs_it_beside_our_search(tmp_path: Path) -> None:
    folder = checkout(tmp_path, "raise SystemExit('started')")

    def run(*options: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "benchmarks.pipedream", "--quick", *options]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=110, check=False)

    done = run("--parts=search", f"--pipedream={folder}")
    assert done.returncode == 0, done.stderr
    published = json.loads(done.stdout.splitlines()[-1])["published"]
    assert {case["theirs"]["note"] for case in published.values()} == {"failed: started"}
    assert all(case["ours"]["slowest_s"] > 0 for case in published.values())
    assert "has no optimizer" in run(f"--pipedream={folder / 'none'}").stderr
    assert "add search" in run("--parts=links", f"--pipedream={folder}").stderr
