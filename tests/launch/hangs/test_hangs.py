"""Reports of hangs: they name each waiting node and its peer, name deadlocks, and accuse no node that goes on."""

import contextlib
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

import lp_pipe as lp
from lp_pipe.channels import ChannelHub, open_sender
from lp_pipe.telemetry.waits import find_standstill
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("warm_template")  # the nodes need torch, for channels

LIMIT_S = 0.3
PATIENCE_S = 20.0


class Peer:
    """A server that calls others on request, or waits."""

    def __init__(self, *others: Any) -> None:
        self._others = others
        self._open = threading.Event()

    def call_next(self) -> str:
        return str(self._others[0].call_next())

    def ask(self) -> str:
        return str(self._others[0].block())

    def block(self) -> str:
        self._open.wait()
        return "done"

    def release(self) -> None:
        self._open.set()


@contextmanager
def launched(program: lp.Program, mode: str, run_dir: Path, limit_s: float | None = LIMIT_S) -> Iterator[lp.Run]:
    """Launch with a short limit. Stuck nodes are left behind at once."""
    run = lp.launch(program, mode, grace=0.2, run_dir=run_dir, hang_after=limit_s)
    try:
        yield run
    finally:
        run.stop()


def reports(run: lp.Run) -> str:
    path = run.run_dir / "hangs.log"
    return path.read_text() if path.exists() else ""


def is_stopped(stat: Path) -> bool:
    """Return whether a thread is stopped, by its file in /proc."""
    return stat.read_text().rpartition(")")[2].split()[0] == "T"


def reported(run: lp.Run, *texts: str) -> str:
    """The reports, once they hold all of these."""
    deadline = time.monotonic() + PATIENCE_S
    while not all(text in reports(run) for text in texts):
        assert time.monotonic() < deadline, f"{texts} are not all in:\n{reports(run)}"
        time.sleep(0.02)
    return reports(run)


def ring(size: int, threads: int, call_timeout: float | None = None) -> lp.Program:
    """Nodes ring/0, ring/1, ... of which each calls the next one, and the last one the first."""
    program = lp.Program("ring")
    pool, client = {"thread_pool_size": threads}, {"call_timeout": call_timeout}
    nodes = [lp.CourierNode(Peer, courier_kwargs=pool, courier_client_kwargs=client) for _ in range(size)]
    with program.group("ring"):
        handles = [program.add_node(node) for node in nodes]
    for index, node in enumerate(nodes):
        node.configure(handles[(index + 1) % size])
    return program


def test_a_handler_that_never_returns_is_reported_with_its_place(
    mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = lp.Program("usage")
    server = program.add_node(lp.CourierNode(Peer), label="server")
    program.add_node(lp.CourierNode(Peer, server), label="actor")
    with launched(program, mode, tmp_path) as run:
        call = run.client("actor").futures.ask()
        text = reported(run, "for a reply of server/0.block()")
        assert re.search(
            r"node actor/0 has waited [\d.]+ s for a reply of server/0\.block\(\) \(at \S*test_hangs\.py:\d+ in ask\); "
            r"server/0 runs its handler block\(\) since [\d.]+ s \(at \S*test_hangs\.py:\d+ in block\)\n",
            text,
        ), text
        assert "deadlock" not in text
        until(lambda: "node actor/0 has waited" in caplog.text)  # it is written to the file first
        run.client("server").release()
        assert call.result(PATIENCE_S) == "done"


def test_servers_that_are_left_alone_are_noted_once(no_leaks: None, tmp_path: Path) -> None:
    program = lp.Program("forgot")
    server = program.add_node(lp.CourierNode(Peer), label="server")
    program.add_node(lp.PyNode(lambda server: server.release(), server), label="client")
    with launched(program, "thread", tmp_path) as run:
        text = reported(run, "note: client/0 has ended; only servers are left (server/0)")
        time.sleep(5 * LIMIT_S)
        assert reports(run) == text and text.count("only servers") == 1


def test_servers_that_work_or_that_were_never_alone_are_not_noted(tmp_path: Path) -> None:
    program = lp.Program("busy")
    with program.group("server"):
        servers = [program.add_node(lp.CourierNode(Peer)) for _ in range(2)]
    with launched(program, "thread", tmp_path / "never") as run:
        time.sleep(5 * LIMIT_S)
        assert reports(run) == ""
    program.add_node(lp.PyNode(lambda server: server.release(), servers[1]), label="client")
    with launched(program, "thread", tmp_path / "works") as run:
        call = run.client("server").futures.block()
        time.sleep(5 * LIMIT_S)
        assert "only servers" not in reports(run)
        run.client("server").release()
        assert call.result(PATIENCE_S) == "done"


def test_status_says_what_a_node_waits_for_until_it_does_not(
    mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    program = lp.Program("usage")
    server = program.add_node(lp.CourierNode(Peer), label="server")
    program.add_node(lp.CourierNode(Peer, server), label="actor")
    with launched(program, mode, tmp_path) as run:
        call = run.client("actor").futures.ask()
        until(lambda: "a reply of server/0.block()" in (run.status()["actor"][0]["waiting"] or ""))
        assert run.status()["server"][0]["waiting"] is None
        reported(run, "node actor/0 has waited")
        run.client("server").release()
        assert call.result(PATIENCE_S) == "done"
        until(lambda: run.status()["actor"][0]["waiting"] is None)
        reported(run, "node actor/0 no longer waits for a reply of server/0.block()")
        assert "no longer waits" in caplog.text


def test_a_node_that_does_not_come_up_is_reported_with_where_its_constructor_is(mode: str, tmp_path: Path) -> None:
    started = tmp_path / "started"

    def never() -> Peer:
        started.touch()
        lp.wait_for_stop()
        return Peer()

    def call(server: Any) -> None:
        until(started.exists)
        server.block()

    program = lp.Program("resolve")
    server = program.add_node(lp.CourierNode(never), label="server")
    program.add_node(lp.PyNode(call, server), label="caller")
    with launched(program, mode, tmp_path) as run:
        text = reported(run, "node caller/0 has waited", "server/0 is not up yet: runs its own code (at ")
        assert "for server/0 to come up" in text
        assert "in never)" in text


def test_the_launcher_that_waits_is_reported_too(no_leaks: None, tmp_path: Path) -> None:
    program = lp.Program("launcher")
    program.add_node(lp.CourierNode(Peer), label="server")
    with launched(program, "thread", tmp_path) as run:
        waiting = threading.Thread(target=run.client("server").block)
        waiting.start()
        reported(run, "the launcher has waited", "for a reply of server/0.block()")
        run.client("server").release()
        waiting.join(PATIENCE_S)
        reported(run, "the launcher no longer waits for")


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3])
def test_calls_in_a_circle_of_full_pools_are_named_as_a_deadlock(mode: str, tmp_path: Path, size: int) -> None:
    with launched(ring(size, threads=1), mode, tmp_path) as run:
        run.client("ring").futures.call_next()
        text = reported(run, "deadlock: these waits are for each other")
        report = text[text.index("deadlock:") :]
        for index in range(size):
            assert f"  ring/{index} waits for ring/{(index + 1) % size}.call_next() since " in report
        assert "in its handler call_next() (at " in report
        assert "lp_pipe stacks " in report
        assert "thread_pool_size" in report
        assert text.count("deadlock:") == 1


def test_constructors_that_call_each_other_are_a_deadlock(no_leaks: None, tmp_path: Path) -> None:
    class Impatient:
        def __init__(self, other: Any) -> None:
            other.hello()

        def hello(self) -> None: ...

    program = lp.Program("constructors")
    left, right = lp.CourierNode(Impatient), lp.CourierNode(Impatient)
    left_handle = program.add_node(left, label="left")
    right_handle = program.add_node(right, label="right")
    left.configure(right_handle)
    right.configure(left_handle)
    with launched(program, "thread", tmp_path) as run:
        text = reported(run, "deadlock:", "Constructors must not call each other")
        assert "left/0 waits for right/0 to come up" in text
        assert "right/0 waits for left/0 to come up" in text


def test_a_circle_that_free_threads_can_end_is_not_called_a_deadlock(no_leaks: None, tmp_path: Path) -> None:
    class Caller(Peer):
        def start(self) -> str:
            return str(self._others[0].ask())  # asks us back: block()

    program = lp.Program("circle")
    caller, other = lp.CourierNode(Caller), lp.CourierNode(Peer)
    caller_handle = program.add_node(caller, label="caller")
    caller.configure(program.add_node(other, label="other"))
    other.configure(caller_handle)
    with launched(program, "thread", tmp_path) as run:
        call = run.client("caller").futures.start()
        text = reported(run, "cycle of waits (may be a deadlock):", "other/0 waits for caller/0.block() since")
        assert "caller/0 waits for other/0.ask() since" in text
        assert "caller/0 runs its handler block() since" in text
        assert "deadlock: " not in text
        run.client("caller").release()
        assert call.result(PATIENCE_S) == "done"
        reported(run, "no longer waits for a reply of caller/0.block()")


def test_a_circle_with_a_deadline_in_it_is_not_called_a_deadlock(no_leaks: None, tmp_path: Path) -> None:
    with launched(ring(2, threads=1, call_timeout=1000.0), "thread", tmp_path) as run:
        run.client("ring").futures.call_next()
        assert "deadlock: " not in reported(run, "cycle of waits (may be a deadlock):")


def test_a_coroutine_that_waits_is_reported(no_leaks: None, tmp_path: Path) -> None:
    class Async(Peer):
        async def ask_async(self) -> str:
            return str(await self._others[0].aio.block())

    program = lp.Program("async")
    server = program.add_node(lp.CourierNode(Peer), label="server")
    program.add_node(lp.CourierNode(Async, server), label="actor")
    with launched(program, "thread", tmp_path) as run:
        call = run.client("actor").futures.ask_async()
        reported(run, "node actor/0 has waited", "server/0 runs its handler block()")
        run.client("server").release()
        assert call.result(PATIENCE_S) == "done"
        reported(run, "node actor/0 no longer waits")


def test_waits_below_the_limit_are_not_reported(no_leaks: None, tmp_path: Path) -> None:
    program = lp.Program("short")
    server = program.add_node(lp.CourierNode(Peer), label="server")
    program.add_node(lp.CourierNode(Peer, server), label="actor")
    with launched(program, "thread", tmp_path, limit_s=30.0) as run:
        call = run.client("actor").futures.ask()
        time.sleep(0.5)
        run.client("server").release()
        assert call.result(PATIENCE_S) == "done"
        assert reports(run) == ""
        assert all(row["waiting"] is None for rows in run.status().values() for row in rows)


def test_the_watch_can_be_switched_off_and_wants_a_sensible_limit(no_leaks: None) -> None:
    program = lp.Program("off")
    program.add_node(lp.PyNode(lambda: None), label="node")
    lp.launch(program, "thread", hang_after=None).wait(PATIENCE_S)
    for limit_s in (0, -1.0, float("nan"), float("inf"), "60"):  # a text was a TypeError without the option's name
        with pytest.raises(ValueError, match=f"hang_after={limit_s!r}: seconds"):
            lp.launch(program, "thread", hang_after=limit_s)  # type: ignore[arg-type]


@pytest.mark.slow
def test_many_that_wait_for_the_same_thing_are_one_report(mode: str, tmp_path: Path) -> None:
    all_up = tmp_path / "all-up"

    def act(server: Any) -> None:
        until(all_up.exists)
        server.block()

    program = lp.Program("many")
    server = program.add_node(lp.CourierNode(Peer), label="server")
    with program.group("actor"):
        for _ in range(3):
            program.add_node(lp.PyNode(act, server))
    with launched(program, mode, tmp_path, limit_s=1.0) as run:
        lp.list_methods(run.client("server"))
        until(lambda: all(row["state"] == "running" for row in run.status()["actor"]))
        all_up.touch()
        # Those that are late are in the second report, when the first wait is four times as old.
        text = reported(run, "(so have 2 more: actor/")
        lines = [line for line in text.splitlines() if re.search(r"node actor/\d has waited", line)]
        assert len(lines) <= 2, lines
        run.client("server").release()


def test_a_receiver_whose_sender_is_silent_is_reported_with_the_channel(mode: str, tmp_path: Path) -> None:
    class Sink:
        def __init__(self, folder: str) -> None:
            self._hub = ChannelHub(f"unix:{folder}/hub", "sink/0")
            lp.register_stop_handler(lambda: self._hub.close("stopping"))
            self._receiver = self._hub.receiver("activations", credits=1)

        def run(self) -> None:
            self._receiver.receive(7)

    class Source:
        def __init__(self, folder: str, sink: Any) -> None:
            lp.list_methods(sink)  # once it answers its hub is there
            self._sender = open_sender(f"unix:{folder}/hub", "activations", name="source/0", peer="sink/0")

        def run(self) -> None:
            lp.wait_for_stop()

    program = lp.Program("channel")
    folder = os.environ["TMPDIR"]
    sink = program.add_node(lp.CourierNode(Sink, folder), label="sink")
    program.add_node(lp.PyClassNode(Source, folder, sink), label="source")
    with launched(program, mode, tmp_path) as run:
        # The first report may come when the source has just connected: code that is so young is told without its place.
        text = reported(
            run, "a message of source/0 on channel 'activations', operation 7", "source/0: runs its own code (at "
        )
        assert "node sink/0 has waited" in text


def test_a_sender_without_credits_is_reported_with_the_channel(no_leaks: None, tmp_path: Path) -> None:
    class Source:
        def __init__(self, folder: str) -> None:
            hub = ChannelHub(f"unix:{folder}/hub", "sink/0")
            lp.register_stop_handler(lambda: hub.close("stopping"))
            self._receiver = hub.receiver("activations", credits=1)
            self._sender = open_sender(hub.endpoint, "activations", name="source/0", peer="sink/0")

        def run(self) -> None:
            self._sender.send(1, "taken by nobody")
            with contextlib.suppress(lp.LpPipeError):  # it is closed at the stop
                self._sender.send(2, "waits")

    program = lp.Program("credits")
    program.add_node(lp.PyClassNode(Source, os.environ["TMPDIR"]), label="source")
    program.add_node(lp.PyNode(lp.wait_for_stop), label="sink")
    with launched(program, "thread", tmp_path) as run:
        text = reported(run, "node source/0 has waited")
        assert "for sink/0 to take a message, on channel 'activations' to sink/0, operation 2 (at " in text


def in_torch(name: str) -> Callable[[Callable[[], object]], object]:
    """A function that looks like one of torch.distributed, in which a thread waits where Python sees no frame."""
    code = f"def {name}(wait):\n    wait()"
    found: dict[str, Any] = {}
    exec(compile(code, "/lib/site-packages/torch/distributed/distributed_c10d.py", "exec"), found)
    return cast(Callable[[Callable[[], object]], object], found[name])


def test_ranks_that_wait_for_each_other_in_torch_are_reported_with_what_each_is_at(
    no_leaks: None, tmp_path: Path
) -> None:
    import torch.distributed.distributed_c10d  # without it nobody looks

    assert torch.distributed.distributed_c10d is not None
    locks = [threading.Lock() for _ in range(4)]

    def step(rank: int) -> None:
        if rank == 3:
            lp.wait_for_stop()
        else:
            in_torch("broadcast" if rank == 1 else "all_reduce")(locks[rank].acquire)

    program = lp.Program("ranks")
    with program.group("rank"):
        for rank, lock in enumerate(locks):
            lock.acquire()
            program.add_node(lp.PyNode(step, rank))
    with launched(program, "thread", tmp_path) as run:
        text = reported(run, "waiting for other ranks, in torch's broadcast() (at ")
        assert re.search(
            r"node rank/[02] has waited [\d.]+ s for other ranks, in torch's all_reduce\(\) \(at \S+:\d+ in step\)",
            text,
        ), text
        assert re.search(r"; rank/3: running its own code \(at \S+:\d+ in step\)", text), text
        assert "deadlock" not in text
        assert "other ranks, in torch's broadcast()" in (run.status()["rank"][1]["waiting"] or "")
        for lock in locks:
            lock.release()
        reported(run, "no longer waits for other ranks")


def test_a_thread_that_computes_in_torch_is_not_taken_for_one_that_waits(no_leaks: None) -> None:
    import torch.distributed.distributed_c10d  # as above

    assert torch.distributed.distributed_c10d is not None
    go_on = threading.Event()

    def compute() -> None:
        while not go_on.is_set():
            in_torch("all_reduce")(partial(sum, range(1000)))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        for _ in range(20):
            find_standstill(thread, sys._current_frames()[cast(int, thread.ident)])
            before = os.times().user
            until(lambda: os.times().user > before)  # noqa: B023
            assert find_standstill(thread, sys._current_frames()[cast(int, thread.ident)]) is None
    finally:
        go_on.set()
        thread.join(PATIENCE_S)


@pytest.mark.slow
def test_a_rank_that_is_frozen_is_named_by_the_others(no_leaks: None, tmp_path: Path) -> None:
    def work(address: lp.Address) -> None:
        import torch
        import torch.distributed as dist

        context = lp.context()
        url = f"tcp://{address.resolve()}"
        dist.init_process_group("gloo", init_method=url, rank=context.index, world_size=context.group_size)
        dist.all_reduce(torch.ones(1))
        if context.index == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()

    program = lp.Program("frozen rank")
    address = lp.Address()
    with program.group("rank"):
        nodes = [lp.PyNode(work, address) for _ in range(3)]
        for node in nodes:
            program.add_node(node)
    address.assign(nodes[0])
    with launched(program, "process", tmp_path, limit_s=3.0) as run:
        text = reported(run, "rank/1's process has not answered for ", "in torch's all_reduce() (at ")
        assert "has waited" in text
        os.kill(run.status()["rank"][1]["pid"], signal.SIGCONT)
        run.wait(PATIENCE_S)


def test_a_frozen_process_is_named_as_one_that_does_not_answer(no_leaks: None, tmp_path: Path) -> None:
    program = lp.Program("frozen")
    server = program.add_node(lp.CourierNode(Peer), label="server")
    program.add_node(lp.CourierNode(Peer, server), label="actor")
    with launched(program, "process", tmp_path, limit_s=3.0) as run:
        run.client("server").release()
        assert run.client("actor").ask() == "done"
        pid = run.status()["server"][0]["pid"]
        os.kill(pid, signal.SIGSTOP)
        until(lambda: all(is_stopped(stat) for stat in Path(f"/proc/{pid}/task").glob("*/stat")))  # not all at once
        try:
            call = run.client("actor").futures.ask()
            reported(run, "for a reply of server/0.block()", "server/0's process has not answered for")
        finally:
            os.kill(pid, signal.SIGCONT)
        assert call.result(PATIENCE_S) == "done"


@pytest.mark.parametrize("mode", ["thread", "multi_host"])
def test_processes_that_do_not_answer_are_reported_though_no_node_waits_for_them(
    no_leaks: None, mode: str, tmp_path: Path
) -> None:
    def stop_itself() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def compute() -> None:
        sum(range(10**10))  # in C code, which does not release Python's lock

    program = lp.Program("silent")
    for label, function in (("stopped", stop_itself), ("busy", compute)):
        program.add_node(
            lp.MultiProcessingColocation([lp.PyNode(function)]), label=label
        )  # a process in thread mode too
    with launched(program, mode, tmp_path, limit_s=2.0) as run:
        text = reported(run, "stopped/0.0's process has not answered for", "busy/0.0's process has not answered for")
        assert ["SIGSTOP" in line for line in text.splitlines() if "stopped/0.0's" in line] == [True]
        assert ["computes in C code" in line for line in text.splitlines() if "busy/0.0's" in line] == [True]
        for label in ("stopped", "busy"):
            until(lambda label=label: "not answering for" in (run.status()[label][0]["waiting"] or ""))  # type: ignore[misc]


def test_a_stopped_template_is_named_when_it_does_not_report_a_dead_process(no_leaks: None, tmp_path: Path) -> None:
    program = lp.Program("killed")
    program.add_node(lp.CourierNode(Peer), label="stage")
    with launched(program, "process", tmp_path, limit_s=2.0) as run:
        run.client("stage").release()
        pid = run.status()["stage"][0]["pid"]
        template = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(template, signal.SIGSTOP)
        try:
            os.kill(pid, signal.SIGKILL)
            text = reported(run, "node stage/0's process is dead", f"the template process {template}")
            assert "stage/0's process has not answered" not in text
            stopping = threading.Thread(target=run.stop, daemon=True)
            stopping.start()
            stopping.join(PATIENCE_S)
            assert not stopping.is_alive()  # the stop waited for ever for the template's report
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(template, signal.SIGCONT)


def test_a_process_that_freezes_before_it_has_ever_answered_is_named_too(no_leaks: None, tmp_path: Path) -> None:
    class Frozen:  # local, so that its process need not import this file, which takes a while
        def __init__(self) -> None:
            os.kill(os.getpid(), signal.SIGSTOP)

    program = lp.Program("frozen")
    server = program.add_node(lp.CourierNode(Frozen), label="server")
    program.add_node(lp.PyNode(lp.list_methods, server), label="actor")
    with launched(program, "process", tmp_path, limit_s=3.0) as run:
        try:
            reported(
                run, "node actor/0 has waited", "for server/0 to come up", "server/0's process has not answered for"
            )
        finally:
            os.kill(run.status()["server"][0]["pid"], signal.SIGCONT)
