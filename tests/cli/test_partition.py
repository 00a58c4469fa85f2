"""`lp_pipe partition`: called in this process; no torch is needed."""

import json
from pathlib import Path

import pytest

import lp_pipe.pipeline as pp
from lp_pipe.cli.main import main

VGG16 = str(Path(__file__).parents[1] / "data" / "vgg16_graph.txt")


@pytest.fixture
def files(folder: Path) -> list[str]:
    layers = tuple(
        pp.LayerProfile(name, 1.0, time - 1.0, 0.0, 0.0) for name, time in zip("abc", (6, 2, 4), strict=True)
    )
    pp.Profile(layers).save("profile.json")
    pp.Topology([pp.Level("device", 2, bandwidth=1e9)]).save("topology.toml")
    return ["profile.json", "topology.toml"]


def test_a_plan_is_printed_with_its_reason_and_written(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partition", *files, "--straight", "-o", "plan.toml"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[:3] == [
        "STAGE  REPLICAS  LAYERS    COMPUTE + ALL-REDUCE  BOUNDARY",
        "0      1         1: a      6 s                   0 s",
        "1      1         2: b … c  6 s                   0 s",
    ]
    assert "2 times as fast as one device" in printed.replace("2.00", "2") and printed.endswith("wrote plan.toml\n")
    assert [stage.layers for stage in pp.Plan.load("plan.toml").stages] == [("a",), ("b", "c")]


def test_a_stage_that_is_too_short_is_a_line_of_its_own(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partition", *files, "--straight", "--action-seconds=2"]) == 0
    captured = capsys.readouterr()
    assert [line for line in captured.out.splitlines() if line.startswith("warning: stage 0 (a)")]
    assert captured.err == ""


def test_the_hosts_of_a_nested_plan_are_printed(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    pp.Topology([pp.Level("device", 1, bandwidth=1e9), pp.Level("host", 2, bandwidth=1e9)]).save("topology.toml")
    assert main(["partition", *files, "--straight", "-o", "plan.toml"]) == 0
    assert [line[:21] for line in capsys.readouterr().out.splitlines()[1:3]] == [
        "0      1 on hosts 0  ",
        "1      1 on hosts 1  ",
    ]
    assert [stage.hosts for stage in pp.Plan.load("plan.toml").stages] == [(0,), (1,)]


def test_a_plan_is_printed_as_json(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partition", *files, "--json", "--max-replicas=1"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["slowest_seconds"] == 6 and plan["stages"][1]["layers"] == ["b", "c"]


def test_schedule_and_recompute_are_chosen_when_asked(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--schedule=auto", "--recompute=auto", "--microbatches=4", "--straight", "-o", "plan.toml"]
    assert main(["partition", *files, *arguments]) == 0
    assert "A step of 4 micro-batches takes 30 s with 1f1b (gpipe: 33 s)." in capsys.readouterr().out
    plan = pp.Plan.load("plan.toml")
    assert (plan.schedule, plan.microbatches) == ("1f1b", 4)
    assert [stage.recompute for stage in plan.stages] == ["none", "none"]


def test_what_the_optimizer_keeps_counts_as_memory(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    pp.Profile((pp.LayerProfile("a", 1.0, 1.0, 0.0, 100.0),)).save("profile.json")
    pp.Topology([pp.Level("device", 2, bandwidth=1e9)], memory=300).save("topology.toml")
    assert main(["partition", *files]) == 0
    assert main(["partition", *files, "--optimizer-bytes=3"]) == 2
    assert "needs at least 400 bytes, 100 more" in capsys.readouterr().err


def test_devices_of_different_speeds_are_named(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    pp.Topology([pp.Level("device", 2, bandwidth=1e9, speeds=(0.5, 1.0))]).save("topology.toml")
    assert main(["partition", *files, "--straight", "--recompute=full", "--device-order=given"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("0      1 on 0    1: a (recomputed)      14 s")


def test_pipedreams_own_profile_is_read(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partition", VGG16, "topology.toml"]) == 0
    assert "node41" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["absent.json", "topology.toml"], "cannot read absent.json"),
        (["topology.toml", "topology.toml"], "topology.toml: not JSON"),
        (["profile.json", "topology.toml", "--cost-model=guess"], "cost_model='guess'"),
        (["profile.json", "topology.toml", "-o", "no/such/folder"], "cannot write no/such/folder"),
    ],
)
def test_wrong_usage_is_one_line(
    arguments: list[str], said: str, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["partition", *arguments]) == 2
    assert said in capsys.readouterr().err
