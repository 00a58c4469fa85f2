"""`--plan`: called in this process, on programs that are drawn; one that is launched."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import lp_pipe.pipeline as pp
from lp_pipe.cli.main import main
from tests.cli.commands import Command

PROGRAM = """
import torch
from torch import nn

import lp_pipe as lp
import lp_pipe.pipeline as pp


class Feeder:
    def batch(self, step):
        return torch.ones(8, 4), torch.ones(8, 2)


class Trainer:
    def __init__(self, pipeline):
        self._pipeline = pipeline

    def run(self):
        print("loss", self._pipeline.step().loss)
        lp.stop()


def add(program, group="stages", **options):
    model = pp.Model(
        lambda: [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)],
        nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    feeder = program.add_node(lp.CourierNode(Feeder), label=f"feeder_of_{group}")
    return pp.add_pipeline(program, model, microbatches=2, inputs=feeder, group=group, **options)


def make_program(**options):
    program = lp.Program("fed")
    pipeline = add(program, **options)
    program.add_node(lp.CourierNode(Trainer, pipeline), label="trainer")
    return program


def interleaved():
    return make_program(schedule="interleaved")


def gpipe():
    return make_program(schedule="gpipe", recompute="none")


def pinned():
    return make_program(resources=lp.Resources(placement="pack"))


def two():
    program = make_program()
    add(program, "others", stages=1)
    return program


def one_group():
    program = make_program()
    add(program, stages=1)
    return program


def empty():
    return lp.Program("empty")


def raising():
    make_program()
    raise KeyError("of its own")


ready = make_program(stages=1, replicas=2)
"""
PLAN = pp.Plan(
    (
        pp.PlannedStage(("0.Linear",), 2, 3.1e-3, 8e-4),
        pp.PlannedStage(("1.ReLU", "2.Linear"), 1, 3e-3, 4e-4),
    ),
    3.1e-3,
)


@pytest.fixture
def target(folder: Path) -> Iterator[str]:
    (folder / "planned_program.py").write_text(PROGRAM)
    PLAN.save("plan.toml")
    yield "./planned_program.py"
    sys.modules.pop("planned_program", None)


def nodes(path: str) -> dict[str, list[str]]:
    return {node["name"]: node.get("notes", []) for node in json.loads(Path(path).read_text())["nodes"]}


def test_a_plan_takes_the_place_of_the_programs_own_stages_and_replicas(target: str) -> None:
    for name in ("make_program", "ready"):
        assert main(["graph", f"{target}:{name}", "--plan=plan.toml", "-o", "graph.json"]) == 0
        assert {name: notes for name, notes in nodes("graph.json").items() if name.startswith("stages")} == {
            "stages/0": ["stage 0, replica 0 of 2", "1 layer: 0.Linear", "3.1 ms, boundary 800 µs"],
            "stages/1": ["stage 0, replica 1 of 2", "1 layer: 0.Linear", "3.1 ms, boundary 800 µs"],
            "stages/2": ["stage 1", "2 layers: 1.ReLU … 2.Linear", "3 ms, boundary 400 µs"],
        }
        sys.modules.pop("planned_program")  # built as it is imported, so anew


def test_the_plan_is_drawn(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", target, "--plan=plan.toml"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[lines.index("· stage 1") :][:3] == [
        "· stage 1",
        "· 2 layers: 1.ReLU … 2.Linear",
        "· 3 ms, boundary 400 µs",
    ]
    for suffix in (".svg", ".dot"):
        assert main(["graph", target, "--plan=plan.toml", "-o", f"graph{suffix}"]) == 0
        assert "stage 0, replica 1 of 2" in Path(f"graph{suffix}").read_text()


def test_a_planned_program_trains(target: str, command: Command) -> None:
    done = command("launch", target, "--plan=plan.toml", "--mode=thread")
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout and "stages/2" in done.stdout


def test_replicas_go_to_the_hosts_that_the_plan_names(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    stages = tuple(replace(stage, replicas=2, hosts=("host-1", 0)) for stage in PLAN.stages)
    replace(PLAN, stages=stages).save("plan.toml")
    options = ["--plan=plan.toml", "--mode=multi_host", "--engine=kubernetes", "--image=train:1", "--dry-run"]
    assert main(["launch", target, *options, "--hosts=2"]) == 0
    nodes = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("stages/")][:4]
    assert nodes == [["stages/0", "host-1"], ["stages/1", "host-0"], ["stages/2", "host-1"], ["stages/3", "host-0"]]
    assert main(["launch", target, *options, "--hosts=1"]) == 3
    assert "host 'host-1' for stages/0" in capsys.readouterr().err
    assert main(["graph", target, "--plan=plan.toml"]) == 0
    assert "· host host-1" in capsys.readouterr().out
    assert main(["launch", f"{target}:pinned", *options, "--hosts=1"]) == 0  # the program says where
    assert "plan.toml: stages: hosts: the program" in capsys.readouterr().err


def test_what_of_the_plan_the_program_decides_otherwise_is_said(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = tuple(replace(stage, replicas=1, recompute="full") for stage in PLAN.stages)
    replace(PLAN, stages=stages, schedule="pipedream", microbatches=8).save("plan.toml")
    assert main(["graph", f"{target}:gpipe", "--plan=plan.toml"]) == 0
    schedule, recompute, microbatches = capsys.readouterr().err.splitlines()
    assert schedule.startswith("lp_pipe: plan.toml: schedule: the program's 'gpipe'")
    assert recompute.startswith("lp_pipe: plan.toml: stages: recompute: the program's 'none'")
    assert microbatches.startswith("lp_pipe: plan.toml: microbatches: the program's 2 ")
    replace(PLAN, stages=stages, schedule="pipedream", microbatches=2).save("plan.toml")
    assert main(["graph", target, "--plan=plan.toml"]) == 0
    assert not capsys.readouterr().err


def test_of_several_pipelines_the_plan_is_for_the_named_one(target: str) -> None:
    assert main(["graph", f"{target}:two", "--plan=plan.toml", "--plan-group=others", "-o", "graph.json"]) == 0
    drawn = nodes("graph.json")
    assert [name for name, notes in drawn.items() if notes] == ["others/0", "others/1", "others/2"]
    assert [name for name in drawn if name.startswith("stages")] == ["stages/0", "stages/1"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([":two", "--plan=plan.toml"], "plan.toml: the program has several pipelines, in the groups stages, others"),
        ([":two", "--plan=plan.toml", "--plan-group=x"], "plan.toml: group 'x' is no pipeline of the program"),
        ([":one_group", "--plan=plan.toml"], "plan.toml: the program has several pipelines in group 'stages', and"),
        ([":one_group", "--plan=plan.toml", "--plan-group=stages"], "give each its own group, add_pipeline(..., "),
        ([":empty", "--plan=plan.toml"], "plan.toml: no pipeline to plan"),
        (["", "--plan=other.toml"], "other.toml: stages: the plan is for another model: it has 1 layers, the model 3"),
        (["", "--plan=mixed.toml"], "mixed.toml: stages: stage 0 of the plan has '2.Linear'"),
        (["", "--plan=many.toml"], "many.toml: stages: replicas=[3] with microbatches=2"),
        (["", "--plan=odd.toml"], "odd.toml: schedule: "),
        ([":gpipe", "--plan=odd.toml"], "odd.toml: schedule: "),
        (
            [":interleaved", "--plan=plan.toml"],
            "plan.toml: stages: schedule 'interleaved' runs 2 stages on each worker",
        ),
        (["", "--plan=absent.toml"], "cannot read absent.toml"),
        (["", "--plan=bad.toml"], "bad.toml: stages is missing"),
        (["", "--plan-group=stages"], "--plan-group=stages needs --plan=FILE"),
    ],
)
@pytest.mark.parametrize("verb", ["graph", "launch"])
def test_a_plan_that_does_not_fit_is_one_line_with_its_file_and_field(
    verb: str, arguments: list[str], said: str, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    everything = "layers = ['0.Linear', '1.ReLU', '2.Linear']\n"
    Path("other.toml").write_text("[[stages]]\nlayers = ['0.Conv2d']\nreplicas = 1\n")
    Path("mixed.toml").write_text(
        "[[stages]]\nlayers = ['2.Linear', '1.ReLU']\nreplicas = 1\n[[stages]]\nlayers = ['0.Linear']\nreplicas = 1\n"
    )
    Path("many.toml").write_text(f"[[stages]]\n{everything}replicas = 3\n")
    Path("odd.toml").write_text(f"schedule = 'odd'\n[[stages]]\n{everything}replicas = 1\n")
    Path("bad.toml").write_text("")
    assert main([verb, target + arguments[0], *arguments[1:]]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1


def test_what_the_targets_own_code_raises_is_its_own_error(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", f"{target}:raising", "--plan=plan.toml"]) == 3
    assert "raised KeyError" in capsys.readouterr().err
