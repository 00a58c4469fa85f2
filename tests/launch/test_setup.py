"""`launch(setup=...)`: a function that runs first in every process of a program."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lp_pipe as lp

WITHIN_S = 30.0

pytestmark = pytest.mark.usefixtures("warm_bare_template", "no_leaks")


known: list[str] = []


class Registered:
    """A value that can only be loaded where `register` has run."""

    def __reduce__(self) -> tuple[Callable[[], str], tuple[()]]:
        return first_known, ()


def first_known() -> str:
    return known[0]


def register() -> None:
    assert threading.current_thread() is threading.main_thread()
    known.append("registered")


@pytest.mark.parametrize("mode", ["thread", "process", "multi_host"])
def test_setup_has_run_before_anything_of_a_node_is_loaded(mode: str, tmp_path: Path) -> None:
    registry: list[str] = []

    def fill() -> None:
        registry.append("filled")

    class Reader:
        def __init__(self) -> None:
            self._at_start = list(registry)

        def read(self) -> list[str]:
            return self._at_start

    def fail_once() -> None:
        if not (tmp_path / "flag").exists():
            (tmp_path / "flag").touch()
            raise ValueError("as planned")
        assert registry == ["filled"]

    program = lp.Program("setup")
    program.add_node(lp.CourierNode(Reader), label="reader")
    inner = lp.MultiProcessingColocation([lp.PyNode(lambda: fail_once())], num_retries_on_failure=1)
    program.add_node(inner, label="again")
    with lp.launch(program, mode, setup=fill) as run:
        assert run.client("reader").read() == ["filled"]
        while run.status()["again"][0]["state"] not in ("finished", "failed"):
            threading.Event().wait(0.05)
        assert run.status()["again"][0]["state"] == "finished"


def test_values_of_a_node_are_unpickled_after_setup() -> None:
    def compare(found: Any) -> None:
        assert found == "registered"

    program = lp.Program("setup")
    program.add_node(lp.PyNode(compare, Registered()), label="node")
    lp.launch(program, "process", setup=register).wait(WITHIN_S)


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_an_exception_of_setup_is_the_failure_of_the_node_which_has_two_tries(mode: str) -> None:
    def wrong() -> None:
        raise LookupError("no such environment")

    program = lp.Program("setup")
    with program.group("node", on_failure="restart", max_restarts=None):
        program.add_node(lp.PyNode(lambda: None))
    with pytest.raises(lp.NodeError) as caught:
        (run := lp.launch(program, mode, setup=wrong)).wait(WITHIN_S)
    error = caught.value
    assert run.status()["node"][0]["restarts"] == 1
    assert (error.label, error.index, error.type_name) == ("node", 0, "LookupError")
    assert "setup" in error.message and "no such environment" in error.message
    assert "in wrong" in error.remote_traceback


def test_a_setup_that_cannot_be_sent_or_called_is_refused_at_launch() -> None:
    lock = threading.Lock()
    program = lp.Program("setup")
    program.add_node(lp.PyNode(lambda: None), label="node")
    with pytest.raises(lp.SerializationError, match="setup"):
        lp.launch(program, "process", setup=lambda: lock.locked())  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match="setup"):
        lp.launch(program, "thread", setup="function")  # type: ignore[arg-type]
