"""lp_pipe/launch/plan/logging_state.py"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

WITHIN_S = 60

# Stdin has triples of a folder, code that sets logging up, and code of a node. For each, two processes are forked: one
# sets logging up, and the other gets its state. Both log the same lines, into files in the folder.
PAIRS = """
import json, logging, logging.config, logging.handlers, os, pickle, sys, warnings
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

def run(part, set_up, in_node):
    if part == "set up":
        exec(set_up, {**globals(), "root": logging.getLogger()})
        with open("state", "wb") as file:
            file.write(codec.dumps(logging_state.capture()))
    else:
        with open("state", "rb") as file:
            logging_state.restore(codec.loads(file.read()))
        exec(in_node, dict(globals()))
    log()

for folder, set_up, in_node in json.load(sys.stdin):
    os.chdir(folder)
    for part in ("set up", "arrive"):
        child = os.fork()
        if child == 0:
            for descriptor, stream in ((1, "out"), (2, "err")):
                os.dup2(os.open(f"{part}.{stream}", os.O_WRONLY | os.O_CREAT), descriptor)
            run(part, set_up, in_node)
            sys.exit()
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{set_up!r} failed in {folder}: " + open(f"{part}.err").read())
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


def log_pairs(pairs: Sequence[tuple[Path, str, str]]) -> None:
    """Write what is logged with each setup, in both processes, into the folder that stands before it."""
    given = json.dumps([(str(folder), set_up, in_node) for folder, set_up, in_node in pairs])
    subprocess.run([sys.executable, "-c", PAIRS], input=given, text=True, timeout=WITHIN_S, check=True)


def read_pair(folder: Path) -> list[str]:
    """Return what was logged where logging was set up, and in a process that has got its state."""
    return [
        "--\n".join((folder / f"{part}.{stream}").read_text() for stream in ("out", "err"))
        for part in ("set up", "arrive")
    ]


def logged(folder: Path, set_up: str, in_node: str = "pass") -> list[str]:
    log_pairs([(folder, set_up, in_node)])
    return read_pair(folder)


def test_a_process_that_gets_the_state_logs_the_same_lines(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in SETUPS}
    for folder in folders.values():
        folder.mkdir()
    log_pairs([(folder, SETUPS[name], "pass") for name, folder in folders.items()])
    for name, folder in folders.items():
        here, there = read_pair(folder)
        assert here == there, name
        assert here != "--\n" or name == "disable", f"{name}: nothing was logged"


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
