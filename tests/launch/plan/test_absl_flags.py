"""lp_pipe/launch/plan/absl_flags.py"""

import subprocess
import sys
from pathlib import Path

import pytest

WITHIN_S = 60

SETTINGS = """
from absl import flags

RATE = flags.DEFINE_float("rate", 0.1, "of learning")
"""

SCRIPT = """
import enum

from absl import app, flags

import lp_pipe as lp
import settings

FLAGS = flags.FLAGS
flags.DEFINE_integer("steps", 1, "how many")
NAMES = flags.DEFINE_multi_string("name", ["nobody"], "who")
class Kind(enum.Enum):
    SMALL = 1
    LARGE = 2
flags.DEFINE_enum_class("kind", Kind.SMALL, Kind, "which")
flags.DEFINE_string("unset", None, "nothing")

class Learner:
    def report(self):
        assert FLAGS["steps"].present is not None and FLAGS.unset is None
        return FLAGS.steps, NAMES.value, settings.RATE.value, FLAGS.kind is Kind.LARGE

def look(learner):
    print(FLAGS.steps, *learner.report())

def make_program():
    program = lp.Program("flags")
    learner = program.add_node(lp.CourierNode(Learner), label="learner")
    program.add_node(lp.PyNode(lambda client: (look(client), lp.stop()), learner), label="other")
    return program

def main(argv):
    lp.launch(make_program(), mode="process").wait()

if __name__ == "__main__":
    app.run(main)
"""
FLAGS = ["--steps=7", "--name=a", "--name=b", "--rate=0.5", "--kind=large"]


@pytest.mark.parametrize(
    "command",
    [["script.py", *FLAGS], ["-m", "lp_pipe", "launch", "script.py", "--", *FLAGS]],
    ids=["as a script", "lp_pipe launch"],
)
def test_code_in_nodes_reads_the_flags_of_the_script(command: list[str], tmp_path: Path) -> None:
    # Launchpad's programs do so. FLAGS did not pickle, and where the nodes import the script it was not parsed.
    (tmp_path / "settings.py").write_text(SETTINGS)
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=WITHIN_S, check=False
    )
    assert "[other/0] 7 7 ['a', 'b'] 0.5 True" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0
