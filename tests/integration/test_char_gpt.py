"""The demo's program, as a user runs it: one program, the same parameters in every mode, cut and schedule."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import psutil
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "char_gpt.py"
SMALL = ("--width=24", "--layers=2", "--heads=2", "--batch_size=8", "--context=32", "--sample_length=5")


def command(*flags: str, mode: str = "process") -> list[str]:
    return [sys.executable, "-m", "lp_pipe", "launch", str(EXAMPLE), f"--mode={mode}", "--", "--seed=1", *flags]


def fingerprint(*flags: str, mode: str, cwd: Path) -> str:
    done = subprocess.run(command(*flags, mode=mode), cwd=cwd, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = re.findall(r"parameters sha256 ([0-9a-f]{64})", done.stdout)
    return str(found)


@pytest.mark.slow  # as the README's program in every mode: tests/test_readme.py
def test_modes_cuts_and_schedules_give_the_same_parameters(tmp_path: Path) -> None:
    cases = [("thread", 3, "1f1b"), ("process", 2, "gpipe")]
    assert (
        len(
            {
                fingerprint(
                    *SMALL, "--steps=3", f"--stages={stages}", f"--schedule={schedule}", mode=mode, cwd=tmp_path
                )
                for mode, stages, schedule in cases
            }
        )
        == 1
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_modes_cuts_and_schedules_give_the_same_parameters_in_full_size(tmp_path: Path) -> None:
    assert (
        len(
            {
                fingerprint("--steps=20", f"--stages={stages}", f"--schedule={schedule}", mode=mode, cwd=tmp_path)
                for mode, stages, schedule in product(("thread", "process"), (1, 2, 3), ("gpipe", "1f1b"))
            }
        )
        == 1
    )


class Demo:
    """A demo that trains until it is disturbed; its events, as `--json` prints them."""

    def __init__(self, cwd: Path, *flags: str) -> None:
        arguments = command(*SMALL, *(flags or ("--steps=100000", "--eval_every=4")))
        arguments.insert(arguments.index("--"), "--json")
        self.process = subprocess.Popen(arguments, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.wait_for_step(5)
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def wait_for_step(self, step: int) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            if event["event"] == "metrics" and (event["step"] or 0) >= step:
                return
        raise AssertionError("the demo ended early")

    def node(self, name: str) -> psutil.Process:
        label, index = name.split("/")
        (found,) = [p for p in self.family if p.name() == f"lp:{label}/{index}"[:15]]
        return found

    def end(self) -> tuple[int, str]:
        """Exit status and stderr."""
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors

    def survivors(self, patience_s: float) -> list[psutil.Process]:
        _, alive = psutil.wait_procs(self.family, timeout=patience_s)
        return list(alive)


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    running = Demo(tmp_path)
    yield running
    for process in (running.process.pid, *(p.pid for p in running.family)):
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue
    running.process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["feeder/0", "stages/0", "stages/1", "evaluator/0", "trainer/0"])
def test_killing_any_node_ends_the_demo_and_names_it(demo: Demo, victim: str) -> None:
    demo.node(victim).kill()
    status, errors = demo.end()
    assert status == 1
    assert victim in errors.splitlines()[0]
    assert "SIGKILL" in errors
    assert len(errors.splitlines()) <= 20
    assert not demo.survivors(1)


@pytest.mark.slow
def test_killing_the_launcher_leaves_no_process(demo: Demo) -> None:
    demo.process.kill()
    assert not demo.survivors(15)


def test_ctrl_c_ends_the_demo_and_says_what_was_saved(demo: Demo) -> None:
    demo.process.send_signal(signal.SIGINT)
    status, errors = demo.end()
    assert status == 130
    assert "Traceback" not in errors
    assert "checkpoint" in errors
    assert not demo.survivors(1)


RESTARTED = ("--steps=60", "--eval_every=4", "--on_failure=restart")


@pytest.mark.slow
@pytest.mark.parametrize(
    "victims",
    [("feeder/0",), ("stages/0",), ("stages/1",), ("evaluator/0",), ("trainer/0",), ("evaluator/0", "feeder/0")],
    ids=" and ".join,
)
def test_with_restarts_a_killed_node_changes_nothing(victims: tuple[str, ...], tmp_path: Path) -> None:
    undisturbed = fingerprint(*SMALL, *RESTARTED[:2], mode="thread", cwd=tmp_path)
    demo = Demo(tmp_path, *RESTARTED)
    processes = [demo.node(victim) for victim in victims]
    for step, process in zip((10, 20), processes, strict=False):
        demo.wait_for_step(step)
        process.kill()
    demo.family += psutil.Process(demo.process.pid).children(recursive=True)
    output, errors = demo.process.communicate(timeout=100)
    assert demo.process.returncode == 0, errors
    assert re.findall(r"parameters sha256 ([0-9a-f]{64})", output) == [undisturbed]
    assert not demo.survivors(5)
