"""A message like the one before has that one's very layout; everything else is packed afresh."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lp_pipe.channels import packing
from lp_pipe.channels.packing import Packer


def message(*, fill: float = 0.0) -> tuple[Any, ...]:
    return torch.full((2, 3), fill), [torch.ones(4, dtype=torch.int64), None], (True, "name", 7)


def assert_packs_the_same(packer: Packer, value: Any) -> packing.Layout:
    """Assert that it packs as packing.pack does, which looks at one value alone."""
    layout, tensors = packer.pack(value)
    expected_layout, expected_tensors = packing.pack(value)
    assert layout == expected_layout
    assert [tensor.data_ptr() for tensor in tensors] == [tensor.data_ptr() for tensor in expected_tensors]
    assert not any(tensor.requires_grad for tensor in tensors)
    for got, expected in zip(tensors, expected_tensors, strict=True):
        assert torch.equal(got, expected)
    return layout


def test_a_message_like_the_last_one_has_the_same_layout_and_its_own_tensors() -> None:
    packer = Packer()
    first = assert_packs_the_same(packer, message(fill=1))
    assert assert_packs_the_same(packer, message(fill=2)) is first


def base() -> Tensor:
    return torch.arange(16.0).reshape(4, 4)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((base(), True), (base(), 1), id="True is no 1"),
        pytest.param((base(), 0), (base(), 0.0), id="0 is no 0.0"),
        pytest.param((base(), 0.0), (base(), -0.0), id="0.0 is no -0.0"),
        pytest.param((base(),), [base()], id="a tuple is no list"),
        pytest.param((base(), base()), ((base(), base()),), id="nesting"),
        pytest.param((base(),), (base().double(),), id="dtype"),
        pytest.param((base(),), (base()[:2],), id="shape"),
        pytest.param((base(),), (base().t(),), id="strides"),
        pytest.param((base(),), (base()[0].expand(4, 4),), id="expanded"),
        pytest.param((base()[:, :3],), (base()[:, :3].contiguous(),), id="gaps"),
        pytest.param((base(),), OrderedDict(x=base()), id="another container"),
    ],
)
def test_what_differs_from_the_last_message_is_seen(before: Any, after: Any) -> None:
    packer = Packer()
    for value in (before, after, after, before):
        layout = assert_packs_the_same(packer, value)
        tensors = packing.copies(layout, packing.pack(value)[1])
        assert repr(packing.unpack(packing.Layout.decode(layout.encode()), tensors)) == repr(value)


def test_an_unusual_value_that_is_like_the_last_one_keeps_its_layout_too() -> None:
    packer = Packer()
    first = packer.pack({"x": base(), "y": 0.5})[0]
    assert packer.pack({"x": base() + 1, "y": 0.5})[0] is first


def test_what_a_channel_cannot_carry_is_refused_also_after_something_alike() -> None:
    packer = Packer()
    packer.pack((torch.ones(2, 2),))
    with pytest.raises(ValueError, match="dense tensors"):
        packer.pack((torch.ones(2, 2).to_sparse(),))
    with pytest.raises(ValueError, match="CPU tensors"):
        packer.pack((torch.ones(2, 2, device="meta"),))


def test_parameters_travel_as_tensors() -> None:
    packer = Packer()
    for _ in range(2):
        layout, tensors = packer.pack([nn.Parameter(torch.ones(3))])
        assert type(packing.unpack(layout, tensors)[0]) is Tensor


def test_values_that_cannot_be_told_apart_are_unpickled_once_and_others_every_time() -> None:
    shared, tensors = packing.pack((torch.ones(1), "name", None))
    assert packing.unpack(shared, tensors)[1] is packing.unpack(shared, tensors)[1]
    apart, tensors = packing.pack((torch.ones(1), {1, 2}))
    assert packing.unpack(apart, tensors)[1] is not packing.unpack(apart, tensors)[1]
