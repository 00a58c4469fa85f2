"""A group's members meet once all that live have asked, and learn when a generation is over."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

import lp_pipe as lp
from lp_pipe.launch.coordination.meetings import Meetings
from lp_pipe.launch.coordination.node_group import NodeRecord
from lp_pipe.launch.plan.spec import NodeSpec
from lp_pipe.launch.supervision.lifecycle import NodeState
from lp_pipe.launch.supervision.messages import Failure
from lp_pipe.membership import Membership


class Group:
    """Three nodes, with what the coordinator does around `Meetings`."""

    def __init__(self) -> None:
        specs = [NodeSpec(f"w/{rank}", "w", rank, 3, lp.PyNode(print), lp.Resources()) for rank in range(3)]
        self.nodes = {spec.node_id: NodeRecord(spec) for spec in specs}
        self.stopping = ""
        self.told: list[tuple[str, int, Sequence[str]]] = []
        self.meetings = Meetings(self.nodes, lambda: self.stopping, lambda *met: self.told.append(met))

    def meet(self, rank: int, generation: int = 0) -> "Future[Membership]":
        future: Future[Membership] = Future()
        self._settle(self.meetings.ask(f"w/{rank}", "w", generation, b"%d" % rank, future))
        return future

    def watch(self, generation: int) -> "Future[str]":
        over: Future[str] = Future()
        self._settle(self.meetings.watch("w", generation, over))
        return over

    def end(self, rank: int, state: NodeState) -> None:
        record = self.nodes[f"w/{rank}"]
        record.become(state)
        record.error = Failure("ValueError", "no luck")
        self._settle(self.meetings.leave(record))

    def stop(self, reason: str) -> None:
        self.stopping = reason
        self._settle([])

    def _settle(self, settlements: list[Any]) -> None:
        for settlement in [*settlements, *self.meetings.settled()]:
            settlement.carry_out()


def test_all_get_the_members_in_rank_order_once_the_last_has_asked() -> None:
    group = Group()
    futures = [group.meet(2), group.meet(0)]
    assert not any(future.done() for future in futures)
    futures.append(group.meet(1))
    members = ("w/0", "w/1", "w/2")
    assert [future.result(0) for future in futures] == [
        Membership("w", 0, rank, members, (b"0", b"1", b"2")) for rank in (2, 0, 1)
    ]
    assert group.told == [("w", 0, members)]


def test_the_survivors_of_a_node_that_has_ended_for_good_meet_without_it() -> None:
    group = Group()
    for rank in range(3):
        group.meet(rank)
    over = group.watch(0)
    group.end(1, NodeState.FAILING)
    assert "w/1" in over.result(0) and "no luck" in over.result(0)
    first, second = group.meet(2, 1), group.meet(0, 1)
    assert second.result(0) == Membership("w", 1, 0, ("w/0", "w/2"), (b"0", b"2"))
    assert first.result(0).rank == 1


def test_survivors_wait_for_a_node_that_is_restarted() -> None:
    group = Group()
    for rank in range(3):
        group.meet(rank)
    group.end(1, NodeState.RESTARTING)
    survivors = [group.meet(rank, 1) for rank in (0, 2)]
    assert not any(future.done() for future in survivors)
    assert group.meet(1, 0).result(0).generation == 1
    assert [future.result(0).rank for future in survivors] == [0, 2]


def test_a_node_that_ends_completes_the_meeting_of_the_others() -> None:
    group = Group()
    waiting = [group.meet(0), group.meet(1)]
    group.end(2, NodeState.FINISHING)
    assert [future.result(0).world_size for future in waiting] == [2, 2]


def test_a_generation_is_over_when_a_member_asks_again_and_a_new_number_is_never_an_old_one() -> None:
    group = Group()
    for rank in range(3):
        group.meet(rank)
    over = group.watch(0)
    last = [group.meet(rank, 0) for rank in range(3)]
    assert "w/0" in over.result(0)
    assert {future.result(0).generation for future in last} == {1}
    assert group.watch(0).done() and not group.watch(1).done()


def test_the_stop_of_the_program_ends_meetings() -> None:
    group = Group()
    waiting = group.meet(0)
    group.stop("program 'p' stops")
    with pytest.raises(lp.Unavailable, match="'p'"):
        waiting.result(0)


def test_a_node_of_another_group_cannot_meet() -> None:
    group = Group()
    with pytest.raises(RuntimeError, match="x/0"):
        group.meetings.ask("x/0", "w", 0, b"", Future())


def test_a_node_that_comes_late_learns_which_members_have_finished() -> None:
    group = Group()
    group.end(1, NodeState.FINISHING)
    group.meet(0)
    assert group.meet(2).result(0).finished == ("w/1",)
