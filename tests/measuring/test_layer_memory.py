import torch

from lp_pipe.measuring.layer_rounds import PeakMeter


def test_what_is_made_counts_while_it_lives() -> None:
    before, meter = torch.ones(256), PeakMeter()
    with meter:
        first = before + 1
        second = first.view(16, 16).T * 2  # a view counts nothing
        assert meter.bytes == 2048
        del first
        assert (meter.bytes, meter.peak_bytes) == (1024, 2048)
    third = before + 1  # nobody counts
    with meter:
        third.add_(1)
        del second
    assert (meter.bytes, meter.peak_bytes) == (0, 2048)


def test_what_is_kept_for_the_backward_counts_until_then() -> None:
    weight, meter = torch.ones(256, requires_grad=True), PeakMeter()
    with meter:
        loss = weight.exp().exp().sum()
        assert meter.bytes == 2 * 1024 + 4
        loss.backward()
    assert weight.grad is not None and meter.peak_bytes >= 3 * 1024


def test_sparse_gradients_are_left_out() -> None:
    embedding, meter = torch.nn.Embedding(8, 4, sparse=True), PeakMeter()
    with meter:
        embedding(torch.tensor([1, 2])).sum().backward()
    assert meter.peak_bytes > 0
