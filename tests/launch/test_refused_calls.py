"""System calls that a kernel or a container's profile refuses: programs run all the same, in a slower way."""

import errno
import platform
import sys

import pytest

from tests.conftest import Script

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the numbers are those of Linux on x86-64"
)

# Install a filter that refuses one call in this process and its children, or exit with the status NOT_PERMITTED.
REFUSE = """
import ctypes, sys
class Step(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte), ("k", ctypes.c_uint32)]
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.POINTER(Step))]
steps = (Step * 4)(Step(0x20, 0, 0, 0), Step(0x15, 0, 1, {number}), Step(0x06, 0, 0, 0x50000 | {error}),
                   Step(0x06, 0, 0, 0x7FFF0000))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(Filter(4, steps)), 0, 0):
    sys.exit(77)
"""
NOT_PERMITTED = 77
CALLS = """
import numpy as np
import lp_pipe as lp

class Server:
    def echo(self, value):
        return value
    async def echo_later(self, value):
        return value
    def count(self):
        yield from range(3)

def use(server):
    large = np.arange(100_000.0)
    for _ in range(3):
        assert (server.echo(large) == large).all()
    assert server.echo_later(1) == 1
    assert list(server.count()) == [0, 1, 2]
    lp.stop()

program = lp.Program("calls")
server = program.add_node(lp.CourierNode(Server), label="server")
with program.group("user", resources=lp.Resources(cpus=1)):
    program.add_node(lp.PyNode(use, server))
with lp.launch(program, "process") as run:
    assert run.client("server").echo(2) == 2
    run.wait(60)
"""
PIPELINE = """
import torch
from torch import nn
import lp_pipe as lp
from lp_pipe import pipeline as pp

def train(pipeline):
    for _ in range(2):
        assert pipeline.step((torch.ones(4, 300), torch.zeros(4, 300))).loss > 0
    lp.stop()

layers = [pp.Layer(nn.Linear, 300, 300), pp.Layer(nn.Linear, 300, 300)]
model = pp.Model(layers, nn.functional.mse_loss, torch.optim.SGD)
program = lp.Program("pipeline")
pipeline = pp.add_pipeline(program, model, stages=2, microbatches=2)
program.add_node(lp.PyNode(train, pipeline), label="trainer")
lp.launch(program, "process").wait(120)
"""
NUMBERS = {
    "epoll_ctl": 233,
    "epoll_create1": 291,
    "eventfd2": 290,
    "getaffinity": 204,
    "memfd_create": 319,
    "pidfd_open": 434,
    "prctl": 157,
    "prlimit64": 302,
    "process_vm_readv": 310,
    "setaffinity": 203,
}


def check(script: Script, name: str, source: str, error: int) -> None:
    process = script(REFUSE.format(number=NUMBERS[name], error=error) + source)
    _, told = process.communicate(timeout=150)
    if process.returncode == NOT_PERMITTED:
        pytest.skip("no seccomp for this user")
    assert process.returncode == 0, told


ERRORS = [errno.ENOSYS, errno.EPERM]  # of a kernel that does not know the call, and of a profile that forbids it


@pytest.mark.parametrize(
    ("name", "error"),
    [
        pytest.param(name, error, marks=[pytest.mark.slow] if (index + which) % 2 else [])
        for index, name in enumerate(NUMBERS)
        for which, error in enumerate(ERRORS)
    ],
)
def test_programs_run_where_a_call_is_refused(name: str, error: int, script: Script) -> None:
    check(script, name, CALLS, error)


def test_pipelines_run_where_shared_memory_is_refused(script: Script) -> None:
    check(script, "memfd_create", PIPELINE, errno.EPERM)
