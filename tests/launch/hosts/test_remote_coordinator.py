"""An agent's messages for its nodes: few messages for many nodes."""

from concurrent.futures import Future
from typing import Any, cast

import pytest

from lp_pipe.errors import Unavailable
from lp_pipe.launch.hosts.agent_messages import CallsOfNodes, FindAll
from lp_pipe.launch.hosts.remote_coordinator import RemoteCoordinator
from lp_pipe.launch.supervision.messages import CallsTaken
from lp_pipe.launch.supervision.peer import Peer

WITHIN_S = 20.0


class Launcher:
    """Keeps what is said."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Future[Any]]] = []
        self.told: list[Any] = []

    def ask(self, question: Any) -> "Future[Any]":
        answer: Future[Any] = Future()
        self.asked.append((question, answer))
        return answer

    def tell_if_open(self, notice: Any) -> None:
        self.told.append(notice)


def coordinator(launcher: Launcher) -> RemoteCoordinator:
    return RemoteCoordinator(cast(Peer, launcher), ["a/0", "a/1"])


def test_questions_that_come_while_one_is_on_its_way_go_together() -> None:
    launcher = Launcher()
    asking = coordinator(launcher)
    answers = [asking.find(address) for address in ("one", "two", "three")]
    assert [question for question, _ in launcher.asked] == [FindAll(["one"])]
    launcher.asked[0][1].set_result(["endpoint of one"])
    assert answers[0].result(WITHIN_S) == "endpoint of one"
    question, answer = launcher.asked[1]
    assert question == FindAll(["two", "three"])
    answer.set_result(["endpoint of two", Unavailable("nobody listens yet at three")])
    assert answers[1].result(WITHIN_S) == "endpoint of two"
    with pytest.raises(Unavailable, match="nobody listens yet at three"):
        answers[2].result(WITHIN_S)
    assert len(launcher.asked) == 2
    asking.find("four")
    assert launcher.asked[2][0] == FindAll(["four"])


def test_all_who_ask_hear_that_the_launcher_is_gone() -> None:
    launcher = Launcher()
    asking = coordinator(launcher)
    answers = [asking.find("one"), asking.find("two")]
    for number in range(2):
        launcher.asked[number][1].set_exception(Unavailable("the launcher is gone"))
    for answer in answers:
        with pytest.raises(Unavailable, match="the launcher is gone"):
            answer.result(WITHIN_S)


def test_calls_are_reported_for_all_nodes_at_once_and_only_if_there_were_any() -> None:
    launcher = Launcher()
    asking = coordinator(launcher)
    assert not asking.report_calls()
    asking.tell("a/0", CallsTaken(3))
    asking.tell("a/1", CallsTaken(4))
    assert asking.report_calls()
    assert launcher.told == [CallsOfNodes({"a/0": 3, "a/1": 4})]
    assert not asking.report_calls()
