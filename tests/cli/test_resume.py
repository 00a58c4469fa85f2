"""`lp_pipe launch --resume`: with the target and flags of the run, and a word about what differs."""

import json
from pathlib import Path

import pytest

from tests.cli.commands import Command

TRAIN = """
import lp_pipe as lp
from lp_pipe.checkpoint import Checkpoints

class Trainer:
    def __init__(self, steps, fail_at):
        self.steps, self.fail_at, self.done = steps, fail_at, 0

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]

    def run(self):
        checkpoints = Checkpoints({"trainer": self})
        checkpoints.restore()
        print("begins at", self.done)
        while self.done < self.steps:
            self.done += 1
            checkpoints.save(self.done)
            if self.done == self.fail_at:
                raise ValueError("no more")
        print("ends at", self.done)

def make_program(steps: int = 9, fail_at: int = 0):
    program = lp.Program("train")
    program.add_node(lp.PyClassNode(Trainer, steps, fail_at), label="trainer")
    return program

if __name__ == "__main__":
    lp.launch(make_program(fail_at=2), "thread", run_dir="by_script").wait()
"""


@pytest.fixture(autouse=True)
def train(folder: Path) -> None:
    (folder / "train.py").write_text(TRAIN)


def test_a_failed_run_says_how_to_go_on_and_that_needs_no_flags(command: Command, folder: Path) -> None:
    failed = command("launch", "train.py", "--mode=thread", "--grace=3", "--", "--steps=4", "--fail_at=2")
    assert failed.returncode == 1
    (run,) = (folder / "runs").iterdir()
    lines = failed.stderr.splitlines()
    assert len(lines) <= 15
    assert lines[-1] == f"to go on from its newest checkpoint: lp_pipe launch --resume=runs/{run.name}"
    first = json.loads((run / "run.json").read_text())
    assert (first["outcome"], first["exit_status"]) == ("failed", 1)
    assert first["failure"] == "node trainer/0 failed: ValueError: no more"

    resumed = command(*lines[-1].split()[-2:])
    assert resumed.returncode == 0
    assert resumed.stderr == ""
    assert "[trainer/0] begins at 2" in resumed.stdout and "[trainer/0] ends at 4" in resumed.stdout
    second = json.loads((run / "run.json").read_text())
    assert second["flags"] == first["flags"]
    assert first["flags"]["options"] == {"mode": "thread", "grace": 3.0}
    assert (second["mode"], second["outcome"], second["exit_status"]) == ("thread", "done", 0)
    assert (second["parent"]["started"], second["parent"]["outcome"]) == (first["started"], "failed")
    assert (second["cwd"], second["versions"].keys() >= {"python", "lp_pipe"}) == (str(folder), True)

    other = command("launch", "train.py", f"--resume={run.name}", "--mode=thread", "--", "--steps=5")
    assert other.returncode == 0
    (said,) = other.stderr.splitlines()
    assert "--grace the default (was 3.0)" in said and "-- --steps=5 (was -- --steps=4 --fail_at=2)" in said
    assert "--mode" not in said and "TARGET" not in said
    assert "[trainer/0] ends at 5" in other.stdout

    (folder / "elsewhere").mkdir()
    there = command("launch", f"--resume={run}", "--grace=1", "--", "--steps=6")
    assert there.returncode == 0
    assert "--grace 1.0 (was the default)" in there.stderr and "[trainer/0] ends at 6" in there.stdout


def test_a_run_of_a_script_needs_its_target(command: Command, brief_command: Command, folder: Path) -> None:
    (folder / "by_script").mkdir()
    record = {"program": "train", "mode": "thread", "run_dir": "x", "host": "h", "pid": 1, "pid_started": 1}
    record |= {"started": 1.0, "ended": 2.0, "control": "", "socket_dir": ""}
    (folder / "by_script" / "run.json").write_text(json.dumps(record))
    refused = brief_command("launch", "--resume=by_script")
    assert refused.returncode == 2 and "TARGET" in refused.stderr
    done = command("launch", "train.py", "--resume=by_script", "--mode=thread")
    assert done.returncode == 0
    (said,) = done.stderr.splitlines()
    assert said.startswith("starting at step 0")
    assert brief_command("launch", "--resume=no_run").returncode == 2
