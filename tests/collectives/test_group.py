"""The nodes of a launched program meet, compute together, and learn of each other's ends, as threads and processes."""

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import lp_pipe as lp
from lp_pipe.collectives.backend import GenerationOver
from lp_pipe.collectives.group import Group

WITHIN_S = 20.0

pytestmark = pytest.mark.usefixtures("warm_template")  # which has imported torch, as every node must


def program_of(count: int, function: Any, *args: Any, **options: Any) -> lp.Program:
    program = lp.Program("collectives")
    with program.group("ranks", **options):
        for _ in range(count):
            program.add_node(lp.PyNode(function, *args))
    return program


def reduce_once(folder: Path, backend: str) -> None:
    group = Group.meet("ranks", backend=backend)
    total = group.all_reduce({"a": torch.full((3,), float(group.rank)), "b": torch.tensor([group.rank])})
    (folder / str(group.rank)).write_text(f"{total['a'].tolist()} {total['b'].tolist()} {type(group.backend).__name__}")
    group.backend.barrier()


@pytest.mark.parametrize(
    ("mode", "backend", "chosen"),
    [
        ("thread", "auto", "InprocBackend"),
        ("thread", "direct", "DirectBackend"),
        ("process", "auto", "ShmBackend"),
        ("process", "direct", "DirectBackend"),
        ("process", "gloo", "RanksBackend"),
        ("multi_host", "auto", "DirectBackend"),
    ],
)
def test_nodes_meet_and_add_up(launched: Any, mode: str, backend: str, chosen: str, tmp_path: Path) -> None:
    launched(program_of(2, reduce_once, tmp_path, backend), mode).wait(WITHIN_S)
    assert [(tmp_path / name).read_text() for name in "01"] == [f"[1.0, 1.0, 1.0] [1] {chosen}"] * 2


def die_in_the_first_generation(folder: Path, how: str) -> None:
    group = Group.meet("ranks")
    if group.generation == 0 and group.rank == 1:
        if how == "raise":
            raise ValueError("no luck")
        kill = threading.Timer(random.uniform(0.02, 0.2), os.kill, (os.getpid(), signal.SIGKILL))
        kill.start()  # in any of the calls below
    while group.generation == 0:
        try:
            group.all_reduce(torch.ones(10_000))
            group.all_gather(torch.ones(10))
            group.backend.agree(1)
        except GenerationOver as error:
            assert "ranks/1" in str(error)
            group = Group.meet("ranks", group.generation + 1)
    total = group.all_reduce(torch.ones(2))
    (folder / str(group.membership.members[group.rank][-1])).write_text(f"{total.tolist()}")
    group.backend.barrier()


@pytest.mark.parametrize(
    ("mode", "how", "on_failure", "left"),
    [("thread", "raise", "ignore", "02"), ("thread", "raise", "restart", "012"), ("process", "kill", "restart", "012")],
)
def test_survivors_of_a_death_meet_again(
    launched: Any, mode: str, how: str, on_failure: str, left: str, tmp_path: Path
) -> None:
    options = {"on_failure": on_failure, "max_restarts": 1} if on_failure == "restart" else {"on_failure": on_failure}
    launched(program_of(3, die_in_the_first_generation, tmp_path, how, **options), mode).wait(WITHIN_S)
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.name.isdigit()} == {
        name: f"[{len(left)}.0, {len(left)}.0]" for name in left
    }
