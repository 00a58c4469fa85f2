"""Calls that are spread over several servers of the same kind."""

import itertools
import os
import pickle
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import lp_pipe as lp
from lp_pipe.rpc import Server
from tests.waiting import until

WITHIN_S = 20.0
_names = itertools.count()


class Worker:
    def __init__(self, number: int) -> None:
        self.number = number
        self.may_go = threading.Event()
        self.running = 0

    def who(self) -> int:
        return self.number

    def square(self, x: int) -> int:
        return x * x

    def hold(self) -> int:
        self.running += 1
        assert self.may_go.wait(WITHIN_S)
        return self.number

    def fail(self) -> None:
        raise KeyError("mine")

    def fail_of_another(self) -> None:
        raise lp.Unavailable("of a client of mine")


@pytest.fixture
def workers(no_leaks: None) -> Iterator[list[Worker]]:
    yield [Worker(number) for number in range(3)]


@pytest.fixture
def servers(workers: list[Worker]) -> Iterator[list[Server]]:
    name = f"inproc:pool{next(_names)}"
    found = [Server(worker, f"{name}/{worker.number}", name=f"worker/{worker.number}") for worker in workers]
    yield found
    for worker in workers:
        worker.may_go.set()
    for server in found:
        server.close()


@pytest.fixture
def pool(servers: list[Server]) -> lp.Pool:
    found = lp.Pool([lp.CourierClient(server.endpoint) for server in servers], safe=["hold"])
    until(lambda: len({found.who() for _ in range(3)}) == 3)  # from the first call on it looks for its members
    return found


def test_a_pool_is_called_like_a_client(pool: lp.Pool) -> None:
    assert pool.square(3) == 9
    assert pool.futures.square(4).result(WITHIN_S) == 16
    assert len(pool) == len(pool.clients) == 3
    with pytest.raises(KeyError):
        pool.fail()
    assert isinstance(pool.futures.fail().exception(WITHIN_S), KeyError)
    with pytest.raises(lp.MethodNotFound):
        pool.nothing()


def test_idle_members_take_turns(pool: lp.Pool) -> None:
    assert Counter(pool.who() for _ in range(9)) == {0: 3, 1: 3, 2: 3}


def test_a_busy_member_gets_no_more_calls(pool: lp.Pool, workers: list[Worker]) -> None:
    future = pool.futures.hold()
    until(lambda: sum(worker.running for worker in workers) == 1)
    (busy,) = [worker for worker in workers if worker.running]
    assert busy.number not in {pool.who() for _ in range(10)}
    busy.may_go.set()
    assert future.result(WITHIN_S) == busy.number


def test_results_of_a_map_come_as_they_arrive_or_in_order(pool: lp.Pool) -> None:
    assert sorted(pool.map("square", range(50))) == [x * x for x in range(50)]
    assert list(pool.map(pool.square, range(50), ordered=True)) == [x * x for x in range(50)]


def test_a_map_takes_items_as_it_goes(pool: lp.Pool) -> None:
    items = itertools.count()
    results = pool.map("square", items)
    assert {next(results) for _ in range(3)} <= {x * x for x in range(20)}
    assert next(items) < 20
    results.close()  # type: ignore[attr-defined]


def test_max_pending_bounds_the_calls_of_each_member(servers: list[Server], workers: list[Worker]) -> None:
    pool = lp.Pool([lp.CourierClient(server.endpoint) for server in servers], max_pending=1)
    until(lambda: len({pool.who() for _ in range(3)}) == 3)
    futures = [pool.futures.hold() for _ in range(3)]
    fourth = threading.Thread(target=pool.who)
    fourth.start()
    fourth.join(0.1)
    assert fourth.is_alive() and [worker.running for worker in workers] == [1, 1, 1]
    workers[1].may_go.set()
    fourth.join(WITHIN_S)
    assert not fourth.is_alive()
    for worker in workers:
        worker.may_go.set()
    assert sorted(future.result(WITHIN_S) for future in futures) == [0, 1, 2]


def test_a_safe_call_goes_to_another_member_when_its_own_ends(
    pool: lp.Pool, servers: list[Server], workers: list[Worker]
) -> None:
    future = pool.futures.hold()
    until(lambda: sum(worker.running for worker in workers) == 1)
    (first,) = [worker for worker in workers if worker.running]
    servers[first.number].close()
    until(lambda: sum(worker.running for worker in workers) == 2)
    for worker in workers:
        worker.may_go.set()
    assert future.result(WITHIN_S) != first.number
    assert first.number not in {pool.who() for _ in range(6)}


def test_another_call_is_unavailable_at_once(servers: list[Server], workers: list[Worker]) -> None:
    pool = lp.Pool([lp.CourierClient(server.endpoint) for server in servers])
    future = pool.futures.hold()
    until(lambda: sum(worker.running for worker in workers) == 1)
    (first,) = [worker for worker in workers if worker.running]
    servers[first.number].close()
    assert isinstance(future.exception(WITHIN_S), lp.Unavailable)


def test_an_unavailable_of_the_handlers_own_is_no_death(pool: lp.Pool) -> None:
    for _ in range(3):
        with pytest.raises(lp.RemoteError):
            pool.fail_of_another()
    assert Counter(pool.who() for _ in range(3)) == {0: 1, 1: 1, 2: 1}


def test_without_any_member_calls_are_unavailable_or_wait_as_a_client_does(servers: list[Server]) -> None:
    endpoints = [server.endpoint for server in servers]
    for server in servers:
        server.close()
    at_once = lp.Pool([lp.CourierClient(endpoint, wait_for_ready=False) for endpoint in endpoints])
    with pytest.raises(lp.Unavailable):
        at_once.who()
    limited = lp.Pool([lp.CourierClient(endpoint, call_timeout=0.2) for endpoint in endpoints])
    with pytest.raises(lp.DeadlineExceeded):
        limited.who()


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: lp.Pool([]), ValueError),
        (lambda: lp.Pool([3]), TypeError),  # type: ignore[list-item]
        (lambda: lp.Pool([lp.CourierClient("inproc:x")], max_pending=0), ValueError),
        (lambda: lp.Pool([lp.CourierClient("inproc:x")], safe="hold"), TypeError),
    ],
)
def test_a_pool_that_cannot_be_is_refused_where_it_is_made(make: Callable[[], lp.Pool], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        make()


def test_a_pool_of_handles_says_that_it_has_no_clients_yet() -> None:
    handle = lp.Program("p").add_node(lp.CourierNode(Worker, 0), label="worker")
    pool = lp.Pool([handle])
    assert len(pickle.loads(pickle.dumps(pool))) == 1
    with pytest.raises(RuntimeError, match="worker/0"):
        pool.who()


class Member(Worker):
    def pid(self) -> int:
        return os.getpid()

    def wait_a_moment(self) -> int:
        time.sleep(0.5)
        return os.getpid()


def use(pool: Any, *, kills: bool) -> None:
    until(lambda: Counter(pool.who() for _ in range(4)) == {0: 2, 1: 2})
    assert sorted(pool.map("square", range(10))) == [x * x for x in range(10)]
    if kills:
        futures = [pool.futures.wait_a_moment() for _ in range(2)]
        victim = pool.clients[0].pid()
        os.kill(victim, signal.SIGKILL)
        assert victim not in {future.result(WITHIN_S) for future in futures}
        until(lambda: {pool.who() for _ in range(4)} == {0, 1}, WITHIN_S)
    lp.stop()


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_a_pool_is_an_argument_of_a_node(mode: str, without_torch: None) -> None:
    program = lp.Program("pool")
    with program.group("worker", on_failure="restart"):
        handles = [program.add_node(lp.CourierNode(Member, number)) for number in range(2)]
    user = lp.PyNode(use, lp.Pool(handles, safe=["wait_a_moment"]), kills=mode == "process")
    program.add_node(user, label="user")
    assert len(list(user.input_handles())) == 2
    lp.launch(program, mode).wait(60)
