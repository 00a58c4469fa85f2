"""Compressed gradients are small, and what compression leaves out comes with the next ones."""

import pytest
import torch
from torch import Tensor

from lp_pipe.collectives.compression import Compression, ErrorFeedback, Fp16, OneBit, TopK

NUMEL = 10_001


def gradient(step: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(step))


def test_the_largest_elements_are_kept() -> None:
    flat = torch.tensor([0.1, -3.0, 0.2, 2.0])
    compression = TopK(0.5)
    assert compression.decode(compression.encode(flat), 4).tolist() == [0.0, -3.0, 0.0, 2.0]


def test_signs_keep_the_mean_of_the_positive_and_of_the_negative_elements() -> None:
    flat = torch.tensor([1.0, -2.0, 3.0, -4.0, 0.0])
    compression = OneBit()
    assert compression.decode(compression.encode(flat), 5).tolist() == [2.0, -2.0, 2.0, -2.0, -2.0]


@pytest.mark.parametrize(("compression", "share"), [(TopK(0.01), 0.03), (OneBit(), 1 / 31), (Fp16(), 0.5)])
def test_nothing_is_lost_in_the_long_run(compression: Compression, share: float) -> None:
    assert Compression.of_text(compression.to_text()) == compression
    feedback = ErrorFeedback(compression)
    given, received = torch.zeros(NUMEL), torch.zeros(NUMEL)
    worst = 0.0
    for step in range(300):
        given += gradient(step)
        form = feedback.encode("x", gradient(step))
        assert [part.dtype for part in form] == compression.dtypes(torch.float32)
        assert sum(part.numel() * part.itemsize for part in form) <= share * NUMEL * 4
        received += compression.decode(form, NUMEL)
        worst = max(worst, float((given - received).norm() / gradient(0).norm()))
    left = float((given - received).norm() / gradient(0).norm())
    assert left <= worst < 15  # what is not sent yet is bounded; without feedback it grows with each step


@pytest.mark.parametrize("ratio", [0, 1.5])
def test_a_ratio_that_is_no_share_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match="ratio"):
        TopK(ratio)
