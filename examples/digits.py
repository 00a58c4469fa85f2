"""A convolutional network that learns digits: with evaluation, a learning-rate schedule, checkpoints, an early stop.

The page docs/tutorial.md walks through it.

    lp_pipe launch examples/digits.py --mode=process
    lp_pipe launch examples/digits.py --mode=thread -- --epochs=3
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.checkpoint import Checkpoints
from lp_pipe.programs.digits import load_digits

BATCH = 64


def loss(scores: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return F.cross_entropy(scores, labels), {"accuracy": (scores.argmax(1) == labels).float().mean()}


def digits(steps: int) -> pp.Model:
    layers = [
        *(nn.Unflatten(1, (1, 8, 8)), pp.Layer(nn.Conv2d, 1, 32, 3, padding=1), nn.ReLU()),
        *(pp.Layer(nn.Conv2d, 32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.3)),
        *(pp.Layer(nn.Linear, 1024, 64), nn.ReLU(), pp.Layer(nn.Linear, 64, 10)),
    ]
    return pp.Model(
        layers,
        loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
    )


def train(pipeline: pp.PipelineClient, epochs: int, per_epoch: int, held_out: tuple[Tensor, Tensor]) -> None:
    stop = pp.EarlyStopping(patience=8)
    parts = {"pipeline": pipeline, "stop": stop}
    checkpoints = Checkpoints(parts, keep=2, keep_best=1, monitor="validation_loss")
    for result in checkpoints.steps(pipeline, epochs * per_epoch, save_every=per_epoch):
        done = result.step + 1
        lp.log_metrics({"loss": result.loss, "total_steps": epochs * per_epoch}, step=done)
        if done % per_epoch == 0:
            found = pipeline.evaluate([held_out])
            checkpoints.record({"validation_loss": found.loss})
            lp.log_metrics({"validation_loss": found.loss, **found.metrics}, step=done)
            print(f"epoch {done // per_epoch}: validation loss {found.loss:.4f}", flush=True)
            if stop(found.loss):
                break
    if (best := checkpoints.best()) is not None:
        pipeline.load(best.path / "pipeline")
    accuracy = pipeline.evaluate([held_out]).metrics["accuracy"]
    print(f"accuracy {accuracy:.1%}, parameters sha256 {pipeline.fingerprint()}", flush=True)
    lp.stop()


def make_program(epochs: int = 60, stages: int = 2) -> lp.Program:
    data = load_digits()
    images, labels = torch.tensor(data.train_images).float(), torch.tensor(data.train_labels)
    held_out = torch.tensor(data.test_images).float(), torch.tensor(data.test_labels)
    program = lp.Program("digits")
    with program.group("feeder", on_failure="restart"):
        feeder = program.add_node(lp.CourierNode(pp.DataLoaderFeeder, TensorDataset(images, labels), BATCH))
    per_epoch = -(-len(labels) // BATCH)
    model = digits(epochs * per_epoch)
    pipeline = pp.add_pipeline(program, model, stages=stages, microbatches=4, inputs=feeder, on_failure="restart")
    with program.group("trainer", on_failure="restart"):
        program.add_node(lp.PyNode(train, pipeline, epochs, per_epoch, held_out))
    return program


if __name__ == "__main__":  # so that python examples/digits.py does it, too
    lp.launch(make_program(), mode="process").wait()
