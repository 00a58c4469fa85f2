"""`lp_pipe profile`: called in this process, on a program that is not launched."""

from pathlib import Path

import pytest

import lp_pipe.pipeline as pp
from lp_pipe.cli.main import main

PROGRAM = """
import torch
from torch import nn

import lp_pipe as lp
import lp_pipe.pipeline as pp


class Feeder:
    def batch(self, step):
        return torch.ones(8, 4), torch.ones(8, 2)


class Needy:
    def __init__(self, other):
        pass


def add(program, feeder, group="stages"):
    model = pp.Model(
        lambda: [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)],
        nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    pp.add_pipeline(program, model, stages=2, microbatches=2, replicas=[2, 1], inputs=feeder, group=group)


def make_program():
    program = lp.Program("fed")
    add(program, program.add_node(lp.CourierNode(Feeder), label="feeder"))
    return program


def two():
    program = make_program()
    add(program, None, "others")
    return program


def needy():
    program = lp.Program("needy")
    feeder = program.add_node(lp.CourierNode(Feeder), label="feeder")
    add(program, program.add_node(lp.CourierNode(Needy, feeder), label="needy"))
    return program


def empty():
    return lp.Program("empty")
"""


@pytest.fixture
def target(folder: Path) -> str:
    (folder / "profiled_program.py").write_text(PROGRAM)
    return "./profiled_program.py"


def test_a_programs_pipeline_is_profiled_on_its_feeders_first_microbatch(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", target, "-o", "profile.json"]) == 0
    profile = pp.Profile.load("profile.json")
    assert [layer.name for layer in profile.layers] == ["0.Linear", "1.ReLU", "2.Linear"]
    assert [layer.activation_bytes for layer in profile.layers] == [4 * 4 * 4, 4 * 4 * 4, 4 * 4 * 2]
    printed = capsys.readouterr().out
    assert printed.startswith("LAYER") and printed.endswith("wrote profile.json\n")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (["two"], "has several pipelines: say which group: stages, others"),
        (["two", "--group=others"], "the pipeline has no feeder"),
        (["two", "--group=feeder"], "group 'feeder' is no pipeline"),
        (["needy"], "node needy/0 needs a client of feeder/0"),
        (["empty"], "has no pipeline"),
    ],
)
def test_what_cannot_be_profiled_is_said(
    name: list[str], said: str, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", f"{target}:{name[0]}", *name[1:]]) == 2
    assert said in capsys.readouterr().err
