"""Arguments that a node's constructor or function does not take are refused where they are written."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

import lp_pipe as lp
from lp_pipe.handles import declared_at

WITHIN_S = 20.0


class Sized:
    def __init__(self, size: int, rate: float = 1.0) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def with_connection(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function("connection", *args, **kwargs)

    return call


@with_connection
def query(connection: str, text: str) -> None: ...


class Model:
    """A class like a model of pydantic, which ignores arguments that its own signature does not have."""

    __signature__ = inspect.Signature()

    def __init__(self, *args: Any) -> None: ...


@pytest.mark.parametrize("kind", [lp.PyNode, lp.PyClassNode, lp.CourierNode, lp.Deferred])
def test_arguments_that_do_not_fit_are_refused_at_once(kind: Any) -> None:
    for args, kwargs in [((1, 2, 3), {}), ((1,), {"colour": 2}), ((), {"rate": 2.0})]:
        with pytest.raises(TypeError, match="Sized"):
            kind(Sized, *args, **kwargs)
    kind(Sized, 1, rate=2.0)


@pytest.mark.parametrize("function", [lambda x: x, dict, functools.partial(Sized, rate=2.0), query, Model, print])
def test_functions_of_any_kind_may_be_called_with_what_they_take(function: Any) -> None:
    lp.PyNode(function, 1)


def test_configure_refuses_them_too_and_replaces_placeholders(mode: str) -> None:
    node = lp.CourierNode(Sized, None)
    with pytest.raises(TypeError, match="colour"):
        node.configure(1, colour=2)
    program = lp.Program("configured")
    handle = program.add_node(node.configure(5), label="sized")
    with lp.launch(program, mode) as run:
        assert run.client(handle).size() == 5


def test_a_node_that_has_got_no_arguments_is_refused_by_launch_with_its_line(mode: str) -> None:
    program = lp.Program("forgotten")
    colocation = lp.MultiThreadingColocation([lp.CourierNode(Sized)])
    program.add_node(colocation, label="sized")
    with pytest.raises(TypeError) as caught:
        lp.launch(program, mode)
    assert "sized/0" in str(caught.value) and "test_arguments.py:" in str(caught.value)
    colocation.children[0].configure(1)
    with lp.launch(program, mode):
        pass


def test_a_declaration_is_the_line_outside_of_lp_pipe() -> None:
    assert declared_at().startswith(__file__)
