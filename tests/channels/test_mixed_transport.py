"""Values of which a part lies on a GPU. Here tensors of float64 play that part, and gloo carries them."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lp_pipe.channels import ChannelHub, Receiver, Sender, kinds, open_sender, packing, registry
from lp_pipe.channels.gloo import GlooReceiver, GlooSender
from lp_pipe.channels.mixed_transport import MixedReceiver, MixedSender
from lp_pipe.channels.ring import RingReceiver, RingSender
from lp_pipe.channels.stream import StreamReceiver, StreamSender
from lp_pipe.errors import ChannelClosed
from tests.channels.edges import PATIENCE_S, in_thread, is_blocked

_numbers = itertools.count()

GPU = torch.device("cuda:0")
HOSTS = {"stream": (StreamSender, StreamReceiver), "ring": (RingSender, RingReceiver)}


@pytest.fixture(autouse=True)
def float64_is_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "is_on_gpu", lambda tensor: tensor.dtype == torch.float64)


@pytest.fixture(params=["stream", "ring"])
def host(request: pytest.FixtureRequest) -> str:
    if request.param == "ring" and not kinds.is_shm_supported():
        pytest.skip("no memfd_create")
    return str(request.param)


@pytest.fixture
def ends(host: str, directory: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Sender, Receiver]]:
    make_sender, make_receiver = HOSTS[host]
    mixed = (lambda: MixedSender(make_sender(), GlooSender()), lambda: MixedReceiver(make_receiver(), GlooReceiver()))
    monkeypatch.setitem(registry._TRANSPORTS, "gloo", mixed)
    hub = ChannelHub(f"unix:{directory}/s", "stages/1")
    receiver = hub.receiver("activations")
    yield open_sender(hub.endpoint, "activations", kind="gloo", name="stages/0"), receiver
    hub.close("the test is over")


def on_gpu(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("size", [3, 300_000])
def test_each_part_goes_its_way_and_the_value_is_put_together_again(ends: tuple[Sender, Receiver], size: int) -> None:
    sender, receiver = ends
    value = {"a": torch.randn(size), "b": (on_gpu(size), 7, on_gpu(2, size).t()), "c": [torch.arange(size), on_gpu(1)]}
    for _ in range(8):  # more often than there are credits
        sender.send(0, value)
        got = receiver.receive(0, PATIENCE_S)
        assert got["b"][1] == 7
        for left, right in zip(
            torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(value), strict=True
        ):
            assert torch.equal(torch.as_tensor(left), torch.as_tensor(right))
        assert got["b"][2].stride() == value["b"][2].stride()  # type: ignore[index]


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(4),
        torch.ones(4, dtype=torch.float64),
        torch.zeros(0, 3, dtype=torch.float64),
        (torch.zeros(0, dtype=torch.float64), torch.ones(2)),
        "no tensor at all",
    ],
)
def test_either_part_may_be_empty(ends: tuple[Sender, Receiver], value: object) -> None:
    sender, receiver = ends
    sender.send(0, value)
    assert str(receiver.receive(0, PATIENCE_S)) == str(value)


def test_what_is_on_its_way_is_free_again_once_it_was_received(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    for number in range(8):
        if number >= 4:
            receiver.receive(0, PATIENCE_S)
        sender.send(0, (on_gpu(100_000), torch.ones(1)))
    transport: Any = sender._transport
    assert list(transport._gpu_tokens) == list(transport._gpu._sending) == [4, 5, 6, 7]


def test_an_aborted_operations_messages_are_dropped_in_both_parts(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    for _ in range(4):
        sender.send(1, (on_gpu(70_000), torch.ones(3)))
    blocked = in_thread(sender.send, 2, (on_gpu(2), torch.ones(2)))
    assert is_blocked(blocked), "all credits are out"
    receiver.abort(1, "the step failed")
    blocked.result(PATIENCE_S)
    got, _ = receiver.receive(2, PATIENCE_S)
    assert got.shape == (2,)


def test_closing_waits_until_the_gpus_part_of_all_is_here(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    for number in range(3):
        sender.send(0, on_gpu(500_000) * 0 + number)
    sender.close("done")
    assert sender._transport._finished.is_set()  # type: ignore[attr-defined]
    for number in range(3):
        assert receiver.receive(0, PATIENCE_S)[0] == number
    with pytest.raises(ChannelClosed, match="done"):
        receiver.receive(0, PATIENCE_S)


def test_closing_does_not_wait_for_a_receiver_that_is_gone(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    sender.send(0, on_gpu(10))
    receiver.close("had enough")
    in_thread(sender.close).result(1.5)


@pytest.mark.skipif(not kinds.is_shm_supported(), reason="no memfd_create")
def test_a_receiver_that_cannot_read_the_senders_gpu_gets_all_through_the_host(directory: str) -> None:
    """CUDA IPC, to a stage on the CPU: the way that there is without a GPU."""
    hub = ChannelHub(f"unix:{directory}/s", "stages/1")
    receiver = hub.receiver("activations", device=torch.device("cpu"))
    sender = open_sender(hub.endpoint, "activations", device=GPU)
    value = (torch.randn(300_000), on_gpu(300_000), on_gpu(3), 5)
    for _ in range(6):
        sender.send(0, value)
        got = receiver.receive(0, PATIENCE_S)
        assert got[3] == 5
        assert all(torch.equal(left, right) for left, right in zip(got[:3], value[:3], strict=True))
    assert sender.carries_gpu
    sender.close()
    hub.close("the test is over")
