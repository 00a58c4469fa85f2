"""Train the character GPT of char_gpt.py on several workers, data-parallel: one plain training loop.

    lp_pipe launch examples/char_gpt_replicas.py --mode=process -- --workers=2

The fingerprint at the end is the same for every number of workers, from 1 to the number of replicas, in every mode, and
also if workers are killed meanwhile: the others go on with their replicas.
"""

import dataclasses
import hashlib
import sys
from pathlib import Path

import torch
from absl import app, flags
from torch import nn

import lp_pipe as lp
import lp_pipe.data_parallel as dp
import lp_pipe.pipeline as pp

sys.path.insert(0, str(Path(__file__).parent))
import char_gpt  # found by the line above

REPLICAS = flags.DEFINE_integer("replicas", 4, "logical replicas: how a batch is cut, which decides what is learnt")
WORKERS = flags.DEFINE_integer("workers", 2, "processes that train; the result does not depend on them")


def train(replica: dp.Replica, config: char_gpt.Config) -> None:
    feeder = char_gpt.Feeder(config.batch_size, config.context, config.seed)
    with pp.layer_rng(config.seed, 0):
        model = nn.Sequential(*(factory() for _, factory in char_gpt.layer_factories(config)))
    parameters = list(model.named_parameters())
    optimizer = replica.optimizer(char_gpt.optimizer(parameters, config.learning_rate), model, clip_grad_norm=1.0)
    scheduler = char_gpt.lr_scheduler(optimizer, config.steps)
    for step in replica.steps(config.steps, config.eval_every, model=model, optimizer=optimizer, scheduler=scheduler):
        loss = torch.zeros(())
        for tokens_BT, target_BT, weight in replica.shards(feeder.batch(step)):
            nats = char_gpt.loss(model(tokens_BT), target_BT)[0] * weight
            nats.backward()
            loss += nats.detach()
        loss = replica.all_reduce(loss)
        if optimizer.step() and replica.rank == 0:
            lp.log_metrics({"loss": float(loss), "workers": replica.world_size}, step=step)
        scheduler.step()
    if replica.rank == 0:
        print(f"parameters sha256 {fingerprint(model)}", flush=True)


def fingerprint(model: nn.Module) -> str:
    """Return the sha256 of all parameters."""
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def make_program() -> lp.Program:
    config = char_gpt.DEFAULT
    values = {name: flags.FLAGS[name].value for name in ("steps", "batch_size", "context", "width", "layers", "seed")}
    config = dataclasses.replace(config, **values)
    program = lp.Program("char_gpt_replicas")
    dp.add_replicas(
        program,
        train,
        config,
        replicas=REPLICAS.value,
        workers=WORKERS.value,
        seed=config.seed,
        on_failure="shrink",
    )
    return program


if __name__ == "__main__":
    app.run(lambda _: lp.launch(make_program(), mode="process").wait())
