"""The states of a node's processes, and how long a restart waits."""

import pytest

from lp_pipe.launch.supervision.lifecycle import TRANSITIONS, Backoff, NodeState


def test_a_node_that_fails_as_it_starts_is_started_ever_more_rarely() -> None:
    backoff = Backoff()
    assert [backoff.after(0.05) for _ in range(8)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_the_back_off_begins_anew_once_the_node_had_served_for_longer_than_it_was_down() -> None:
    backoff = Backoff()
    served = (0.0, 0.1, 0.2, 0.4, 0.81, 0.05)
    assert [backoff.after(served_s + 1.0, served_s) for served_s in served] == [0.1, 0.2, 0.4, 0.8, 0.1, 0.2]


def test_a_node_that_takes_a_second_to_fail_is_started_ever_more_rarely() -> None:
    backoff = Backoff()
    assert [backoff.after(1.0) for _ in range(4)] == [0.1, 0.2, 0.4, 0.8]
    assert backoff.after(5.1) == 0.1


def test_a_server_that_is_killed_every_half_second_never_waits_for_seconds() -> None:
    backoff = Backoff()
    assert {backoff.after(0.6, 0.5) for _ in range(100)} == {0.1}


def test_the_first_restart_waits_also_after_no_time_at_all() -> None:
    assert Backoff().after(0.0) == 0.1


@pytest.mark.parametrize("state", NodeState)
def test_every_state_has_its_transitions_and_only_gone_states_lead_to_a_start(state: NodeState) -> None:
    following = TRANSITIONS[state]
    assert following and state not in following
    assert (NodeState.STARTING in following) == (state is NodeState.DOWN)
    assert state.when_gone.is_gone or state.is_alive
    if state.is_gone:  # its process cannot come back but by a start
        assert all(after.is_gone or after is NodeState.STARTING for after in following)


def test_words_are_those_of_the_status() -> None:
    words = {"waiting", "starting", "running", "finished", "failed", "stopped", "restarting"}
    assert {state.word for state in NodeState} == words
    assert all(state.word == state.when_gone.word for state in NodeState)
