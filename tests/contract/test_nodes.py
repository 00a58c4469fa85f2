"""The contract's section on nodes, in every mode."""

import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import pytest

import lp_pipe as lp
from tests.waiting import until

WITHIN_S = 20.0


def run_to_the_end(mode: str, *nodes: Any) -> None:
    program = lp.Program("nodes")
    for index, node in enumerate(nodes):
        program.add_node(node, label=f"node{index}")
    with lp.launch(program, mode, grace=2.0) as run:
        run.wait(30)


def test_functions_classes_and_arguments_may_be_local_everywhere(mode: str) -> None:
    captured = {"x": 3}

    class Argument:
        def __init__(self, y: int) -> None:
            self.y = y

    class Local:
        def __init__(self, function: Callable[[], Any], argument: Any) -> None:
            assert isinstance(argument, Argument) and argument.y == 4
            self._function = function

        def ask(self) -> Any:
            return self._function()

        def make(self) -> Any:
            return Argument(5)

        def take(self, argument: Any) -> bool:
            return isinstance(argument, Argument)

    program = lp.Program("local")
    node = lp.CourierNode(Local, lambda: captured["x"], Argument(4))
    server = program.add_node(node, label="server")

    def use(server: Any, key: Callable[[Any], Any]) -> None:
        assert key(server.ask()) == 6
        assert server.make().y == 5
        assert server.take(Argument(1))
        lp.stop()

    program.add_node(lp.PyNode(use, server, key=lambda x: 2 * x), label="user")
    with lp.launch(program, mode, grace=2.0) as run:
        run.wait(30)


def test_classes_of_main_may_be_everything(script: Any) -> None:
    process = script(
        """
        import lp_pipe as lp
        import threading

        class Mine:
            def __init__(self, x): self.x = x
            def __eq__(self, other): return type(other) is type(self) and other.x == self.x

        class Trouble(ValueError): pass

        class Server:
            def __init__(self, mine, deferred):
                assert isinstance(mine, Mine) and isinstance(deferred, Mine)
                self.was_used = threading.Event()
            def back(self, mine):
                assert isinstance(mine, Mine), type(mine)
                return Mine(mine.x + 1)
            def fail(self): raise Trouble("oh")
            def used(self): self.was_used.set()
            def wait_until_used(self): assert self.was_used.wait(30)

        def use(server):
            assert server.back(Mine(1)) == Mine(2)
            try: server.fail()
            except Trouble: server.used()

        for mode in ("thread", "process"):
            program = lp.Program("main")
            server = program.add_node(lp.CourierNode(Server, Mine(1), lp.Deferred(Mine, 3)), label="server")
            program.add_node(lp.PyNode(use, server), label="user")
            with lp.launch(program, mode) as run:
                assert run.client(server).back(Mine(5)) == Mine(6)
                try: run.client("server").fail()
                except Trouble as error: assert isinstance(error, lp.RemoteError)
                run.client(server).wait_until_used()
        print("fine")
        """
    )
    out, err = process.communicate(timeout=60)
    assert out.strip() == "fine", err


def test_a_deferred_is_built_once_per_node_with_what_it_needs(mode: str) -> None:
    made: list[int] = []

    class Part:
        def __init__(self, server: Any = None, inner: Any = None) -> None:
            made.append(1)
            self.count = len(made)
            self.server, self.inner = server, inner

    class Server:
        def answer(self) -> int:
            return 42

    def use(first: Any, holder: Any, again: Any = None) -> None:
        assert first is holder["again"] and first is again
        assert first.server.answer() == 42 and isinstance(first.inner, Part)
        assert first.inner.inner is None
        lp.stop()

    program = lp.Program("deferred")
    server = program.add_node(lp.CourierNode(Server), label="server")
    part = lp.Deferred(Part, server, inner=lp.Deferred(Part))
    program.add_node(lp.PyNode(use, part, {"again": part}, again=part), label="user")
    with lp.launch(program, mode, grace=2.0) as run:
        run.wait(30)
    if mode == "process":
        assert not made  # nothing is built at the launcher


def test_a_failing_deferred_names_itself_its_cause_and_its_file(mode: str) -> None:
    def broken() -> None:
        raise KeyError("no such weight")

    with pytest.raises(lp.NodeError) as caught:
        run_to_the_end(mode, lp.PyNode(print, [lp.Deferred(broken)]))
    for part in ("Deferred", "no such weight", "KeyError", "test_nodes.py"):
        assert part in str(caught.value)


def test_a_node_may_be_configured_after_it_was_added(mode: str) -> None:
    class Ring:
        def __init__(self, other: Any, number: int) -> None:
            self._other, self._number = other, number

        def number(self) -> int:
            return self._number

        def ask(self) -> int:
            return self._other.number()

    program = lp.Program("ring")
    one, two = lp.CourierNode(Ring), lp.CourierNode(Ring)
    first, second = program.add_node(one, label="ring"), program.add_node(two, label="ring")
    one.configure(second, number=1)
    two.configure(first, number=2)
    with lp.launch(program, mode, grace=2.0) as run:
        assert (run.client(first).ask(), run.client("ring", 1).ask()) == (2, 1)


def test_a_py_class_node_takes_any_callable(mode: str) -> None:
    class Runs:
        def __init__(self, x: int) -> None:
            self._x = x

        def run(self) -> None:
            if self._x:
                raise ValueError("it ran")

    run_to_the_end(mode, lp.PyClassNode(lambda: None), lp.PyClassNode(dict), lp.PyClassNode(Runs, 0))
    run_to_the_end(mode, lp.PyClassNode(Runs, 1).disable_run())
    with pytest.raises(lp.NodeError, match="it ran"):
        run_to_the_end(mode, lp.PyClassNode(functools.partial(Runs, 1)).disable_run().enable_run())


def test_every_node_has_addresses_and_handles() -> None:
    assert len(lp.CourierNode(int).addresses) == 1 and isinstance(lp.CourierNode(int).addresses[0], lp.Address)
    assert lp.PyNode(int).addresses == [] and lp.PyClassNode(int).addresses == []
    assert isinstance(lp.PyNode(int).create_handle(), lp.Handle)


def test_a_pool_has_exactly_its_size(own_templates: None, serve: Any) -> None:
    class Counter:
        def __init__(self) -> None:
            self._now = self._most = 0
            self._lock = threading.Lock()

        def work(self) -> None:
            with self._lock:
                self._now += 1
                self._most = max(self._most, self._now)
            time.sleep(0.05)
            with self._lock:
                self._now -= 1

        def most(self) -> int:
            return self._most

    for size in (1, 3):
        client = serve(Counter, courier_kwargs={"thread_pool_size": size})
        for future in [client.futures.work() for _ in range(12)]:
            future.result(WITHIN_S)
        assert client.most() == size


# Batches


class Point(NamedTuple):
    x: Any
    y: Any


class Batches:
    def __init__(self, size: int = 4, **options: Any) -> None:
        batched = lp.batched_handler(size, **options)
        self._sizes: list[int] = []
        self._gate = threading.Event()
        self._running = self._most = 0
        for name in ("arrays", "keywords", "bad_shape", "wrong_length", "mixed", "nothing_split", "gated", "pairs"):
            setattr(self, name, batched(getattr(self, name)))

    def arrays(self, x: Any) -> Any:
        """Documented."""
        assert isinstance(x, np.ndarray)
        self._sizes.append(len(x))
        return x * 2

    def keywords(self, x: Any, *, k: Any) -> Any:
        return [a + b for a, b in zip(x, k, strict=True)]

    def bad_shape(self, x: Any) -> Any:
        return x[:, 0]

    def wrong_length(self, x: Any) -> Any:
        return x[:-1]

    def mixed(self, x: Any) -> Any:
        return {"double": x["a"] * 2, "point": Point(x["a"], list(x["a"]))}, ["text"] * len(x["a"])

    def nothing_split(self, x: Any) -> Any:
        return 3

    def gated(self, x: Any) -> Any:
        self._running += 1
        self._most = max(self._most, self._running)
        assert self._gate.wait(WITHIN_S)
        self._running -= 1
        self._sizes.append(len(x))
        return x

    def pairs(self, pair: Any) -> Any:
        assert isinstance(pair, Point)
        return pair.x + pair.y

    def open(self) -> None:
        self._gate.set()

    def sizes(self) -> list[int]:
        return self._sizes

    def most(self) -> int:
        return self._most


def together(futures: list[Any]) -> list[Any]:
    return [future.result(WITHIN_S) for future in futures]


def test_a_batch_stacks_and_splits_members(serve: Any) -> None:
    client = serve(Batches, timeout=2 * WITHIN_S)  # full ones run at once
    rows = together([client.futures.arrays(np.full((2, 3), i)) for i in range(4)])
    assert [row.shape for row in rows] == [(2, 3)] * 4 and rows[3][0, 0] == 6
    assert client.sizes() == [4]
    answers = together([client.futures.mixed({"a": np.float64([i])}) for i in range(4)])
    assert all(type(answer) is tuple and answer[1] == "text" for answer in answers)
    assert [float(answer[0]["double"][0]) for answer in answers] == [0, 2, 4, 6]
    assert [type(answer[0]["point"]).__name__ for answer in answers] == ["Point"] * 4
    assert together([client.futures.keywords(i, k=10) for i in range(4)]) == [10, 11, 12, 13]
    points = [client.futures.pairs(Point(np.float64([i]), np.ones(1))) for i in range(4)]
    assert [float(sum_) for (sum_,) in together(points)] == [1, 2, 3, 4]


def test_a_batch_that_is_not_full_runs_after_its_time(serve: Any) -> None:
    client = serve(Batches, timeout=timedelta(seconds=0.3))
    began = time.monotonic()
    client.arrays(np.zeros(1))
    assert 0.25 < time.monotonic() - began < WITHIN_S
    assert client.sizes() == [1]


def test_padding_makes_every_batch_full_and_cuts_the_answers(serve: Any) -> None:
    client = serve(Batches, timeout=0.05, pad_batch=True)
    assert [float(x[0]) for x in together([client.futures.arrays(np.full(1, i)) for i in range(3)])] == [0, 2, 4]
    assert set(client.sizes()) == {4}


@pytest.mark.parametrize("pool", [0, 1, 2])
def test_waiting_calls_pin_no_thread_and_waiting_batches_fill(serve: Any, pool: int) -> None:
    client = serve(Batches, timeout=0.05, courier_kwargs={"thread_pool_size": pool})
    first = client.futures.gated(0)
    until(lambda: client.most() == 1)  # it runs now, alone
    others = [client.futures.gated(i) for i in range(1, 9)]
    client.open()  # on the same connection: they have come
    assert together([first, *others]) == list(range(9))
    assert client.sizes() == [1, 4, 4] and client.most() == 1


def test_a_batch_that_fails_fails_all_its_callers(serve: Any) -> None:
    client = serve(Batches, timeout=WITHIN_S)
    for method in ("wrong_length", "bad_shape", "nothing_split"):
        for future in [getattr(client.futures, method)(1) for _ in range(4)]:
            assert isinstance(future.exception(WITHIN_S), lp.RemoteError)
        assert together([client.futures.arrays(np.zeros(1)) for _ in range(4)])  # and the server goes on


# Two calls each: their shapes differ, then counts, positional and keyword, keywords, keys, and lengths.
UNLIKE_CALLS: list[Any] = [
    [((np.zeros(1),), {}), ((np.zeros(2),), {})],
    [((1,), {}), ((1, 2), {})],
    [((1,), {}), ((), {"x": 1})],
    [((), {"x": 1}), ((), {"z": 1})],
    [(({"a": 1},), {}), (({"b": 1},), {})],
    [(((1, 2),), {}), (((1, 2, 3),), {})],
]


def test_calls_that_do_not_go_together_fail_together(serve: Any) -> None:
    client = serve(Batches, 2, timeout=WITHIN_S)
    for calls in UNLIKE_CALLS:
        futures = [client.futures.arrays(*args, **kwargs) for args, kwargs in calls]
        assert all(isinstance(future.exception(WITHIN_S), lp.RemoteError) for future in futures), calls


def test_a_batched_handler_keeps_name_and_doc() -> None:
    batches = Batches()
    assert (batches.arrays.__name__, batches.arrays.__doc__) == ("arrays", "Documented.")


# Cacher


class Source:
    def __init__(self) -> None:
        self._calls: dict[str, int] = {}
        self._lock = threading.Lock()
        self._gate = threading.Event()

    def _count(self, name: str) -> int:
        with self._lock:
            self._calls[name] = self._calls.get(name, 0) + 1
            return self._calls[name]

    def get(self, *args: Any, **kwargs: Any) -> int:
        return self._count("get")

    def none(self) -> None:
        self._count("none")

    def fail(self) -> None:
        raise ValueError(f"failure {self._count('fail')}")

    def slow(self) -> int:
        assert self._gate.wait(WITHIN_S)
        return self._count("slow")

    def open(self) -> None:
        self._gate.set()

    def mutable(self) -> list[int]:
        return [self._count("mutable")]

    def calls(self) -> dict[str, int]:
        return self._calls


def cached(mode: str, interval: float, methods: Any = None) -> tuple[lp.Run, Any, Any]:
    program = lp.Program("cache")
    source = program.add_node(lp.CourierNode(Source), label="source")
    cacher = program.add_node(lp.CacherNode(source, refresh_interval=interval, methods=methods), label="cacher")
    run = lp.launch(program, mode, grace=2.0)
    return run, run.client(source), run.client(cacher)


def test_results_are_kept_by_method_and_arguments(mode: str) -> None:
    run, source, cacher = cached(mode, 60)
    with run:
        assert cacher.get(1, a=1, b=2) == cacher.get(1, b=2, a=1) == 1
        assert cacher.get(1, a=1) == 2 and cacher.get() == 3 and cacher.get([1, {"x": np.zeros(2)}]) == 4
        assert cacher.get([1, {"x": np.zeros(2)}]) == 4
        text = "".join(["a", "b"])
        assert cacher.get(text, text) == cacher.get("ab", "".join(["a", "b"])) == 5
        assert cacher.none() is None and cacher.none() is None
        mutable = cacher.mutable()
        mutable.append(9)
        assert cacher.mutable() == [1]
        assert source.calls() == {"get": 5, "none": 1, "mutable": 1}


def test_a_cached_result_is_refreshed_on_demand_only(mode: str) -> None:
    run, source, cacher = cached(mode, 0.1)
    with run:
        assert cacher.get() == 1
        time.sleep(0.4)
        assert source.calls() == {"get": 1}
        assert cacher.get() == 2


def test_errors_are_not_cached_and_unknown_methods_named(mode: str) -> None:
    run, _, cacher = cached(mode, 60)
    with run:
        for count in (1, 2):
            with pytest.raises(ValueError, match=f"failure {count}"):
                cacher.fail()
        for _ in range(2):
            with pytest.raises(lp.MethodNotFound, match=r"gett.*'get'"):
                cacher.gett()


def test_concurrent_misses_are_one_call(mode: str) -> None:
    run, source, cacher = cached(mode, 60)
    with run:
        futures = [cacher.futures.slow() for _ in range(40)]
        time.sleep(0.1)
        source.open()
        assert set(together(futures)) == {1}
        assert source.calls()["slow"] == 1


def test_hits_and_misses_are_counted(mode: str) -> None:
    run, source, cacher = cached(mode, 60, methods=("get", "fail"))
    with run:
        assert lp.cache_info(cacher) == lp.CacheInfo(hits=0, misses=0)
        for argument in (1, 1, 1, 2):
            cacher.get(argument)
        cacher.none()  # passed on: does not count
        for _ in range(2):
            with pytest.raises(ValueError, match="failure"):
                cacher.fail()
        assert lp.cache_info(cacher) == lp.CacheInfo(hits=2, misses=4)
        assert not any("cache" in name for name in lp.list_methods(cacher))
        with pytest.raises(lp.MethodNotFound):
            lp.cache_info(source)


def test_methods_that_are_not_named_pass_through(mode: str) -> None:
    run, source, cacher = cached(mode, 60, methods=("none",))
    with run:
        assert (cacher.get(), cacher.get()) == (1, 2)
        assert (cacher.none(), cacher.none()) == (None, None)
        assert source.calls()["none"] == 1
        with pytest.raises(lp.MethodNotFound):
            cacher.gett()


@pytest.mark.parametrize("interval", [0, -1, 0.0])
def test_an_interval_must_be_positive(interval: float) -> None:
    with pytest.raises(ValueError, match="refresh_interval"):
        lp.CacherNode(lp.CourierNode(Source).create_handle(), refresh_interval=interval)


# Colocations


def test_a_colocation_in_threads_is_one_entry_whose_inner_handles_work(mode: str) -> None:
    class Pid:
        def pid(self) -> int:
            return os.getpid()

    colocation = lp.MultiThreadingColocation([])
    first = colocation.add_node(lp.CourierNode(Pid))
    inner = lp.MultiThreadingColocation([lp.CourierNode(Pid)])
    second = inner.add_node(lp.CourierNode(Pid))
    colocation.add_node(inner)
    program = lp.Program("colocation")
    outside = program.add_node(lp.CourierNode(Pid), label="outside")

    class User:
        def __init__(self, *clients: Any) -> None:
            self._clients = clients

        def pids(self) -> list[int]:
            return [client.pid() for client in self._clients]

    with program.group("inside"):
        program.add_node(colocation)
    program.add_node(lp.CourierNode(User, first, second, outside), label="user")
    assert len(program.groups["inside"]) == 1
    with lp.launch(program, mode, grace=2.0) as run:
        inner_pid = run.client(first).pid()
        assert run.client("user").pids() == [inner_pid, run.client(second).pid(), run.client(outside).pid()]
        assert run.client(second).pid() == inner_pid
        assert len(run.status()["inside"]) == 1


def test_an_inner_failure_is_the_colocations(mode: str) -> None:
    def fail() -> None:
        raise ValueError("inner")

    colocation = lp.MultiThreadingColocation([lp.PyNode(lp.wait_for_stop), lp.PyNode(fail)])
    with pytest.raises(lp.NodeError, match=r"node0/0.*ValueError: inner"):
        run_to_the_end(mode, colocation)


def test_a_colocation_takes_nodes_only() -> None:
    for wrong in (3, None, int, lp.Program("p")):
        with pytest.raises((ValueError, TypeError)):
            lp.MultiThreadingColocation([wrong])
        with pytest.raises((ValueError, TypeError)):
            lp.MultiThreadingColocation([]).add_node(wrong)


def test_an_empty_colocation_fails_at_launch_or_wait(mode: str) -> None:
    with pytest.raises((ValueError, lp.NodeError), match="at least one"):
        run_to_the_end(mode, lp.MultiThreadingColocation([]))


def test_importing_needs_no_torch_and_no_engine() -> None:

    code = "import lp_pipe, sys; print('torch' in sys.modules, 'ray' in sys.modules, 'grpc' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False"] * 3
