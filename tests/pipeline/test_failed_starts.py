"""A stage that cannot start: its neighbours and clients are told why, and not that it is gone."""

import pytest
import torch
from torch import nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.context import current_context
from tests.pipeline.plain_loop import adam, launched, squared_error


def no_layer() -> nn.Module:
    """Build the layer in the program's setup, and fail in a worker."""
    node = current_context()
    if node is None:
        return nn.Linear(4, 4)
    raise ValueError(f"no weights for {node.name}")


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


@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.slow)], indirect=True)
def test_a_client_outside_of_a_with_block_has_the_failure_as_its_errors_cause(mode: str, place: int) -> None:
    # It was in the text at best; what a stage was doing, and where, came from `wait` alone.
    layers: list[pp.Layer] = [pp.Layer(nn.Linear, 4, 4) for _ in range(4)]
    layers[place] = pp.Layer(no_layer)
    program = lp.Program("alone")
    model = pp.Model(layers, loss=squared_error, optimizer=adam)
    handle = pp.add_pipeline(program, model, stages=4, microbatches=2)
    run = lp.launch(program, mode)
    with pytest.raises(lp.Unavailable) as raised:
        run.client(handle).step((torch.zeros(4, 4), torch.zeros(4, 4)))
    cause: BaseException | None = raised.value
    while cause is not None and not isinstance(cause, lp.NodeError):
        cause = cause.__cause__
    assert isinstance(cause, lp.NodeError) and (cause.label, cause.index) == ("stages", place)
    assert f"no weights for stages/{place}" in cause.message
    assert "in no_layer" in cause.remote_traceback
    with pytest.raises(lp.NodeError, match=f"no weights for stages/{place}"):
        run.wait(20)
