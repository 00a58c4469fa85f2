"""Lines of nodes on their way from an agent to the launcher: within a bounded number of bytes."""

import threading
import uuid
from collections.abc import Iterator

import pytest

from lp_pipe import connections
from lp_pipe.connections import Connection
from lp_pipe.launch.hosts.agent_messages import LinesWritten, NodeLines, NodeUnfinishedLine
from lp_pipe.launch.hosts.shipped_logs import ReceivedLogs, ShippedLogs
from lp_pipe.launch.supervision.peer import Handlers, Peer
from lp_pipe.rpc import codec
from lp_pipe.telemetry.terminal_lines import Unfinished
from tests.waiting import until

WITHIN_S = 10.0
Pair = tuple[Peer, Peer]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """The launcher's end, and the agent's."""
    accepted: list[Connection] = []
    endpoint = f"inproc:{uuid.uuid4().hex}"
    listener = connections.listen(endpoint, accepted.append)
    ours = connections.connect(endpoint)
    links = tuple(Peer(connection, lambda message: None, codec) for connection in (accepted[0], ours))
    for link in links:
        link.start()
    yield links[0], links[1]
    ours.close()
    listener.close()


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


def receive(pair: Pair, logs: ReceivedLogs) -> list[int]:
    """Hand what comes to the launcher's end on; returns how many bytes each piece has."""
    launcher = pair[0]
    handlers, sizes = Handlers(), list[int]()

    def take(message: NodeLines | NodeUnfinishedLine, content: bytes | Unfinished) -> None:
        sizes.append(len(message.text))
        logs.put(launcher, message.node_id, message.is_stderr, content)

    handlers.on(NodeLines, lambda message: take(message, message.text))
    handlers.on(NodeUnfinishedLine, lambda message: take(message, Unfinished(message.text, message.is_settled)))
    launcher.handle = handlers
    return sizes


def ship(pair: Pair) -> ShippedLogs:
    """Return the agent's end, which gets its credit back."""
    shipped = ShippedLogs(pair[1])
    pair[1].handle = Handlers()
    pair[1].handle.on(LinesWritten, lambda message: shipped.written(message.size))
    return shipped


def test_lines_wait_at_the_agent_while_the_launcher_writes_nothing(pair: Pair) -> None:
    output = Output()
    received, shipped = ReceivedLogs(output), ship(pair)
    sizes = receive(pair, received)
    line, count = b"x" * 1000, 5000

    def ship_all() -> None:
        for _ in range(count):
            shipped.write("node/0", False, [line])

    shipping = threading.Thread(target=ship_all)
    shipping.start()
    until(lambda: sum(sizes) > 500_000)
    shipping.join(0.1)
    assert shipping.is_alive() and sum(sizes) < 600_000  # of 5 MB
    output.may_write.set()
    shipping.join(WITHIN_S)
    until(lambda: len(output.lines) == count)
    received.close()
    assert output.is_closed and set(output.lines) == {line}
    assert received.last_lines("node/0") == [line.decode()] * 20


def test_an_unfinished_line_is_shown_at_the_launcher_and_left_out_without_credit(pair: Pair) -> None:
    output = Output()
    output.may_write.set()
    received, shipped = ReceivedLogs(output), ship(pair)
    receive(pair, received)
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
    shipped = ShippedLogs(pair[1])
    shipping = threading.Thread(target=lambda: [shipped.write("node/0", False, [b"x" * 100_000]) for _ in range(20)])
    shipping.start()
    shipping.join(0.1)
    assert shipping.is_alive()
    shipped.close()
    shipping.join(WITHIN_S)
    assert not shipping.is_alive()
