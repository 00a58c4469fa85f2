"""A model that does not fit a process's memory trains where its parameters are sharded over the workers."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import lp_pipe as lp
import lp_pipe.data_parallel as dp
import lp_pipe.pipeline as pp

LAYERS, WIDTH = 64, 1024  # a heap grows by 64 MiB, which is little beside them
PARAMETERS = LAYERS * WIDTH**2


@pytest.fixture(autouse=True)
def _limit_of_this_process() -> Iterator[None]:
    """Keep the limit that later tests of this process need: a layer may be built here, too."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


def limit_memory() -> None:
    """Leave this process 10 bytes per parameter beside what it has; Adam needs 16, and a quarter with 4 shards."""
    used = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line)
    limit = (int(used.split()[1]) << 10) + 10 * PARAMETERS
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))


def train_replica(replica: dp.Replica, zero: int) -> None:
    torch.set_num_threads(1)
    limit_memory()
    with torch.device("meta" if zero else "cpu"):
        model: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    if zero:
        model = replica.shard(model, zero)
    optimizer = replica.optimizer(torch.optim.Adam(model.parameters()), model)
    for _ in replica.steps(3):
        for x, y, weight in replica.shards((torch.ones(4, WIDTH), torch.zeros(4, WIDTH))):
            (nn.functional.mse_loss(model(x), y) * weight).backward()
        optimizer.step()


class Limit(nn.Module):
    """The first layer, which is built before the others."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        limit_memory()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def train_pipeline(pipeline: pp.PipelineClient) -> None:
    for _ in range(3):
        pipeline.step((torch.ones(4, WIDTH), torch.ones(4, WIDTH)))
    lp.stop()


def run(kind: str, zero: int, run_dir: Path) -> None:
    program = lp.Program("limited")
    if kind == "loop":
        dp.add_replicas(program, train_replica, zero, replicas=4)
    else:
        layers = [pp.Layer(Limit), *(pp.Layer(nn.Linear, WIDTH, WIDTH, bias=False) for _ in range(LAYERS))]
        model = pp.Model(layers, nn.functional.mse_loss, torch.optim.Adam)
        pipeline = pp.add_pipeline(program, model, stages=1, replicas=4, microbatches=4, zero=zero)
        program.add_node(lp.PyNode(train_pipeline, pipeline), label="trainer")
    lp.launch(program, mode="process", run_dir=run_dir).wait(300)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loop", "pipeline"])
def test_a_model_beyond_one_processs_memory_trains_in_shards(kind: str, tmp_path: Path) -> None:
    run(kind, 3, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loop", "pipeline"])
def test_without_shards_its_error_names_zero(kind: str, tmp_path: Path) -> None:
    with pytest.raises(lp.NodeError, match="zero="):
        run(kind, 0, tmp_path / "run")
