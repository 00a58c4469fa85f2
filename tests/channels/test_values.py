"""The values that may travel through a channel, and how they arrive."""

import collections
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lp_pipe.connections import Frame, frames
from tests.channels.edges import PATIENCE_S, Edge, assert_same


def tensors_of_every_sort() -> dict[str, torch.Tensor]:
    matrix = torch.randn(4, 6)
    dtypes = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.complex64]
    plain = {str(dtype): (matrix * 10).to(dtype) for dtype in [*dtypes, torch.bool, torch.complex128]}
    complex_matrix = torch.randn(3, 2, dtype=torch.complex64)
    return plain | {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
        "empty in the middle": torch.zeros(2, 0, 3),
        "transposed": matrix.t(),
        "strided": matrix[::2, 1::2],
        "expanded": torch.randn(3, 1).expand(3, 5),
        "row of a large storage": torch.randn(100, 7)[50],
        "channels last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "conjugated": complex_matrix.conj(),
        "negative bit": complex_matrix.conj().imag,
        "odd size": torch.arange(13, dtype=torch.uint8),
    }


def test_tensors_of_every_dtype_and_shape(edge: Edge) -> None:
    receiver, sender = edge.receiver(), edge.sender()
    sent = tensors_of_every_sort()
    sender.send(0, sent)
    got = receiver.receive(0, PATIENCE_S)
    assert list(got) == list(sent)
    for name in sent:
        assert_same(got[name], sent[name])
    # A kernel may sum in another order for another memory format, so that arrives too.
    assert got["channels last"].is_contiguous(memory_format=torch.channels_last)
    assert got["transposed"].stride() == sent["transposed"].stride()


class Point(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3),
        (),
        None,
        "no tensor at all",
        Point(torch.ones(1), 2),
        collections.OrderedDict(b=torch.ones(1), a=[]),
        {"deep": [({"x": (torch.ones(2, 2),)},), []]},
    ],
)
def test_containers(edge: Edge, value: Any) -> None:
    receiver, sender = edge.receiver(), edge.sender()
    sender.send(0, value)
    got = receiver.receive(0, PATIENCE_S)
    assert type(got) is type(value)
    assert str(got) == str(value)


def test_gradients_do_not_travel(edge: Edge) -> None:
    receiver, sender = edge.receiver(), edge.sender()
    weight = torch.nn.Parameter(torch.ones(3))
    sender.send(0, (weight, weight * 2))
    for tensor in receiver.receive(0, PATIENCE_S):
        assert type(tensor) is torch.Tensor
        assert not tensor.requires_grad
        tensor.requires_grad_()


def test_tensors_that_cannot_travel_are_refused_and_the_channel_goes_on(edge: Edge) -> None:
    receiver, sender = edge.receiver(credits=1), edge.sender()
    with pytest.raises(ValueError, match=r"dense tensors.*sparse_coo: return tensor\.to_dense\(\) in the layer"):
        sender.send(0, torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match=r"not one that is nested: return torch\.nested\.to_padded_tensor"):
        sender.send(0, torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    with pytest.raises(ValueError, match=r"meta: send tensor\.cpu\(\)"):
        sender.send(0, torch.empty(3, device="meta"))
    with pytest.raises(Exception, match="pickle"):
        sender.send(0, threading.Lock())
    sender.send(0, torch.ones(1))
    assert_same(receiver.receive(0, PATIENCE_S), torch.ones(1))


def test_shapes_and_leaves_may_change_from_value_to_value(edge: Edge) -> None:
    receiver, sender = edge.receiver(), edge.sender()
    for length, note in [(3, "a"), (3, "a"), (5, "a"), (0, "b"), (3, 1), (3, True)]:
        sender.send(0, [torch.full((length,), 2.0), note])
        tensor, got = receiver.receive(0, PATIENCE_S)
        assert_same(tensor, torch.full((length,), 2.0))
        assert (type(got), got) == (type(note), note)


def test_the_layout_goes_only_when_it_changes(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver, sender = edge.receiver(), edge.sender()
    went: list[int] = []  # values whose layout did
    send = sender._connection.send

    def note_and_send(frame: Frame) -> None:
        tag_bytes = 8
        if frame.kind == frames.CHANNEL_DATA and len(frame.body) > tag_bytes:
            went.append(len(received))
        send(frame)

    monkeypatch.setattr(sender._connection, "send", note_and_send)
    values = [(torch.ones(2), 1), (torch.zeros(2), 1), (torch.zeros(2), 2), (torch.zeros(2), 2)]
    received: list[Any] = []
    for value in values:
        sender.send(0, value)
        received.append(receiver.receive(0, PATIENCE_S)[1])
    assert received == [1, 1, 2, 2] and went == [0, 2]


def test_mutable_leaves_are_never_shared(edge: Edge) -> None:
    receiver, sender = edge.receiver(), edge.sender()
    note = {1, 2}  # a set is a leaf
    for _ in range(2):
        sender.send(0, note)
    first, second = receiver.receive(0, PATIENCE_S), receiver.receive(0, PATIENCE_S)
    first.add(3)
    assert note == second == {1, 2}


def test_the_sender_may_overwrite_at_once(edge: Edge) -> None:
    receiver, sender = edge.receiver(), edge.sender()
    tensor = torch.ones(1000)
    sender.send(0, tensor)
    tensor.zero_()
    assert_same(receiver.receive(0, PATIENCE_S), torch.ones(1000))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(0, 2),
        lambda x: x[:, 1:],
        lambda x: x[::2, :, 1],
        lambda x: x.mean(1, keepdim=True).expand(4, 5, 6),
        lambda x: x[:1, 1:3].expand(7, 2, 6),
        lambda x: x.sum().expand(3, 2),
        lambda x: x.unfold(1, 3, 1),
    ],
    ids=["transposed", "sliced", "strided", "expanded", "sliced and expanded", "scalar expanded", "windows"],
)
def test_a_view_keeps_its_values_and_its_layout(edge: Edge, view: Callable[[Tensor], Tensor]) -> None:
    """Kernels sum in another order over another layout; overlapping windows cannot be written, so they turn dense."""
    receiver, sender = edge.receiver(), edge.sender()
    sent = view(torch.randn(4, 5, 6))
    sender.send(0, sent)
    received = receiver.receive(0, PATIENCE_S)
    assert torch.equal(received, sent)
    assert received.stride() == sent.stride() or sent.shape[-1] == 3


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[1],
        lambda x: x[:, 1:, 1:],
        lambda x: torch.view_as_complex(x)[1:].conj(),
        lambda x: torch.view_as_complex(x).conj().imag,
    ],
    ids=["a slice", "a slice with gaps", "conjugated", "negated"],
)
def test_a_view_lies_in_memory_as_it_did(edge: Edge, view: Callable[[Tensor], Tensor]) -> None:
    """Products of few features have other bits where a row begins elsewhere in a cache line, or is conjugated first."""
    receiver, sender = edge.receiver(), edge.sender()
    for _ in range(2):
        sent = view(torch.randn(3, 3, 2))
        sender.send(0, sent)
        received = receiver.receive(0, PATIENCE_S)
        assert torch.equal(received, sent)
        assert received.data_ptr() % 64 == sent.data_ptr() % 64
        assert (received.is_conj(), received.is_neg()) == (sent.is_conj(), sent.is_neg())
        received.mul_(2)  # as a layer may do in place


def test_evaluation_and_training_share_a_channel(edge: Edge) -> None:
    """Inference tensors cannot be written outside inference mode: slots made in one must serve the other."""
    receiver, sender = edge.receiver(credits=1), edge.sender()
    for is_inference in (True, False, True):
        with torch.inference_mode(is_inference):
            sender.send(0, torch.ones(3))
            assert_same(receiver.receive(0, PATIENCE_S), torch.ones(3))


class Noted:
    """A container with something of its own beside its tensor."""

    def __init__(self, tensor: Tensor, note: Any) -> None:
        self.tensor, self.note = tensor, note


pytree.register_pytree_node(
    Noted, lambda noted: ([noted.tensor], noted.note), lambda leaves, note: Noted(*leaves, note)
)


def test_what_containers_keep_beside_their_leaves_is_nobody_elses(edge: Edge) -> None:
    """Regression: it was sent once, and all values shared that object, so changes in place were lost or came twice."""
    receiver, sender = edge.receiver(), edge.sender()
    note = {"count": 0}
    for count in range(3):
        note["count"] = count
        sender.send(0, Noted(torch.ones(2), note))
    for count in range(3):
        got = receiver.receive(0, PATIENCE_S)
        assert got.note == {"count": count}
        got.note["count"] = 9


def test_containers_may_keep_what_cannot_be_compared(edge: Edge) -> None:
    receiver, sender = edge.receiver(), edge.sender()
    for number in range(3):
        sender.send(0, Noted(torch.ones(2), torch.tensor([1, number])))
        assert receiver.receive(0, PATIENCE_S).note.tolist() == [1, number]


@pytest.mark.parametrize("key", [True, 1.0])
def test_equal_keys_keep_their_types(edge: Edge, key: Any) -> None:
    receiver, sender = edge.receiver(), edge.sender()
    for sent in (1, key):
        sender.send(0, {sent: torch.ones(1)})
    assert [type(next(iter(receiver.receive(0, PATIENCE_S)))) for _ in range(2)] == [int, type(key)]


@pytest.mark.skipif(not hasattr(torch, "uint4"), reason="a torch without it")
def test_what_torch_cannot_copy_is_refused_and_the_channel_goes_on(edge: Edge) -> None:
    """Regression: such a value broke the channel in the middle of a copy, and with it the pipeline."""
    receiver, sender = edge.receiver(credits=1), edge.sender()
    data = torch.arange(4, dtype=torch.uint8)
    for value in (data.view(torch.uint4), {"a": [data.view(torch.uint4)]}):
        with pytest.raises(ValueError, match=r"torch.uint4: send tensor.view\(torch.uint8\)"):
            sender.send(0, value)
    sender.send(0, data)
    assert_same(receiver.receive(0, PATIENCE_S), data)
