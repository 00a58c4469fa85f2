"""A table of a replay buffer: items with keys and priorities, and rules by which they are sampled and removed."""

import itertools
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lp_pipe.rl.replay.key_order import KeyOrder
from lp_pipe.rl.replay.rate_limiter import MinSize, RateLimiter
from lp_pipe.rl.replay.selectors import Fifo, Lifo, Prioritized, Selector, Uniform
from lp_pipe.rl.replay.snapshot import TableSnapshot, segment_file
from lp_pipe.rl.replay.sum_tree import SumTree
from lp_pipe.rl.tree import Array, leaves_of, rebuilt

_MOST_SEGMENTS = 512
_FEWEST_ROWS = 64  # of a segment
_MOST_PACKED_BYTES = 1 << 16  # of a sample: copies of more cost more, and each array keeps the memory of all
_ALIGNMENT = 8
_VERSIONS = itertools.count(1)  # of segments, in this process: a table that is loaded has none of before


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

    def __reduce_ex__(self, protocol: Any) -> Any:
        leaves = [leaf for _, leaf in leaves_of(self)]
        is_packed = protocol >= 5 and sum(leaf.nbytes for leaf in leaves) <= _MOST_PACKED_BYTES
        if not is_packed or not all(leaf.dtype.isbuiltin == 1 and not leaf.dtype.hasobject for leaf in leaves):
            return tuple.__reduce_ex__(self, protocol)
        layout = [(leaf.dtype.str, leaf.shape) for leaf in leaves]
        memory = bytearray().join([leaf.tobytes() + bytes(-leaf.nbytes % _ALIGNMENT) for leaf in leaves])
        return _unpacked, (rebuilt(self.data, itertools.repeat(0)), layout, pickle.PickleBuffer(memory))


def _unpacked(structure: Any, layout: Sequence[tuple[str, tuple[int, ...]]], memory: Any) -> Sample:
    """Return a sample whose arrays are in one piece of memory, in which they travel in a third of the time."""
    arrays, offset = [], 0
    for dtype, shape in layout:
        array: Array = np.ndarray(shape, dtype, memory, offset)
        arrays.append(array)
        offset += array.nbytes + -array.nbytes % _ALIGNMENT
    keys, probabilities, weights, times_sampled, *columns = arrays
    return Sample(keys, probabilities, weights, times_sampled, rebuilt(structure, iter(columns)))


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
        self._paths: list[str] = []  # of the leaves
        self._keys = np.zeros(size, dtype=np.int64)
        self._times = np.zeros(size, dtype=np.int64)
        self._priorities = np.zeros(size)
        self._order = KeyOrder(size)
        self._num_used = 0  # slots from here on never had an item
        self._freed = np.zeros(size, dtype=np.int64)  # a stack of the other free slots
        self._num_freed = 0
        self._live = np.zeros(size, dtype=np.int64)  # slots, dense, for uniform choices
        self._place = np.zeros(size, dtype=np.int64)  # of a slot in _live
        self._weights = {
            selector: SumTree(size)
            for selector in (options.sampler, options.remover)
            if isinstance(selector, Prioritized)
        }
        self._largest = 1.0
        # Rows of the columns, of _keys and of _live, by segment: a checkpoint writes only segments that have changed.
        self._segment_bits = (max(_FEWEST_ROWS, -(-size // _MOST_SEGMENTS)) - 1).bit_length()
        self._versions = np.zeros(((size - 1) >> self._segment_bits) + 1, dtype=np.int64)
        self._version = next(_VERSIONS)  # of what changes now
        self._snapshot: TableSnapshot | None = None  # of this moment or an earlier one, while it is being written
        self._is_ring = isinstance(options.remover, Fifo) and not options.max_times_sampled

    @property
    def size(self) -> int:
        return self._order.size

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
        count, size = len(leaves[0]), self.options.max_size
        keys = np.arange(self.inserts, self.inserts + count)
        given = np.full(count, self._largest) if priorities is None else self._checked_priorities(keys, priorities)
        one_by_one = size - self.size < count and not isinstance(self.options.remover, Fifo)
        one_by_one |= count > size  # each may remove one before it
        step = 1 if one_by_one else max(1, count)
        for first in range(0, count, step):
            chosen = slice(first, first + step)
            self._insert(keys[chosen], [leaf[chosen] for leaf in leaves], given[chosen])
        return keys

    def _insert(self, keys: Array, leaves: Sequence[Array], priorities: Array) -> None:
        slots = self._claim(len(keys))
        run = self._run_of(slots)
        chosen = slots if run is None else run
        self._before_change(slots)
        for column, leaf in zip(self._columns, leaves, strict=True):
            column[chosen] = leaf
        self._keys[chosen], self._times[chosen] = keys, 0
        self._order.append(keys, slots)
        self._set_priorities(slots, priorities, run)
        self.inserts += len(keys)

    def sample(self, count: int) -> Sample:
        """Return `count` items; those that were sampled as often as allowed are removed.

        Raises:
            ValueError: the table is empty.
        """
        if not self.size:
            raise ValueError("an empty table has nothing to sample")
        if isinstance(self.options.sampler, Fifo | Lifo):
            return self._sample_in_turn(count)
        slots, probabilities = self._chosen(self.options.sampler, count)
        sample = self._taken(slots, probabilities)
        if self.options.max_times_sampled:
            self._remove(dict.fromkeys(slots[self._times[slots] >= self.options.max_times_sampled].tolist()))
        return sample

    def update_priorities(self, keys: Any, values: Any) -> None:
        """Set priorities of items by key. Keys that are gone are counted; of a key given twice the last one counts.

        Raises:
            ValueError: a priority is negative or NaN; nothing was changed.
        """
        keys = np.asarray(keys)
        values = self._checked_priorities(keys, values)
        slots = self._order.slots_of(keys)
        is_known = slots >= 0
        num_known = int(np.count_nonzero(is_known))
        self.unknown_keys += len(keys) - num_known
        if num_known < len(keys):
            slots, values = slots[is_known], values[is_known]
        self._set_priorities(slots, values)

    def info(self) -> dict[str, int]:
        """Return the counts."""
        counts = {"inserts": self.inserts, "samples": self.samples, "deletes": self.deletes, "size": self.size}
        return {**counts, "unknown_keys": self.unknown_keys}

    def state_dict(self) -> dict[str, Any]:
        """Return all that later samples depend on."""
        slots = self._order.slots()
        rank = np.zeros(self.options.max_size, dtype=np.int64)
        rank[slots] = np.arange(self.size)
        never_used = range(self.options.max_size - 1, self._num_used - 1, -1)
        return {
            "columns": [column[slots] for column in self._columns],
            "structure": self._structure,
            "keys": self._keys[slots],
            "times": self._times[slots],
            "priorities": self._priorities[slots],
            "live": rank[self._live[: self.size]],
            "slots": slots,
            "free": [*never_used, *self._freed[: self._num_freed].tolist()],
            "counts": (self.inserts, self.samples, self.deletes, self.unknown_keys),
            "largest": self._largest,
            "generator": self._generator.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state; the next samples are those that would have come."""
        self.__init__(self.options, self._generator)  # type: ignore[misc]
        slots = state["slots"]
        self._structure = state["structure"]
        self._paths = [path for _, path in leaves_of(self._structure)]
        for rows in state["columns"]:
            column = np.zeros((self.options.max_size, *rows.shape[1:]), rows.dtype)
            column[slots] = rows
            self._columns.append(column)
        self._keys[slots], self._times[slots] = state["keys"], state["times"]
        self._order.append(state["keys"], slots)
        free = np.array(state["free"], dtype=np.int64)
        is_freed = free != self.options.max_size - 1 - np.arange(len(free))  # at the bottom: those never used
        first_freed = int(np.argmax(is_freed)) if is_freed.any() else len(free)
        self._num_used = self.options.max_size - first_freed
        self._num_freed = len(free) - first_freed
        self._freed[: self._num_freed] = free[first_freed:]
        self._live[: len(slots)] = slots[state["live"]]
        self._place[self._live[: len(slots)]] = np.arange(len(slots))
        self._write_priorities(slots, state["priorities"])
        self._load_counts(state)

    def snapshot(self) -> TableSnapshot:
        """Return the state as it is now, to be written by another thread while the table goes on."""
        if self._snapshot is not None and self._snapshot.is_open:
            self._snapshot.keep(np.arange(len(self._versions)))  # the table tells one snapshot only of its changes
        used = self._num_used
        times = self._times[:used]
        small = {
            "structure": self._structure,
            "columns": [(column.dtype, column.shape[1:]) for column in self._columns],
            "times": times.astype(np.min_scalar_type(int(times.max(initial=0)))),
            "priorities": self._priorities[:used].copy(),
            "size": self.size,
            "freed": self._freed[: self._num_freed].copy(),
            "counts": (self.inserts, self.samples, self.deletes, self.unknown_keys),
            "largest": self._largest,
            "generator": self._generator.bit_generator.state,
        }
        rows, bits = [*self._columns, self._keys, self._live], self._segment_bits

        def contents(segment: int) -> bytes:
            chosen = slice(segment << bits, min(used, (segment + 1) << bits))
            return pickle.dumps([array[chosen] for array in rows], protocol=5)

        self._version = next(_VERSIONS)
        self._snapshot = TableSnapshot(small, self._versions[: self._num_segments(used)], contents)
        return self._snapshot

    def load_segments(self, small: dict[str, Any], folder: Path, table: int) -> None:
        """Continue from a snapshot in a folder; the next samples are those that would have come.

        table: the number of the table in it. small: what is small of it.
        """
        self.__init__(self.options, self._generator)  # type: ignore[misc]
        self._structure = small["structure"]
        self._paths = [path for _, path in leaves_of(self._structure)]
        self._columns = [np.zeros((self.options.max_size, *shape), dtype) for dtype, shape in small["columns"]]
        self._num_used = used = len(small["times"])
        for number in range(self._num_segments(used)):
            rows = pickle.loads((folder / segment_file(table, number)).read_bytes())
            first = number << self._segment_bits
            for array, found in zip([*self._columns, self._keys, self._live], rows, strict=True):
                array[first : first + len(found)] = found
        self._times[:used] = small["times"]
        live = self._live[: small["size"]]
        self._place[live] = np.arange(len(live))
        slots = live[np.argsort(self._keys[live])]
        self._order.append(self._keys[slots], slots)
        self._write_priorities(slots, small["priorities"][slots])
        self._num_freed = len(small["freed"])
        self._freed[: self._num_freed] = small["freed"]
        self._load_counts(small)

    def _load_counts(self, state: dict[str, Any]) -> None:
        self.inserts, self.samples, self.deletes, self.unknown_keys = state["counts"]
        self._largest = state["largest"]
        self._generator.bit_generator.state = state["generator"]

    def _num_segments(self, rows: int) -> int:
        return (rows + (1 << self._segment_bits) - 1) >> self._segment_bits

    def _before_change(self, rows: Array) -> None:
        """Note that these rows are about to change; a snapshot that is being written copies them first."""
        segments = rows >> self._segment_bits
        self._versions[segments] = self._version
        if self._snapshot is not None:
            if self._snapshot.is_open:
                self._snapshot.keep(segments)
            else:
                self._snapshot = None

    def _checked(self, items: Any) -> list[Array]:
        """Return the leaves as arrays, and make the columns at the first insert."""
        paths, leaves = [], []
        for path, leaf in leaves_of(items):
            paths.append(path)
            leaves.append(np.asarray(leaf))
        if not leaves or any(leaf.ndim == 0 for leaf in leaves) or len({len(leaf) for leaf in leaves}) != 1:
            shapes = {path or "item": leaf.shape for path, leaf in zip(paths, leaves, strict=True)}
            raise ValueError(f"items are a tree of arrays with one leading axis of the same length, got {shapes}")
        if not self._columns:
            self._structure, self._paths = rebuilt(items, iter(paths)), paths
            self._columns = [np.zeros((self.options.max_size, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
        if self._paths != paths:
            raise ValueError(f"items have the leaves {paths}, but earlier ones had {self._paths}")
        for path, leaf, column in zip(paths, leaves, self._columns, strict=True):
            if leaf.shape[1:] != column.shape[1:] or leaf.dtype != column.dtype:
                raise ValueError(
                    f"{path or 'item'} has shape {leaf.shape[1:]} and dtype {leaf.dtype}, but earlier items had "
                    f"{column.shape[1:]} and {column.dtype}"
                )
        return leaves

    def _checked_priorities(self, keys: Array, priorities: Any) -> Array:
        values = np.asarray(priorities, dtype=np.float64)
        if values.shape != keys.shape:
            raise ValueError(f"there must be one priority for each of {len(keys)} keys, got shape {values.shape}")
        wrong = ~((values >= 0.0) & np.isfinite(values))
        if wrong.any():
            first = int(np.argmax(wrong))
            raise ValueError(f"the priority of key {keys[first]} is {values[first]}: it must be a number from 0 on")
        return values

    def _set_priorities(self, slots: Array, values: Array, run: slice | None = None) -> None:
        if len(values):
            self._largest = max(self._largest, float(values.max()))
            self._write_priorities(slots, values, run)

    def _write_priorities(self, slots: Array, values: Array, run: slice | None = None) -> None:
        """Set the priorities of slots. run: the same slots, if they are consecutive."""
        self._priorities[slots if run is None else run] = values
        for selector, weights in self._weights.items():
            if run is None:
                weights.update(slots, values**selector.exponent)
            else:
                weights.update_run(run.start, values**selector.exponent)

    def _run_of(self, slots: Array) -> slice | None:
        """Return the slots of an insert as a slice, if they are known to be consecutive."""
        if not self._is_ring or not len(slots) or slots[-1] - slots[0] != len(slots) - 1:
            return None
        return slice(int(slots[0]), int(slots[-1]) + 1)

    def _claim(self, count: int) -> Array:
        """Return slots into which items are about to come; items leave if there are not enough free ones."""
        used = self.size
        num_free = self.options.max_size - used
        if not num_free and not isinstance(self.options.remover, Fifo):
            self._free_slot(self._one(self.options.remover))  # the item that comes writes its own priority
            used, num_free = used - 1, 1
        reused = min(count, self._num_freed)
        unused = min(count, num_free) - reused
        slots = np.concatenate(
            (
                self._freed[self._num_freed - reused : self._num_freed][::-1],
                np.arange(self._num_used, self._num_used + unused),
            )
        )
        self._num_freed -= reused
        self._num_used += unused
        self._before_change(np.arange(used, used + len(slots)))
        self._live[used : used + len(slots)] = slots
        self._place[slots] = np.arange(used, used + len(slots))
        if count > num_free:
            slots = np.concatenate((slots, self._claim_oldest(count - num_free)))
        return slots

    def _claim_oldest(self, count: int) -> Array:
        """Remove the oldest items of a full table; their slots come last in `_live`, as if each was removed alone.

        So the first one's place goes to the slot that was last, and each other one's place to the slot before it.
        """
        slots = self._order.remove_oldest(count)
        self.deletes += count
        places, last = self._place[slots], self._live[-1]
        places[1:][slots[1:] == last] = places[0]  # the last slot is among them: it has just moved
        moved = np.concatenate(([last], slots[:-1]))
        self._before_change(places)
        self._before_change(np.array([len(self._live) - 1]))
        self._live[places] = moved
        self._live[-1] = slots[-1]
        self._place[moved] = places
        self._place[slots[-1]] = len(self._live) - 1
        return slots

    def _one(self, selector: Selector) -> int:
        """Return the slot of one item by a rule."""
        if isinstance(selector, Fifo):
            return self._order.oldest()
        if isinstance(selector, Lifo):
            return self._order.newest()
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
        most = self.options.max_times_sampled
        order = self._order.slots() if isinstance(self.options.sampler, Fifo) else self._order.slots()[::-1]
        if not most:
            slots = np.full(count, order[0])
        else:
            slots = np.repeat(order[:count], most - self._times[order[:count]])[:count]
        if len(slots) < count:
            raise ValueError(f"a sample of {count} items needs more items than the table has")
        times = self._times[slots]
        sample = self._taken(slots, np.ones(count))
        is_first = np.concatenate(([True], slots[1:] != slots[:-1]))
        starts = np.flatnonzero(is_first)
        times += 1 + np.arange(count) - starts[np.cumsum(is_first) - 1]
        if most:
            self._remove(slots[times == most].tolist())
        return sample._replace(times_sampled=times)

    def _taken(self, slots: Array, probabilities: Array) -> Sample:
        np.add.at(self._times, slots, 1)
        self.samples += len(slots)
        weights = np.ones(len(slots))
        if isinstance(self.options.sampler, Prioritized):
            weights = (self.size * probabilities) ** -self.options.sampler.importance
            weights /= weights.max()
        data = rebuilt(self._structure, iter([column.take(slots, axis=0) for column in self._columns]))
        return Sample(self._keys[slots], probabilities, weights, self._times[slots], data)

    def _remove(self, slots: Iterable[int]) -> None:
        removed = list(slots)
        for slot in removed:
            self._free_slot(slot)
        if removed:
            self._write_priorities(np.array(removed), np.zeros(len(removed)))

    def _free_slot(self, slot: int) -> None:
        last_place = self.size - 1
        self._order.remove(int(self._keys[slot]))
        place, last = self._place[slot], self._live[last_place]
        self._before_change(place[None])
        self._live[place], self._place[last] = last, place
        self._freed[self._num_freed] = slot
        self._num_freed += 1
        self.deletes += 1
