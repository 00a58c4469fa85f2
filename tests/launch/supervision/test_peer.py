"""Notices, questions and answers between two ends of a connection."""

import os
import pickle
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

import lp_pipe as lp
from lp_pipe import connections
from lp_pipe.connections import Connection
from lp_pipe.launch.supervision import messages
from lp_pipe.launch.supervision.messages import HasLostState, Hear, LogEvent, RequestStop, Resolve, View
from lp_pipe.launch.supervision.peer import Peer, PendingAnswers
from lp_pipe.telemetry.waits import PoolStatus
from tests.waiting import until

WITHIN_S = 10.0
MakePeers = Callable[[Callable[[Any], object]], Peer]


@pytest.fixture
def asking() -> "Iterator[MakePeers]":
    """Return a peer whose messages are handled by the function that the test gives."""
    opened: list[Any] = []

    def make(handle: Callable[[Any], object]) -> Peer:
        accepted: list[Connection] = []
        endpoint = f"inproc:{uuid.uuid4().hex}"
        listener = connections.listen(endpoint, accepted.append)
        ours = connections.connect(endpoint)
        opened.extend([listener, ours])
        peers = Peer(ours, lambda message: None), Peer(accepted[0], handle)
        for peer in peers:
            peer.start()
        return peers[0]

    yield make
    for one in opened:
        one.close()


def test_notices_arrive_in_order_and_questions_are_answered(asking: MakePeers) -> None:
    heard: list[Any] = []

    def handle(message: Any) -> object:
        heard.append(message)
        return f"endpoint of {message.address}" if isinstance(message, Resolve) else None

    peer = asking(handle)
    peer.tell(RequestStop())
    peer.tell(LogEvent("resumed", {"step": 3}))
    assert peer.ask(Resolve("server")).result(WITHIN_S) == "endpoint of server"
    assert heard == [RequestStop(), LogEvent("resumed", {"step": 3}), Resolve("server")]


def test_an_answer_may_come_later_and_not_in_the_order_of_the_questions(asking: MakePeers) -> None:
    answers: dict[str, Future[str]] = {"first": Future(), "second": Future()}
    peer = asking(lambda message: answers[message.address])
    first, second = peer.ask(Resolve("first")), peer.ask(Resolve("second"))
    answers["second"].set_result("two")
    assert second.result(WITHIN_S) == "two" and not first.done()
    answers["first"].set_exception(lp.Unavailable("node first/0 failed"))
    with pytest.raises(lp.Unavailable, match="first/0"):
        first.result(WITHIN_S)


@pytest.mark.parametrize(("raised", "caught"), [(lp.Unavailable, lp.Unavailable), (RuntimeError, RuntimeError)])
def test_an_error_of_the_other_end_keeps_its_class(asking: MakePeers, raised: Any, caught: Any) -> None:
    def handle(message: Any) -> object:
        raise raised("address 7")

    with pytest.raises(caught, match="address 7"):
        asking(handle).ask(HasLostState("7")).result(WITHIN_S)


def test_a_question_is_unavailable_once_the_connection_is_closed(asking: MakePeers) -> None:
    never: Future[str] = Future()
    peer = asking(lambda message: never)
    asked = peer.ask(Hear())
    peer.connection.close("the host went down")
    for answer in (asked, peer.ask(Hear())):
        with pytest.raises(lp.Unavailable):
            answer.result(WITHIN_S)
    with pytest.raises(lp.Unavailable):
        peer.tell(RequestStop())


def test_answers_that_come_twice_or_after_the_end_are_ignored() -> None:
    pending = PendingAnswers()
    number, answer = pending.add()
    pending.settle(number, "first")
    pending.settle(number, "second")
    assert answer.result(0) == "first"
    _, waiting = pending.add()
    pending.close("gone")
    _, late = pending.add()
    for future in (waiting, late):
        with pytest.raises(lp.Unavailable, match="gone"):
            future.result(0)
    assert pending.closed_reason == "gone"


SURROGATE = os.fsdecode(b"/data/\xff")  # a path that is no UTF-8


@pytest.mark.parametrize(
    "message",
    [
        messages.Hello("a/0", 4711, 2),
        messages.CodeEnded(messages.Failure("ValueError", "asked to", "Traceback …", is_plain_echo=True)),
        messages.LogMetrics({"loss": float("inf"), "accuracy": 0.5}, None),
        messages.StartNode(
            label="a",
            index=0,
            group_size=1,
            run_dir=SURROGATE,
            socket_dir="",
            cwd=SURROGATE,
            sys_path=(SURROGATE, "\udcff"),
            argv=("-c",),
            main={},
            env={"A": SURROGATE},
            threads=1,
            cpus=(),
            devices=(),
            grace_s=5.0,
            state=b"\x00",
            membership=None,
            previous_end="",
        ),
        messages.Waits(View([], [PoolStatus("unix:x", 4, 1, ("quick",))], ["stages/1: forward"])),
    ],
)
def test_messages_come_back_equal(message: Any) -> None:
    assert messages.decode(*messages.encode(message)) == message


class Command:
    """Runs a command where it is unpickled, unless that is refused."""

    def __reduce__(self) -> Any:
        return os.system, ("exit 1",)


@pytest.mark.parametrize("data", [pickle.dumps(Command()), pickle.dumps(os.getpid), pickle.dumps(lp.Resources())])
def test_bytes_that_name_other_classes_or_functions_are_refused(data: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError, match="no part of a supervision message"):
        messages.decode(data)


def test_a_peer_that_sends_such_bytes_loses_its_connection(asking: MakePeers, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []
    peer = asking(heard.append)
    monkeypatch.setattr(messages, "encode", lambda message: (pickle.dumps(Command()), ()))
    with pytest.raises((lp.Unavailable, pickle.UnpicklingError)):
        peer.tell(RequestStop())
        until(lambda: peer.connection.closed_reason)
        peer.tell(RequestStop())
    assert heard == []
