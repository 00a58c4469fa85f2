"""The launcher's messages to a node's process, also to one that does not listen."""

import socket
import threading
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import pytest

from lp_pipe.connections.unix import UnixConnection
from lp_pipe.launch import process
from lp_pipe.launch.coordination.coordinator import Coordinator
from lp_pipe.launch.process import ProcessHost
from lp_pipe.launch.processes.node_link import NodeLink
from lp_pipe.launch.supervision import messages

PINGS = 2_000  # a socket holds less than 300 of them


def kind(body: "bytes | bytearray | memoryview") -> str:
    return type(messages.decode(body)).__name__


def test_a_process_that_reads_nothing_holds_up_neither_the_pings_to_the_others_nor_its_own_stop() -> None:
    # A node in C code that keeps Python's lock, or stopped in a debugger, for some minutes: the thread that sends the
    # pings waited for it, and all the other nodes took the launcher for dead.
    ours, theirs = (UnixConnection(sock, name) for sock, name in zip(socket.socketpair(), ("node", "us"), strict=True))
    stream = NodeLink(ours, Coordinator.__new__(Coordinator), lambda stream, hello: None)
    stream.start()

    def speak() -> None:
        for _ in range(PINGS):
            stream.mention(messages.Ping())
            stream.look(1.0)
        stream.tell_if_open(messages.Stop())

    speaking = threading.Thread(target=speak, daemon=True)
    speaking.start()
    speaking.join(20)
    is_held_up = speaking.is_alive()
    heard: SimpleQueue[str] = SimpleQueue()
    theirs.start(lambda frame: heard.put(kind(frame.body)), lambda reason: None)
    words = [heard.get(timeout=20)]
    while words[-1] != "Stop":
        words.append(heard.get(timeout=20))
    for connection in (ours, theirs):
        connection.close()
    assert not is_held_up
    assert {"Ping", "Look"} < set(words) and len(words) < PINGS


class Asked:
    """A node's stream whose process answers at once, or never."""

    def __init__(self, stacks: str | None) -> None:
        self._stacks = stacks

    def ask_stacks(self) -> "Future[str]":
        answer: Future[str] = Future()
        if self._stacks is not None:
            answer.set_result(self._stacks)
        return answer


def test_processes_that_do_not_say_where_they_are_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    # One after the other, two on one host took longer than the launcher waits for the host, and the report of a hang
    # had none of its nodes.
    monkeypatch.setattr(process, "_STACKS_PATIENCE_S", 0.2)
    host = ProcessHost.__new__(ProcessHost)
    streams: Any = {**{f"deaf/{index}": Asked(None) for index in range(200)}, "well/0": Asked("in step()")}
    host._streams = streams
    stacks: Future[str] = Future()
    threading.Thread(target=lambda: stacks.set_result(host.stacks()), daemon=True).start()
    text = stacks.result(20)
    assert text.endswith("node well/0\nin step()") and text.count("no answer") == 200
