"""Models of every sort train on GPUs to the bits of the plain loop, and a GPU's memory is free again after failures."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lp_pipe.pipeline as pp
from tests.gpu.peers import DEVICE
from tests.pipeline.plain_loop import PlainLoop, adam, assert_same_state, launched, random_batches, squared_error

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("deterministic"),
]

D = 8
STAGES: dict[str, Any] = {"stages": 2, "device": DEVICE, "microbatches": 4}
BATCHES = random_batches([8, 8], D)


class Convolves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        images = x.reshape(-1, 1, 2, D // 2).to(memory_format=torch.channels_last)
        return self.conv(images).mean(1).flatten(1)  # type: ignore[no-any-return]


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(D, 3 * D)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).unsqueeze(1).chunk(3, -1)
        return F.scaled_dot_product_attention(query, key, value).squeeze(1)


class Recurs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, D, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.unsqueeze(1))[0].squeeze(1)  # type: ignore[no-any-return]


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.embedding((x[:, 0].abs() * 4).long().clamp(max=15))  # type: ignore[no-any-return]


class Adds(nn.Module):
    @staticmethod
    def forward(x: Tensor, *, skipped: Tensor) -> Tensor:
        return x + skipped


class MadeOnGpu(nn.Linear):
    """Draws its weights from the GPU's own generator."""

    def __init__(self) -> None:
        super().__init__(D, D, device=DEVICE)


LAYERS: dict[str, list[Any]] = {
    "conv": [pp.Layer(nn.Linear, D, D), pp.Layer(Convolves)],
    "attention": [pp.Layer(nn.Linear, D, D), pp.Layer(Attends), nn.Dropout(0.2)],
    "lstm": [pp.Layer(Recurs), pp.Layer(nn.Linear, D, D)],
    "embedding": [pp.Layer(Embeds), pp.Layer(nn.Linear, D, D)],
    "made on the gpu": [pp.Layer(MadeOnGpu), pp.Layer(MadeOnGpu)],
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("mode", ["thread", "process"])
def test_a_model_trains_to_the_same_bits(mode: str, layers: str, precision: str) -> None:
    model = pp.Model(LAYERS[layers], squared_error, adam)
    plain = PlainLoop(model, 4, precision=precision, device=DEVICE)
    with launched(mode, model, BATCHES, precision=precision, **STAGES) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(BATCHES)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


def test_layers_made_on_the_gpu_are_the_same_in_every_process() -> None:
    model = pp.Model(LAYERS["made on the gpu"], squared_error, adam)
    states = []
    for mode in ("process", "process", "thread"):
        with launched(mode, model, **STAGES) as pipeline:
            states.append(pipeline.state_dict())
    for state in states[1:]:
        assert_same_state(state, states[0])


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw"])
def test_asynchronous_schedules_have_the_same_bits_in_both_modes(schedule: str) -> None:
    model = pp.Model([pp.Layer(nn.Linear, D, D), nn.Tanh(), pp.Layer(nn.Linear, D, D)], squared_error, adam)
    losses = []
    for mode in ("thread", "process"):
        with launched(mode, model, random_batches([8] * 4, D), schedule=schedule, **STAGES) as pipeline:
            losses.append([result.loss for result in pipeline.steps()])
    assert losses[0] == losses[1]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("channel", ["auto", "nccl"])
@pytest.mark.parametrize("layers", LAYERS)
def test_stages_on_two_gpus_train_to_the_same_bits(layers: str, channel: str) -> None:
    if layers == "made on the gpu":
        pytest.skip("its layers name one GPU")
    model = pp.Model(LAYERS[layers], squared_error, adam)
    plain = PlainLoop(model, 4, device=DEVICE)
    options: dict[str, Any] = {**STAGES, "device": ["cuda:0", "cuda:1"], "channel": channel}
    with launched("process", model, BATCHES, **options) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(BATCHES)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


class TakesTooMuch(nn.Module):
    """Asks for more memory than there is, once, in the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 5:
            torch.empty(1 << 50, dtype=torch.uint8, device=x.device)
        return x * 1.0


def test_a_step_that_is_out_of_memory_can_be_taken_again() -> None:
    model = pp.Model([pp.Layer(nn.Linear, D, D), TakesTooMuch(), pp.Layer(nn.Linear, D, D)], squared_error, adam)
    plain = PlainLoop(
        pp.Model([model.layers[0], nn.Identity(), model.layers[2]], squared_error, adam), 4, device=DEVICE
    )
    with launched("process", model, **STAGES) as pipeline:
        losses = [pipeline.step(BATCHES[0]).loss]
        with pytest.raises(Exception, match="memory"):
            pipeline.step(BATCHES[1])
        losses.append(pipeline.step(BATCHES[1]).loss)
    assert losses == plain.steps(BATCHES)
