"""A stage that cannot start: its neighbours and clients are told why, and not that it is gone."""

import pytest
import torch
from torch import nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.context import context
from tests.pipeline.plain_loop import adam, launched, squared_error


def no_layer() -> nn.Module:
    """Only a worker cannot build it; the program's setup can."""
    try:
        name = context().name
    except RuntimeError:
        return nn.Linear(4, 4)
    raise ValueError(f"no weights for {name}")


@pytest.mark.parametrize(
    ("mode", "place"),
    [
        *(("thread", place) for place in (0, 1, 3)),
        ("process", 1),
        *(pytest.param("process", place, marks=pytest.mark.slow) for place in (0, 3)),
    ],
    indirect=["mode"],
)
def test_a_layer_that_cannot_be_built_is_what_everybody_is_told(mode: str, place: int) -> None:
    layers: list[pp.Layer] = [pp.Layer(nn.Linear, 4, 4) for _ in range(4)]
    layers[place] = pp.Layer(no_layer)
    model = pp.Model(layers, loss=squared_error, optimizer=adam)
    with (
        pytest.raises(lp.Unavailable) as raised,
        launched(mode, model, stages=4, microbatches=2) as pipeline,
    ):
        pipeline.step((torch.zeros(4, 4), torch.zeros(4, 4)))
    # stages/0 may be up by then, and be stopped while it is called.
    assert f"no weights for stages/{place}" in "".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
