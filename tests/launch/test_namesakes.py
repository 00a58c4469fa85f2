"""What a script defines is found by name in its nodes: by pickle, and by the children of multiprocessing."""

import textwrap
from typing import Any

import pytest

WITHIN_S = 20.0

SCRIPT = """
import dataclasses, multiprocessing, pickle, sys
import lp_pipe as lp

@dataclasses.dataclass
class Point:
    x: int

def main(x):  # a name that the process which starts nodes has as well
    return Point(x)

def point(x):
    return Point(x)

class Server:
    def through_pickle(self, value):
        return pickle.loads(pickle.dumps(value))

    def in_pool(self, method):
        with multiprocessing.get_context(method).Pool(1) as pool:
            return pool.map(point, [1, 2])

program = lp.Program("names")
server = program.add_node(lp.CourierNode(Server), label="server")
with lp.launch(program, "process") as run:
    client = run.client(server)
    BODY
"""


def output_of(script: Any, body: str) -> str:
    launcher = script(textwrap.dedent(SCRIPT).replace("BODY", body))
    out, err = launcher.communicate(timeout=WITHIN_S)
    assert launcher.returncode == 0, err
    return str(out)


def test_objects_classes_and_functions_of_the_script_pickle_in_a_node(script: Any) -> None:
    body = "print(client.through_pickle([Point(3), Point]) == [Point(3), Point], client.through_pickle(main)(4))"
    assert "True Point(x=4)" in output_of(script, body)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_functions_of_the_script_run_in_pools_of_a_node(script: Any, method: str) -> None:
    assert "[Point(x=1), Point(x=2)]" in output_of(script, f"print(client.in_pool({method!r}))")
