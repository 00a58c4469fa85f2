"""The device of the optimizer's state after it was restored; torch's meta device stands for a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lp_pipe.pipeline.compute.stage import Stage
from lp_pipe.pipeline.saving.contents import Saved
from lp_pipe.pipeline.worker.training import Training

ELSEWHERE = torch.device("meta")


class Scaled(nn.Module):
    """Has a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.weight = nn.Parameter(torch.ones(2, 3))


def state_of(parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return what Adam keeps of a parameter, as a checkpoint has it: on the host."""
    like = torch.ones(parameter.shape)
    return {"step": torch.tensor(3.0), "exp_avg": like, "exp_avg_sq": like.clone()}


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}])
def test_a_restored_optimizer_has_its_state_where_torch_would_put_it(options: dict[str, Any]) -> None:
    """A step that stays on the host is read by a fused kernel as an address of the GPU."""
    stage = Stage(0, 0, [Scaled()], seed=0, device=ELSEWHERE)
    own: list[torch.optim.Optimizer] = []

    def adam(parameters: Any) -> torch.optim.Optimizer:
        own.append(torch.optim.Adam(parameters))
        return own[0]

    training = Training([stage], adam, None)
    entries = {name: {"state": state_of(p), "options": options} for name, p in training.named_parameters.items()}
    training.restore(Saved({}, entries, None, [], {}, {}))

    plain = torch.optim.Adam(training.parameters)
    plain.param_groups[0].update(options)
    states = {index: state_of(parameter) for index, parameter in enumerate(training.parameters)}
    plain.load_state_dict({**plain.state_dict(), "state": states})
    for parameter in training.parameters:
        places = [{key: value.device.type for key, value in o.state[parameter].items()} for o in (own[0], plain)]
        assert places[0] == places[1]
        assert places[0]["exp_avg"] == ELSEWHERE.type
