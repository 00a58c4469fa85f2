"""The learner's side of an experiment in rounds, whose result is the same however it is distributed. Needs no torch."""

import copy
import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lp_pipe.rl.environment_loop import seed_sequence
from lp_pipe.rl.experiment import Builder, Learner, Network, Spec
from lp_pipe.rl.replay.table import Table, TableState


class RoundsLearner:
    """A table and a learner that take the items of one round at a time.

    versions: the weights after each learner round, the newest `lag + 1` of them; round 0 is the initial weights.
    """

    def __init__(self, builder: Builder, network: Network, spec: Spec, seed: int, lag: int) -> None:
        self._batch_size = builder.batch_size
        self.table = TableState(builder.make_replay_table(spec), _generator(seed, "table"))
        self.learner: Learner = builder.make_learner(network, spec, _generator(seed, "learner"))
        self._lag = lag
        self._carry = 0.0
        self.round = 0
        self.steps = 0
        self.versions: dict[int, tuple[int, Any]] = {}
        self._keep_version()

    @property
    def options(self) -> Table:
        return self.table.options

    def version_for(self, number: int) -> tuple[int, Any]:
        """Return the learner steps and weights with which actors act in a round."""
        return self.versions[max(0, number - 1 - self._lag)]

    def learn(self, items_of_actors: Sequence[Any]) -> None:
        """Take a round's items, in the order of the actors, and do the steps that they are good for."""
        before = self.table.inserts
        for items in items_of_actors:
            if items is not None:
                self.table.insert(items)
        samples = [self.table.sample(self._batch_size) for _ in range(self._num_steps(self.table.inserts - before))]
        updates = [self.learner.step(sample) for sample in samples]
        for sample, update in zip(samples, updates, strict=True):
            if update.priorities is not None:
                self.table.update_priorities(sample.keys, np.asarray(update.priorities))
        self.steps += len(samples)
        self.round += 1
        self._keep_version()

    def _num_steps(self, items: int) -> int:
        limiter = self.options.rate_limiter
        if self.table.size < limiter.min_size:
            return 0
        due = self._carry + items * limiter.samples_per_insert / self._batch_size
        if self.options.max_times_sampled:  # a queue may have dropped some of a round's items
            due = min(due, self.table.size * self.options.max_times_sampled / self._batch_size)
        self._carry = due - math.floor(due)
        return math.floor(due)

    def _keep_version(self) -> None:
        self.versions[self.round] = self.steps, copy.deepcopy(self.learner.variables())
        self.versions.pop(self.round - self._lag - 1, None)


def fingerprint_of(*trees: Any) -> str:
    """Return the sha256 of trees of arrays, tensors, numbers and strings: of structure, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for tree in trees:
        _add_to(digest, tree)
    return digest.hexdigest()


def _add_to(digest: "hashlib._Hash", tree: Any) -> None:
    if isinstance(tree, Mapping):
        digest.update(b"{")
        for name in sorted(tree, key=repr):
            digest.update(repr(name).encode())
            _add_to(digest, tree[name])
        digest.update(b"}")
    elif isinstance(tree, tuple | list) and not (tree and all(type(value) is int for value in tree)):
        digest.update(b"[")
        for value in tree:
            _add_to(digest, value)
        digest.update(b"]")
    elif tree is None or isinstance(tree, bool | int | float | str | bytes | tuple | list):
        digest.update(f"{tree!r};".encode())
    else:
        array = np.asarray(_bytes_of(tree) if hasattr(tree, "detach") else tree)
        if array.dtype == object:
            raise TypeError(f"a fingerprint needs arrays, tensors, numbers and strings, got {type(tree).__name__}")
        digest.update(f"{array.dtype}{tuple(tree.shape)}:".encode())
        digest.update(np.ascontiguousarray(array).tobytes())


def _bytes_of(tensor: Any) -> Any:
    whole = tensor.detach().cpu().contiguous().reshape(-1)
    return whole.view(sys.modules["torch"].uint8).numpy()  # numpy has no bfloat16


def _generator(seed: int, role: str) -> np.random.Generator:
    return np.random.default_rng(seed_sequence(seed, role, 0, 0))
