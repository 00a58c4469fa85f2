"""Closing at either end: the other end notices, and gets the reason."""

import pytest
import torch

from lp_pipe.errors import ChannelClosed, Unavailable
from tests.channels.edges import PATIENCE_S, Edge, assert_same, in_thread, is_blocked


def test_the_receiver_gets_what_was_sent_and_then_the_reason(edge: Edge) -> None:
    receiver, sender = edge.receiver(), edge.sender()
    sender.send(0, torch.ones(2))
    sender.close("no more data")
    assert_same(receiver.receive(0, PATIENCE_S), torch.ones(2))
    with pytest.raises(ChannelClosed, match=r"channel 'activations' from stages/0: no more data"):
        receiver.receive(0, PATIENCE_S)
    with pytest.raises(ChannelClosed, match="no more data"):
        sender.send(0, None)


@pytest.mark.parametrize("who", ["receiver", "hub"])
def test_closing_the_receiving_end_reaches_a_blocked_sender(edge: Edge, who: str) -> None:
    receiver, sender = edge.receiver(credits=1), edge.sender()
    sender.send(0, None)
    blocked = in_thread(sender.send, 0, None)
    assert is_blocked(blocked)
    (receiver if who == "receiver" else edge.hub).close("stage 1 stops")
    with pytest.raises(ChannelClosed, match=r"channel 'activations' to stages/1: stage 1 stops"):
        blocked.result(PATIENCE_S)
    with pytest.raises(ChannelClosed, match="stage 1 stops"):
        receiver.receive(0)


def test_closing_frees_a_blocked_receiver_here_and_there(edge: Edge) -> None:
    for closing in ("sender", "receiver"):
        receiver, sender = edge.receiver(), edge.sender()
        blocked = in_thread(receiver.receive, 0)
        assert is_blocked(blocked)
        (sender if closing == "sender" else receiver).close(f"{closing} stops")
        with pytest.raises(ChannelClosed, match=f"{closing} stops"):
            blocked.result(PATIENCE_S)


def test_closing_before_the_other_end_is_there(edge: Edge) -> None:
    edge.receiver().close("changed my mind")
    sender = edge.sender()
    with pytest.raises(ChannelClosed, match="changed my mind"):
        sender.send(0, None)
    sender = edge.sender()
    sender.close("me too")
    with pytest.raises(ChannelClosed, match="me too"):
        edge.receiver().receive(0, PATIENCE_S)


def test_a_closed_hub_tells_a_sender_that_waits_for_its_receiver(edge: Edge) -> None:
    sender = edge.sender()
    blocked = in_thread(sender.send, 0, None)
    edge.hub.close("shut down")
    with pytest.raises(ChannelClosed, match="shut down"):
        blocked.result(PATIENCE_S)
    with pytest.raises(ChannelClosed, match="shut down"):
        edge.receiver()
    with pytest.raises(Unavailable, match=r"channel 'activations' to stages/1: "):
        edge.sender()


def test_a_channel_has_one_sender_and_one_receiver(edge: Edge) -> None:
    receiver, sender = edge.receiver(), edge.sender()
    sender.send(0, "the first comes through")
    with pytest.raises(ValueError, match=r"'activations' of stages/1 .*receiver"):
        edge.receiver()
    second = edge.sender()
    with pytest.raises(ChannelClosed, match=r"'activations' of stages/1 .*sender"):
        second.send(0, "from the wrong one")
    sender.send(0, "from the right one")
    assert receiver.receive(0, PATIENCE_S) == "the first comes through"
    assert receiver.receive(0, PATIENCE_S) == "from the right one"


def test_a_channel_may_be_made_again_after_it_closed(edge: Edge) -> None:
    for number in range(3):
        receiver, sender = edge.receiver(), edge.sender()
        sender.send(0, number)
        assert receiver.receive(0, PATIENCE_S) == number
        receiver.close(f"round {number}")


def test_closing_the_sender_frees_its_own_blocked_send(edge: Edge) -> None:
    edge.receiver(credits=1)
    sender = edge.sender()
    sender.send(0, None)
    blocked = in_thread(sender.send, 0, None)
    assert is_blocked(blocked)
    sender.close("enough")
    with pytest.raises(ChannelClosed, match=r"channel 'activations' to stages/1: enough"):
        blocked.result(PATIENCE_S)


def test_all_that_was_sent_arrives_also_large_values_before_the_reason(edge: Edge) -> None:
    receiver, sender = edge.receiver(), edge.sender()
    for number in range(4):
        sender.send(0, torch.full((1_000_000,), float(number)))
    sender.close("no more data")
    for number in range(4):
        assert_same(receiver.receive(0, PATIENCE_S), torch.full((1_000_000,), float(number)))
    with pytest.raises(ChannelClosed, match="no more data"):
        receiver.receive(0, PATIENCE_S)
