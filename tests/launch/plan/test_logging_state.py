"""lp_pipe/launch/plan/logging_state.py"""

import subprocess
import sys
from pathlib import Path

import pytest

WITHIN_S = 60

# The same lines are logged in the process that was set up and in one that has got its state.
PAIR = """
import logging, logging.config, logging.handlers, os, pickle, sys, warnings
from lp_pipe.launch.plan import logging_state
from lp_pipe.rpc import codec

class Braces(logging.Formatter):
    def format(self, record):
        return "{" + record.getMessage() + "}"

class Shouting(logging.Handler):
    def emit(self, record):
        print(record.getMessage().upper(), flush=True)

def log():
    logging.getLogger("mine").debug("1 debug")
    logging.getLogger("mine.inner").info("2 info")
    logging.getLogger("noisy").warning("3 warning")
    warnings.warn("4 a caution")
    logging.warning("5 root")

if sys.argv[1] == "set up":
    root = logging.getLogger()
    {set_up}
    with open("state", "wb") as file:
        file.write(codec.dumps(logging_state.capture()))
else:
    with open("state", "rb") as file:
        logging_state.restore(codec.loads(file.read()))
    {in_node}
log()
"""
DICT_CONFIG = {
    "version": 1,
    "formatters": {"short": {"format": "%(name)s/%(message)s"}},
    "handlers": {"out": {"class": "logging.StreamHandler", "formatter": "short", "stream": "ext://sys.stdout"}},
    "loggers": {"mine": {"level": "DEBUG", "handlers": ["out"], "propagate": False}, "noisy": {"level": "ERROR"}},
}
SETUPS = {
    "nothing": "pass",
    "a level": "root.setLevel(logging.INFO)",
    "basicConfig": "logging.basicConfig(level=logging.DEBUG, format='<%(levelname)s|%(name)s|%(message)s>')",
    "stdout": "logging.basicConfig(stream=sys.stdout, level=logging.INFO)",
    "a formatter of the script": "root.addHandler(logging.StreamHandler()); root.handlers[0].setFormatter(Braces())",
    "a handler of the script": "root.addHandler(Shouting()); root.setLevel(logging.INFO)",
    "a filter": "logging.basicConfig(level=0); root.handlers[0].addFilter(lambda record: record.levelno != 20)",
    "dictConfig": f"logging.config.dictConfig({DICT_CONFIG})",
    "memory": "root.addHandler(logging.handlers.MemoryHandler(9, 30, logging.StreamHandler())); root.setLevel(10)",
    "disable": "logging.disable(logging.WARNING)",
    "captureWarnings": "logging.captureWarnings(True); logging.basicConfig(format='%(name)s')",
    "level names": "logging.addLevelName(30, 'CAREFUL'); logging.basicConfig()",
    "two streams": "root.addHandler(logging.StreamHandler(sys.stdout)); root.addHandler(logging.StreamHandler())",
    "absl": "from absl import logging as absl; absl.use_absl_handler(); absl.get_absl_handler().setFormatter(Braces())",
    "absl's level": "from absl import logging as absl; absl.use_absl_handler(); absl.set_verbosity(absl.ERROR)",
}


def logged(folder: Path, set_up: str, in_node: str = "pass") -> list[str]:
    """What is logged where logging was set up, and in a process that has its state."""
    (folder / "pair.py").write_text(PAIR.replace("{set_up}", set_up).replace("{in_node}", in_node))
    found = []
    for part in ("set up", "arrive"):
        command = [sys.executable, "pair.py", part]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=WITHIN_S, check=True)
        found.append(done.stdout + "--\n" + done.stderr)
    return found


@pytest.mark.parametrize("name", SETUPS)
def test_a_process_that_gets_the_state_logs_the_same_lines(name: str, tmp_path: Path) -> None:
    here, there = logged(tmp_path, SETUPS[name])
    assert here == there


def test_a_log_file_is_continued_by_both(tmp_path: Path) -> None:
    set_up = "logging.basicConfig(filename='log', filemode='w', level=logging.INFO, format='%(message)s')"
    logged(tmp_path, set_up)
    lines = ["2 info", "3 warning", "5 root"]
    assert (tmp_path / "log").read_text().splitlines() == lines * 2


@pytest.mark.parametrize("stream", ["io.StringIO()", "open('elsewhere', 'w')"])
def test_in_place_of_a_handler_that_cannot_travel_there_is_one_to_stderr(stream: str, tmp_path: Path) -> None:
    set_up = f"import io; logging.basicConfig(stream={stream}, level=logging.INFO); root.addHandler(root.handlers[0])"
    here, there = logged(tmp_path, set_up)
    assert "2 info" not in here
    assert there.count("INFO:mine.inner:2 info\n") == 1


def test_a_module_that_sets_up_its_logger_again_repeats_no_line(tmp_path: Path) -> None:
    set_up = "logging.getLogger('mine').addHandler(logging.StreamHandler()); root.setLevel(logging.INFO)"
    here, there = logged(tmp_path, set_up, in_node="logging.getLogger('mine').addHandler(logging.StreamHandler())")
    assert here == there
    assert here.count("2 info\n") == 1


OWN = """
import logging, sys
import lp_pipe as lp

def node():
    logging.basicConfig(filename="node.log", level=logging.INFO, format="%(message)s")
    logging.info("in its file")

program = lp.Program("own")
program.add_node(lp.PyNode(node), label="node")
lp.launch(program, sys.argv[1]).wait()
print(open("node.log").read())
"""


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_a_node_sets_up_logging_for_itself(mode: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(OWN)
    command = [sys.executable, "script.py", mode]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=WITHIN_S, check=True)
    assert done.stdout == "in its file\n\n"
    assert done.stderr == ""
