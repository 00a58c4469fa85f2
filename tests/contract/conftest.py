"""Fixtures of the public contract's tests: a program of one server, and a node that reports what it has seen."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import lp_pipe as lp

Serve = Callable[..., Any]
InNode = Callable[..., Any]


@pytest.fixture
def no_leaks(warm_bare_template: None, no_leaks: None) -> None:
    """As for all tests, but with a template that was there before the test."""


@pytest.fixture
def serve(mode: str) -> Iterator[Serve]:
    """`serve(ctor, *args, **options)`: a client, in the launcher, of a node that serves the object."""
    runs: list[lp.Run] = []

    def start(ctor: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        program = lp.Program("contract")
        handle = program.add_node(lp.CourierNode(ctor, *args, **options), label="server")
        runs.append(lp.launch(program, mode, grace=2.0))
        return runs[-1].client(handle)

    yield start
    for run in runs:
        run.stop()


@pytest.fixture
def in_node(mode: str) -> InNode:
    """Return a function that calls `f(*args)` inside of a node with these arguments, and returns the result."""

    def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        class Reporter:
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                self._result = function(*args, **kwargs)

            def result(self) -> Any:
                return self._result

        program = lp.Program("contract")
        target = program.add_node(lp.CourierNode(Reporter, *args, **kwargs), label="reporter")
        with lp.launch(program, mode, grace=2.0) as run:
            return run.client(target).result()

    return call
