"""A U-Net that takes noise off handwritten digits, as a pipeline whose skips go past the stages between.

    lp_pipe launch examples/unet.py --mode=process

The digits are scikit-learn's (1797 images of 8 x 8 pixels, bundled with it). The last 297 are held out; on them the
network is measured beside the noise itself, and beside a blur.

Shapes: B images, C channels, H x W pixels.
"""

import numpy as np
import torch
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp

NOISE = 0.3  # standard deviation, where pixels are 0 to 1
HELD_OUT = 297
BATCH_SIZE = 60
STEPS = 300


def digits() -> Tensor:
    """All images, [B, 1, 8, 8], 0 to 1."""
    from sklearn.datasets import load_digits

    return torch.from_numpy(load_digits().images.astype(np.float32) / 16).unsqueeze(1)


def noisy(clean_BCHW: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return clean_BCHW + NOISE * torch.randn(clean_BCHW.shape, generator=generator)


class Feeder:
    """Pairs (noisy, clean), a pure function of the step."""

    def __init__(self) -> None:
        self._training, self._held_out = digits().split([1797 - HELD_OUT, HELD_OUT])

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        chosen = torch.randperm(len(self._training), generator=torch.Generator().manual_seed(step))[:BATCH_SIZE]
        clean = self._training[chosen]
        return noisy(clean, step), clean

    def held_out(self) -> tuple[Tensor, Tensor]:
        return noisy(self._held_out, -1), self._held_out


class Down(nn.Module):
    """Half the resolution flows on; the full one is kept for the way up."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)

    def forward(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        features = self.conv(x_BCHW).relu()
        return nn.functional.max_pool2d(features, 2), features


class Up(nn.Module):
    """Twice the resolution, with the details that were kept."""

    def __init__(self, inputs: int, kept: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs + kept, outputs, 3, padding=1)

    def forward(self, x_BCHW: Tensor, kept_BCHW: Tensor) -> Tensor:
        larger = nn.functional.interpolate(x_BCHW, scale_factor=2.0)
        return self.conv(torch.cat([larger, kept_BCHW], 1)).relu()


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def unet() -> pp.Model:
    layers = [
        pp.Stash("8x8", pp.Layer(Down, 1, 16)),
        pp.Stash("4x4", pp.Layer(Down, 16, 32)),
        pp.Layer(nn.Conv2d, 32, 64, 3, padding=1),
        pp.Layer(nn.ReLU, inplace=True),
        pp.Pop("4x4", pp.Layer(Up, 64, 32, 32)),
        pp.Pop("8x8", pp.Layer(Up, 32, 16, 16)),
        pp.Layer(nn.Conv2d, 16, 1, 1),
    ]
    return pp.Model(layers, squared_error, lambda parameters: torch.optim.Adam(parameters, lr=3e-3))


def train(pipeline: pp.PipelineClient, feeder: lp.CourierClient, steps: int) -> None:
    """Train, then compare on the digits that were held out; ends the program."""
    for result in pipeline.steps(steps):
        lp.log_metrics({"loss": result.loss, "total_steps": steps}, step=result.step + 1)
        if lp.stop_event().is_set():
            return
    noisy_BCHW, clean_BCHW = feeder.held_out()
    blurred_BCHW = nn.functional.avg_pool2d(noisy_BCHW, 3, stride=1, padding=1, count_include_pad=False)
    print(f"mean squared error of the noise: {squared_error(noisy_BCHW, clean_BCHW):.4f}")
    print(f"of a blur: {squared_error(blurred_BCHW, clean_BCHW):.4f}")
    print(f"of the U-Net: {pipeline.evaluate([(noisy_BCHW, clean_BCHW)]).loss:.4f}")
    print(f"parameters sha256 {pipeline.fingerprint()}", flush=True)
    lp.stop()


def make_program(stages: int | list[int] = 3, schedule: str = "1f1b", steps: int = STEPS) -> lp.Program:
    """Build the feeder, the pipeline and the trainer."""
    program = lp.Program("unet")
    feeder = program.add_node(lp.CourierNode(Feeder), label="feeder")
    pipeline = pp.add_pipeline(program, unet(), stages=stages, schedule=schedule, microbatches=4, inputs=feeder)
    program.add_node(lp.PyNode(train, pipeline, feeder, steps), label="trainer")
    return program


if __name__ == "__main__":  # so that python examples/unet.py does it, too
    lp.launch(make_program(), mode="process").wait()
