"""Shards whose optimizer runs in the host's memory get the bits of others, whatever is written to them meanwhile.

The host is the stand-in for the GPU: copies are copies there, too. Tensors on the meta device show what is moved.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lp_pipe.private_torch import version_of
from lp_pipe.training.state_shards import OwnShard, StateShards, flat


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in ((3, 5), (7,))]


def upper_halves(of: list[nn.Parameter]) -> dict[nn.Parameter, OwnShard]:
    return {one: OwnShard(flat(one)[one.numel() // 2 :], one.numel() // 2) for one in of}


def gradients(of: list[nn.Parameter], step: int) -> dict[nn.Parameter, Tensor]:
    return {one: torch.sin(flat(one)[one.numel() // 2 :] + step) for one in of}


def in_place(parameter: nn.Parameter, states: StateShards) -> None:
    with torch.no_grad():
        parameter.mul_(2)


def through_data(parameter: nn.Parameter, states: StateShards) -> None:
    parameter.data.mul_(2)
    states.note_writes(to_shards=True)


def beside_the_shard(parameter: nn.Parameter, states: StateShards) -> None:
    flat(parameter)[:1] = 3.0
    states.note_writes(to_shards=False)


@pytest.mark.parametrize("write", [in_place, through_data, beside_the_shard])
def test_offloaded_shards_have_the_bits_of_others(write: Callable[[nn.Parameter, StateShards], None]) -> None:
    trained = []
    for is_offloaded in (False, True):
        own = parameters()
        states = StateShards(torch.optim.Adam(own, 0.1), upper_halves(own), is_offloaded=is_offloaded)
        for step in range(4):
            states.step(gradients(own, step))
            if step == 1:
                write(own[0], states)
        values = [value for state in states.states().values() for value in state.values.values()]
        trained.append([*own, *values])
    assert all(map(torch.equal, *trained))


def test_an_offloaded_update_that_fails_leaves_what_one_in_place_leaves() -> None:
    class Fails(torch.optim.SGD):
        elementwise = True
        count = 0

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            self.count += 1
            if self.count == 2:
                with torch.no_grad():
                    self.param_groups[0]["params"][0].zero_()
                raise ValueError("in the middle")
            super().step()

    for is_offloaded in (False, True):
        own = parameters()
        states = StateShards(Fails(own, 0.1), upper_halves(own), is_offloaded=is_offloaded)
        states.step(gradients(own, 0))
        versions = [version_of(one) for one in own]
        with pytest.raises(ValueError, match="middle"):
            states.step(gradients(own, 1))
        assert not flat(own[0])[7:].any() and flat(own[0])[:7].all()
        assert [version_of(one) > before for one, before in zip(own, versions, strict=True)] == [True, False]


@pytest.mark.parametrize(("is_offloaded", "device"), [(False, "meta"), (True, "cpu")])
def test_state_that_was_read_goes_where_the_update_is(is_offloaded: bool, device: str) -> None:
    parameter = nn.Parameter(torch.empty(4, device="meta"))
    adam = torch.optim.Adam([parameter])
    states = StateShards(adam, {parameter: OwnShard(flat(parameter)[2:], 2)}, is_offloaded=is_offloaded)
    whole = {"step": torch.tensor(3.0), "exp_avg": torch.arange(4.0), "exp_avg_sq": torch.arange(4.0)}
    cut = {"step": torch.tensor(3.0), "exp_avg": torch.arange(2.0), "exp_avg_sq": torch.arange(2.0)}
    for take, given in ((states.take_whole, whole), (states.set_states, cut)):
        take({parameter: given})
        (state,) = states.states().values()
        assert {name: value.device.type for name, value in state.values.items()} == {
            "step": "cpu",
            "exp_avg": device,
            "exp_avg_sq": device,
        }
