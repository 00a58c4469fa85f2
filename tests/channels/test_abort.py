"""An operation that is given up at one end or both; later ones work."""

import pytest
import torch

from lp_pipe.errors import ChannelClosed
from tests.channels.edges import PATIENCE_S, Edge, assert_same, in_thread, is_blocked


def test_values_of_earlier_operations_are_dropped(edge: Edge) -> None:
    receiver, sender = edge.receiver(credits=2), edge.sender()
    sender.send(1, "old")
    sender.send(1, "old too")
    sending = in_thread(sender.send, 2, "new")
    assert receiver.receive(2, PATIENCE_S) == "new"
    sending.result(PATIENCE_S)


def test_a_value_of_a_later_operation_is_an_error(edge: Edge) -> None:
    receiver, sender = edge.receiver(), edge.sender()
    sender.send(2, "later")
    with pytest.raises(AssertionError, match="tag 2 came while 1 was asked for"):
        receiver.receive(1, PATIENCE_S)
    assert receiver.receive(2, PATIENCE_S) == "later"


def test_abort_frees_a_blocked_sender_and_later_operations_work(edge: Edge) -> None:
    receiver, sender = edge.receiver(credits=1), edge.sender()
    sender.send(1, "fills the channel")
    blocked = in_thread(sender.send, 1, "too many")
    assert is_blocked(blocked)
    sender.abort(1, "stage 2 failed")
    with pytest.raises(ChannelClosed, match=r"'activations' to stages/1: stage 2 failed"):
        blocked.result(PATIENCE_S)
    with pytest.raises(ChannelClosed, match="stage 2 failed"):
        sender.send(0, "even older")
    sending = in_thread(sender.send, 2, "works")
    assert receiver.receive(2, PATIENCE_S) == "works"
    sending.result(PATIENCE_S)


def test_abort_frees_a_blocked_receiver_and_later_operations_work(edge: Edge) -> None:
    receiver, sender = edge.receiver(), edge.sender()
    blocked = in_thread(receiver.receive, 1)
    assert is_blocked(blocked)
    receiver.abort(1, "stage 2 failed")
    with pytest.raises(ChannelClosed, match=r"'activations' from .*: stage 2 failed"):
        blocked.result(PATIENCE_S)
    with pytest.raises(ChannelClosed, match="stage 2 failed"):
        receiver.receive(0)
    sender.send(2, "works")
    assert receiver.receive(2, PATIENCE_S) == "works"


def test_abort_drops_queued_and_arriving_values_and_returns_their_credits(edge: Edge) -> None:
    receiver, sender = edge.receiver(credits=2), edge.sender()
    sender.send(1, torch.ones(2))
    sender.send(1, torch.ones(3))
    receiver.abort(1, "gone wrong")
    receiver.poll()
    for length in (4, 5):
        sender.send(1, torch.ones(length))  # would block if the credits had not come back
        receiver.poll()
    sender.send(2, torch.ones(5))  # as before: its layout came with a value that was dropped
    assert_same(receiver.receive(2, PATIENCE_S), torch.ones(5))


def test_an_older_abort_does_not_replace_a_newer_one(edge: Edge) -> None:
    receiver, sender = edge.receiver(), edge.sender()
    for end in (sender, receiver):
        end.abort(5, "newer")
        end.abort(3, "older")
    with pytest.raises(ChannelClosed, match="newer"):
        sender.send(4, None)
    with pytest.raises(ChannelClosed, match="newer"):
        receiver.receive(4)
