"""A checkpoint goes on with the kind of scheduler that it is of."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from lp_pipe.errors import PipelineError
from lp_pipe.training.resume_checks import kind_of, refuse_other_scheduler

OPTIMIZER = torch.optim.SGD([nn.Parameter(torch.ones(1))])


def linear() -> schedulers.LinearLR:
    return schedulers.LinearLR(OPTIMIZER)


def test_a_kind_has_the_names_of_all_its_parts() -> None:
    chained = schedulers.ChainedScheduler([linear(), linear()])
    assert kind_of(linear()) == "LinearLR"
    sequential = schedulers.SequentialLR(OPTIMIZER, [linear(), linear()], [3])
    assert kind_of(sequential) == "SequentialLR of LinearLR and LinearLR"
    sequential._schedulers[1] = chained
    assert kind_of(sequential) == "SequentialLR of LinearLR and (ChainedScheduler of LinearLR and LinearLR)"


def test_schedulers_with_the_same_entries_are_told_apart() -> None:
    """Their states have the same keys, with other meanings."""
    own, other = (
        schedulers.LambdaLR(OPTIMIZER, lambda step: 1.0),
        schedulers.MultiplicativeLR(OPTIMIZER, lambda step: 1.0),
    )
    assert own.state_dict().keys() == other.state_dict().keys()
    with pytest.raises(PipelineError, match=r"another lr_scheduler, MultiplicativeLR, than this model's, LambdaLR"):
        refuse_other_scheduler(own, kind_of(other))


@pytest.mark.parametrize("saved", ["LinearLR", None], ids=["the same", "from before kinds were kept"])
def test_the_same_kind_goes_on(saved: str | None) -> None:
    refuse_other_scheduler(linear(), saved)
