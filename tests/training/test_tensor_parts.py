"""A range of a tensor's elements is cut into boxes, whatever the order of its dimensions in memory."""

import itertools

import pytest
import torch

from lp_pipe.training.tensor_parts import memory_order, part_of_range

TENSORS = {
    "number": torch.tensor(3.0),
    "vector": torch.randn(5),
    "matrix": torch.randn(4, 3),
    "transposed": torch.randn(4, 3).T,
    "cube": torch.randn(2, 2, 3),
    "channels_last": torch.randn(1, 2, 2, 3).to(memory_format=torch.channels_last),
    "rows of one": torch.randn(3, 1, 2).transpose(0, 2),
}


@pytest.mark.parametrize("name", TENSORS)
def test_the_boxes_of_two_ranges_are_the_whole_tensor(name: str) -> None:
    whole = TENSORS[name]
    elements, order = whole.as_strided((whole.numel(),), (1,)), memory_order(whole)
    for begin, end in itertools.combinations(range(whole.numel() + 1), 2):
        found = torch.full_like(whole, torch.nan)
        for first, last in ((0, begin), (begin, end), (end, whole.numel())):
            part = part_of_range(elements[first:last], whole.shape, first, order)
            for (offset, size), values in zip(part.boxes, part.values, strict=True):
                found[tuple(slice(one, one + length) for one, length in zip(offset, size, strict=True))] = values
            assert torch.equal(part.flat(order), elements[first:last])
            assert len(part.boxes) <= max(1, 2 * whole.dim() - 1)
        assert torch.equal(found, whole)
