"""`lp_pipe profile`: mostly called in this process, on a program that is not launched."""

import signal
import time
from pathlib import Path

import pytest

import lp_pipe.pipeline as pp
from lp_pipe.cli.main import main
from tests.cli.commands import Start, is_alive

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


def one_group():
    program = make_program()
    add(program, None, "stages")
    return program


def needy():
    program = lp.Program("needy")
    feeder = program.add_node(lp.CourierNode(Feeder), label="feeder")
    add(program, program.add_node(lp.CourierNode(Needy, feeder), label="needy"))
    return program


def empty():
    return lp.Program("empty")


class Broken(nn.Module):
    def forward(self, x):
        raise ArithmeticError("does not add up")


def broken():
    program = lp.Program("broken")
    feeder = program.add_node(lp.CourierNode(Feeder), label="feeder")
    model = pp.Model([nn.Linear(4, 4), Broken()], nn.functional.mse_loss, lambda named: torch.optim.SGD(named, lr=0.1))
    pp.add_pipeline(program, model, stages=1, microbatches=2, inputs=feeder)
    return program
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
        (["two"], "several pipelines: name the group of one: stages, others"),
        (["two", "--group=others"], "the pipeline has no feeder"),
        (["one_group"], "has the stages of 2 pipelines: give each a group"),
        (["one_group", "--group=stages"], "group 'stages' of Program('fed': "),
        (["two", "--group=feeder"], "group 'feeder'"),
        (["needy"], "node needy/0 needs a client of feeder/0"),
        (["empty"], "has no pipeline"),
        (["make_program", "--device=gpu"], "'gpu' must be 'auto', 'cpu', 'cuda'"),
        (["make_program", "--device=cuda:99"], "device='cuda:99': this process sees"),
        (["make_program", "-o", "no/such/folder.json"], "cannot write no/such/folder.json: there is no folder"),
        (["make_program", "--links"], "leave out --links or "),
    ],
)
def test_what_cannot_be_profiled_is_said(
    name: list[str], said: str, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", f"{target}:{name[0]}", *name[1:]]) == 2
    assert said in capsys.readouterr().err


def test_what_a_layer_raises_is_one_line_with_its_own_frame(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", f"{target}:broken"]) == 3
    error = capsys.readouterr().err
    assert error.startswith(f"lp_pipe: {target}:broken raised ArithmeticError: does not add up\n")
    assert "in forward" in error and "Traceback" not in error


def test_a_profile_is_written_as_pipedreams_where_the_file_is_called_so(target: str) -> None:
    assert main(["profile", target, "-o", "graph.txt"]) == 0
    assert [layer.name for layer in pp.Profile.from_pipedream("graph.txt").layers] == ["0.Linear", "1.ReLU", "2.Linear"]
    pp.Topology([pp.Level("device", 2, bandwidth=1e9)]).save("topology.toml")
    assert main(["partition", "graph.txt", "topology.toml", "--straight", "-o", "plan.toml"]) == 0
    assert main(["graph", target, "--plan=plan.toml"]) == 0


LONG = """
import os, pathlib
import torch
from torch import nn
import lp_pipe as lp
import lp_pipe.pipeline as pp

class Feeder:
    def batch(self, step):
        return torch.ones(8, 4), torch.ones(8, 4)

class Signing(nn.Linear):
    def forward(self, x):
        print(f"pid {os.getpid()}", flush=True)
        return super().forward(x)

def make_program():
    program = lp.Program("long")
    feeder = program.add_node(lp.CourierNode(Feeder), label="feeder")
    model = pp.Model(
        [pp.Layer(Signing, 4, 4) for _ in range(2)],
        nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    pp.add_pipeline(program, model, stages=2, microbatches=2, inputs=feeder)
    return program
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_processes_that_keep_busy_end_with_the_command(number: int, folder: Path, start: Start) -> None:
    (folder / "long_program.py").write_text(LONG)
    run = start("profile", "long_program.py", "--busy=2")
    other = int(run.wait_for("[busy/0] pid ").split()[-1])
    run.process.send_signal(number)
    status, _, errors = run.finish()
    assert status == (130 if number == signal.SIGINT else -number)
    assert not any("Traceback" in line for line in errors)
    ends = time.monotonic() + 20
    while is_alive(other):  # at once after Ctrl+C: the command waits for it
        assert number == signal.SIGKILL and time.monotonic() < ends
        time.sleep(0.01)


def test_busy_needs_a_number_of_processes(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", target, "--busy=0"]) == 2
    assert "busy=0: must be at least 1" in capsys.readouterr().err
