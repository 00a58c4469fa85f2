"""Programs run in a Python that has lost the private parts which lp_pipe uses."""

import subprocess
import sys
from pathlib import Path

import pytest

from lp_pipe import private_python

# Run before anything else of lp_pipe: none of the names that `private_python` looks up is there.
LOST = """
from lp_pipe import private_python
private_python.getattr = lambda owner, name, default: default
import atexit, lp_pipe as lp
"""


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_a_program_runs_and_ends_without_any_private_part_of_python(mode: str, tmp_path: Path) -> None:
    code = f"""{LOST}
program = lp.Program("lost")
program.add_node(lp.PyNode(print, "node ran"), label="node")
lp.launch(program, {mode!r}, run_dir={str(tmp_path)!r}).wait()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "node ran" in done.stdout


def test_the_flags_for_a_new_interpreter_are_those_of_this_one() -> None:
    flags = "from lp_pipe import private_python; print(*private_python.interpreter_flags())"
    lost = f"{LOST}\nprint(*private_python.interpreter_flags())"
    for code in (flags, lost):
        command = [sys.executable, "-O", "-W", "ignore:x", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        of_environment = "-B"  # PYTHONDONTWRITEBYTECODE, which the new interpreter has as well
        assert [flag for flag in done.stdout.split() if flag != of_environment] == ["-O", "-Wignore:x"]


def test_exit_functions_run_once() -> None:
    code = "import atexit, os; from lp_pipe import private_python; atexit.register(print, 'called')\n"
    code += "private_python.run_exit_functions(); import sys; sys.stdout.flush(); os._exit(0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "called\n"


def test_options_of_a_parser_are_all_its_names() -> None:
    import argparse

    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("-n", "--number")
    parser.add_argument("place")
    assert private_python.options_of(parser) == ["-n", "--number"]
