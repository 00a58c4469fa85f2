"""The node that serves replay tables: calls that a rate limiter holds back wait without a thread."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import lp_pipe as lp
from lp_pipe.errors import CheckpointError
from lp_pipe.rl.replay.snapshot import Snapshots, read_snapshots
from lp_pipe.rl.replay.table import Table, TableState
from lp_pipe.rl.tree import leaves_of
from lp_pipe.rpc.daemon_pool import settle


class ReplayNode(lp.CourierNode):
    """A node with tables, by name. seed: of all samples.

    Its client has insert, sample, update_priorities, info, state_dict and load_state_dict.
    """

    def __init__(self, tables: Mapping[str, Table], seed: int = 0) -> None:
        """Raises:
        ValueError: there is no table.
        """
        if not tables:
            raise ValueError("a replay node needs at least one table: rl.ReplayNode({'replay': rl.Table(10_000)})")
        super().__init__(ReplayServer, dict(tables), seed, courier_kwargs={"thread_pool_size": 0})
        self._server_kwargs["has_shared_reader"] = True  # no handler waits: see `ReplayServer`


class ReplayPart:
    """A replay node as a part of checkpoints: `Checkpoints({"replay": rl.ReplayPart(client)})`.

    The node writes its tables itself, while training goes on, and of what has not changed since the checkpoint before
    it writes nothing. A client as a part is saved as well, but its whole state goes through the node that saves.
    """

    def __init__(self, client: Any) -> None:
        self.courier_client = client

    def save_async(self, path: Path) -> "Future[dict[str, str]]":
        """Return once the node has the state of this moment, with a future of its write."""
        self.courier_client.take_snapshot()
        written: Future[dict[str, str]] = self.courier_client.futures.write_snapshot(path)
        return written

    def load(self, path: Path) -> None:
        """Let the node continue from the state in a folder, which its host must see."""
        self.courier_client.load_state_dict(path)


class _Waiting(NamedTuple):
    """A call about `items` items that waits for the rate limiter. work: what it does once it may."""

    items: int
    work: Callable[[], Any]
    result: "Future[Any]"


class _Served:
    """A table with the calls that wait for its limiter, of each kind in the order of arrival.

    Its methods are called with the server's lock held.
    """

    def __init__(self, name: str, state: TableState) -> None:
        self._name = name
        self.state = state
        self._inserts: deque[_Waiting] = deque()
        self._samples: deque[_Waiting] = deque()

    def insert(self, count: int, work: Callable[[], Any]) -> Any:
        self.state.options.rate_limiter.check_insert(count, self._name)
        return self._in_turn(self._inserts, self.state.may_insert, count, work)

    def sample(self, count: int, work: Callable[[], Any]) -> Any:
        self.state.options.rate_limiter.check_sample(count, self._name)
        return self._in_turn(self._samples, self.state.may_sample, count, work)

    def serve_waiting(self) -> None:
        """Answer all waiting calls that may pass now, each kind in the order of arrival."""
        is_served = bool(self._inserts or self._samples)
        while is_served:
            is_served = self._serve_first(self._inserts, self.state.may_insert)
            is_served |= self._serve_first(self._samples, self.state.may_sample)

    def _in_turn(
        self, queue: deque[_Waiting], may_pass: Callable[[int], bool], count: int, work: Callable[[], Any]
    ) -> Any:
        """Return the result, or a coroutine that waits for it and is cancelled if the caller goes."""
        if not queue and may_pass(count):
            result = work()
            self.serve_waiting()
            return result
        waiting = _Waiting(count, work, Future())
        queue.append(waiting)
        return _until_done(waiting.result)

    def _serve_first(self, queue: deque[_Waiting], may_pass: Callable[[int], bool]) -> bool:
        while queue and queue[0].result.cancelled():
            queue.popleft()  # its caller has gone
        if not queue or not may_pass(queue[0].items):
            return False
        waiting = queue.popleft()
        if waiting.result.set_running_or_notify_cancel():
            settle(waiting.result, waiting.work)  # an error is this caller's, not that of the call which made room
        return True


async def _until_done(result: "Future[Any]") -> Any:
    return await asyncio.wrap_future(result)


class ReplayServer:
    """What a replay node serves.

    A handler runs in the thread that has read the call, so calls of one client keep their order, and returns at once:
    that one thread reads the calls of all clients on this host.
    Only a call that must wait for its limiter becomes a task in the event loop.
    """

    def __init__(self, tables: Mapping[str, Table], seed: int) -> None:
        seeds = np.random.SeedSequence(seed).spawn(len(tables))
        self._tables = {
            name: _Served(name, TableState(table, np.random.default_rng(one)))
            for (name, table), one in zip(tables.items(), seeds, strict=True)
        }
        self._snapshots = Snapshots()
        self._lock = threading.Lock()

    def insert(self, table: str, items: Any, priorities: Any = None) -> Any:
        """Insert a tree of arrays with one leading axis, once the table's limiter admits it; return the keys.

        Raises:
            ValueError: the items do not fit to earlier ones, a priority is negative or NaN, or the call can never pass.
        """
        served = self._of(table)
        count = next((len(leaf) for _, leaf in leaves_of(items)), 0)
        with self._lock:
            return served.insert(count, lambda: served.state.insert(items, priorities))

    def sample(self, table: str, n: int) -> Any:
        """Return n items as a `Sample`, once the table's limiter admits it.

        Raises:
            ValueError: the call can never pass.
        """
        if n < 1:
            raise ValueError(f"sample: n must be at least 1, got {n}")
        served = self._of(table)
        with self._lock:
            return served.sample(n, lambda: served.state.sample(n))

    def update_priorities(self, table: str, keys: Any, values: Any) -> None:
        """Set priorities of items by key; keys that are gone are ignored and counted.

        Raises:
            ValueError: a priority is negative or NaN.
        """
        served = self._of(table)
        with self._lock:
            served.state.update_priorities(keys, values)

    def info(self) -> dict[str, dict[str, int]]:
        """Return the counts of each table."""
        with self._lock:
            return {name: served.state.info() for name, served in self._tables.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all tables."""
        with self._lock:
            return {name: served.state.state_dict() for name, served in self._tables.items()}

    def load_state_dict(self, state: Mapping[str, Any] | Path) -> None:
        """Continue from a state, or from the folder that `write_snapshot` has written.

        Raises:
            CheckpointError: the folder has other tables.
        """
        with self._lock:
            if isinstance(state, Path):
                self._load(state)
            else:
                for name, served in self._tables.items():
                    served.state.load_state_dict(state[name])
            for served in self._tables.values():
                served.serve_waiting()

    def take_snapshot(self) -> None:
        """Take the state as it is now, for `write_snapshot`."""
        with self._lock:
            self._snapshots.take(list(self._tables), [served.state for served in self._tables.values()])

    def write_snapshot(self, path: Path) -> "Future[dict[str, str]]":
        """Write the snapshot into a new folder; return the sha256 of the files. The tables go on meanwhile."""
        return self._snapshots.write_in_thread(path)

    def _load(self, path: Path) -> None:
        names, small = read_snapshots(path)
        if set(names) != set(self._tables):
            raise CheckpointError(
                f"{path} has the tables {', '.join(names)}, but this node has {', '.join(self._tables)}"
            )
        for number, name in enumerate(names):
            self._tables[name].state.load_segments(small[number], path, number)

    def _of(self, table: str) -> _Served:
        served = self._tables.get(table)
        if served is None:
            raise KeyError(f"there is no table {table!r}; tables: {', '.join(self._tables)}")
        return served
