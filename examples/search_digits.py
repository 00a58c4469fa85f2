"""A search for the best small network on scikit-learn's digits: 64 trials, most of which end early.

    lp_pipe launch examples/search_digits.py
    lp_pipe experiment best search_digits

The page docs/search.md explains it.
"""

import torch
from torch import nn
from torch.nn import functional as F

import lp_pipe as lp
import lp_pipe.search as ls
from lp_pipe.programs.digits import load_digits

BATCH = 64


def train(t: ls.Trial) -> None:
    data = load_digits()
    images, labels = torch.tensor(data.train_images).float(), torch.tensor(data.train_labels)
    test_images, test_labels = torch.tensor(data.test_images).float(), torch.tensor(data.test_labels)
    torch.manual_seed(t.seed)
    model = nn.Sequential(nn.Linear(64, t.params["width"]), nn.ReLU(), nn.Linear(t.params["width"], 10))
    options = t.params["optimizer"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=options["lr"], weight_decay=options["decay"])
    t.restore(model, optimizer)
    for epoch in t.steps():
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            scores = model(test_images)
        t.log_metrics({"accuracy": float((scores.argmax(1) == test_labels).float().mean())})
        t.report({"loss": float(F.cross_entropy(scores, test_labels))}, checkpoint=(model, optimizer))


def make_program(trials: int = 64, epochs: int = 16, slots: int = 2) -> lp.Program:
    return ls.experiment(
        "search_digits",
        train,
        space={
            "width": ls.choice(16, 32, 64),
            "optimizer": {"lr": ls.log(1e-4, 1e-1), "decay": ls.uniform(0.0, 0.1)},
        },
        searcher=ls.Halving("loss", max_trials=trials, max_steps=epochs, divisor=4),
        slots=slots,
    )


if __name__ == "__main__":  # so that python examples/search_digits.py does it, too
    lp.launch(make_program(), mode="process").wait()
