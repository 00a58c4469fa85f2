"""Batches are asked for ahead; what comes of that is forgotten with the training that it was for."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.pipeline.worker.batch_source import BatchSource
from lp_pipe.rpc import Server
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("no_leaks")


class Feeder:
    """A feeder whose batches from `broken_from` on cannot be had."""

    def __init__(self) -> None:
        self.broken_from = 3

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        if step >= self.broken_from:
            raise OSError("the disk of the data is away")
        return torch.ones(4, 2), torch.ones(4, 2)

    def break_from(self, step: int) -> None:
        self.broken_from = step


def test_after_going_back_every_stage_asks_the_feeder_again(tmp_path: Path) -> None:
    model = pp.Model([pp.Layer(nn.Linear, 2, 2), pp.Layer(nn.Linear, 2, 2)], nn.functional.mse_loss, torch.optim.Adam)
    program = lp.Program("away")
    feeder = program.add_node(lp.CourierNode(Feeder), label="feeder")
    handle = pp.add_pipeline(program, model, stages=2, microbatches=2, inputs=feeder)
    with lp.launch(program, run_dir=tmp_path) as run:
        pipeline = run.client(handle)
        assert [pipeline.step().step for _ in range(3)] == [0, 1, 2]
        pipeline.mirror()
        pipeline.save(tmp_path / "checkpoint")
        with pytest.raises(OSError, match=r"(?s)away.*in the feeder's batch\(3\)"):
            pipeline.step()
        run.client(feeder).break_from(6)
        pipeline.go_back(3)
        assert [pipeline.step().step for _ in range(3)] == [3, 4, 5]
        with pytest.raises(OSError, match=r"(?s)away.*in the feeder's batch\(6\)"):
            pipeline.step()
        run.client(feeder).break_from(1000)
        pipeline.load(tmp_path / "checkpoint")
        assert [pipeline.step().step for _ in range(5)] == [3, 4, 5, 6, 7]


class Counting:
    """Knows which batches it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def batch(self, step: int) -> tuple[int, int]:
        self.asked.append(step)
        return step, step


def test_a_batch_that_was_asked_for_while_the_feeder_was_down_is_not_drawn_after_going_back(socket_home: Path) -> None:
    endpoint = f"unix:{socket_home}/feeder"
    server = Server(first := Counting(), endpoint)
    source = BatchSource(lp.CourierClient(endpoint))
    assert source.get(0) == (0, 0)
    until(lambda: first.asked == [0, 1])
    server.close(5.0)
    assert source.get(1) == (1, 1)  # which asks for the one behind it
    source.drop_prefetched()

    server = Server(restored := Counting(), endpoint)
    assert source.get(5) == (5, 5)
    until(lambda: 6 in restored.asked)
    server.close(5.0)
    assert restored.asked == [5, 6]
