"""A plain script whose node fails: 15 lines on stderr, exit status 1, everything else in the run's folder."""

from pathlib import Path

import pytest

from lp_pipe.launch.run_records import record_in
from tests.conftest import Script

pytestmark = pytest.mark.usefixtures("warm_bare_template")

PATIENCE_S = 60
PROGRAM = """
import sys
import lp_pipe as lp

def fail():
    try:
        {}["key"]
    except KeyError as error:
        raise ValueError("too hot") from error

def launched():
    program = lp.Program("hot")
    program.add_node(lp.PyNode(fail), label="oven")
    return lp.launch(program, MODE, run_dir=RUN_DIR)
"""


def run(script: Script, mode: str, folder: Path, end: str) -> tuple[int, list[str]]:
    process = script(f"MODE = {mode!r}\nRUN_DIR = {str(folder)!r}\n{PROGRAM}\n{end}\n")
    _, errors = process.communicate(timeout=PATIENCE_S)
    return process.returncode, errors.splitlines()


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_a_plain_script_shows_the_report(mode: str, script: Script, tmp_path: Path) -> None:
    for end in ("launched().wait()", "with launched() as run:\n    run.wait()"):
        status, lines = run(script, mode, tmp_path / "out", end)
        assert status == 1
        assert len(lines) <= 15
        assert lines[0].startswith("node oven/0 on ")
        assert lines[0].endswith(" failed: ValueError: too hot")
        assert any(line.endswith('in fail:  raise ValueError("too hot") from error') for line in lines)
        assert lines[-2:] == [f"  the whole traceback: {tmp_path}/out/failure.txt", f"run folder {tmp_path}/out"]
    whole = (tmp_path / "out" / "failure.txt").read_text()
    assert whole.startswith("node oven/0 failed: ValueError: too hot\n\nTraceback (most recent call last):")
    assert "KeyError: 'key'" in whole


@pytest.mark.parametrize(
    ("what", "end", "expected"),
    [
        ("another error", "launched().stop()\nraise RuntimeError('mine')", "RuntimeError: mine"),
        ("a story", "try:\n    1 / 0\nexcept ZeroDivisionError:\n    launched().wait()", "ZeroDivisionError: division"),
        ("a cause", "try:\n    launched().wait()\nexcept lp.NodeError as e:\n    raise OSError('x') from e", "too hot"),
    ],
)
def test_every_other_error_is_printed_as_ever(
    what: str, end: str, expected: str, script: Script, tmp_path: Path
) -> None:
    status, lines = run(script, "thread", tmp_path / "out", end)
    assert status == 1
    assert any(line == "Traceback (most recent call last):" for line in lines)
    assert any(expected in line for line in lines)


def test_the_record_of_a_script_that_an_exception_ends_says_so(script: Script, tmp_path: Path) -> None:
    end = "fail = lp.wait_for_stop\nlaunched()\nraise RuntimeError('mine')"
    status, _ = run(script, "process", tmp_path / "out", end)
    record = record_in(tmp_path / "out")
    assert status == 1 and record is not None
    assert (record.outcome, record.exit_status) == ("failed", 1)
    assert "RuntimeError: mine" in record.failure


def test_a_hook_of_the_scripts_own_is_left_alone(script: Script, tmp_path: Path) -> None:
    own = "sys.excepthook = lambda kind, error, trace: print('mine:', error, file=sys.stderr)\nlaunched().wait()"
    _, lines = run(script, "thread", tmp_path / "out", own)
    assert lines[0] == "mine: node oven/0 failed: ValueError: too hot"
    assert "Traceback (most recent call last):" in lines


def test_a_later_run_that_goes_well_in_the_same_folder_leaves_no_failure(script: Script, tmp_path: Path) -> None:
    run(script, "thread", tmp_path / "out", "launched().wait()")
    assert (tmp_path / "out" / "failure.txt").exists()
    status, lines = run(script, "thread", tmp_path / "out", "fail = print\nlaunched().wait()")
    assert (status, lines) == (0, [])
    assert not (tmp_path / "out" / "failure.txt").exists()
