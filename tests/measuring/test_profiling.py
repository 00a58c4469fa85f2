import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import lp_pipe.pipeline as pp


def sgd(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def make_model(*layers: object) -> pp.Model:
    return pp.Model(list(layers), functional.mse_loss, sgd)


class Sleep(nn.Module):
    """Takes its time in the forward, and twice that in the backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        y = x * 1
        if y.requires_grad:
            y.register_hook(lambda gradient: time.sleep(2 * self.seconds))
        return y


def test_layers_are_measured_by_name() -> None:
    layers = pp.Layer(nn.Linear, 8, 16, name="wide"), nn.ReLU(), Sleep(0.01), nn.Linear(16, 4)
    profile = pp.profile(make_model(*layers), torch.randn(32, 8), torch.randn(32, 4))
    assert [layer.name for layer in profile.layers] == ["0.wide", "1.ReLU", "2.Sleep", "3.Linear"]
    assert [layer.parameter_bytes for layer in profile.layers] == [4 * (8 * 16 + 16), 0, 0, 4 * (16 * 4 + 4)]
    assert [layer.activation_bytes for layer in profile.layers] == [4 * 32 * width for width in (16, 16, 16, 4)]
    assert profile.edges is None
    sleep = profile.layers[2]
    assert 0.01 <= sleep.forward_s < 0.1 and 0.02 <= sleep.backward_s < 0.2
    assert sleep.backward_weight_s == pytest.approx(0, abs=0.005)
    assert profile.layers[0].backward_input_s == pytest.approx(0, abs=1e-3)  # nobody wants the input's gradient


def test_operations_are_counted_by_layer_and_kept_in_a_file(tmp_path: Path) -> None:
    layers = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4, bias=False), Unsqueeze(), nn.Conv1d(4, 4, 1)
    profile = pp.profile(make_model(*layers), torch.randn(32, 8), torch.randn(32, 4, 1))
    product = 2 * 32 * 16  # operations of a matrix product with 16, times its other size
    assert [layer.flops for layer in profile.layers] == [product * 8, 0, product * 4, 0, product]
    # The first layer's input needs no gradient.
    assert [layer.backward_flops for layer in profile.layers] == [product * 8, 0, 2 * product * 4, 0, 2 * product]
    profile.save(tmp_path / "profile.json")
    assert pp.Profile.load(tmp_path / "profile.json") == profile


class Unsqueeze(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(-1)


class Wasteful(nn.Module):
    """Has three tensors of its output's size at a time: x + 1, its square, and the sum of the two."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            more = x + 1
            more + more * more
        return x + 0


def test_spread_and_peak_memory_are_measured() -> None:
    profile = pp.profile(make_model(nn.Linear(8, 16), Wasteful(), nn.ReLU()), torch.randn(64, 8), torch.randn(64, 16))
    assert all(layer.forward_spread_s is not None and layer.forward_spread_s >= 0 for layer in profile.layers)
    assert all(layer.backward_spread_s is not None and layer.backward_spread_s >= 0 for layer in profile.layers)
    output = 4 * 64 * 16
    assert profile.layers[1].peak_bytes == 3 * output
    assert profile.layers[2].peak_bytes is not None and profile.layers[2].peak_bytes >= 2 * output  # and the loss


def test_what_waits_for_a_backward_is_measured_once() -> None:
    """Plans took a layer's output for it: of a Transformer's layer, that was 2 % of what a stage held."""
    block = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    layers = nn.Linear(8, 16), nn.ReLU(inplace=True), block, nn.Tanh(), nn.Flatten(), nn.Linear(16, 4)
    profile = pp.profile(make_model(*layers), torch.randn(32, 8), torch.randn(32, 4))
    one = 4 * 32 * 16  # bytes of the first layer's output, which ReLU overwrites, and the block keeps
    # The block's own are GELU's input and output. Tanh's output it keeps itself, and the last Linear through a view.
    # The loss keeps the last output, and the target, which is there anyway.
    assert [layer.stash_bytes for layer in profile.layers] == [one, 0, 8 * one, one, 0, one // 4]


def test_the_models_own_modules_and_the_threads_stay_as_they_are() -> None:
    linear, threads = nn.Linear(2, 2), torch.get_num_threads()
    before = linear.weight.clone()
    pp.profile(make_model(linear), torch.randn(4, 2), torch.randn(4, 2))
    assert torch.equal(linear.weight, before) and linear.weight.grad is None
    assert torch.get_num_threads() == threads


class Fork(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x * 3


class Add(nn.Module):
    def forward(self, x: torch.Tensor, skipped: torch.Tensor) -> torch.Tensor:
        return x + skipped


def test_a_skip_is_an_edge_from_its_stash_to_its_pop() -> None:
    layers = nn.Linear(4, 4), pp.Stash("skip", Fork()), nn.Linear(4, 4), pp.Pop("skip", Add()), nn.Linear(4, 4)
    profile = pp.profile(make_model(*layers), torch.randn(8, 4), torch.randn(8, 4))
    assert profile.edges is not None and ("1.Stash", "3.Pop") in profile.edges
    assert profile.layers[1].activation_bytes == 2 * 4 * 8 * 4
    assert profile.order() == [0, 1, 2, 3, 4]


def test_only_models_are_profiled() -> None:
    with pytest.raises(pp.PipelineError, match="not Linear"):
        pp.profile(nn.Linear(1, 1), torch.ones(1, 1), torch.ones(1, 1))  # type: ignore[arg-type]
