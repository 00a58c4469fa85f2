"""Any value of containers, tensors and other leaves arrives as it was sent, over every kind of channel."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.channels.edges import PATIENCE_S, Edge

DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.uint8, torch.complex64]
VIEWS = [lambda x: x, lambda x: x.transpose(0, -1), lambda x: x[..., ::2], lambda x: x.expand(2, *x.shape)]

shapes = st.lists(st.integers(0, 4), min_size=1, max_size=3)
tensors = st.builds(
    lambda shape, dtype, view: view((torch.randn(shape) * 3).to(dtype)),
    shapes,
    st.sampled_from(DTYPES),
    st.sampled_from(VIEWS),
)
large = st.builds(lambda count, dtype: torch.ones(count).to(dtype), st.just(300_001), st.sampled_from(DTYPES))
leaves = st.one_of(tensors, large, st.none(), st.integers(), st.text(max_size=5), st.booleans())
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ),
    max_leaves=6,
)


def assert_same_leaf(got: Any, sent: Any) -> None:
    if not isinstance(sent, Tensor):
        assert type(got) is type(sent) and got == sent
        return
    assert got.dtype == sent.dtype and got.shape == sent.shape and torch.equal(got, sent)
    if not any(stride == 0 for stride in got.stride()):
        got.zero_()  # it is the receiver's own


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sent=st.lists(values, min_size=1, max_size=4))
def test_any_nested_value_arrives_as_it_was_sent(edge: Edge, sent: list[Any]) -> None:
    receiver, sender = edge.receiver(), edge.sender()
    for value in sent:
        sender.send(0, value)
    for value in sent:
        got_leaves, got_tree = pytree.tree_flatten(receiver.receive(0, PATIENCE_S))
        leaves, tree = pytree.tree_flatten(value)
        assert got_tree == tree
        for got, leaf in zip(got_leaves, leaves, strict=True):
            assert_same_leaf(got, leaf)
    sender.close("that was all")
    receiver.close("that was all")
