"""A script's definitions are found by name in its nodes: by pickle, and by the children of multiprocessing."""

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


LOOKS_AT_MAIN = '''
"""What the script is for.

>>> 1 + 1
2
"""
from __future__ import annotations
import dataclasses, doctest, inspect, multiprocessing, pathlib, sys, typing
import lp_pipe as lp

LAUNCHES = pathlib.Path(sys.argv[0]).with_name("launches")
LAUNCHES.touch()
LAUNCHES.write_text(LAUNCHES.read_text() + "x")
count = 0

@dataclasses.dataclass
class Record:
    number: typing.Optional[int]
    other: Other | None = None
    parent: Record | None = None

class Other:
    record: Record  # and so back

def doubled(value: typing.Optional[int]) -> Record:
    """
    >>> doubled(2).number
    4
    """
    return Record(value * 2)

def counted():
    global count
    count += 1
    return count

def answer(queue):
    queue.put((doubled(1).number, __name__))

class Server:
    def look(self):
        main = sys.modules["__main__"]
        assert inspect.getsource(Record).startswith("@dataclasses.dataclass")
        assert "global count" in inspect.getsource(counted) and "class Server" in inspect.getsource(type(self))
        assert pathlib.Path(main.__file__) == pathlib.Path(sys.argv[0]).resolve()
        assert main.__doc__.startswith("What the script is for")
        assert doctest.testmod() == (0, 2)
        hints = typing.get_type_hints(Record)
        assert hints["parent"] == typing.Optional[Record] and hints["other"] == typing.Optional[Other]
        assert hints["number"] == typing.Optional[int]
        assert typing.get_type_hints(doubled)["return"] is Record
        assert (counted(), main.counted(), main.count, count) == (1, 2, 2, 2)
        for method in ("spawn", "forkserver"):
            context = multiprocessing.get_context(method)
            queue = context.Queue()
            child = context.Process(target=answer, args=(queue,))
            child.start()
            assert queue.get(timeout=10)[0] == 2
            child.join()
        return "seen"

    def call(self, function):
        return function()

program = lp.Program("looks")
server = program.add_node(lp.CourierNode(Server), label="server")
with lp.launch(program, "process") as run:
    client = run.client(server)
    print(client.look(), client.call(counted), count)
    count = 10
    print(client.call(counted), client.call(lambda: count), count)
    assert LAUNCHES.read_text() == "x"
'''


def test_whatever_asks_for_the_main_module_finds_the_script(script: Any) -> None:
    launcher = script(LOOKS_AT_MAIN)
    out, err = launcher.communicate(timeout=2 * WITHIN_S)
    assert launcher.returncode == 0, err
    # What comes with a call has the values of its sender, and leaves those of the node alone.
    assert "seen 1 0" in out and "11 10 10" in out
