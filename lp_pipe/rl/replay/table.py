"""A table of a replay buffer: items with keys and priorities, and rules by which they are sampled and removed."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lp_pipe.rl.replay.rate_limiter import MinSize, RateLimiter
from lp_pipe.rl.replay.selectors import Fifo, Lifo, Prioritized, Selector, Uniform
from lp_pipe.rl.replay.sum_tree import SumTree
from lp_pipe.rl.tree import Array, leaves_of, rebuilt


class Sample(NamedTuple):
    """A batch of items.

    probabilities: of each item at the time of the sample. weights: for the loss, largest 1. times_sampled: of each
    item, this time included. data: the tree that was inserted, with one leading axis.
    """

    keys: Array
    probabilities: Array
    weights: Array
    times_sampled: Array
    data: Any


@dataclass(frozen=True)
class Table:
    """The options of a table.

    max_size: items; another insert removes what `remover` chooses. max_times_sampled: an item is removed after so many
    samples; 0: never. rate_limiter: default: `MinSize(1)`.
    """

    max_size: int
    sampler: Selector = field(default_factory=Uniform)
    remover: Selector = field(default_factory=Fifo)
    max_times_sampled: int = 0
    rate_limiter: RateLimiter = field(default_factory=lambda: MinSize(1))

    def __post_init__(self) -> None:
        """Raises:
        ValueError: a number is out of range, or the table is too small for its limiter.
        """
        if self.max_size < 1 or self.max_times_sampled < 0:
            raise ValueError(
                "a table needs max_size of at least 1 and max_times_sampled of at least 0, got "
                f"{self.max_size} and {self.max_times_sampled}"
            )
        if self.rate_limiter.min_size > self.max_size:
            raise ValueError(
                f"a table of max_size={self.max_size} never has the min_size={self.rate_limiter.min_size} items of its "
                "rate limiter"
            )

    @staticmethod
    def queue(size: int) -> "Table":
        """Return a table that gives each item once, the oldest first, and takes at most `size` that were not given."""
        return Table(size, Fifo(), Fifo(), 1, RateLimiter(1.0, 1, 0.0, float(size)))


class TableState:
    """The items of one table. Not thread-safe; the limiter is up to the caller.

    generator: the randomness of its samples.
    """

    def __init__(self, options: Table, generator: np.random.Generator) -> None:
        self.options = options
        self._generator = generator
        self.inserts = self.samples = self.deletes = self.unknown_keys = 0
        size = options.max_size
        self._columns: list[Array] = []
        self._structure: Any = None
        self._keys = np.zeros(size, dtype=np.int64)
        self._times = np.zeros(size, dtype=np.int64)
        self._priorities = np.zeros(size)
        # By key, the oldest first. A dict's first entry takes longer to find with each one that was removed before it.
        self._slots: OrderedDict[int, int] = OrderedDict()
        self._free = list(range(size - 1, -1, -1))
        self._live = np.zeros(size, dtype=np.int64)  # slots, dense, for uniform choices
        self._place = np.zeros(size, dtype=np.int64)  # of a slot in _live
        self._weights = {
            selector: SumTree(size)
            for selector in (options.sampler, options.remover)
            if isinstance(selector, Prioritized)
        }
        self._largest = 1.0

    @property
    def size(self) -> int:
        return len(self._slots)

    @property
    def _used(self) -> int:
        """The number of slots that are not free, those of an insert in progress included."""
        return self.options.max_size - len(self._free)

    def may_insert(self, count: int) -> bool:
        return self.options.rate_limiter.may_insert(count, self.inserts, self.samples, self.deletes)

    def may_sample(self, count: int) -> bool:
        return self.options.rate_limiter.may_sample(count, self.inserts, self.samples, self.deletes)

    def insert(self, items: Any, priorities: Any = None) -> Array:
        """Insert items and return their keys.

        items: a tree of arrays with one leading axis. priorities: one each; None: the largest ever given, at first 1.

        Raises:
            ValueError: structure, shape or dtype differ from earlier items, or a priority is negative or NaN.
        """
        leaves = self._checked(items)
        keys = np.arange(self.inserts, self.inserts + len(leaves[0]))
        given = np.full(len(keys), self._largest) if priorities is None else self._checked_priorities(keys, priorities)
        one_by_one = len(self._free) < len(keys) and not isinstance(self.options.remover, Fifo)
        one_by_one |= len(keys) > self.options.max_size  # each may remove one before it
        step = 1 if one_by_one else max(1, len(keys))
        for first in range(0, len(keys), step):
            chosen = slice(first, first + step)
            self._insert(keys[chosen], [leaf[chosen] for leaf in leaves], given[chosen])
        return keys

    def _insert(self, keys: Array, leaves: Sequence[Array], priorities: Array) -> None:
        count = len(keys)
        slots = np.array([self._room() for _ in range(count)], dtype=np.int64)
        for column, leaf in zip(self._columns, leaves, strict=True):
            column[slots] = leaf
        self._keys[slots], self._times[slots] = keys, 0
        for key, slot in zip(keys.tolist(), slots.tolist(), strict=True):
            self._slots[key] = slot
        self._set_priorities(slots, priorities)
        self.inserts += count

    def sample(self, count: int) -> Sample:
        """Return `count` items; those that were sampled as often as allowed are removed.

        Raises:
            ValueError: the table is empty.
        """
        if not self._slots:
            raise ValueError("an empty table has nothing to sample")
        if isinstance(self.options.sampler, Fifo | Lifo):
            return self._sample_in_turn(count)
        slots, probabilities = self._chosen(self.options.sampler, count)
        sample = self._taken(slots, probabilities)
        if self.options.max_times_sampled:
            for slot in dict.fromkeys(slots.tolist()):
                if self._times[slot] >= self.options.max_times_sampled:
                    self._remove(slot)
        return sample

    def update_priorities(self, keys: Any, values: Any) -> None:
        """Set priorities of items by key. Keys that are gone are counted; of a key given twice the last one counts.

        Raises:
            ValueError: a priority is negative or NaN; nothing was changed.
        """
        keys = np.asarray(keys)
        values = self._checked_priorities(keys, values)
        slots = [self._slots.get(key, -1) for key in keys.tolist()]
        known = np.array(slots, dtype=np.int64) >= 0
        self.unknown_keys += int(len(known) - known.sum())
        self._set_priorities(np.array(slots, dtype=np.int64)[known], values[known])

    def info(self) -> dict[str, int]:
        """Return the counts."""
        counts = {"inserts": self.inserts, "samples": self.samples, "deletes": self.deletes, "size": self.size}
        return {**counts, "unknown_keys": self.unknown_keys}

    def state_dict(self) -> dict[str, Any]:
        """Return all that later samples depend on."""
        slots = np.fromiter(self._slots.values(), np.int64, self.size)
        rank = np.zeros(self.options.max_size, dtype=np.int64)
        rank[slots] = np.arange(self.size)
        return {
            "columns": [column[slots] for column in self._columns],
            "structure": self._structure,
            "keys": self._keys[slots],
            "times": self._times[slots],
            "priorities": self._priorities[slots],
            "live": rank[self._live[: self.size]],
            "slots": slots,
            "free": list(self._free),
            "counts": (self.inserts, self.samples, self.deletes, self.unknown_keys),
            "largest": self._largest,
            "generator": self._generator.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state; the next samples are those that would have come."""
        self.__init__(self.options, self._generator)  # type: ignore[misc]
        slots = state["slots"]
        self._structure = state["structure"]
        for rows in state["columns"]:
            column = np.zeros((self.options.max_size, *rows.shape[1:]), rows.dtype)
            column[slots] = rows
            self._columns.append(column)
        self._keys[slots], self._times[slots] = state["keys"], state["times"]
        self._slots = OrderedDict(zip(state["keys"].tolist(), slots.tolist(), strict=True))
        self._free = list(state["free"])
        self._live[: len(slots)] = slots[state["live"]]
        self._place[self._live[: len(slots)]] = np.arange(len(slots))
        self._write_priorities(slots, state["priorities"])
        self.inserts, self.samples, self.deletes, self.unknown_keys = state["counts"]
        self._largest = state["largest"]
        self._generator.bit_generator.state = state["generator"]

    def _checked(self, items: Any) -> list[Array]:
        """Return the leaves as arrays, and make the columns at the first insert."""
        named = [(path, np.asarray(leaf)) for path, leaf in leaves_of(items)]
        if not named or any(leaf.ndim == 0 for _, leaf in named) or len({len(leaf) for _, leaf in named}) != 1:
            shapes = {path or "item": leaf.shape for path, leaf in named}
            raise ValueError(f"items are a tree of arrays with one leading axis of the same length, got {shapes}")
        if not self._columns:
            self._structure = rebuilt(items, iter([path for path, _ in named]))
            self._columns = [np.zeros((self.options.max_size, *leaf.shape[1:]), leaf.dtype) for _, leaf in named]
        known = [path for _, path in leaves_of(self._structure)]
        if known != [path for path, _ in named]:
            raise ValueError(f"items have the leaves {[path for path, _ in named]}, but earlier ones had {known}")
        for (path, leaf), column in zip(named, self._columns, strict=True):
            if leaf.shape[1:] != column.shape[1:] or leaf.dtype != column.dtype:
                raise ValueError(
                    f"{path or 'item'} has shape {leaf.shape[1:]} and dtype {leaf.dtype}, but earlier items had "
                    f"{column.shape[1:]} and {column.dtype}"
                )
        return [leaf for _, leaf in named]

    def _checked_priorities(self, keys: Array, priorities: Any) -> Array:
        values = np.asarray(priorities, dtype=np.float64)
        if values.shape != keys.shape:
            raise ValueError(f"there must be one priority for each of {len(keys)} keys, got shape {values.shape}")
        wrong = ~((values >= 0.0) & np.isfinite(values))
        if wrong.any():
            first = int(np.argmax(wrong))
            raise ValueError(f"the priority of key {keys[first]} is {values[first]}: it must be a number from 0 on")
        return values

    def _set_priorities(self, slots: Array, values: Array) -> None:
        if len(values):
            self._largest = max(self._largest, float(values.max()))
            self._write_priorities(slots, values)

    def _write_priorities(self, slots: Array, values: Array) -> None:
        self._priorities[slots] = values
        for selector, weights in self._weights.items():
            weights.update(slots, values**selector.exponent)

    def _room(self) -> int:
        """Return a free slot, into which an item is about to come."""
        if not self._free:
            self._free_slot(self._one(self.options.remover))  # the item that comes writes its own priority
        slot = self._free.pop()
        place = self._used - 1
        self._live[place], self._place[slot] = slot, place
        return slot

    def _one(self, selector: Selector) -> int:
        """Return the slot of one item by a rule."""
        if isinstance(selector, Fifo):
            return next(iter(self._slots.values()))
        if isinstance(selector, Lifo):
            return next(reversed(self._slots.values()))
        slots, _ = self._chosen(selector, 1)
        return int(slots[0])

    def _chosen(self, selector: Uniform | Prioritized, count: int) -> tuple[Array, Array]:
        """Return slots that are drawn independently, with their probabilities."""
        total = self._weights[selector].total if isinstance(selector, Prioritized) else 0.0
        if isinstance(selector, Prioritized) and total > 0.0:
            slots = self._weights[selector].find(self._generator.random(count))
            return slots, self._weights[selector].weights(slots) / total
        places = self._generator.integers(self.size, size=count)
        return self._live[places], np.full(count, 1.0 / self.size)

    def _sample_in_turn(self, count: int) -> Sample:
        """Sample one by one, since each may remove its item and so change which is the oldest or newest."""
        parts = []
        for _ in range(count):
            if not self._slots:
                raise ValueError(f"a sample of {count} items needs more items than the table has")
            slot = self._one(self.options.sampler)
            parts.append(self._taken(np.array([slot]), np.ones(1)))
            if self.options.max_times_sampled and self._times[slot] >= self.options.max_times_sampled:
                self._remove(slot)
        leaves = [np.concatenate(one) for one in zip(*(_leaves(part.data) for part in parts), strict=True)]
        keys, probabilities, weights, times = (
            np.concatenate(one) for one in zip(*(part[:4] for part in parts), strict=True)
        )
        return Sample(keys, probabilities, weights, times, rebuilt(self._structure, iter(leaves)))

    def _taken(self, slots: Array, probabilities: Array) -> Sample:
        np.add.at(self._times, slots, 1)
        self.samples += len(slots)
        weights = np.ones(len(slots))
        if isinstance(self.options.sampler, Prioritized):
            weights = (self.size * probabilities) ** -self.options.sampler.importance
            weights /= weights.max()
        data = rebuilt(self._structure, iter([column[slots] for column in self._columns]))
        return Sample(self._keys[slots], probabilities, weights, self._times[slots], data)

    def _remove(self, slot: int) -> None:
        self._free_slot(slot)
        self._write_priorities(np.array([slot]), np.zeros(1))

    def _free_slot(self, slot: int) -> None:
        del self._slots[int(self._keys[slot])]
        place, last = self._place[slot], self._live[self._used - 1]
        self._live[place], self._place[last] = last, place
        self._free.append(slot)
        self.deletes += 1


def _leaves(tree: Any) -> list[Array]:
    return [leaf for _, leaf in leaves_of(tree)]
