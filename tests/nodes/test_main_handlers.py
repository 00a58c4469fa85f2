"""`CourierNode(..., handlers="main")`: handlers run in the thread that has built the object."""

import signal
import sqlite3
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import lp_pipe as lp

WITHIN_S = 20.0


class Database:
    """sqlite3 refuses other threads than the one that has connected."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:")
        self.connection.execute("create table items (x)")

    def put(self, x: int) -> None:
        self.connection.execute("insert into items values (?)", (x,))

    def items(self) -> Iterator[int]:
        for (x,) in self.connection.execute("select x from items order by x"):
            yield x

    def endless(self) -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            self.put(100)

    def is_main_thread(self) -> bool:
        return threading.current_thread() is threading.main_thread()

    def handle_signals(self) -> None:
        signal.signal(signal.SIGUSR2, lambda number, frame: None)

    def fail(self) -> None:
        raise SystemExit(3)


def run(mode: str, *, colocated: bool = False) -> None:
    def user(database: Any) -> None:
        for future in [database.futures.put(x) for x in range(5)]:
            future.result(WITHIN_S)
        assert list(database.items()) == [0, 1, 2, 3, 4]
        with database.endless() as items:
            assert next(items) == 1
        assert isinstance(database.futures.fail().exception(WITHIN_S), lp.RemoteError)
        if mode == "process" and not colocated:
            assert database.is_main_thread()
            database.handle_signals()
        unfinished = database.endless()
        assert next(unfinished) == 1
        lp.stop()

    program = lp.Program("main")
    node = lp.CourierNode(Database, handlers="main")
    if colocated:
        program.add_node(lp.MultiThreadingColocation([node, lp.PyNode(user, node.create_handle())]), label="both")
    else:
        program.add_node(lp.PyNode(user, program.add_node(node, label="database")), label="user")
    lp.launch(program, mode).wait(60)


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_handlers_and_generators_run_in_the_thread_of_the_constructor(mode: str, without_torch: None) -> None:
    run(mode)


def test_in_a_colocation_it_is_the_nodes_thread() -> None:
    run("thread", colocated=True)


class Async:
    async def act(self) -> None: ...


class Batched:
    def __init__(self) -> None:
        self.act = lp.batched_handler(batch_size=2)(self.act)  # type: ignore[method-assign]

    def act(self, xs: list[int]) -> list[int]:
        return xs


class Running:
    def run(self) -> None: ...


def test_what_needs_other_threads_is_refused() -> None:
    with pytest.raises(TypeError, match="act"):
        lp.CourierNode(Async, handlers="main")
    with pytest.raises(ValueError, match="thread_pool_size"):
        lp.CourierNode(Database, handlers="main", courier_kwargs={"thread_pool_size": 2})
    with pytest.raises(ValueError, match="'threads'"):
        lp.CourierNode(Database, handlers="threads")  # type: ignore[arg-type]


@pytest.mark.parametrize(("ctor", "named"), [(Running, "run"), (Batched, "act")])
def test_what_shows_only_in_the_node_ends_it(ctor: type, named: str) -> None:
    program = lp.Program("main")
    program.add_node(lp.CourierNode(ctor, handlers="main"), label="bad")
    with pytest.raises(lp.NodeError, match=rf"(?s)bad/0.*TypeError.*{named}"):
        lp.launch(program, "thread").wait(WITHIN_S)


def test_without_its_run_an_object_may_serve_in_main() -> None:
    program = lp.Program("main")
    program.add_node(lp.CourierNode(Running, handlers="main").disable_run(), label="fine")
    program.add_node(lp.PyNode(lp.stop), label="user")
    lp.launch(program, "thread").wait(WITHIN_S)
