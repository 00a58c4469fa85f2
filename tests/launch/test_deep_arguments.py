"""Arguments nested deeper than Python's stack: they arrive, or the error names the node and the argument."""

from typing import Any

import pytest

import lp_pipe as lp

pytestmark = pytest.mark.usefixtures("warm_bare_template")

WITHIN_S = 20.0
DEPTH = 3000


def nested(item: Any) -> list[Any]:
    value = [item]
    for _ in range(DEPTH):
        value = [value]
    return value


def innermost(value: Any) -> Any:
    while isinstance(value, list):
        value = value[0]
    return value


class Server:
    def take(self, value: Any) -> bool:
        return True

    def nest(self) -> Any:
        return nested(None)


def use(value: Any) -> None:
    assert innermost(value).take(1)
    lp.stop()


def test_a_handle_deep_inside_an_argument_is_dereferenced_in_threads(no_leaks: None) -> None:
    program = lp.Program("deep")
    server = program.add_node(lp.CourierNode(Server), label="server")
    program.add_node(lp.PyNode(use, nested(server)), label="user")
    lp.launch(program, "thread").wait(WITHIN_S)


def test_what_cannot_travel_to_a_process_is_named(no_leaks: None) -> None:
    program = lp.Program("deep")
    program.add_node(lp.PyNode(print, 1, end=nested("")), label="printer")
    with pytest.raises(lp.SerializationError) as caught:
        lp.launch(program, "process")
    assert "printer/0" in str(caught.value) and "argument end" in str(caught.value)


def test_calls_name_their_argument_or_result(mode: str) -> None:
    program = lp.Program("deep")
    server = program.add_node(lp.CourierNode(Server), label="server")
    with lp.launch(program, mode) as run:
        client = run.client(server)
        with pytest.raises(lp.SerializationError, match=r"take.*args\[0\] of type list"):
            client.take(nested(1))
        with pytest.raises(lp.SerializationError, match=r"nest.*result of type list"):
            client.nest()
        assert client.take(1)
