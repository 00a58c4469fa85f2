"""`breakpoint()` in a node that is a process, and `input()`, which has no terminal there."""

import io
import os
import pdb
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import lp_pipe as lp
from lp_pipe.launch.debuggers import DebuggerSession
from lp_pipe.launch.processes.node_stdin import waiting_nodes
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("without_torch")

WITHIN_S = 30.0


def launched(tmp_path: Path, function: Callable[[], None], **options: object) -> lp.Run:
    program = lp.Program("debugged")
    program.add_node(lp.PyNode(function), label="x")
    return lp.launch(program, "process", run_dir=tmp_path, **options)  # type: ignore[arg-type]


def talk(run: lp.Run, commands: str, node: str = "x/0") -> str:
    """Return what a user sees who attaches, types these lines, and leaves."""
    until(lambda: node in waiting_nodes(run.run_dir), WITHIN_S)
    reading, writing = os.pipe()
    os.write(writing, commands.encode())
    os.close(writing)
    shown = io.StringIO()
    session = DebuggerSession(run.run_dir, node)
    try:
        with os.fdopen(reading) as typed:
            shown.write(session.talk(typed, shown, stay=True))
    finally:
        session.connection.close()
    return shown.getvalue()


def test_a_breakpoint_in_a_node_is_a_debugger_for_who_attaches(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        answer = 41
        breakpoint()
        print("the answer is", answer)

    run = launched(tmp_path, work)
    shown = talk(run, "p answer + 1\n")
    assert (
        "(Pdb) 42\n(Pdb) " in shown and "test_node_stdin.py(" in shown and shown.endswith("still waits in its debugger")
    )
    assert waiting_nodes(run.run_dir)["x/0"]["place"].endswith("in work")
    shown = talk(run, "answer = 7\nc\n")  # attached once more
    assert shown.startswith("42\n(Pdb) ") and shown.endswith("the node's process has ended")
    run.wait(WITHIN_S)
    assert waiting_nodes(run.run_dir) == {}
    out, err = capfd.readouterr()
    assert "[x/0] the answer is 7\n" in out
    assert f"lp_pipe attach {tmp_path.name} x/0" in err


def test_pdb_by_itself_and_post_mortem_are_attached_to_as_well(tmp_path: Path) -> None:
    def work() -> None:
        import pdb

        pdb.set_trace()
        try:
            raise KeyError("lost")
        except KeyError as error:
            pdb.post_mortem(error.__traceback__)

    run = launched(tmp_path, work)
    shown = talk(run, "c\np 6 * 7\nq\n")
    assert "KeyError" in shown and "42" in shown and shown.endswith("the node's process has ended")
    run.wait(WITHIN_S)


def test_a_stop_lets_the_node_go_on(tmp_path: Path) -> None:
    def work() -> None:
        breakpoint()
        (lp.context().run_dir / "went on").touch()

    run = launched(tmp_path, work, grace=20.0)
    until(lambda: waiting_nodes(run.run_dir))
    run.stop()
    assert (tmp_path / "went on").exists()
    assert run.status()["x"][0]["state"] == "stopped"


def test_a_node_in_a_debugger_is_no_hang_and_one_terminal_has_it(tmp_path: Path) -> None:
    class Server:
        def __init__(self) -> None:
            import pdb  # noqa: F401  # takes a while on a busy machine, and until then `ask` makes no progress

        def ask(self) -> int:
            breakpoint()
            return 1

    def client(server: lp.CourierClient) -> None:
        assert server.ask() == 1
        lp.stop()

    program = lp.Program("debugged")
    with program.group("server", on_hang="stop"):
        server = program.add_node(lp.CourierNode(Server))
    program.add_node(lp.PyNode(client, server), label="client")
    run = lp.launch(program, "process", run_dir=tmp_path, hang_after=2.0)
    until(lambda: "in a debugger" in (run.status()["server"][0]["waiting"] or ""), WITHIN_S)
    log = tmp_path / "hangs.log"
    until(lambda: log.exists() and "server/0 stands in a debugger" in log.read_text(), WITHIN_S)
    first = DebuggerSession(run.run_dir, "server/0")
    is_taken = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(lambda: is_taken.wait(WITHIN_S) and talk(run, "p 'never'\n", "server/0"))
        assert first._receive()
        is_taken.set()
        assert "another terminal is attached" in second.result(WITHIN_S)
    first.connection.close()
    talk(run, "c\n", "server/0")
    run.wait(WITHIN_S)
    assert run.status()["server"][0]["restarts"] == 0


def test_python_s_own_switch_of_breakpoints_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    launched(tmp_path, lambda: breakpoint()).wait(WITHIN_S)


def test_input_in_a_node_fails_with_what_to_do_and_other_reads_are_at_the_end(tmp_path: Path) -> None:
    def work() -> None:
        assert (sys.stdin.read(), list(sys.stdin), sys.stdin.buffer.read(), sys.stdin.isatty()) == ("", [], b"", False)
        input("name? ")

    with pytest.raises(lp.NodeError, match="EOFError") as raised:
        launched(tmp_path, work).wait(WITHIN_S)
    assert "x/0" in str(raised.value) and "argument" in str(raised.value)


def test_in_thread_mode_breakpoints_are_plain_python_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "breakpointhook", lambda: pdb.Pdb(stdin=io.StringIO("c\n"), stdout=shown).set_trace())
    shown = io.StringIO()

    def work() -> None:
        breakpoint()

    program = lp.Program("debugged")
    program.add_node(lp.PyNode(work), label="x")
    lp.launch(program, "thread", run_dir=tmp_path).wait(WITHIN_S)
    assert "(Pdb)" in shown.getvalue() and waiting_nodes(tmp_path) == {}
