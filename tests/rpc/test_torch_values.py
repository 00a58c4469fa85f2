"""Compiled and scripted functions and custom operators of a script, in nodes."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lp_pipe as lp
from lp_pipe.rpc import codec

ONES = torch.ones(2)


def backend(graph: Any, inputs: Any) -> Any:
    return graph.forward


compiled = torch.compile(lambda x: x + 1, backend=backend, fullgraph=True)


@torch.compile(backend="eager")
def recursive(x: torch.Tensor, times: int = 2) -> Any:
    return x if times == 0 else recursive(x, times - 1) + 1


@torch.compiler.disable
def disabled(x: torch.Tensor) -> torch.Tensor:
    return x + 3


@torch.jit.script
def scripted(x: torch.Tensor, times: int) -> torch.Tensor:
    for i in range(times):
        x = x + i
    return x


@torch.jit.script
def with_default(x: torch.Tensor, factor: int = 2) -> torch.Tensor:
    return x * factor


traced = torch.jit.trace(lambda x: x * 3 + ONES, torch.zeros(2))
compiled_module = torch.compile(torch.nn.Linear(2, 2), backend="eager")
scripted_module = torch.jit.script(torch.nn.Linear(2, 2))


@torch.library.custom_op("lp_pipe_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def gradient_of_doubled(context: Any, gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 2


doubled.register_autograd(gradient_of_doubled)


class Server:
    def results(self) -> list[torch.Tensor]:
        x = torch.ones(2, requires_grad=True)
        doubled(x).sum().backward()
        calls = [
            f(ONES)
            for f in (compiled, recursive, disabled, with_default, traced, doubled, torch.ops.lp_pipe_tests.doubled)
        ]
        modules = [compiled_module(ONES), scripted_module(ONES)]
        return [value.detach() for value in [*calls, scripted(ONES, 3), *modules, x.grad]]

    def back(self, value: Any) -> Any:
        return value


@pytest.fixture
def client(mode: str) -> Iterator[Any]:
    module = sys.modules[__name__]
    codec.ship_by_value([module])
    try:
        program = lp.Program("torch")
        server = program.add_node(lp.CourierNode(Server), label="server")
        with lp.launch(program, mode) as run:
            yield run.client(server)
    finally:
        codec.ship_by_name([module])


def test_they_compute_the_same_in_a_node(client: Any) -> None:
    for there, here in zip(client.results(), Server().results(), strict=True):
        assert torch.equal(there, here)
    assert client.back(doubled) is doubled


@pytest.mark.parametrize("function", [compiled, recursive, disabled, with_default, traced, doubled])
def test_they_travel_as_arguments_and_results(function: Any) -> None:
    back = codec.loads(codec.dumps(function))
    assert torch.equal(back(ONES), function(ONES))
    assert type(back) is type(function)


@pytest.mark.parametrize("op", [torch.ops, torch.ops.aten, torch.ops.aten.add, torch.ops.aten.add.Tensor])
def test_operators_of_torch_travel_by_name(op: Any) -> None:
    assert codec.loads(codec.dumps(op)) is op
