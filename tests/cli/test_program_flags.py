"""The parameters of the function that makes a program are flags, with their types."""

import enum
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import pytest

from lp_pipe.cli.errors import UsageError
from lp_pipe.cli.program_flags import MakerFlags
from tests.cli.commands import Command

TARGET = '''
import argparse, sys
import lp_pipe as lp

def make_program(num_producers=2, optimizer: str = "adam"):
    """Make a program of producers.

    Further lines.
    """
    print("made with", num_producers, optimizer)
    return program_of(num_producers)

def program_of(count):
    program = lp.Program("producers")
    with program.group("producers"):
        for _ in range(int(count)):
            program.add_node(lp.PyNode(int))
    return program

def by_argparse(unused=0):
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int)
    return program_of(parser.parse_args().count)

def for_hosts(num_hosts: int, *, per_host: int):
    return program_of(num_hosts * per_host)

if __name__ == "__main__":  # for `python demo.py`
    print(sys.argv, argparse.ArgumentParser().parse_args())
'''


class Color(enum.Enum):
    RED = "#f00"
    BLUE = "#00f"


def everything(  # type: ignore[no-untyped-def]
    count: int = 1,
    rate=0.5,
    name="x",
    fast: bool = False,
    slow=True,
    kind: Literal["adam", "sgd", 3] = "adam",
    color: Color = Color.RED,
    limit: int | None = 5,
    old: Optional[float] = None,  # noqa: UP045
    sizes: list[int] = [1],  # noqa: B006
    names: Sequence[str] = (),
    pair: tuple[float, ...] = (),
    either: int | list[int] = 3,
    folder: Path = Path("here"),
    noted: Annotated[int, "a note"] = 0,
    options: dict[str, int] = {},  # noqa: B006
    untyped=None,
) -> None:
    """Take one of everything."""


def parsed(*flags: str) -> dict[str, Any]:
    found = MakerFlags("demo.py", everything).parse(flags)
    assert found.unknown == []
    return found.values


def test_only_what_is_given_is_passed_on() -> None:
    assert parsed() == {}


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--count=3"], "count", 3),
        (["--count", "-3"], "count", -3),
        (["--rate=1e-3"], "rate", 1e-3),
        (["--name=3"], "name", "3"),
        (["--fast"], "fast", True),
        (["--fast=false"], "fast", False),
        (["--noslow"], "slow", False),
        (["--no-slow"], "slow", False),
        (["--slow", "no"], "slow", False),
        (["--kind=sgd"], "kind", "sgd"),
        (["--kind=3"], "kind", 3),
        (["--color=BLUE"], "color", Color.BLUE),
        (["--color=#00f"], "color", Color.BLUE),
        (["--limit=7"], "limit", 7),
        (["--limit=None"], "limit", None),
        (["--old=2"], "old", 2.0),
        (["--sizes=1,2, 3"], "sizes", [1, 2, 3]),
        (["--sizes=1", "--sizes=2"], "sizes", [1, 2]),
        (["--sizes="], "sizes", []),
        (["--names=a,b"], "names", ["a", "b"]),
        (["--pair=1,2"], "pair", (1.0, 2.0)),
        (["--either=4"], "either", 4),
        (["--either=4,5"], "either", [4, 5]),
        (["--folder=a/b"], "folder", Path("a/b")),
        (["--noted=4"], "noted", 4),
        (["--options={'a': 1}"], "options", {"a": 1}),
        (["--untyped=1"], "untyped", 1),
        (["--untyped=0.1"], "untyped", 0.1),
        (["--untyped=none"], "untyped", None),
        (["--untyped=a,b"], "untyped", "a,b"),
    ],
)
def test_a_flag_has_the_type_of_its_parameter(flags: list[str], name: str, value: Any) -> None:
    found = parsed(*flags)
    assert (found, type(found[name])) == ({name: value}, type(value))


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--count=three", "three"),
        ("--fast=maybe", "maybe"),
        ("--kind=adm", "did you mean 'adam'"),
        ("--color=GREEN", "RED, BLUE"),
        ("--limit=x", "x"),
        ("--sizes=1,x", "x"),
        ("--options=}", "}"),
    ],
)
def test_a_value_of_another_type_is_refused(flag: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        parsed(flag)
    assert flag.partition("=")[0] in str(error.value) and said in str(error.value)


def test_unknown_flags_name_the_nearest_one() -> None:
    maker = MakerFlags("demo.py", everything)
    found = maker.parse(["--coutn=3", "--rate=1"])
    assert (found.values, found.unknown) == ({"rate": 1.0}, ["--coutn=3"])
    with pytest.raises(UsageError, match="did you mean '--count'"):
        maker.refuse(found.unknown)


def test_help_has_the_first_line_of_the_docstring_and_every_flag() -> None:
    text = MakerFlags("demo.py", everything).help()
    assert "Take one of everything." in text
    assert "RED|BLUE" in text and "default: RED" in text
    assert "adam|sgd|3" in text


def test_parameters_are_flags_of_launch_and_graph(command: Command, brief_command: Command, folder: Path) -> None:
    """Regression: `-- --num_producers=3` was ignored, and the program launched with its defaults."""
    (folder / "demo.py").write_text(TARGET)
    done = command("launch", "demo.py", "--mode=thread", "--run-dir=out", "--", "--num-producers=3")
    assert (done.returncode, done.stderr) == (0, "")
    assert "made with 3 adam" in done.stdout
    assert "producers: 3 nodes" in brief_command("graph", "demo.py", "--", "--num_producers", "3").stdout
    wrong = brief_command("graph", "demo.py", "--", "--num_produces=3")
    assert (wrong.returncode, wrong.stderr) == (
        2,
        "lp_pipe: demo.py does not take --num_produces=3; did you mean '--num_producers'?\n",
    )
    listed = brief_command("launch", "demo.py", "--", "--help")
    assert (listed.returncode, listed.stderr) == (0, "")
    assert "Make a program of producers." in listed.stdout and "Further" not in listed.stdout


def test_a_function_that_parses_its_flags_itself_has_them_all(brief_command: Command, folder: Path) -> None:
    (folder / "demo.py").write_text(TARGET)
    assert "producers: 4 nodes" in brief_command("graph", "demo.py:by_argparse", "--", "--count=4").stdout


def test_a_parameter_without_a_default_must_be_given(brief_command: Command, folder: Path) -> None:
    (folder / "demo.py").write_text(TARGET)
    missing = brief_command("graph", "demo.py:program_of")
    assert missing.returncode == 2 and "needs -- --count=VALUE" in missing.stderr
    given = brief_command("graph", "demo.py:for_hosts", "--", "--num_hosts=2", "--per_host=3")
    assert "producers: 6 nodes" in given.stdout


def test_flags_of_absl_and_parameters_go_together(brief_command: Command, folder: Path) -> None:
    absl = "from absl import flags\nflags.DEFINE_integer('extra', 0, 'More.')\n"
    (folder / "demo.py").write_text(absl + TARGET.replace("range(int(count))", "range(count + flags.FLAGS.extra)"))
    done = brief_command("graph", "demo.py", "--", "--num_producers=3", "--extra=2")
    assert "producers: 5 nodes" in done.stdout
    listed = brief_command("graph", "demo.py", "--", "--help").stdout
    assert "--num_producers" in listed and "--extra: More." in listed
    assert "did you mean '--num_producers'" in brief_command("graph", "demo.py", "--", "--num_produces=3").stderr


LAUNCHPADS = """
from absl import app, flags
import lp_pipe as lp
from lp_pipe import *

FLAGS = flags.FLAGS
flags.DEFINE_integer("num_producers", 2, "The number of concurrent producers.")

def make_program(num_producers: int, delay=0.0) -> lp.Program:
    program = lp.Program("producers")
    with program.group("producer"):
        for _ in range(num_producers):
            program.add_node(lp.CourierNode(dict))
    return program

def main(_):
    lp.launch(make_program(FLAGS.num_producers))

if __name__ == "__main__":
    app.run(main)
"""


def test_a_parameter_that_is_a_flag_of_absl_has_its_value(brief_command: Command, folder: Path) -> None:
    """Flags as in Launchpad's examples. A module that is named `program` is no program."""
    (folder / "demo.py").write_text(LAUNCHPADS)
    assert "producers: 2 nodes" in brief_command("graph", "demo.py").stdout
    assert "producers: 5 nodes" in brief_command("graph", "demo.py", "--", "--num_producers=5", "--delay=1").stdout
    wrong = brief_command("graph", "demo.py", "--", "--producers=5")
    assert wrong.returncode == 2 and "--num_producers" in wrong.stderr
    (folder / "demo.py").write_text(LAUNCHPADS.replace("num_producers: int", "num_producers=7"))
    assert "producers: 7 nodes" in brief_command("graph", "demo.py").stdout
    assert "producers: 5 nodes" in brief_command("graph", "demo.py", "--", "--num_producers=5").stdout
