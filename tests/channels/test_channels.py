"""The contract of every channel, whichever way its tensors travel: order, credits, the choice of the way."""

import contextlib
import subprocess
import sys
import time

import pytest
import torch

from lp_pipe.channels import ChannelHub, kinds, open_sender
from lp_pipe.errors import Unavailable
from tests.channels.edges import PATIENCE_S, Edge, assert_same, in_thread, is_blocked


def test_a_value_arrives_as_it_was_sent(edge: Edge) -> None:
    receiver, sender = edge.receiver(), edge.sender()
    sender.send(0, {"x": torch.arange(6).reshape(2, 3), "mask": None, "more": [torch.ones(2), (7, "seven")]})
    value = receiver.receive(0, PATIENCE_S)
    assert_same(value["x"], torch.arange(6).reshape(2, 3))
    assert value["mask"] is None
    assert_same(value["more"][0], torch.ones(2))
    assert value["more"][1] == (7, "seven")


def test_values_arrive_in_order(edge: Edge) -> None:
    receiver, sender = edge.receiver(credits=3), edge.sender()

    def send_all() -> None:
        for number in range(200):
            sender.send(number // 10, torch.full((number % 7,), float(number)))

    sending = in_thread(send_all)
    for number in range(200):
        assert_same(receiver.receive(number // 10, PATIENCE_S), torch.full((number % 7,), float(number)))
    sending.result(PATIENCE_S)


@pytest.mark.parametrize("credits", [1, 3])
def test_credits_bound_what_is_on_its_way(edge: Edge, credits: int) -> None:
    receiver, sender = edge.receiver(credits), edge.sender()
    for number in range(credits):
        sender.send(0, number)
    one_more = in_thread(sender.send, 0, credits)
    assert is_blocked(one_more)
    assert receiver.receive(0, PATIENCE_S) == 0
    one_more.result(PATIENCE_S)
    assert [receiver.receive(0, PATIENCE_S) for _ in range(credits)] == list(range(1, credits + 1))


def test_the_receiver_may_be_made_after_the_sender(edge: Edge) -> None:
    sender = edge.sender()
    sending = in_thread(sender.send, 0, torch.ones(2))
    assert is_blocked(sending)
    receiver = edge.receiver()
    assert_same(receiver.receive(0, PATIENCE_S), torch.ones(2))
    sending.result(PATIENCE_S)


def test_channels_of_a_hub_do_not_wait_for_each_other(edge: Edge) -> None:
    slow, fast = (edge.hub.receiver(name, credits=1) for name in ("slow", "fast"))
    to_slow, to_fast = (open_sender(edge.hub.endpoint, name, kind=edge.kind) for name in ("slow", "fast"))
    to_slow.send(0, "stays")
    for number in range(5):
        to_fast.send(0, number)
        assert fast.receive(0, PATIENCE_S) == number
    assert slow.receive(0, PATIENCE_S) == "stays"


def test_a_receiver_may_only_look(edge: Edge) -> None:
    """Regression: a receiver that reads the connection itself read nothing with a timeout of 0."""
    receiver, sender = edge.receiver(), edge.sender()

    def value() -> object:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                return receiver.receive(0, timeout_s=0)
        return "nothing came"

    in_thread(sender.send, 0, "something")
    assert value() == "something"


def test_a_timeout_names_channel_and_peer(edge: Edge) -> None:
    receiver, _sender = edge.receiver(), edge.sender()
    with pytest.raises(TimeoutError, match=r"'activations' from .*: nothing with tag 3 came within 0.01 s"):
        receiver.receive(3, timeout_s=0.01)


@pytest.mark.parametrize(
    ("endpoint", "kind"), [("inproc:x", "shm"), ("unix:/tmp/x", "inproc"), ("unix:/tmp/x", "pigeon"), ("grpc:x", "shm")]
)
def test_a_kind_that_does_not_fit_is_refused(endpoint: str, kind: str) -> None:
    with pytest.raises(ValueError, match=f"channel kind '{kind}' .*use one of 'auto'"):
        open_sender(endpoint, "activations", kind=kind)


@pytest.mark.parametrize("scheme", ["inproc", "unix"])
def test_auto_and_stream_work_over_every_connection(directory: str, scheme: str) -> None:
    hub = ChannelHub(f"{scheme}:{directory}/s", "stages/1")
    for kind in ("auto", "stream"):
        receiver, sender = hub.receiver(kind), open_sender(hub.endpoint, kind, kind=kind)
        sender.send(0, (torch.arange(5), torch.zeros(0)))
        assert_same(receiver.receive(0, PATIENCE_S)[0], torch.arange(5))
    hub.close("done")


def test_importing_channels_does_not_import_torch() -> None:
    code = "import sys, lp_pipe.channels; assert 'torch' not in sys.modules; lp_pipe.channels.ChannelHub"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_only_who_is_told_the_endpoint_reaches_a_hub_over_grpc() -> None:
    hub = ChannelHub(kinds.named("grpc").hub_endpoint("unix:/nowhere"), "stages/1")
    where, _, token = hub.endpoint.partition("#")
    with pytest.raises(Unavailable, match="wrong token") as raised:
        open_sender(f"{where}#{'0' * len(token)}", "activations", kind="grpc")
    assert token not in str(raised.value)
    hub.close("done")
