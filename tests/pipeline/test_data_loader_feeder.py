"""A data set as feeder, in one line: every stage gets the same batches, also after a resume within an epoch."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import lp_pipe as lp
import lp_pipe.pipeline as pp
from tests.pipeline.plain_loop import sgd


class Noisy(Dataset[Any]):
    """Augmented with what all three libraries draw."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = torch.rand(()).item() + random.random() + np.random.rand()
        return torch.full((4,), index + noise), index


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for index in range(5):
            yield torch.full((4,), float(index)), index


def train(pipeline: pp.PipelineClient, steps: int) -> None:
    for _ in pipeline.steps(steps):
        pass
    lp.stop()


def test_a_data_set_becomes_a_feeder_in_one_line(mode: str) -> None:
    program = lp.Program("data")
    feeder = program.add_node(lp.CourierNode(pp.DataLoaderFeeder, Noisy(), 4, epochs=2), label="feeder")
    model = pp.Model([nn.Linear(4, 8), nn.Linear(8, 10)], nn.functional.cross_entropy, sgd)
    pipeline = pp.add_pipeline(program, model, stages=2, microbatches=2, inputs=feeder)
    with lp.launch(program, mode) as run:
        assert [result.step for result in run.client(pipeline).steps()] == [0, 1, 2, 3, 4, 5]


def batches(feeder: pp.DataLoaderFeeder, steps: range) -> list[Any]:
    found = [feeder.batch(step) for step in steps]
    return [None if batch is None else [part.tolist() for part in batch] for batch in found]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_step_has_the_same_batch_wherever_reading_begins(workers: int) -> None:
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index,union-attr]
    whole = batches(pp.DataLoaderFeeder(Noisy(), 4, epochs=2), range(7))
    feeder = pp.DataLoaderFeeder(Noisy(), 4, epochs=2, num_workers=workers)
    assert batches(feeder, range(4, 7)) == whole[4:]
    assert batches(feeder, range(1, 3)) == whole[1:3]  # it goes back
    assert batches(feeder, range(1, 3)) == whole[1:3]  # another stage asks
    assert whole[6] is None
    for epoch in (whole[:3], whole[3:6]):
        assert sorted(index for _, indices in epoch for index in indices) == list(range(10))
        assert [len(indices) for _, indices in epoch] == [4, 4, 2]
    assert whole[0] != whole[3], "another order, and other noise"
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]  # type: ignore[index,union-attr]
    assert torch.equal(torch.get_rng_state(), states[2])


def test_order_last_batch_and_collation_are_the_users() -> None:
    def collate(samples: list[Any]) -> tuple[Tensor, Tensor]:
        return torch.stack([x for x, _ in samples]), torch.tensor([-index for _, index in samples])

    feeder = pp.DataLoaderFeeder(Noisy(), 4, shuffle=False, epochs=1, drop_last=True, collate_fn=collate)
    assert [batch[1] for batch in batches(feeder, range(2))] == [[0, -1, -2, -3], [-4, -5, -6, -7]]
    assert feeder.batch(2) is None and feeder.steps_per_epoch() == 2


def test_a_stream_is_read_again_from_its_start() -> None:
    feeder = pp.DataLoaderFeeder(Stream(), 2, epochs=2)
    assert [batch and batch[1] for batch in batches(feeder, range(7))] == [[0, 1], [2, 3], [4]] * 2 + [None]
    assert batches(feeder, range(4, 5))[0][1] == [2, 3]


def test_what_cannot_be_fed_is_refused() -> None:
    with pytest.raises(ValueError, match="IterableDataset"):
        pp.DataLoaderFeeder(Stream(), 2, shuffle=True)
    with pytest.raises(ValueError, match="10 samples"):
        pp.DataLoaderFeeder(Noisy(), 11, drop_last=True)
