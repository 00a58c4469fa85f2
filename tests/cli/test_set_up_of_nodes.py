"""`lp_pipe launch --setup --log-level`, and absl's logging: what nodes find when the command launches them."""

from pathlib import Path

import pytest

from tests.cli.commands import Command

PROGRAM = """
import logging
from absl import app, logging as absl_logging
import lp_pipe as lp

{set_up}
registry = []

def register():
    registry.append("registered")

def node():
    print(registry)
    logging.getLogger("mine").info("1 info")
    absl_logging.info("2 absl")
    logging.getLogger("mine").warning("3 warning")

program = lp.Program("demo")
program.add_node(lp.PyNode(node), label="node")
if __name__ == "__main__":
    app.run(lambda _: lp.launch(program, "thread").wait())
"""


@pytest.mark.parametrize("mode", ["thread", "process"])
@pytest.mark.parametrize("target", ["demo", "demo.py"])
def test_setup_names_a_function_of_a_module_or_file(mode: str, target: str, command: Command, folder: Path) -> None:
    (folder / "demo.py").write_text(PROGRAM.format(set_up=""))
    done = command("launch", "demo.py", f"--mode={mode}", f"--setup={target}:register")
    assert done.returncode == 0, done.stderr
    assert "['registered']" in done.stdout


def test_a_setup_that_is_not_there_is_a_usage_error(brief_command: Command, folder: Path) -> None:
    (folder / "demo.py").write_text(PROGRAM.format(set_up=""))
    for wrong in ("demo:registr", "nothing:register", "demo", "demo:registry"):
        done = brief_command("launch", "demo.py", f"--setup={wrong}")
        assert done.returncode == 2, wrong
        assert wrong.partition(":")[0] in done.stderr


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_absl_logs_as_in_a_script_that_calls_app_run(mode: str, command: Command, folder: Path) -> None:
    (folder / "demo.py").write_text(PROGRAM.format(set_up=""))
    done = command("launch", "demo.py", f"--mode={mode}")
    lines = [line.partition("demo.py:")[2].partition("] ")[2] for line in done.stderr.splitlines()]
    assert lines == ["1 info", "2 absl", "3 warning"], done.stderr


@pytest.mark.parametrize("mode", ["thread", "process"])
@pytest.mark.parametrize(
    ("set_up", "level", "expected"),
    [
        ("", "ERROR", ""),
        ("logging.basicConfig(level=logging.DEBUG, format='%(message)s')", "WARNING", "3 warning"),
        ("absl_logging.set_verbosity(absl_logging.ERROR)", "INFO", "1 info 2 absl 3 warning"),
    ],
)
def test_log_level_is_that_of_all_modes(
    mode: str, set_up: str, level: str, expected: str, command: Command, folder: Path
) -> None:
    (folder / "demo.py").write_text(PROGRAM.format(set_up=set_up))
    done = command("launch", "demo.py", f"--mode={mode}", f"--log-level={level.lower()}")
    assert done.returncode == 0
    found = [text for text in ("1 info", "2 absl", "3 warning") if text in done.stderr]
    assert " ".join(found) == expected, done.stderr
