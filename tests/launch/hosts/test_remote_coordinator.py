"""What an agent says for its nodes: few messages for many of them."""

from concurrent.futures import Future
from typing import Any, cast

import pytest

from lp_pipe.errors import Unavailable
from lp_pipe.launch.hosts.agent_link import AgentLink
from lp_pipe.launch.hosts.remote_coordinator import RemoteCoordinator
from lp_pipe.launch.supervision.messages import CallsTaken

WITHIN_S = 20.0


class Link:
    """Keeps what is said."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any, Future[Any]]] = []
        self.told: list[tuple[Any, ...]] = []

    def ask(self, method: str, argument: Any) -> "Future[Any]":
        answer: Future[Any] = Future()
        self.asked.append((method, argument, answer))
        return answer

    def tell(self, *words: Any) -> None:
        self.told.append(words)


def coordinator(link: Link) -> RemoteCoordinator:
    return RemoteCoordinator(cast(AgentLink, link), ["a/0", "a/1"])


def test_questions_that_come_while_one_is_on_its_way_go_together() -> None:
    link = Link()
    asking = coordinator(link)
    answers = [asking.find(address) for address in ("one", "two", "three")]
    assert [argument for _, argument, _ in link.asked] == [["one"]]
    link.asked[0][2].set_result(["endpoint of one"])
    assert answers[0].result(WITHIN_S) == "endpoint of one"
    method, argument, answer = link.asked[1]
    assert (method, argument) == ("find_all", ["two", "three"])
    answer.set_result(["endpoint of two", Unavailable("nobody listens yet at three")])
    assert answers[1].result(WITHIN_S) == "endpoint of two"
    with pytest.raises(Unavailable, match="nobody listens yet at three"):
        answers[2].result(WITHIN_S)
    assert len(link.asked) == 2
    asking.find("four")
    assert link.asked[2][1] == ["four"]


def test_all_who_ask_hear_that_the_launcher_is_gone() -> None:
    link = Link()
    asking = coordinator(link)
    answers = [asking.find("one"), asking.find("two")]
    for number in range(2):
        link.asked[number][2].set_exception(Unavailable("the launcher is gone"))
    for answer in answers:
        with pytest.raises(Unavailable, match="the launcher is gone"):
            answer.result(WITHIN_S)


def test_calls_are_reported_for_all_nodes_at_once_and_only_if_there_were_any() -> None:
    link = Link()
    asking = coordinator(link)
    assert not asking.report_calls()
    asking.tell("a/0", CallsTaken(3))
    asking.tell("a/1", CallsTaken(4))
    assert asking.report_calls()
    assert link.told == [("calls", {"a/0": 3, "a/1": 4})]
    assert not asking.report_calls()
