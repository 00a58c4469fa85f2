"""A run on as many hosts as there are: the program is built again when one is lost, and when one comes."""

import functools
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import lp_pipe as lp
from lp_pipe.launch import elastic
from lp_pipe.launch.elastic import HostCount
from lp_pipe.launch.engines import Invitation, LocalEngine, StartedAgent
from tests.launch.engines.programs import agent_of, are_gone, grown
from tests.waiting import until

WITHIN_S = 30.0

pytestmark = pytest.mark.usefixtures("no_leaks")


class Where:
    """A node that tells on which of how many hosts it runs."""

    def __init__(self, num_hosts: int) -> None:
        self._num_hosts = num_hosts

    def ask(self) -> tuple[int, int, int]:
        """With its process and its agent's."""
        return self._num_hosts, os.getpid(), psutil.Process().parent().ppid()


def make_program(num_hosts: int, **options: Any) -> lp.Program:
    program = lp.Program("elastic")
    with program.group("where", **options):
        for _ in range(num_hosts):
            program.add_node(lp.CourierNode(Where, num_hosts))
    return program


def running(function: Callable[[], None]) -> Callable[[int], lp.Program]:
    """A program of one node that calls the function, however many hosts there are."""

    def make(num_hosts: int) -> lp.Program:
        program = lp.Program("one")
        program.add_node(lp.PyNode(function), label="one")
        return program

    return make


class Patient(LocalEngine):
    """An elastic run whose hosts come back when they are told to."""

    def __init__(self, hosts: str) -> None:
        super().__init__(hosts)
        self.may_come_back = threading.Event()

    def start_again(self, invitation: Invitation, name: str) -> StartedAgent | None:
        return super().start_again(invitation, name) if self.may_come_back.is_set() else None

    def start(self, invitation: Invitation) -> Any:
        self.may_come_back.set()
        started = super().start(invitation)
        self.may_come_back.clear()
        return started


def checkpoint(run: lp.ElasticRun, step: int) -> None:
    """Save a checkpoint as a trainer would."""
    (run.run_dir / "checkpoints" / f"step-{step:08}").mkdir(parents=True)


def everywhere(run: lp.ElasticRun) -> list[tuple[int, int, int]]:
    return [run.run.client("where", index).ask() for index in range(run.num_hosts)]


def launched(make: Callable[[int], lp.Program], hosts: str, num_hosts: str, **options: Any) -> tuple[Any, Patient]:
    engine = Patient(hosts)
    return lp.launch_elastic(make, num_hosts, engine=engine, grace=2.0, **options), engine


def test_a_lost_host_leaves_a_smaller_program_and_its_return_a_larger_one_with_the_next_checkpoint() -> None:
    run, engine = launched(make_program, "3", "2:3")
    with run:
        three = everywhere(run)
        psutil.Process(three[2][2]).kill()
        until(lambda: run.num_hosts == 2)
        two = everywhere(run)
        assert [row[0] for row in (*three, *two)] == [3, 3, 3, 2, 2]
        assert [row[2] for row in two] == [row[2] for row in three[:2]]  # agents stay
        assert are_gone([row[1] for row in three])
        checkpoint(run, 1)
        engine.may_come_back.set()
        until(lambda: len(run._hosts.up()) == 3)
        assert everywhere(run) == two  # until there is a checkpoint that is newer than the host
        until(lambda: grown(run, 3))
        assert [row[0] for row in everywhere(run)] == [3, 3, 3]


@pytest.mark.slow
def test_a_spare_host_takes_the_nodes_of_a_lost_one_and_the_others_stay() -> None:
    run, _ = launched(lambda n: make_program(n, on_failure="restart"), "3", "1:2")
    with run:
        before = everywhere(run)
        psutil.Process(before[1][2]).kill()
        until(lambda: run.status()["where"][1]["restarts"] == 1)
        after = everywhere(run)
        assert after[0] == before[0] and after[1][1] != before[1][1] and run.num_hosts == 2


def test_a_function_that_exits_instead_of_building_the_smaller_program_ends_the_run_so() -> None:
    """The exit ended only the thread that builds: `wait` returned as after a good end."""

    def make(num_hosts: int) -> lp.Program:
        if num_hosts < 2:
            raise SystemExit("not on one host")
        return make_program(num_hosts)

    run, _ = launched(make, "2", "1:2")
    psutil.Process(everywhere(run)[1][2]).kill()
    with pytest.raises(SystemExit, match="not on one host"):
        run.wait(WITHIN_S)


@pytest.mark.slow
def test_too_few_hosts_end_the_run_and_say_how_many_are_needed() -> None:
    run, _ = launched(make_program, "2", "2:2", join_timeout=15.0)
    psutil.Process(everywhere(run)[1][2]).kill()
    with pytest.raises(lp.LaunchError, match=r"1 hosts are up, at least 2 are needed(.|\n)*local1"):
        run.wait(WITHIN_S)


@pytest.mark.slow
def test_a_failure_of_the_program_itself_ends_it() -> None:
    def fail() -> None:
        raise ValueError("mine")

    run, _ = launched(running(fail), "2", "1:2")
    with pytest.raises(lp.NodeError, match="ValueError: mine"):
        run.wait(WITHIN_S)


@pytest.mark.slow
def test_so_does_one_long_after_the_loss_of_a_host_that_it_did_not_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It began again, once: the loss had been counted, and nobody looked whether the program had survived it.
    monkeypatch.setattr(elastic, "_ECHO_S", 0.0)

    def fail() -> None:
        with (tmp_path / "starts").open("a") as starts:
            starts.write("x")
        until((tmp_path / "fail").exists)
        raise ValueError("mine")

    run, _ = launched(running(fail), "2", "1:1")
    until((tmp_path / "starts").exists)
    agent_of("local1").kill()  # the spare one
    until(lambda: run._losses == 1)
    (tmp_path / "fail").touch()
    with pytest.raises(lp.NodeError, match="ValueError: mine"):
        run.wait(WITHIN_S)
    assert (tmp_path / "starts").read_text() == "x"


@pytest.mark.slow
def test_a_program_that_stops_itself_is_over(tmp_path: Path) -> None:
    run, _ = launched(running(lp.stop), "1", "1:2", run_dir=tmp_path)
    run.wait(WITHIN_S)
    assert run.is_over and run.run_dir == tmp_path


@pytest.mark.slow
def test_fewer_hosts_than_may_be_are_enough_from_the_start() -> None:
    class Half(Patient):
        def start_again(self, invitation: Invitation, name: str) -> StartedAgent | None:
            nobody = Invitation(["127.0.0.1:9"], b"no credentials", invitation.log_dir)
            return super().start_again(nobody if name == "local1" else invitation, name)

    with lp.launch_elastic(make_program, "1:2", engine=Half("2")) as run:
        assert run.num_hosts == 1 and everywhere(run)[0][0] == 1


def test_numbers_of_hosts_are_written_as_torchrun_has_them() -> None:
    assert HostCount.parse("2:4") == (2, 4)
    for wrong in ("4", "4:2", "0:1", "a:b", ""):
        with pytest.raises(ValueError, match="write MIN:MAX"):
            HostCount.parse(wrong)


def test_what_makes_no_sense_is_refused_before_a_host_is_asked_for() -> None:
    for options, error in (
        ({"make_program": lambda num_hosts: None}, "make_program returns a Program, not None of type NoneType"),
        ({"hang_after": 0}, "hang_after=0: seconds are needed"),
        ({"engine": "nomad"}, "unknown engine 'nomad'"),
    ):
        with pytest.raises((TypeError, ValueError), match=error):
            lp.launch_elastic(**{"make_program": make_program, "num_hosts": "1:2", **options})  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_stop_while_hosts_are_missing_ends_at_once() -> None:
    run, _ = launched(make_program, "2", "2:2")
    psutil.Process(everywhere(run)[1][2]).kill()
    until(lambda: run.run.is_over)
    began = time.monotonic()
    run.stop()
    assert time.monotonic() - began < 10


class Lost:
    """A stand-in for ElasticHosts: its host is lost once the node fails, and no other one comes."""

    losses = 0
    lost_at = math.inf

    def __init__(self) -> None:
        self.is_waited_for = threading.Event()

    def up(self) -> dict[str, Any]:
        return {"host": None}

    def wait_for(self, least: int, is_first: bool, is_stopping: threading.Event) -> dict[str, Any]:
        if not is_first:
            self.is_waited_for.set()
            is_stopping.wait(WITHIN_S)
        return self.up()

    def close(self, patience_s: float) -> None:
        """Nothing is left."""


def test_a_stop_while_hosts_are_waited_for_is_no_failure(tmp_path: Path) -> None:
    """Regression: the lost host's error was raised after a stop in that moment."""

    def fail() -> None:
        hosts.losses += 1
        raise ConnectionError("the host is lost")

    hosts: Any = Lost()
    start = functools.partial(lp.launch, mode="thread", run_dir=tmp_path)
    run = elastic.ElasticRun(running(fail), HostCount(1, 1), hosts, lambda program, agents, used: start(program))
    assert hosts.is_waited_for.wait(WITHIN_S)
    run.stop()
    run.wait(WITHIN_S)
