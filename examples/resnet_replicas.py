"""Train a small residual network with BatchNorm on handwritten digits, data-parallel: one plain training loop.

    lp_pipe launch examples/resnet_replicas.py --mode=process -- --workers=2

The digits are scikit-learn's (1797 images of 8 x 8 pixels, bundled with it). The last 297 are held out; on them the
network reaches about 94 % accuracy in 4 epochs.

A batch is cut into as many parts as there are logical replicas. BatchNorm normalizes over one part, as torch's
DistributedDataParallel does it, and the buffers are those of replica 0. So the accuracy and the fingerprint at the end
are the same for every number of workers. With a worker for each replica, dp.BatchNorm would normalize over the whole
batch.
"""

import hashlib

import torch
from absl import app, flags
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import lp_pipe as lp
import lp_pipe.data_parallel as dp
import lp_pipe.pipeline as pp

EPOCHS = flags.DEFINE_integer("epochs", 4, "passes over the training images")
BATCH_SIZE = flags.DEFINE_integer("batch_size", 100, "images of a step, of all replicas")
WIDTH = flags.DEFINE_integer("width", 16, "channels of the first block; the others have twice as many")
REPLICAS = flags.DEFINE_integer("replicas", 4, "logical replicas: how a batch is cut, which decides what is learnt")
WORKERS = flags.DEFINE_integer("workers", 2, "processes that train; the result does not depend on them")

SEED = 3
HELD_OUT = 297


class Block(nn.Module):
    """Two convolutions beside a shortcut. Source: He et al., 2015 (Deep Residual Learning), figure 2 and option B."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layers(x) + self.shortcut(x))


def resnet(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        Block(width, width, 1),
        Block(width, 2 * width, 2),
        Block(2 * width, 2 * width, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


def digits() -> tuple[Tensor, Tensor]:
    """Return images [N, 1, 8, 8] from 0 to 1, and their labels."""
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)


def train(replica: dp.Replica, epochs: int, batch_size: int, width: int) -> None:
    images, labels = digits()
    count = len(images) - HELD_OUT
    with pp.layer_rng(SEED, 0):
        model = resnet(width)
    steps = epochs * (count // batch_size)
    optimizer = replica.optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4), model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
    for step in replica.steps(steps, save_every=10, model=model, optimizer=optimizer, scheduler=scheduler):
        epoch, number = divmod(step, count // batch_size)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
        chosen = order[number * batch_size : (number + 1) * batch_size]
        for x, y, weight in replica.shards((images[chosen], labels[chosen])):
            loss = F.cross_entropy(model(x), y) * weight
            loss.backward()
        optimizer.step()
        scheduler.step()
    if replica.rank == 0:
        model.eval()
        with torch.no_grad():
            is_right = model(images[count:]).argmax(1) == labels[count:]
        print(f"accuracy {is_right.float().mean():.3f} on {HELD_OUT} held-out images", flush=True)
        print(f"parameters sha256 {fingerprint(model)}", flush=True)


def fingerprint(model: nn.Module) -> str:
    """Return the sha256 of all parameters and buffers."""
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def make_program() -> lp.Program:
    program = lp.Program("resnet_replicas")
    arguments = (EPOCHS.value, BATCH_SIZE.value, WIDTH.value)
    dp.add_replicas(
        program, train, *arguments, replicas=REPLICAS.value, workers=WORKERS.value, seed=SEED, on_failure="shrink"
    )
    return program


if __name__ == "__main__":
    app.run(lambda _: lp.launch(make_program(), mode="process").wait())
