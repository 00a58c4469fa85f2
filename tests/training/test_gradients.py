"""The norm over all stages is that of torch.nn.utils.clip_grad_norm_ over all parameters, to the bit."""

import itertools

import pytest
import torch
from torch import nn

import lp_pipe.pipeline as pp
from lp_pipe.training.device import CPU
from lp_pipe.training.gradients import norms_of, total_norm
from tests.pipeline.plain_loop import D, PlainLoop, assert_same_state, launched, random_batches, sgd, squared_error
from tests.pipeline.test_exactness import apply

KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]


def _gradients(dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(5, generator=generator).to(dtype) * 3 for dtype in dtypes]


def test_the_norm_of_parts_is_the_norm_of_the_whole() -> None:
    first, second = _gradients([torch.float32] * 5), _gradients([torch.float32] * 7)
    found = total_norm([*norms_of(first), *norms_of(second)], CPU)
    assert found is not None
    assert torch.equal(found, nn.utils.get_total_norm([*first, *second]))


@pytest.mark.parametrize("kinds", list(itertools.permutations(KINDS, 3)), ids=str)
def test_gradients_of_several_dtypes_add_up_in_the_order_of_torch(kinds: tuple[torch.dtype, ...]) -> None:
    # It groups them by dtype: in the order of the parameters the sum of squares had other last bits.
    gradients = _gradients([*kinds, *kinds[::-1], *kinds] * 3)
    found, wanted = total_norm(norms_of(gradients), CPU), nn.utils.get_total_norm(gradients)
    assert found is not None
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)


def test_no_gradients_have_no_norm() -> None:
    assert norms_of([]) == []
    assert total_norm([], CPU) is None


def test_layers_of_several_dtypes_are_clipped_as_in_one_process() -> None:
    layers = [
        pp.Layer(nn.Linear, D, D),
        apply(lambda x: x.bfloat16()),
        pp.Layer(nn.Linear, D, D, dtype=torch.bfloat16),
        apply(lambda x: x.double()),
        pp.Layer(nn.Linear, D, D, dtype=torch.float64),
        apply(lambda x: x.float()),
        pp.Layer(nn.Linear, D, D),
    ]
    model, batches = pp.Model(layers, squared_error, sgd), random_batches([8] * 4)
    plain = PlainLoop(model, 2, 0.05)
    with launched("thread", model, batches, stages=3, microbatches=2, clip_grad_norm=0.05) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(batches)
        assert_same_state(pipeline.state_dict(), plain.state_dict())
