"""A part of the checkpoints that dies between two calls: all parts go back, and the numbers stay the same."""

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.checkpoint import Checkpoints
from tests.integration.small import squared_error
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("no_leaks")
STEPS, SAVE_EVERY = 8, 3


@pytest.fixture
def without_torch() -> None:
    """Let templates preload torch: otherwise each stage needs a second to load it."""


class Life:
    """The process or thread that is a node at the moment: a file tells which one it is, so that it can be struck."""

    _events: ClassVar[dict[Path, threading.Event]] = {}  # in thread mode

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / f"life of {name}"

    def begin(self) -> threading.Event:
        """Called by the node; returns what it dies of as a thread."""
        event = self._events[self._path] = threading.Event()
        new = self._path.with_suffix(".new")
        new.write_text(f"{os.getpid()} {time.monotonic_ns()}")
        new.rename(self._path)
        return event

    def has_begun(self) -> bool:
        return self._path.exists()

    def kill(self) -> None:
        """Kill its process, which may have ended already."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def strike(self) -> None:
        """End it, and wait until it has been started again."""
        before = self._path.read_text()
        if self._pid == os.getpid():
            self._events[self._path].set()
        else:
            self.kill()
        until(lambda: self._path.read_text() != before)

    @property
    def _pid(self) -> int:
        return int(self._path.read_text().split()[0])


class Strikes:
    """A record of kills: each happens once, also if the trainer itself dies and is started again.

    wanted: names of nodes by point, such as {"step 3": ["counter"]}. pause_s: at every point.
    """

    def __init__(self, folder: Path, wanted: dict[str, Sequence[str]], pause_s: float = 0.0) -> None:
        self._folder, self._wanted, self._pause_s = folder, wanted, pause_s

    def at(self, point: str) -> None:
        time.sleep(self._pause_s)
        mark = self._folder / f"struck at {point}"
        if point not in self._wanted or mark.exists():
            return
        mark.touch()
        for name in self._wanted[point]:
            if name == "trainer":
                raise RuntimeError("the trainer dies")
            Life(self._folder, name).strike()

    def missing(self) -> list[str]:
        return [point for point in self._wanted if not (self._folder / f"struck at {point}").exists()]


class Mortal:
    """A node with a life."""

    def __init__(self, folder: Path, name: str) -> None:
        self._death = Life(folder, name).begin()

    def run(self) -> None:
        while not lp.stop_event().wait(0.01):
            if self._death.is_set():
                raise RuntimeError("struck")


class Stream(Mortal):
    """A stream that cannot begin anywhere."""

    def __init__(self, folder: Path) -> None:
        self._lock, self._generator = threading.Lock(), torch.Generator().manual_seed(0)
        self._recent: dict[int, tuple[Tensor, Tensor]] = {}
        super().__init__(folder, "feeder")

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        with self._lock:
            if step not in self._recent:
                draw = torch.randn(4, 8, generator=self._generator)
                self._recent[step] = draw[:, :6].clone(), draw[:, 6:].clone()
                self._recent.pop(step - 4, None)
            return self._recent[step]

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return {"generator": self._generator.get_state(), "recent": dict(self._recent)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._lock:
            self._generator.set_state(state["generator"])
            self._recent = dict(state["recent"])


class Counter(Mortal):
    def __init__(self, folder: Path) -> None:
        self._total = 0
        super().__init__(folder, "counter")

    def add(self, number: int) -> None:
        self._total += number

    def state_dict(self) -> dict[str, int]:
        return {"total": self._total}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._total = state["total"]


class Probe:
    """A part of the trainer's own: its place among the parts tells how far a save, or going back, has come."""

    def __init__(self, name: str, strikes: Strikes) -> None:
        self._name, self._strikes = name, strikes
        self._saves = self._loads = 0

    def state_dict(self) -> None:
        self._saves += 1
        self._strikes.at(f"{self._name} of save {self._saves}")

    def load_state_dict(self, state: None) -> None:
        self._loads += 1
        self._strikes.at(f"{self._name} of load {self._loads}")


def train_by_steps(
    checkpoints: Checkpoints, pipeline: pp.PipelineClient, counter: Any, strikes: Strikes, mirror_every: int | None
) -> None:
    for result in checkpoints.steps(pipeline, STEPS, save_every=SAVE_EVERY, mirror_every=mirror_every):
        strikes.at(f"use {result.step}")
        counter.add(result.step)
        strikes.at(f"step {result.step}")


def train_in_rounds(
    checkpoints: Checkpoints, pipeline: pp.PipelineClient, counter: Any, strikes: Strikes, mirror_every: int | None
) -> None:
    checkpoints.begin(pipeline)
    strikes.at("begun")
    is_done = False
    while not is_done:
        with checkpoints.recovering(pipeline):
            strikes.at(f"round {pipeline.current_step()}")
            for result in pipeline.steps(min(SAVE_EVERY, STEPS - pipeline.current_step())):
                strikes.at(f"use {result.step}")
                counter.add(result.step)
                strikes.at(f"step {result.step}")
            step = pipeline.current_step()
            checkpoints.save(step)
            strikes.at(f"saved {step}")
            is_done = step == STEPS


LOOPS = {"steps": train_by_steps, "rounds": train_in_rounds}


def train(
    loop: str,
    mirror_every: int | None,
    pipeline: pp.PipelineClient,
    feeder: Any,
    counter: Any,
    strikes: Strikes,
    folder: Path,
) -> None:
    first, last = Probe("begin", strikes), Probe("end", strikes)
    parts = {"first": first, "pipeline": pipeline, "feeder": feeder, "counter": counter, "last": last}
    checkpoints = Checkpoints(parts)
    strikes.at("built")
    LOOPS[loop](checkpoints, pipeline, counter, strikes, mirror_every)
    drawn = feeder.batch(STEPS)[0].sum().item()
    result = f"{pipeline.fingerprint()}, counted {counter.state_dict()['total']}, next {drawn}"
    (folder / "result").write_text(result)
    lp.stop()


def trained(mode: str, folder: Path, wanted: dict[str, Sequence[str]], **options: Any) -> str:
    """Return the weights, what was counted, and where the stream is."""
    folder.mkdir()
    strikes = Strikes(folder, wanted)
    launched(mode, folder, strikes, **options).wait(90)
    assert strikes.missing() == []
    return (folder / "result").read_text()


def launched(
    mode: str,
    folder: Path,
    strikes: Strikes,
    *,
    loop: str = "steps",
    schedule: str = "1f1b",
    mirror_every: int | None = None,
) -> lp.Run:
    layers = [pp.Layer(nn.Linear, 6, 8), pp.Layer(nn.Dropout, 0.5), pp.Layer(nn.Linear, 8, 2)]
    model = pp.Model(layers, squared_error, torch.optim.Adam)
    program = lp.Program("lost")
    with program.group("feeder", on_failure="restart"):
        feeder = program.add_node(lp.CourierNode(Stream, folder))
    options: dict[str, Any] = {"microbatches": 2, "inputs": feeder, "on_failure": "restart", "schedule": schedule}
    pipeline = pp.add_pipeline(program, model, stages=2, **options)
    with program.group("counter", on_failure="restart"):
        counter = program.add_node(lp.CourierNode(Counter, folder))
    with program.group("trainer", on_failure="restart"):
        program.add_node(lp.PyNode(train, loop, mirror_every, pipeline, feeder, counter, strikes, folder))
    return lp.launch(program, mode, run_dir=folder / "run")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return trained("thread", tmp_path_factory.mktemp("undisturbed") / "run", {})


# By loop: between which operations of the trainer a part dies; a number says which of several.
POINTS = {
    "steps": [
        "built",  # before the first checkpoint
        "begin of save 1",
        "end of save 1",  # between state_dict() and the write
        "step 0",
        "step 3",  # between two checkpoints
        "begin of save 2",
        "end of save 2",
        "step 7",  # after the last step
    ],
    "rounds": ["begun", "round 3", "step 4", "begin of save 3", "end of save 3", "saved 6", "saved 8"],
}


@pytest.mark.parametrize("victim", ["counter", pytest.param("feeder", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("loop", "point"), [(loop, point) for loop in POINTS for point in POINTS[loop]])
def test_a_part_that_dies_when_nobody_calls_it_does_not_change_the_numbers(
    tmp_path: Path, undisturbed: str, loop: str, point: str, victim: str
) -> None:
    assert trained("thread", tmp_path / "run", {point: [victim]}, loop=loop) == undisturbed


@pytest.mark.parametrize(
    "wanted",
    [
        {"step 3": ["counter", "feeder"]},
        {"step 3": ["counter"], "begin of load 1": ["counter"]},  # before it was restored
        {"step 3": ["counter"], "end of load 1": ["counter"]},  # after that, before anything has used it
        {"step 3": ["counter"], "begin of load 1": ["feeder"]},
        {"step 3": ["counter"], "step 4": ["counter"]},  # again, before the next checkpoint
        {"step 4": ["counter", "feeder", "trainer"]},
        {"use 4": ["counter"]},  # the trainer's own call ends it, so that it is started again, too
        {"begin of save 1": ["counter", "feeder", "trainer"]},
    ],
    ids=str,
)
def test_parts_that_die_one_after_another_do_not_change_the_numbers(
    tmp_path: Path, undisturbed: str, wanted: dict[str, Sequence[str]]
) -> None:
    assert trained("thread", tmp_path / "run", wanted) == undisturbed


@pytest.mark.parametrize("victim", ["counter", "feeder"])
def test_states_in_memory_are_gone_back_to(tmp_path: Path, undisturbed: str, victim: str) -> None:
    wanted = {"step 4": [victim], "begin of save 2": [victim]}
    assert trained("thread", tmp_path / "run", wanted, mirror_every=1) == undisturbed


def test_an_asynchronous_schedule_goes_back_too(tmp_path: Path) -> None:
    options: dict[str, Any] = {"schedule": "pipedream"}
    expected = trained("thread", tmp_path / "undisturbed", {}, **options)
    wanted = {"step 1": ["feeder"], "step 4": ["counter"], "end of save 3": ["feeder"]}
    assert trained("thread", tmp_path / "run", wanted, **options) == expected


@pytest.mark.parametrize(
    ("loop", "wanted"),
    [
        ("steps", {"step 0": ["counter"], "begin of save 2": ["feeder"], "end of save 3": ["counter"]}),
        pytest.param("steps", {"step 3": ["feeder"], "end of load 1": ["counter"]}, marks=pytest.mark.slow),
        pytest.param("steps", {"begin of save 1": ["counter"], "step 4": ["trainer"]}, marks=pytest.mark.slow),
        pytest.param("rounds", {"round 3": ["feeder"], "saved 6": ["counter"]}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_processes_that_are_killed_do_not_change_the_numbers(
    tmp_path: Path, undisturbed: str, loop: str, wanted: dict[str, Sequence[str]]
) -> None:
    assert trained("process", tmp_path / "run", wanted, loop=loop) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("round_number", range(6))
def test_kills_at_random_moments_do_not_change_the_numbers(tmp_path: Path, undisturbed: str, round_number: int) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    folder = tmp_path / "run"
    folder.mkdir()
    run = launched("process", folder, Strikes(folder, {}, pause_s=0.1), loop=rng.choice(list(LOOPS)))
    for victim in ("counter", "feeder"):
        until(Life(folder, victim).has_begun)
    for _ in range(3):
        time.sleep(rng.uniform(0, 0.7))
        if not run.is_over:
            Life(folder, rng.choice(["counter", "feeder"])).kill()
    run.wait(90)
    assert (folder / "result").read_text() == undisturbed
