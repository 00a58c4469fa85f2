"""Nodes that have no room, or have lost their host, are started on a host that joins the running program."""

import os
from pathlib import Path
from typing import Any

import psutil
import pytest

import lp_pipe as lp
from lp_pipe.launch.hosts import elastic_hosts
from tests.launch.test_elastic import Patient
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture(autouse=True)
def _hosts_come_back_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_hosts, "_BRING_BACK_EVERY_S", 0.2)


class Where:
    """A node that tells its process, and its agent's."""

    def ask(self) -> tuple[int, int]:
        return os.getpid(), psutil.Process().parent().ppid()


def make_program(count: int, **resources: Any) -> lp.Program:
    program = lp.Program("late")
    options: dict[str, Any] = {"on_failure": "ignore", "least_nodes": 1, "least_started": 1}
    with program.group("where", resources=lp.Resources(**resources), **options):
        for _ in range(count):
            program.add_node(lp.CourierNode(Where))
    return program


def states(run: lp.Run) -> list[str]:
    return [row["state"] for row in run.status()["where"]]


def test_nodes_of_a_lost_host_start_on_the_host_that_comes_and_so_do_those_that_had_no_room(tmp_path: Path) -> None:
    engine = Patient("2")
    program = make_program(3, placement="spread")
    with lp.launch(program, "multi_host", engine=engine, run_dir=tmp_path, grace=2.0) as run:
        assert states(run)[2] == "waiting"
        with pytest.raises(lp.Unavailable, match="where/2"):
            run.client("where", 2).ask()
        before = [run.client("where", index).ask() for index in range(2)]
        psutil.Process(before[1][1]).kill()
        until(lambda: states(run) == ["running", "failed", "waiting"])
        engine.may_come_back.set()
        until(lambda: states(run).count("running") == 2)
        late = states(run).index("running", 1)  # where/1, or where/2 if something of where/1 might be left
        after = run.client("where", late).ask()
        assert run.client("where", 0).ask() == before[0]
        assert after[0] != before[1][0] and after[1] not in (before[0][1], before[1][1])
        assert not psutil.pid_exists(before[1][0])
    assert "running" not in states(run) and "waiting" not in states(run)


def test_without_room_on_this_host_nodes_wait_and_the_least_number_is_an_error(tmp_path: Path) -> None:
    memory = int(0.4 * psutil.virtual_memory().total)
    with lp.launch(make_program(4, memory=memory), "process", run_dir=tmp_path) as run:
        until(lambda: states(run) == ["running", "running", "waiting", "waiting"])
    with pytest.raises(ValueError, match="'where'"):
        lp.launch(make_program(4, memory=4 * memory), "process", run_dir=tmp_path)
