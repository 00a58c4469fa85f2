"""Functions that do not run when a node calls them, or that return twice."""

import os
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lp_pipe as lp

WITHIN_S = 20.0


async def train() -> None:
    raise ValueError("nobody awaits this")


def batches() -> Iterator[int]:
    yield 1


async def replies() -> AsyncIterator[int]:
    yield 1


class Runs:
    async def run(self) -> None:
        raise ValueError("nobody awaits this")


def failure_of(node: lp.Node[Any], mode: str = "thread") -> lp.NodeError:
    program = lp.Program("unrun")
    program.add_node(node, label="node")
    with pytest.raises(lp.NodeError) as caught:
        lp.launch(program, mode).wait(WITHIN_S)
    return caught.value


# Each of these used to end well at once.
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: lp.PyNode(train), "train is async.*asyncio.run"),
        (lambda: lp.PyNode(lambda: train()), "is async"),
        (lambda: lp.PyNode(batches), "batches is a generator.*iterate"),
        (lambda: lp.PyNode(replies), "replies is an async generator.*iterate"),
        (lambda: lp.PyClassNode(Runs), "Runs.run is async"),
        (lambda: lp.CourierNode(Runs), "Runs.run is async"),
        (lambda: lp.CourierNode(train), "train is async"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_what_only_looks_like_a_call_is_refused(make: Callable[[], lp.Node[Any]], says: str) -> None:
    error = failure_of(make())
    assert error.type_name == "TypeError"
    assert re.search(says, error.message)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_child_that_run_forks_is_no_second_node(tmp_path: Path, without_torch: None) -> None:
    """Regression: the child reported its own end as the node's, and withdrew the node's server."""

    class Forks:
        def run(self) -> None:
            statuses = []
            for leave in (lambda: None, lambda: {}["in the child"], lambda: exit(4), lambda: exit("why")):
                child = os.fork()
                if child == 0:
                    leave()
                    return
                statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            (tmp_path / "statuses").write_text(repr(statuses))
            while not (tmp_path / "asked").exists():
                lp.wait_for_stop(0.01)

        def ask(self) -> str:
            return "served"

    def ask(server: Any) -> None:
        while not (tmp_path / "statuses").exists():
            lp.wait_for_stop(0.01)
        (tmp_path / "asked").write_text(server.ask())

    program = lp.Program("forks")
    forks = program.add_node(lp.CourierNode(Forks), label="forks")
    program.add_node(lp.PyNode(ask, forks), label="asks")
    lp.launch(program, "process", run_dir=tmp_path / "run").wait(WITHIN_S)
    assert (tmp_path / "statuses").read_text() == "[0, 1, 4, 1]"
    assert (tmp_path / "asked").read_text() == "served"
    assert "KeyError: 'in the child'" in (tmp_path / "run" / "logs" / "forks-0.log").read_text()
