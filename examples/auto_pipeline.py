"""Turn a plain nn.Module into a pipeline that is cut by the measured times of its layers.

    lp_pipe launch examples/auto_pipeline.py --mode=process

    module --profile--> seconds, bytes --partition(topology)--> plan --add_pipeline--> stages

The layers are unequal on purpose: equal numbers of layers per stage would leave one process waiting for the other.
"""

import torch
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp

PROCESSES = 2
MICROBATCHES = 8


def make_module() -> nn.Module:
    torch.manual_seed(0)
    wide = [layer for _ in range(2) for layer in (nn.Linear(512, 512), nn.ReLU())]
    narrow = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.ReLU())]
    return nn.Sequential(*wide, nn.Linear(512, 128), *narrow, nn.Linear(128, 10))


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(1024, 512, generator=generator)
    return images, images[:, :10].argmax(dim=1)  # what there is to learn: the largest of ten numbers


class Trainer:
    def __init__(self, pipeline: pp.PipelineClient, steps: int) -> None:
        self._pipeline = pipeline
        self._steps = steps

    def run(self) -> None:
        losses = [self._pipeline.step(make_batch(step)).loss for step in range(self._steps)]
        print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {self._steps} steps")
        lp.stop()


def make_program(steps: int = 50) -> lp.Program:
    model = pp.Model(make_module(), nn.functional.cross_entropy, lambda named: torch.optim.Adam(named, lr=3e-3))
    sample_input, sample_target = (part.chunk(MICROBATCHES)[0] for part in make_batch(0))
    profile = pp.profile(model, sample_input, sample_target)
    topology = pp.Topology([pp.Level("process", count=PROCESSES, bandwidth=2e9)])
    plan = pp.partition(profile, topology, straight=True)
    print(plan.reason)
    program = lp.Program("auto_pipeline")
    pipeline = pp.add_pipeline(program, model, stages=plan, microbatches=MICROBATCHES)
    with program.group("trainer"):
        program.add_node(lp.CourierNode(Trainer, pipeline, steps))
    return program


if __name__ == "__main__":  # so that python examples/auto_pipeline.py does it, too
    lp.launch(make_program(), mode="process").wait()
