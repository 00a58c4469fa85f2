"""`group(on_hang=…)`: a node that makes no progress is killed, and started again or the program's failure."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lp_pipe as lp
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("without_torch")

LIMIT_S = 1.0
WITHIN_S = 30.0


class Server:
    """Hangs in its first life, at the first call; a file tells the lives apart."""

    def __init__(self, flag: Path) -> None:
        self._is_first = not flag.exists()
        flag.touch()

    def ask(self) -> str:
        if self._is_first:
            lp.wait_for_stop()  # in thread mode nothing else ends it, and the thread would be left
        return "answered"

    def freeze(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def is_first(self) -> bool:
        return self._is_first


def served(flag: Path, on_hang: str, client: Callable[..., None], **options: Any) -> lp.Program:
    program = lp.Program("hung")
    with program.group("server", on_hang=on_hang, **options):
        server = program.add_node(lp.CourierNode(Server, flag))
    program.add_node(lp.PyNode(client, server), label="client")
    return program


def ask_until_answered(server: Any) -> None:
    while True:
        try:
            assert server.ask() == "answered"
        except lp.Unavailable:  # it was killed during the call
            continue
        lp.stop()
        return


def test_a_node_whose_handler_hangs_is_started_again(mode: str, tmp_path: Path) -> None:
    program = served(tmp_path / "flag", "restart", ask_until_answered)
    run = lp.launch(program, mode, run_dir=tmp_path / "run", hang_after=LIMIT_S, grace=0.2)
    run.wait(WITHIN_S)
    assert run.status()["server"][0]["restarts"] == 1
    # The one that waited is not at fault, although it made no progress either.
    assert run.status()["client"][0]["restarts"] == 0


@pytest.mark.parametrize("options", [{"mode": "process"}, {"mode": "multi_host", "hosts": "2"}])
def test_a_call_right_after_the_kill_waits_for_the_next_process(options: dict[str, Any], tmp_path: Path) -> None:
    def call_twice(server: Any) -> None:
        with pytest.raises(lp.Unavailable):
            server.ask()
        assert server.is_first() is False  # it raised Unavailable: the dying process had reset the connection
        lp.stop()

    program = served(tmp_path / "flag", "restart", call_twice)
    run = lp.launch(program, run_dir=tmp_path / "run", hang_after=LIMIT_S, grace=0.2, **options)
    run.wait(WITHIN_S)
    assert run.status()["server"][0]["restarts"] == 1


def test_a_node_that_hangs_is_the_failure_of_its_program(mode: str, tmp_path: Path) -> None:
    program = served(tmp_path / "flag", "stop", lambda server: server.ask())
    with pytest.raises(lp.NodeError) as caught:
        lp.launch(program, mode, run_dir=tmp_path / "run", hang_after=LIMIT_S, grace=0.2).wait(WITHIN_S)
    assert (caught.value.label, caught.value.index) == ("server", 0)
    assert "ask()" in str(caught.value) and "test_on_hang.py" in str(caught.value), "where it hangs"


def test_restarts_after_hangs_are_limited(tmp_path: Path) -> None:
    def hang_again(server: Any) -> None:
        while True:
            try:
                server.freeze()
            except lp.Unavailable:
                continue

    program = served(tmp_path / "flag", "restart", hang_again, max_restarts=1)
    with pytest.raises(lp.NodeError) as caught:
        lp.launch(program, "process", run_dir=tmp_path / "run", hang_after=2.5, grace=0.2).wait(WITHIN_S)
    assert caught.value.label == "server"


def test_a_stopped_process_is_reported_and_started_again_though_no_node_waits_for_it(tmp_path: Path) -> None:
    flag = tmp_path / "flag"

    def idle(server: Any) -> None:
        while True:
            try:
                if not server.is_first():
                    break
            except lp.Unavailable:
                continue
            lp.wait_for_stop(0.1)
        lp.stop()

    program = lp.Program("stopped")
    with program.group("server", on_hang="restart"):
        server = program.add_node(lp.CourierNode(Server, flag))
    program.add_node(lp.CourierNode(Server, flag), label="other")
    with lp.launch(program, "process", run_dir=tmp_path / "run", hang_after=2.5, grace=0.2) as run:
        for label in ("server", "other"):
            run.client(label).is_first()
            os.kill(run.status()[label][0]["pid"], signal.SIGSTOP)
        try:
            until(lambda: run.status()["server"][0]["restarts"] == 1)
            until(lambda: "not answering for" in (run.status()["other"][0]["waiting"] or ""))
            assert run.client(server).is_first() is False
            text = (run.run_dir / "hangs.log").read_text()
            assert "node other/0" in text and "SIGSTOP" in text, "on_hang='report' is the default"
            assert run.status()["other"][0]["restarts"] == 0
        finally:
            os.kill(run.status()["other"][0]["pid"], signal.SIGCONT)
        until(lambda: run.status()["other"][0]["waiting"] is None)


def test_a_node_that_works_is_left_alone(no_leaks: None, tmp_path: Path) -> None:
    limit_s = 2.0  # eight times as long as a call, for machines with other work

    class Busy:
        def work(self) -> None:
            time.sleep(0.25)

    def call_for_long(server: Any) -> None:
        began = time.monotonic()
        while time.monotonic() < began + 1.5 * limit_s:
            server.work()
        lp.stop()

    program = lp.Program("busy")
    with program.group("server", on_hang="stop"):
        server = program.add_node(lp.CourierNode(Busy))
    program.add_node(lp.PyNode(call_for_long, server), label="client")
    lp.launch(program, "process", run_dir=tmp_path, hang_after=limit_s).wait(WITHIN_S)


@pytest.mark.parametrize("value", ["kill", None, True])
def test_an_unknown_policy_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="on_hang"), lp.Program("x").group("server", on_hang=value):
        pass


def test_a_policy_without_a_limit_is_refused() -> None:
    program = served(Path("flag"), "restart", ask_until_answered)
    with pytest.raises(ValueError, match=r"'server'.*hang_after"):
        lp.launch(program, "thread", hang_after=None)
