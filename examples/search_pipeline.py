"""A search over pipelines: each trial is a program of two stages and a trainer, as processes below its slot.

    lp_pipe launch examples/search_pipeline.py
    lp_pipe experiment best search_pipeline

The page docs/search.md explains it.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import lp_pipe as lp
import lp_pipe.pipeline as pp
import lp_pipe.search as ls
from lp_pipe.programs.digits import load_digits

BATCH = 128


def make_trial(t: ls.Trial) -> lp.Program:
    width, layers = t.params["width"], [pp.Layer(nn.Linear, 64, t.params["width"]), nn.ReLU()]
    for _ in range(t.params["depth"]):
        layers += [pp.Layer(nn.Linear, width, width), nn.ReLU()]
    layers.append(pp.Layer(nn.Linear, width, 10))
    model = pp.Model(
        layers,
        F.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=t.params["lr"]),
        seed=t.seed,
    )
    program = lp.Program(f"trial-{t.id}")
    pipeline = pp.add_pipeline(program, model, stages=2, microbatches=4)
    program.add_node(lp.PyNode(train, t, pipeline), label="trainer")
    return program


def train(t: ls.Trial, pipeline: Any) -> None:
    """Train an epoch a step; the searcher says how many."""
    data = load_digits()
    images, labels = torch.tensor(data.train_images).float(), torch.tensor(data.train_labels)
    test = torch.tensor(data.test_images).float(), torch.tensor(data.test_labels)
    t.restore(pipeline)
    for epoch in t.steps():
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(BATCH):
            pipeline.step((images[batch], labels[batch]))
        t.report({"loss": pipeline.evaluate([test]).loss}, checkpoint=pipeline)
    lp.stop()


def make_program(trials: int = 16, epochs: int = 9, slots: int = 1, mode: str = "process") -> lp.Program:
    return ls.experiment(
        "search_pipeline",
        ls.program(make_trial, mode),
        space={"lr": ls.log(1e-4, 1e-1), "width": ls.choice(32, 64), "depth": ls.integer(0, 2)},
        searcher=ls.Halving("loss", max_trials=trials, max_steps=epochs, divisor=3),
        slots=slots,
    )


if __name__ == "__main__":  # so that python examples/search_pipeline.py does it, too
    lp.launch(make_program(), mode="process").wait()
