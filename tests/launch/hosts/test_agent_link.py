"""Calls between the launcher and an agent, and the lines of nodes that go the same way within their bounds."""

import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

import lp_pipe as lp
from lp_pipe import connections
from lp_pipe.connections import Connection
from lp_pipe.launch.hosts.agent_link import AgentLink
from lp_pipe.launch.hosts.shipped_logs import ReceivedLogs, ShippedLogs
from lp_pipe.telemetry.terminal_lines import Unfinished
from tests.waiting import until

WITHIN_S = 10.0
Pair = tuple[AgentLink, AgentLink]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """The launcher's end, and the agent's."""
    accepted: list[Connection] = []
    endpoint = f"inproc:{uuid.uuid4().hex}"
    listener = connections.listen(endpoint, accepted.append)
    ours = connections.connect(endpoint)
    links = AgentLink(accepted[0]), AgentLink(ours)
    for link, connection in zip(links, (accepted[0], ours), strict=True):
        connection.start(link.on_frame, link.on_close)
    yield links
    ours.close()
    listener.close()


class Target:
    def __init__(self) -> None:
        self.told: list[Any] = []
        self.later: Future[str] = Future()

    def tell(self, *args: Any) -> None:
        self.told.append(args)

    def fail(self, kind: type[Exception]) -> None:
        raise kind("as asked")

    def answer_later(self) -> "Future[str]":
        return self.later

    def _private(self) -> None:
        raise AssertionError("nobody may call this")


def test_each_side_calls_the_other(pair: Pair) -> None:
    launcher, agent = pair
    targets = Target(), Target()
    for link, target in zip(pair, targets, strict=True):
        link.serve(target)
    launcher.tell("tell", "to the agent", {"a": [1]})
    assert agent.ask("tell", b"to the launcher").result(WITHIN_S) is None
    until(lambda: targets[1].told)
    assert targets[1].told == [("to the agent", {"a": [1]})] and targets[0].told == [(b"to the launcher",)]


def test_errors_come_back_as_what_the_caller_tells_apart(pair: Pair) -> None:
    launcher, agent = pair
    agent.serve(Target())
    for kind in (lp.Unavailable, RuntimeError):
        with pytest.raises(kind, match="as asked"):
            launcher.ask("fail", kind).result(WITHIN_S)
    for wrong in ("_private", "unknown"):
        with pytest.raises(lp.LaunchError):
            launcher.ask(wrong).result(WITHIN_S)


def test_an_answer_may_come_later_and_never_comes_from_one_that_is_gone(pair: Pair) -> None:
    launcher, agent = pair
    target = Target()
    agent.serve(target)
    asked = launcher.ask("answer_later")
    assert not asked.done()
    target.later.set_result("now")
    assert asked.result(WITHIN_S) == "now"
    target.later = Future()
    asked = launcher.ask("answer_later")
    agent.close("the host went down")
    with pytest.raises(lp.Unavailable, match="the host went down"):
        asked.result(WITHIN_S)
    with pytest.raises(lp.Unavailable):
        launcher.ask("tell").result(WITHIN_S)
    launcher.tell("tell")  # nobody hears it


class Output:
    """Takes lines when it may."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.lines: list[bytes] = []
        self.is_closed = False

    def write(self, node_id: str, is_stderr: bool, lines: list[bytes]) -> None:
        self.may_write.wait(WITHIN_S)
        self.lines += lines

    def show(self, node_id: str, is_stderr: bool, unfinished: Unfinished) -> None:
        self.lines.append(unfinished.text)

    def flush(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True


class _Receiving:
    def __init__(self, logs: ReceivedLogs, link: AgentLink) -> None:
        self._logs, self._link = logs, link
        self.received_bytes = 0

    def log(self, node_id: str, is_stderr: bool, text: bytes) -> None:
        self.received_bytes += len(text)
        self._logs.put(self._link, node_id, is_stderr, text)

    def unfinished(self, node_id: str, is_stderr: bool, text: bytes, is_settled: bool) -> None:
        self._logs.put(self._link, node_id, is_stderr, Unfinished(text, is_settled))


class _Shipping:
    def __init__(self, logs: ShippedLogs) -> None:
        self.logged = logs.logged


def test_lines_wait_at_the_agent_while_the_launcher_writes_nothing(pair: Pair) -> None:
    launcher, agent = pair
    output = Output()
    received, shipped = ReceivedLogs(output), ShippedLogs(agent)
    receiving = _Receiving(received, launcher)
    launcher.serve(receiving)
    agent.serve(_Shipping(shipped))
    line, count = b"x" * 1000, 5000

    def ship() -> None:
        for _ in range(count):
            shipped.write("node/0", False, [line])

    shipping = threading.Thread(target=ship)
    shipping.start()
    until(lambda: receiving.received_bytes > 500_000)
    shipping.join(0.1)
    assert shipping.is_alive() and receiving.received_bytes < 600_000  # of 5 MB
    output.may_write.set()
    shipping.join(WITHIN_S)
    until(lambda: len(output.lines) == count)
    received.close()
    assert output.is_closed and set(output.lines) == {line}
    assert received.last_lines("node/0") == [line.decode()] * 20


def test_an_unfinished_line_is_shown_at_the_launcher_and_left_out_without_credit(pair: Pair) -> None:
    launcher, agent = pair
    output = Output()
    output.may_write.set()
    received, shipped = ReceivedLogs(output), ShippedLogs(agent)
    launcher.serve(_Receiving(received, launcher))
    agent.serve(_Shipping(shipped))
    for _ in range(10_000):  # of which credit would run out if it never came back
        shipped.show("node/0", False, Unfinished(b"x" * 100, False))
    until(lambda: output.lines != [])
    shipped.write("node/0", False, [b"last"])
    until(lambda: output.lines[-1] == b"last")
    received.close()
    output.may_write.clear()
    shipped.show("node/0", False, Unfinished(b"y" * 600_000, False))
    shipped.show("node/0", False, Unfinished(b"without credit, returns", False))


def test_the_launcher_says_that_nobody_reads_what_it_writes_and_writes_the_rest_when_somebody_does(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    # It gave up without a word, and the files of the run lacked what was left.
    output = Output()
    received = ReceivedLogs(output)
    for line in (b"first", b"last"):
        received.put(pair[0], "node/0", False, line)
    received.close(patience_s=0.1)
    assert "lp_pipe.telemetry.log_pump" in [record.name for record in caplog.records]
    assert not output.is_closed
    output.may_write.set()
    until(lambda: output.is_closed)
    assert output.lines == [b"first", b"last"]


def test_a_pump_that_waits_is_freed_when_the_launcher_is_gone(pair: Pair) -> None:
    _, agent = pair
    shipped = ShippedLogs(agent)
    shipping = threading.Thread(target=lambda: [shipped.write("node/0", False, [b"x" * 100_000]) for _ in range(20)])
    shipping.start()
    shipping.join(0.1)
    assert shipping.is_alive()
    shipped.close()
    shipping.join(WITHIN_S)
    assert not shipping.is_alive()
