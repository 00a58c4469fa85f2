"""pp.profile(busy=N): others compute meanwhile, in processes that end with it."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import lp_pipe.pipeline as pp
from lp_pipe.errors import PipelineError
from lp_pipe.measuring.layer_rounds import Work
from lp_pipe.measuring.profiling import others_busy
from tests.cli.commands import is_alive

pytestmark = pytest.mark.usefixtures("no_leaks")

SAMPLE = torch.ones(4, 4), torch.ones(4, 4)


class Signing(nn.Module):
    """Every forward in a process writes a byte more into that process's file."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.folder = folder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with open(self.folder / str(os.getpid()), "ab") as file:
            file.write(b".")
        y: torch.Tensor = self.linear(x)
        return y


class FailingElsewhere(nn.Module):
    def __init__(self, home: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.home = home

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.getpid() != self.home:
            raise ValueError("not at home")
        y: torch.Tensor = self.linear(x)
        return y


def model_of(layer: pp.Layer) -> pp.Model:
    return pp.Model([layer], functional.mse_loss, lambda parameters: torch.optim.SGD(parameters, lr=0.1))


def work_of(folder: Path) -> Work:
    return Work([pp.Layer(Signing, folder)], (), functional.mse_loss, 0, SAMPLE, "cpu")


def others(folder: Path) -> dict[int, int]:
    """How many forwards each other process has done."""
    files = {int(path.name): path.stat().st_size for path in folder.iterdir()}
    files.pop(os.getpid(), None)
    return files


def wait_for_more(folder: Path, than: int) -> None:
    ends = time.monotonic() + 30
    while sum(others(folder).values()) <= than:
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_other_processes_train_the_layers_while_they_are_measured(tmp_path: Path) -> None:
    profile = pp.profile(model_of(pp.Layer(Signing, tmp_path)), *SAMPLE, busy=3)
    assert [layer.name for layer in profile.layers] == ["0.Signing"]
    assert profile.layers[0].parameter_bytes == 4 * 20
    assert len(others(tmp_path)) == 2
    assert not any(map(is_alive, others(tmp_path)))


def test_they_are_warm_before_go_on_meanwhile_and_are_gone_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), others_busy(work_of(tmp_path), 1):
        forwards = sum(others(tmp_path).values())
        assert forwards >= 4
        wait_for_more(tmp_path, than=forwards)
        raise ZeroDivisionError
    assert not any(map(is_alive, others(tmp_path)))


def test_what_fails_in_them_alone_is_said() -> None:
    with pytest.raises(PipelineError, match=r"busy(.|\n)*not at home"):
        pp.profile(model_of(pp.Layer(FailingElsewhere, os.getpid())), *SAMPLE, busy=2)


@pytest.mark.slow
def test_one_that_is_killed_does_not_pass_for_a_busy_one(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="busy="), others_busy(work_of(tmp_path), 1):
        (other,) = others(tmp_path)
        os.kill(other, signal.SIGKILL)
        while is_alive(other):
            time.sleep(0.01)


@pytest.mark.slow
def test_they_work_no_longer_than_their_limit(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="ended before it did"), others_busy(work_of(tmp_path), 1, limit_s=0.1):
        (other,) = others(tmp_path)
        while is_alive(other):
            time.sleep(0.01)


@pytest.mark.parametrize("busy", [0, -1])
def test_at_least_this_process_is_busy(busy: int) -> None:
    with pytest.raises(PipelineError, match=f"busy={busy}"):
        pp.profile(model_of(pp.Layer(nn.Linear, 4, 4)), *SAMPLE, busy=busy)
