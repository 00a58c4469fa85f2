"""The cutting of a batch into micro-batches, and the weight of each one's loss."""

from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.layers.batch_dims import cut, unmarked
from lp_pipe.pipeline.layers.microbatches import aligned, apart, check_pair, loss_weights, split

Point = namedtuple("Point", "x y")


def sizes(value: Any, microbatches: int) -> list[int]:
    return [len(part) for part in split(value, microbatches)]


def test_a_batch_is_cut_as_torch_chunk_does() -> None:
    assert sizes(torch.zeros(10, 2), 4) == [3, 3, 3, 1]
    assert sizes(torch.zeros(6), 4) == [2, 2, 2]  # torch.chunk gives fewer
    assert sizes(torch.zeros(3), 4) == [1, 1, 1]
    assert sizes(torch.zeros(3), 1) == [3]


@given(batch=st.integers(0, 40), microbatches=st.integers(1, 12))
def test_every_size_is_cut_as_torch_chunk_does(batch: int, microbatches: int) -> None:
    value = torch.arange(batch)
    for got, want in zip(split(value, microbatches), value.chunk(microbatches), strict=True):
        assert torch.equal(got, want)


def test_containers_keep_their_shape() -> None:
    first, second = split({"a": torch.arange(4), "b": [Point(torch.arange(4) + 10, None)], "c": "text"}, 2)
    assert first["a"].tolist() == [0, 1] and second["a"].tolist() == [2, 3]
    assert isinstance(second["b"][0], Point) and second["b"][0].x.tolist() == [12, 13]
    assert first["b"][0].y is None and first["c"] == "text"


def test_what_has_no_batch_dimension_goes_to_every_microbatch() -> None:
    scale = torch.tensor(2.0)
    assert all(part[1] is scale for part in split((torch.zeros(4), scale), 2))


@pytest.mark.parametrize("value", [None, 3, "text", (), torch.tensor(1.0)])
def test_a_batch_without_a_batch_dimension_is_refused(value: object) -> None:
    with pytest.raises(PipelineError, match="at least one tensor with a batch dimension"):
        split(value, 2)


@pytest.mark.parametrize(("length", "other"), [(4, 1), (8, 7), (10, 20)])
def test_tensors_that_are_cut_at_different_samples_are_refused(length: int, other: int) -> None:
    """8 in 4 are 2, 2, 2, 2, and 7 are 2, 2, 2, 1: as many, so that the samples were mixed without a word."""
    with pytest.raises(PipelineError, match=rf"{length} and {other} samples .*\[\({length},\), \({other}, 3\)\]"):
        split((torch.zeros(length), torch.zeros(other, 3)), 4)


def test_several_rows_for_each_sample_are_cut_with_it() -> None:
    with pytest.raises(PipelineError, match=r"8 and 16 samples.*pp\.cut"):
        split((torch.arange(8), torch.arange(16)), 4)
    parts = split((torch.arange(8), cut(torch.arange(16))), 4)
    assert [(x.tolist(), unmarked(y).tolist()) for x, y in parts][1] == ([2, 3], [4, 5, 6, 7])
    with pytest.raises(PipelineError, match="8 and 7 samples"):
        split((torch.arange(8), cut(torch.arange(7))), 4)


def test_an_array_beside_tensors_is_refused() -> None:
    """Every micro-batch got all of it: the weights of 8 samples for the one that it had."""
    with pytest.raises(PipelineError, match=r"holds a ndarray of shape \(8,\), .* torch.from_numpy"):
        split({"x": torch.zeros(8, 3), "weight": np.ones(8)}, 4)
    assert len(split({"x": torch.zeros(8, 3), "scale": np.float32(2), "names": ["a"] * 8}, 4)) == 4


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(4).to_sparse(), r"of layout torch\.sparse_coo"),
        (lambda: torch.eye(4).to_sparse_csr(), r"of layout torch\.sparse_csr"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested"),
    ],
    ids=["coo", "csr", "nested"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_tensors_that_torch_cannot_cut_are_refused(make: Callable[[], torch.Tensor], kind: str) -> None:
    """Regression: the error was "Cannot access storage of SparseTensorImpl", or "an invalid python storage"."""
    with pytest.raises(PipelineError, match=f"the batch holds a tensor that is {kind}, .* give dense tensors"):
        split((torch.zeros(4), make()), 2)


def test_slices_begin_where_the_plain_loops_do() -> None:
    """Kernels may sum in another order at another address: a message may begin anywhere."""
    message = torch.frombuffer(memoryview(torch.zeros(26).numpy())[1:], dtype=torch.float32)
    assert message.data_ptr() % 64
    for askew, there in ((message, torch.zeros(25)), (message[1:], torch.zeros(25)[1:])):
        for part, plain in zip(split(askew, 3), there.chunk(3), strict=True):
            assert part.data_ptr() % 64 == plain.data_ptr() % 64
        assert aligned({"a": askew})["a"].data_ptr() % 64 == there.data_ptr() % 64


def test_a_tensor_that_comes_twice_is_one_wherever_it_begins() -> None:
    """A layer that writes to one of them writes to both, as in the plain loop, and not by chance."""
    askew = torch.frombuffer(memoryview(torch.zeros(26).numpy())[1:], dtype=torch.float32)
    first, second = split((askew, askew), 5)[2]
    first.fill_(1)
    assert second.tolist() == [1.0] * 5
    assert not aligned(askew).any()
    one, other = apart([torch.zeros(2).expand(3, 2), aligned(askew)])
    assert one.shape == (3, 2) and other.shape == (25,)
    whole = torch.zeros(4)
    one, other = apart([whole[:2], {"a": whole}])
    one.fill_(1)
    assert other["a"].tolist() == [0.0] * 4


def test_a_mean_loss_weighs_by_samples() -> None:
    targets = split(torch.zeros(10), 4)
    assert loss_weights(targets, "samples") == [3 / 10, 3 / 10, 3 / 10, 1 / 10]


def test_the_samples_are_those_of_the_first_tensor() -> None:
    assert loss_weights(split({"a": torch.tensor(1), "b": torch.zeros(3, 7)}, 2), "samples") == [2 / 3, 1 / 3]


@pytest.mark.parametrize("target", [None, 3, torch.tensor(3.0), {}], ids=["None", "int", "scalar", "empty"])
def test_a_target_without_samples_has_no_weight(target: Any) -> None:
    """Regression: it was a bare StopIteration. Only evaluations may have one, since batches of training are cut."""
    with pytest.raises(PipelineError, match="no tensor with a batch dimension"):
        loss_weights([target], "samples")


def test_a_sum_loss_weighs_one() -> None:
    assert loss_weights(split(torch.zeros(5), 2), "one") == [1.0, 1.0]


def test_a_function_may_count_tokens() -> None:
    targets = split(torch.tensor([[1, 1], [1, 0], [0, 0]]), 3)
    assert loss_weights(targets, lambda target: target.sum()) == [2 / 3, 1 / 3, 0.0]


def test_weights_that_add_up_to_nothing_are_refused() -> None:
    with pytest.raises(PipelineError, match=r"add up to 0\.0: \[0\.0, 0\.0\]: give a batch that has samples"):
        loss_weights([torch.zeros(1), torch.zeros(1)], lambda target: 0)


def test_a_batch_is_a_pair() -> None:
    assert check_pair([1, 2], "step()") == (1, 2)  # a DataLoader gives lists
    with pytest.raises(PipelineError, match=r"step\(\) takes a pair \(input, target\), not tuple of 3"):
        check_pair((1, 2, 3), "step()")
    with pytest.raises(PipelineError, match="not Tensor"):
        check_pair(torch.zeros(2, 2), "step()")


@dataclass
class Masked:
    mask: torch.Tensor


class Encoding(UserDict[str, Any]):
    """A mapping as tokenizers return it."""


@pytest.mark.parametrize("value", [Encoding(ids=torch.ones(4, 3)), (torch.ones(4, 3), Encoding(ids=[torch.ones(4)]))])
def test_a_container_that_torch_does_not_know_is_refused(value: Any) -> None:
    """Beside a tensor it went to each micro-batch as a whole."""
    with pytest.raises(
        PipelineError, match=r"holds a Encoding, whose tensor 'data.ids.*' would not be cut .* dict\(batch\)"
    ):
        split(value, 2)


def test_so_is_a_dataclass() -> None:
    with pytest.raises(PipelineError, match="holds a Masked, whose tensor 'mask' would not be cut"):
        split((torch.ones(4, 3), Masked(torch.ones(4))), 2)
