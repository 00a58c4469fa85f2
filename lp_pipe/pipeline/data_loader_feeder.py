"""A feeder over a data set: batches by step from torch's DataLoader, the same ones after a resume in mid-epoch."""

import contextlib
import itertools
import math
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lp_pipe.training.rng import sample_rng

# Two stages ask for each step, and one step ahead of the training.
_RECENT_STEPS = 8

SamplePlace = tuple[int, int]  # a sample's epoch and index


class DataLoaderFeeder:
    """A feeder of a data set's batches: `program.add_node(lp.CourierNode(pp.DataLoaderFeeder, data, 32))`.

    A step's batch follows from (seed, step) alone, so a training that goes back or is resumed asks for the same batches
    again, and nothing of the feeder has to be saved. What is random in the data set's `__getitem__` (random, numpy and
    torch) follows from (seed, epoch, index), with any number of workers.

    dataset: map-style, of (input, target) pairs after collation. An IterableDataset is read from its start again after
        going back, up to the step, and must give the same items in the same order each time.
    batch_size: samples of a step, over all micro-batches and replicas; the last batch of an epoch may be smaller.
    epochs: after which the data ends; None: never.
    num_workers, collate_fn: as of torch.utils.data.DataLoader; workers are processes of the feeder's.

    Raises:
        ValueError: the data set is empty, or shuffle is asked of an IterableDataset.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool | None = None,
        epochs: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
    ) -> None:
        self._is_iterable = isinstance(dataset, IterableDataset)
        if self._is_iterable and shuffle:
            raise ValueError("shuffle=True needs a map-style data set (with __len__), got an IterableDataset")
        self._dataset = dataset
        self._epochs = epochs
        self._seed = seed
        self._shuffle = shuffle is not False and not self._is_iterable
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._options = {"num_workers": num_workers, "collate_fn": collate_fn}
        self._lock = threading.Lock()  # two stages may ask at a time
        self._due: int | None = None
        self._batches: Iterator[Any] = iter(())
        self._recent: dict[int, Any] = {}
        if not self._is_iterable and self.steps_per_epoch() == 0:
            raise ValueError(f"the data set has {self._size()} samples, too few for one batch of {batch_size}")

    def batch(self, step: int) -> Any:
        """Return the (input, target) of a step, or None after the last epoch."""
        with self._lock:
            if step not in self._recent:
                if step != self._due:  # at the start, after going back, and after an error
                    self._batches, self._recent = self._batches_from(step), {}
                self._due = None
                self._recent[step] = next(self._batches, None)
                self._recent.pop(step - _RECENT_STEPS, None)
                self._due = step + 1
            return self._recent[step]

    def steps_per_epoch(self) -> int:
        """Return how many batches a pass over a map-style data set has."""
        whole = self._size() / self._batch_size
        return math.floor(whole) if self._drop_last else math.ceil(whole)

    def _size(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def _batches_from(self, step: int) -> Iterator[Any]:
        # A generator of its own: in thread mode the stages use torch's default one.
        options: dict[str, Any] = {**self._options, "generator": torch.Generator()}
        if self._is_iterable:
            return itertools.islice(self._passes(options), step, None)
        source = _SeededDataset(self._dataset, self._seed)
        return iter(DataLoader(source, batch_sampler=_Places(self, step), **options))

    def _passes(self, options: dict[str, Any]) -> Iterator[Any]:
        for _ in range(self._epochs) if self._epochs is not None else itertools.count():
            loader = DataLoader(self._dataset, self._batch_size, drop_last=self._drop_last, **options)
            found = False
            for batch in loader:
                found = True
                yield batch
            if not found:
                return

    def places_from(self, step: int) -> Iterator[list[SamplePlace]]:
        """Yield the places of each step's samples, from this step on."""
        first, done = divmod(step, self.steps_per_epoch())
        for epoch in itertools.count(first):
            if self._epochs is not None and epoch >= self._epochs:
                return
            order = self._order(epoch)
            for number in range(done, self.steps_per_epoch()):
                start = number * self._batch_size
                yield [(epoch, index) for index in order[start : start + self._batch_size]]
            done = 0

    def _order(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self._size()))
        generator = torch.Generator().manual_seed(_number(self._seed, epoch))
        order: list[int] = torch.randperm(self._size(), generator=generator).tolist()
        return order


class _Places:
    """A batch sampler for torch's DataLoader."""

    def __init__(self, feeder: DataLoaderFeeder, step: int) -> None:
        self._feeder = feeder
        self._step = step

    def __iter__(self) -> Iterator[list[SamplePlace]]:
        return self._feeder.places_from(self._step)


class _SeededDataset(Dataset[Any]):
    """The user's data set, with random numbers that follow from a sample's epoch and index."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitem__(self, place: SamplePlace) -> Any:
        epoch, index = place
        with _drawing(_number(self._seed, epoch, index)):
            return self._dataset[index]


@contextlib.contextmanager
def _drawing(number: int) -> Iterator[None]:
    """Seed the generators of Python, numpy and torch in the body; restore them after it, as other threads use them.

    A DataLoader's worker has generators of its own. It was forked while another thread may have held the lock on
    torch's, so it must not take that lock.
    """
    if get_worker_info() is not None:
        random.seed(number)
        np.random.seed(number % (1 << 32))
        torch.default_generator.manual_seed(number)
        yield
        return
    of_python, of_numpy = random.getstate(), np.random.get_state()
    random.seed(number)
    np.random.seed(number % (1 << 32))
    try:
        with sample_rng(number):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def _number(*parts: int) -> int:
    """Return a seed that follows from these numbers."""
    state = np.random.SeedSequence([part % (1 << 64) for part in parts]).generate_state(2, np.uint32)
    return int(state[0]) << 31 ^ int(state[1])
