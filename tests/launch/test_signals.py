"""Ctrl+C, SIGTERM and SIGHUP at the launcher: scripts that are interrupted, as a user would."""

import functools
import itertools
import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

import lp_pipe as lp
from lp_pipe.launch import signals
from lp_pipe.launch.coordination.coordinator import Coordinator
from lp_pipe.launch.services import LauncherServices
from lp_pipe.launch.signals import Interrupts, Latch

WITHIN_S = 20.0

# `{node}` runs in process mode and in thread mode; the script prints "ready" once it runs.
SCRIPT = """
    import signal, sys, threading, time
    import lp_pipe as lp

    def say(line):
        sys.stdout.write(line + "\\n")  # in one piece: nodes that are threads share the stream

    def obedient():
        say("ready")
        lp.wait_for_stop()
        say("stopped in order")

    def stubborn():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready", flush=True)
        lp.wait_for_stop()
        print("told", flush=True)
        while True:
            time.sleep(1)

    program = lp.Program("interrupted")
    program.add_node(lp.PyNode({node}), label="node")
    {body}
"""


def lines_until_ready(launcher: "subprocess.Popen[str]", word: str = "ready") -> None:
    assert launcher.stdout is not None
    while word not in (line := launcher.stdout.readline()):
        assert line, launcher.communicate()[1]


# Short sleeps: a signal that comes just before one is noted, and not handled before its end (CPython).
BODIES = {
    "wait": "lp.launch(program, MODE).wait()",
    "with": "with lp.launch(program, MODE): [time.sleep(0.5) for _ in range(200)]",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
@pytest.mark.parametrize("launch_mode", ["thread", "process"])
def test_one_signal_stops_in_order(script: Any, body: str, number: int, status: int, launch_mode: str) -> None:
    launcher = script(SCRIPT.format(node="obedient", body=body.replace("MODE", repr(launch_mode))))
    lines_until_ready(launcher)
    launcher.send_signal(number)
    out, err = launcher.communicate(timeout=WITHIN_S)
    assert "stopped in order" in out, err
    # An uncaught KeyboardInterrupt: Python ends itself by SIGINT, which shells show as 130.
    assert launcher.returncode == status, err


def test_keyboard_interrupt_comes_once_the_nodes_are_down_and_the_handlers_are_restored(script: Any) -> None:
    body = """
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    run = lp.launch(program, "process")
    assert before != (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    try:
        run.wait()
    except KeyboardInterrupt:
        print("states:", run.status()["node"][0]["state"], run.interrupted_by)
    assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    run.wait()
    """
    launcher = script(SCRIPT.format(node="obedient", body=body))
    lines_until_ready(launcher)
    launcher.send_signal(signal.SIGINT)
    out, err = launcher.communicate(timeout=WITHIN_S)
    assert "states: stopped 2" in out, err
    assert launcher.returncode == 0, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_two_signals_kill_at_once(script: Any, number: int) -> None:
    launcher = script(SCRIPT.format(node="stubborn", body="lp.launch(program, 'process', grace=60).wait()"))
    lines_until_ready(launcher)
    launcher.send_signal(number)
    lines_until_ready(launcher, "told")  # the first one has had its effect: of two that come at once Python handles one
    launcher.send_signal(number)
    launcher.communicate(timeout=WITHIN_S)
    assert launcher.returncode in (-signal.SIGINT, 143)


def test_further_hang_ups_do_not_hurry(script: Any) -> None:
    """A terminal that is closed sends one, and its shell another one."""
    body = """
    def slow():
        print("ready", flush=True)
        lp.wait_for_stop()
        signal.pthread_kill(launcher, signal.SIGHUP)
        signal.pthread_kill(launcher, signal.SIGHUP)
        lp.stop_event().wait()
        time.sleep(0.5)
        say("stopped in order")

    launcher = threading.get_ident()
    program = lp.Program("slow")
    program.add_node(lp.PyNode(slow), label="node")
    lp.launch(program, "thread", grace=60).wait()
    """
    launcher = script(SCRIPT.format(node="obedient", body=body))
    lines_until_ready(launcher)
    launcher.send_signal(signal.SIGHUP)
    out, err = launcher.communicate(timeout=WITHIN_S)
    assert "stopped in order" in out, err
    assert launcher.returncode == 129, err


@pytest.mark.parametrize(
    "meaning", ["signal.SIG_IGN", "lambda number, frame: say('settings read')"], ids=["nohup", "own"]
)
def test_a_hang_up_that_the_script_has_a_meaning_for_stops_nothing(script: Any, meaning: str) -> None:
    body = f"""
    signal.signal(signal.SIGHUP, {meaning})
    with lp.launch(program, "process"):
        signal.raise_signal(signal.SIGHUP)
        say("goes on")
    """
    launcher = script(SCRIPT.format(node="obedient", body=body))
    out, err = launcher.communicate(timeout=WITHIN_S)
    assert "goes on" in out, err
    assert launcher.returncode == 0, err


def test_a_signal_during_the_stop_leaves_it_orderly_and_is_raised_after_it(script: Any) -> None:
    body = """
    class Slow:
        def hello(self):
            return "hello"

        def run(self):
            lp.wait_for_stop()
            print("ready", flush=True)
            time.sleep(1.0)
            print("stopped in order", flush=True)

    program = lp.Program("slow")
    program.add_node(lp.CourierNode(Slow), label="node")
    try:
        with lp.launch(program, "process") as run:
            run.client("node").hello()
        print("must not come here")
    except KeyboardInterrupt:
        print("raised")
    """
    launcher = script(SCRIPT.format(node="obedient", body=body))
    lines_until_ready(launcher)
    launcher.send_signal(signal.SIGINT)
    out, err = launcher.communicate(timeout=WITHIN_S)
    assert "stopped in order" in out, err
    assert "raised" in out
    assert "must not" not in out


def test_handlers_are_restored_whichever_of_several_runs_ends_first(no_leaks: None) -> None:
    def program() -> lp.Program:
        graph = lp.Program("one of two")
        graph.add_node(lp.PyNode(lp.wait_for_stop), label="node")
        return graph

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    for order in ([0, 1], [1, 0]):
        runs = [lp.launch(program(), "thread") for _ in range(2)]
        for index in order:
            runs[index].stop()
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_other_threads_launch_without_touching_the_handlers(no_leaks: None) -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def launch() -> None:
        program = lp.Program("thread")
        program.add_node(lp.PyNode(lp.wait_for_stop), label="node")
        with lp.launch(program, "thread"):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join(WITHIN_S)
    assert seen == [before]


@pytest.mark.parametrize("launch_mode", ["thread", "process"])
def test_a_script_that_fails_takes_its_nodes_down(script: Any, launch_mode: str) -> None:
    # The second node's own thread is no daemon: the interpreter would wait for it before any atexit function ran.
    body = f"""
    def threaded(event):
        threading.Thread(target=obedient).start()
        event.set()

    event = program.add_node(lp.CourierNode(lambda: threading.Event()), label="event")
    program.add_node(lp.PyNode(threaded, event), label="threaded")
    run = lp.launch(program, {launch_mode!r})
    run.client("event").wait({WITHIN_S})  # else nothing may have begun that could be stopped in order
    raise ValueError("of the script")
    """
    launcher = script(SCRIPT.format(node="obedient", body=body))
    out, err = launcher.communicate(timeout=WITHIN_S)
    assert "stopped in order" in out, err
    assert launcher.returncode == 1, err
    assert "ValueError: of the script" in err and "program 'interrupted'" in err


# The user's own exit functions and threads end as in any script.
FALLS_OFF_ITS_END = """
    import atexit
    atexit.register(say, "exit function")
    lp.launch(program, {mode!r})
    threading.Thread(target=say, args=("thread",)).start()
    {last}
"""


@pytest.mark.parametrize(
    ("node", "last", "status"),
    [
        ("lambda: [time.sleep(0.5), say('node done')]", "", 0),
        ("lambda: [time.sleep(0.5), say('node done')]", "sys.exit(3)", 3),  # absl's app.run always calls sys.exit
        ("lambda: [time.sleep(0.5), say('node done'), 1 / 0]", "", 1),
    ],
    ids=["finishes", "exits", "fails"],
)
@pytest.mark.parametrize("launch_mode", ["thread", "process"])
def test_a_script_that_falls_off_its_end_waits_for_its_program(
    script: Any, node: str, last: str, status: int, launch_mode: str
) -> None:
    # A ported Launchpad script whose last line is `launch(program)` ended with status 0 and nothing done.
    body = FALLS_OFF_ITS_END.format(mode=launch_mode, last=last)
    launcher = script(SCRIPT.format(node=node, body=body))
    out, err = launcher.communicate(timeout=WITHIN_S)
    assert "node done" in out and "thread\n" in out and "exit function" in out, (out, err)
    assert launcher.returncode == status, err
    assert ("ZeroDivisionError" in err) == (status == 1)


@pytest.mark.parametrize(("last", "status"), [("", 1), ("run.stop()", 0)], ids=["untold", "stopped"])
@pytest.mark.parametrize("launch_mode", ["thread", "process"])
def test_a_failure_before_the_end_of_the_script_is_reported_there(
    script: Any, last: str, status: int, launch_mode: str
) -> None:
    # The run was over when the script ended, so there was nothing to wait for: status 0, and not a word.
    body = f"""
    run = lp.launch(program, {launch_mode!r})
    while not run.is_over:
        time.sleep(0.01)
    {last}
    """
    launcher = script(SCRIPT.format(node="lambda: 1 / 0", body=body))
    out, err = launcher.communicate(timeout=WITHIN_S)
    assert launcher.returncode == status, (out, err)
    assert ("ZeroDivisionError" in err) == (status == 1)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_script_that_waits_at_its_end_is_interrupted_in_order(script: Any, number: int, status: int) -> None:
    launcher = script(SCRIPT.format(node="obedient", body=FALLS_OFF_ITS_END.format(mode="process", last="")))
    lines_until_ready(launcher)
    launcher.send_signal(number)
    out, err = launcher.communicate(timeout=WITHIN_S)
    assert "stopped in order" in out and "exit function" in out, err
    assert launcher.returncode == status, err


def test_a_script_that_ends_after_its_program_is_not_warned(script: Any) -> None:
    launcher = script(SCRIPT.format(node="lambda: say('ready')", body="lp.launch(program, 'thread').wait()"))
    assert launcher.communicate(timeout=WITHIN_S) == ("ready\n", "")


def test_no_node_outlives_an_interrupted_launcher(script: Any, socket_home: Path) -> None:
    body = """
    import os
    program.add_node(lp.PyNode(lambda: print("pid", os.getpid(), flush=True) or stubborn()), label="other")
    lp.launch(program, "process", grace=0.2).wait()
    """
    launcher = script(SCRIPT.format(node="stubborn", body=body))
    lines_until_ready(launcher)
    family = psutil.Process(launcher.pid).children(recursive=True)
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=WITHIN_S)
    _, alive = psutil.wait_procs(family, timeout=1.0)
    assert not alive
    assert not list(socket_home.glob("lp-*"))


def test_children_that_nodes_fork_in_thread_mode_end_at_a_sigterm(no_leaks: None) -> None:
    def fork_and_terminate() -> None:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        child.terminate()
        child.join(5)
        child.kill()
        child.join()
        exits.append(child.exitcode)

    exits: list[int | None] = []
    program = lp.Program("forks")
    program.add_node(lp.PyNode(fork_and_terminate), label="node")
    with lp.launch(program, "thread") as run:
        run.wait(10)
    assert exits == [-signal.SIGTERM]


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("is_installed", [False, True])
def test_a_signal_before_anything_is_started_is_raised(monkeypatch: pytest.MonkeyPatch, is_installed: bool) -> None:
    """The stop that it asks for waited for ever for a thread that was to look after the nodes."""
    install = Interrupts.install

    def interrupted(interrupts: Interrupts) -> None:
        if is_installed:
            install(interrupts)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Interrupts, "install", interrupted)
    program = lp.Program("interrupted")
    program.add_node(lp.PyNode(lp.wait_for_stop), label="node")
    with pytest.raises(KeyboardInterrupt):
        lp.launch(program, "thread")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("no_leaks")
def test_a_signal_at_the_end_of_a_with_block_waits_for_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look for a failure could be left with the coordinator's lock, which the stop needs."""

    def look(services: LauncherServices) -> None:
        signal.raise_signal(signal.SIGINT)
        looked.append(True)

    looked: list[bool] = []
    monkeypatch.setattr(LauncherServices, "first_failure", look)
    program = lp.Program("interrupted")
    program.add_node(lp.PyNode(lp.wait_for_stop), label="node")
    with pytest.raises(KeyboardInterrupt), lp.launch(program, "thread"):
        pass
    assert looked


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize(
    ("question", "ask"),
    [
        ("resolve", lambda run: run.client("server")),
        ("settled_failure", lambda run: run._services.first_failure()),
        ("request_stop", lambda run: run.request_stop()),
    ],
    ids=["client", "unavailable", "stop"],
)
def test_a_signal_while_the_main_thread_asks_the_coordinator_waits_for_the_answer(
    monkeypatch: pytest.MonkeyPatch, question: str, ask: Callable[[lp.Run], object]
) -> None:
    """Regression: a signal inside of the lock left it taken, so that no stop and no second Ctrl+C ended the nodes."""

    def interrupted(*args: Any, **options: Any) -> Any:
        if not asked:
            asked.append(True)
            signal.raise_signal(signal.SIGINT)
            answered.append(True)
        return original(*args, **options)

    asked: list[bool] = []
    answered: list[bool] = []
    original = getattr(Coordinator, question)
    program = lp.Program("interrupted")
    program.add_node(lp.CourierNode(object), label="server")
    with pytest.raises(KeyboardInterrupt), lp.launch(program, "thread") as run:
        monkeypatch.setattr(Coordinator, question, interrupted)
        ask(run)
    assert answered


def interrupt_at(step: int, call: Callable[[], object]) -> None:
    """Call it, with a SIGINT before the `step`-th instruction of signals.py inside, if there are so many.

    Of others' code not: where that handles an exception, CPython would have it as every later one's context.
    """
    steps = itertools.count(1)

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != signals.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and next(steps) == step:
            signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)


def test_a_signal_at_any_instruction_of_a_wait_does_not_disturb_the_end() -> None:
    """An interrupted threading.Event was left locked, so that the run could not end; or raised another error."""
    for step in itertools.count(1):
        latch = Latch()
        try:
            interrupt_at(step, functools.partial(latch.wait, 0.01))
        except KeyboardInterrupt:
            latch.open()
            assert latch.wait(0)
        else:
            break
    assert step > 20


def test_a_signal_at_any_instruction_of_their_restoration_is_for_the_handlers_of_before() -> None:
    """Regression: our handler raised the signal again and again: RecursionError."""
    for step in itertools.count(1):
        interrupts = Interrupts(hurry=lambda: None, suspend=lambda: None)
        interrupts.install()
        try:
            interrupt_at(step, interrupts.uninstall)
        except KeyboardInterrupt:
            interrupts.uninstall()
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        else:
            break
    assert step > 20
