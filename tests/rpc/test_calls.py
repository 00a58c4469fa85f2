"""Call the methods of a server: in this process and through a socket, with the same results."""

import concurrent.futures
import copy
import enum
import functools
import gc
import os
import pickle
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import lp_pipe as lp
from lp_pipe import connections
from lp_pipe.connections.credentials import Credentials
from lp_pipe.rpc import Server
from lp_pipe.rpc.calls import add_quick_callback
from tests.connections.carriers import own_loopback

WITHIN_S = 20.0

Serve = Callable[..., lp.CourierClient]


@pytest.fixture(params=["inproc", "unix", "grpc", "grpcs"])
def endpoint(request: pytest.FixtureRequest, socket_home: Path, run_credentials: Credentials) -> str:
    """Yield an address for each carrier, at which no server listens yet."""
    if request.param not in ("grpc", "grpcs"):
        return f"{request.param}:{socket_home}/server"
    host = own_loopback()
    with socket.create_server((host, 0)) as sock:
        return f"{request.param}:{host}:{sock.getsockname()[1]}"


def _beside(endpoint: str, number: int) -> str:
    """An endpoint for one more server."""
    if endpoint.startswith("grpc"):
        return endpoint.rpartition(":")[0] + ":0"
    return f"{endpoint}{number}"


@pytest.fixture
def serve(endpoint: str, no_leaks: None) -> Iterator[Serve]:
    """`serve(target)` gives a client of a server of `target`."""
    servers: list[Server] = []

    def start(target: object, *, thread_pool_size: int = 16, name: str = "server/0", **client: Any) -> lp.CourierClient:
        server = Server(target, _beside(endpoint, len(servers)), thread_pool_size=thread_pool_size, name=name)
        servers.append(server)
        return lp.CourierClient(server.endpoint, **client)

    start.servers = servers  # type: ignore[attr-defined]
    yield start
    for server in servers:
        server.close()


class Calculator:
    """A server as users write it."""

    constant = 3

    def __init__(self) -> None:
        self.double = lambda x: 2 * x
        self.data = [1, 2]
        self.looked = False

    def add(self, a: int, b: int = 10) -> int:
        return a + b

    def echo(self, /, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def fail(self, error: BaseException) -> None:
        raise error

    def __call__(self, x: int) -> int:
        return -x

    def _private(self) -> str:
        return "secret"

    def __dunder__(self) -> str:
        return "secret"

    @staticmethod
    def static(x: int) -> int:
        return x + 1

    @classmethod
    def of_class(cls) -> str:
        return cls.__name__

    @property
    def a_property(self) -> Callable[[], str]:
        self.looked = True
        return lambda: "secret"

    @functools.cached_property
    def cached(self) -> Callable[[], str]:
        self.looked = True
        return lambda: "secret"

    def was_looked_at(self) -> bool:
        return self.looked


def test_a_call_looks_like_one(serve: Serve) -> None:
    client = serve(Calculator())
    assert client.add(1, 2) == 3
    assert client.add(b=1, a=1) == 2
    assert client.add(1) == 11
    assert client(5) == -5
    future = client.futures.add(1, b=4)
    assert isinstance(future, concurrent.futures.Future)
    assert future.result(WITHIN_S) == 5
    assert client.futures(7).result(WITHIN_S) == -7


# What is exposed.


def test_public_callables_are_exposed_however_they_got_there(serve: Serve) -> None:
    class Child(Calculator):
        pass

    client = serve(Child())
    assert (client.double(4), client.static(1), client.of_class(), client.add(1, 1)) == (8, 2, "Child", 2)
    exposed = ["__call__", "add", "double", "echo", "fail", "of_class", "static", "was_looked_at"]
    assert lp.list_methods(client) == exposed
    assert not client.was_looked_at()  # nothing was computed by listing


@pytest.mark.parametrize("name", ["constant", "data", "a_property", "cached", "nothing"])
def test_data_attributes_and_unknown_names_are_not_exposed(serve: Serve, name: str) -> None:
    client = serve(Calculator())
    with pytest.raises(lp.MethodNotFound, match=name):
        getattr(client, name)()
    assert not client.was_looked_at()


def test_a_missing_method_is_named_with_the_nearest_one(serve: Serve) -> None:
    client = serve(Calculator())
    with pytest.raises(lp.MethodNotFound, match=r"'ad'.*did you mean 'add'") as caught:
        client.ad(1)
    assert isinstance(caught.value, AttributeError)
    assert not isinstance(caught.value, lp.RemoteError)
    with pytest.raises(lp.MethodNotFound, match=r"was_looked_at"):
        client.zzzzzz()


def test_private_names_never_leave_the_client(serve: Serve) -> None:
    client = serve(Calculator())
    for name in ("_private", "__dunder__", "__len__"):
        assert not hasattr(client, name)
        assert not hasattr(client.futures, name)


def test_any_keyword_name_is_allowed(serve: Serve) -> None:
    client = serve(Calculator())
    names = ["self", "name", "method", "address", "args", "kwargs", "timeout", "call", "handler", "function", "cls"]
    kwargs = dict.fromkeys(names, 1)
    assert client.echo(1, **kwargs) == ((1,), kwargs)
    assert client.futures.echo(**kwargs).result(WITHIN_S) == ((), kwargs)

    class Called:
        def __call__(self, /, **kwargs: Any) -> Any:
            return kwargs

    client = serve(Called())
    assert client(**kwargs) == kwargs
    assert client.futures(**kwargs).result(WITHIN_S) == kwargs


# The client as an object.


def test_probing_a_client_is_local() -> None:
    client = lp.CourierClient("inproc:nobody-at-all")  # any call would wait for ever
    assert "nobody" in repr(client)
    assert client == client
    assert client != lp.CourierClient("inproc:nobody-at-all")
    assert hash(client) == hash(client)
    for copied in (copy.copy(client), copy.deepcopy(client), pickle.loads(pickle.dumps(client))):
        assert copied.address == client.address


def test_a_client_made_from_an_address_or_sent_through_a_call_works(serve: Serve) -> None:
    client = serve(Calculator())
    assert isinstance(client.address, str)
    assert lp.CourierClient(client.address).add(1, 1) == 2

    class Caller:
        def call(self, other: Any) -> int:
            result: int = other.add(20, 1)
            return result

    assert serve(Caller()).call(client) == 21


def test_clients_that_come_and_go_leave_no_connections(serve: Serve) -> None:
    # Every client that travels through a call is a new one; each kept a connection and a thread until the server ended.
    client = serve(Calculator())
    (server,) = serve.servers  # type: ignore[attr-defined]
    client.add(1, 1)
    for _ in range(30):
        lp.CourierClient(client.address).add(1, 1)
        lp.CourierClient(client.address).futures.add(1, 1).result(WITHIN_S)
    deadline = time.monotonic() + WITHIN_S
    while len(server._connections) > 1:
        assert time.monotonic() < deadline


def test_a_future_outlives_its_client(serve: Serve) -> None:
    release = threading.Event()

    class Waits:
        def wait(self) -> str:
            assert release.wait(WITHIN_S)
            return "done"

    future = lp.CourierClient(serve(Waits()).address).futures.wait()
    gc.collect()
    release.set()
    assert future.result(WITHIN_S) == "done"


# Threads.


@pytest.mark.parametrize("size", [1, 3])
def test_handlers_run_in_exactly_so_many_threads(serve: Serve, size: int) -> None:
    class Meeting:
        def __init__(self) -> None:
            self._barrier = threading.Barrier(size)
            self.most = self._now = 0
            self._lock = threading.Lock()

        def meet(self) -> str:
            with self._lock:
                self._now += 1
                self.most = max(self.most, self._now)
            self._barrier.wait(WITHIN_S)  # only reached together
            with self._lock:
                self._now -= 1
            return threading.current_thread().name

    meeting = Meeting()
    client = serve(meeting, thread_pool_size=size)
    futures = [client.futures.meet() for _ in range(4 * size)]
    assert len({future.result(WITHIN_S) for future in futures}) == size
    assert meeting.most == size


def test_inline_handlers_need_no_thread(serve: Serve) -> None:
    client = serve(Calculator(), thread_pool_size=0)
    assert [client.add(i, 1) for i in range(100)] == list(range(1, 101))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("call server/0")]


def test_many_threads_share_a_client(serve: Serve) -> None:
    client = serve(Calculator())
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda i: (i, client.add(i, i), client.futures.add(i, 1).result(WITHIN_S)), range(400)))
    assert results == [(i, 2 * i, i + 1) for i in range(400)]


# Futures.


class Gate:
    """A handler that waits until the test opens it."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        self.calls = 0

    def wait(self, value: Any = None) -> Any:
        self.calls += 1
        self.entered.set()
        assert self.open.wait(WITHIN_S)
        return value

    def peek(self) -> int:
        return self.calls


def test_a_call_in_progress_can_be_cancelled_and_its_handler_goes_on(serve: Serve) -> None:
    gate = Gate()
    client = serve(gate)
    future = client.futures.wait("x")
    assert gate.entered.wait(WITHIN_S)
    assert future.cancel()
    assert future.cancelled()
    assert future.cancel()
    assert concurrent.futures.wait([future], WITHIN_S).done == {future}
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(WITHIN_S)
    gate.open.set()
    assert client.wait("y") == "y"


def test_a_finished_call_cannot_be_cancelled(serve: Serve) -> None:
    future = serve(Calculator()).futures.add(1, 1)
    assert future.result(WITHIN_S) == 2
    assert not future.cancel()


def test_a_call_that_is_cancelled_before_the_server_is_up_is_never_sent(endpoint: str, no_leaks: None) -> None:
    gate = Gate()
    gate.open.set()
    client = lp.CourierClient(endpoint)
    future = client.futures.wait()
    assert future.cancel()
    server = Server(gate, endpoint)
    assert client.peek() == 0
    assert concurrent.futures.wait([future], WITHIN_S).done == {future}
    server.close()
    assert gate.calls == 0


def test_result_may_run_out_of_time_and_the_call_stays_pending(serve: Serve) -> None:
    gate = Gate()
    future = serve(gate).futures.wait("late")
    with pytest.raises(concurrent.futures.TimeoutError):
        future.result(0.01)
    assert not future.done()
    gate.open.set()
    assert future.result(WITHIN_S) == "late"


def test_arguments_are_captured_at_the_call(endpoint: str, no_leaks: None) -> None:
    data = bytearray(b"x" * 10_000)
    items = [1, 2]
    client = lp.CourierClient(endpoint)
    future = client.futures.echo(items, pickle.PickleBuffer(data))  # nobody is there yet
    items.append(3)
    data[:] = b"y" * 10_000
    server = Server(Calculator(), endpoint)
    (got_items, got_data), _ = future.result(WITHIN_S)
    assert got_items == [1, 2]
    assert bytes(got_data) == b"x" * 10_000
    client = lp.CourierClient(endpoint)
    client.add(1, 1)
    future = client.futures.echo(items)
    items.clear()
    assert future.result(WITHIN_S) == (([1, 2, 3],), {})
    server.close()


@pytest.mark.parametrize("pool", [0, 4])
def test_callbacks_may_call(serve: Serve, pool: int) -> None:
    client = serve(Calculator(), thread_pool_size=pool)
    results: list[int] = []
    done = threading.Event()

    def again(future: Any) -> None:
        results.append(future.result())
        if len(results) == 20:
            done.set()
        else:
            client.futures.add(len(results), client.add(0, 0)).add_done_callback(again)

    client.futures.add(0, 0).add_done_callback(again)
    assert done.wait(WITHIN_S)
    assert results == list(range(20))


def test_a_callback_that_is_added_while_the_reply_arrives_may_call(serve: Serve) -> None:
    # It ran in the connection's thread, where a call waits for a reply that this very thread should read.
    client = serve(Calculator())
    for delay in range(200):
        done = threading.Event()
        future = client.futures.add(1, 1)
        for _ in range(delay):
            pass
        future.add_done_callback(lambda _, done=done: (client.add(1, 1), done.set()))
        assert done.wait(WITHIN_S)


def test_a_quick_callback_runs_where_the_reply_is_read_although_nobody_asks_for_it(serve: Serve) -> None:
    client = serve(Calculator())
    ran: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    called = client.futures.add(1, 1)
    add_quick_callback(called, lambda future: ran.put((future.result(), threading.current_thread().name)))
    result, thread = ran.get(timeout=WITHIN_S)
    assert result == 2 and not thread.startswith("call callbacks")
    done = threading.Event()
    settled = client.futures.add(1, 2)
    assert settled.result() == 3
    add_quick_callback(settled, lambda _: done.set())
    assert done.is_set()


def test_a_broken_callback_harms_nobody(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    client = serve(gate)
    done = threading.Event()
    future = client.futures.wait(1)
    future.add_done_callback(lambda _: 1 / 0)
    future.add_done_callback(lambda _: done.set())
    gate.open.set()
    assert done.wait(WITHIN_S)
    assert client.wait(2) == 2


# Deadlines.


@pytest.mark.parametrize("timeout", [0.05, timedelta(seconds=0.05)])
def test_a_call_that_takes_too_long_is_named(serve: Serve, timeout: Any) -> None:
    gate = Gate()
    client = serve(gate, call_timeout=timeout)
    for call in (client.wait, lambda: client.futures.wait().result(WITHIN_S)):
        with pytest.raises(lp.DeadlineExceeded, match="wait") as caught:
            call()
        assert isinstance(caught.value, TimeoutError)
        assert not isinstance(caught.value, lp.RemoteError)
    gate.open.set()


@pytest.mark.parametrize("timeout", [None, 0, 0.0, timedelta(0), 60, float("inf")])
def test_no_deadline_or_a_long_one(serve: Serve, timeout: Any) -> None:
    client = serve(Calculator(), call_timeout=timeout)
    assert client.add(1, 1) == 2
    assert client.futures.add(1, 1).result(WITHIN_S) == 2


@pytest.mark.parametrize("address", ["localhost", "", None])
def test_what_is_no_address_of_a_server_is_refused(address: Any) -> None:
    # Calls waited for ever for it to come up.
    with pytest.raises(ValueError, match=r"CourierClient\(.*\.address"):
        lp.CourierClient(address)


@pytest.mark.parametrize("timeout", [-1, -0.5, timedelta(seconds=-1)])
def test_a_negative_deadline_is_refused(timeout: Any) -> None:
    with pytest.raises(ValueError, match="call_timeout"):
        lp.CourierClient("inproc:x", call_timeout=timeout)


def test_a_deadline_that_is_a_text_is_refused_as_that() -> None:
    """Regression: the error was "'<' not supported between instances of 'str' and 'int'"."""
    with pytest.raises(TypeError, match=r"call_timeout must be .*got '5'"):
        lp.CourierClient("inproc:x", call_timeout="5")  # type: ignore[arg-type]


def test_the_deadline_counts_while_nobody_is_there(endpoint: str) -> None:
    client = lp.CourierClient(endpoint, call_timeout=0.1)
    with pytest.raises(lp.DeadlineExceeded, match="anything"):
        client.anything()
    with pytest.raises(lp.DeadlineExceeded, match="anything"):
        client.futures.anything().result(WITHIN_S)


def test_a_result_is_freed_before_its_deadline(serve: Serve) -> None:
    # The list of deadlines held every future, and with it the result, for the whole call_timeout.
    import weakref

    class Tracked(list):  # type: ignore[type-arg]
        pass

    class Lists:
        def make(self) -> Any:
            return Tracked([1])

    future = serve(Lists(), call_timeout=600).futures.make()
    result = weakref.ref(future.result(WITHIN_S))
    del future
    deadline = time.monotonic() + WITHIN_S
    while result() is not None:
        gc.collect()
        assert time.monotonic() < deadline


# Nobody there.


def test_without_wait_for_ready_a_call_to_nobody_is_unavailable_at_once(endpoint: str) -> None:
    client = lp.CourierClient(endpoint, wait_for_ready=False)
    with pytest.raises(lp.Unavailable, match="add"):
        client.add(1, 1)
    error = client.futures.add(1, 1).exception(WITHIN_S)
    assert isinstance(error, lp.Unavailable)
    assert isinstance(error, ConnectionError)
    assert not isinstance(error, lp.RemoteError)
    assert str(error).count(".add():") == 1, "the call was named twice"


def test_a_call_waits_until_the_server_is_up(endpoint: str, no_leaks: None) -> None:
    client = lp.CourierClient(endpoint)
    futures = [client.futures.add(i, 1) for i in range(3)]
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.append(client.add(1, 1)))
    thread.start()
    server = Server(Calculator(), endpoint)
    thread.join(WITHIN_S)
    assert answers == [2]
    assert [future.result(WITHIN_S) for future in futures] == [1, 2, 3]
    server.close()


def test_the_end_of_the_server_ends_the_calls_that_wait(serve: Serve) -> None:
    gate = Gate()
    client = serve(gate, thread_pool_size=1)
    (server,) = serve.servers  # type: ignore[attr-defined]
    running = client.futures.wait("in time")
    assert gate.entered.wait(WITHIN_S)
    waiting = [client.futures.wait() for _ in range(3)]
    closing = threading.Thread(target=server.close, args=(WITHIN_S,))
    closing.start()
    for future in waiting:  # at once: these have not begun
        assert isinstance(future.exception(WITHIN_S), lp.Unavailable)
    gate.open.set()  # within the grace: this one is still answered
    closing.join(WITHIN_S)
    assert running.result(WITHIN_S) == "in time"
    assert gate.calls == 1


def test_a_call_that_arrives_as_its_server_closes_is_refused_at_once(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It came into the queue after the close had looked there, and was told nothing before the end of the grace.
    gate = Gate()
    client = serve(gate, thread_pool_size=1)
    (server,) = serve.servers  # type: ignore[attr-defined]
    running = client.futures.wait("in time")
    assert gate.entered.wait(WITHIN_S)
    closing = threading.Thread(target=server.close, args=(2 * WITHIN_S,))
    has_looked = threading.Event()
    submit, discard = server._pool.submit, server._pool.discard

    def submit_late(*task: Any) -> None:
        closing.start()
        assert has_looked.wait(WITHIN_S)
        submit(*task)

    def look() -> list[Any]:
        found = discard()
        has_looked.set()
        return found  # type: ignore[no-any-return]

    monkeypatch.setattr(server._pool, "submit", submit_late)
    monkeypatch.setattr(server._pool, "discard", look)
    assert isinstance(client.futures.wait().exception(WITHIN_S), lp.Unavailable)
    gate.open.set()
    closing.join(WITHIN_S)
    assert running.result(WITHIN_S) == "in time"
    assert gate.calls == 1


def test_a_handler_that_outlives_the_grace_leaves_its_caller_unavailable(serve: Serve) -> None:
    gate = Gate()
    client = serve(gate)
    (server,) = serve.servers  # type: ignore[attr-defined]
    future = client.futures.wait()
    assert gate.entered.wait(WITHIN_S)
    server.close(0.05)
    assert isinstance(future.exception(WITHIN_S), lp.Unavailable)
    gate.open.set()


def test_a_client_finds_a_server_that_comes_back(endpoint: str, no_leaks: None) -> None:
    client = lp.CourierClient(endpoint)
    for _ in range(3):
        server = Server(Calculator(), endpoint)
        assert client.add(1, 1) == 2
        server.close()


def test_a_call_after_the_end_of_a_server_goes_to_its_successor(endpoint: str, no_leaks: None) -> None:
    # While another thread was about to read the end, nobody else saw it: the call was lost, 4 of 100 times here.
    client = lp.CourierClient(endpoint)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(50):
            server = Server(Calculator(), endpoint)
            assert client.add(1, 1) == 2
            server.close()
            server = Server(Calculator(), endpoint)
            assert client.futures.add(1, 1).result(WITHIN_S) == 2
            server.close()
    finally:
        sys.setswitchinterval(interval)


def test_closing_a_server_under_fire_settles_every_call(endpoint: str, no_leaks: None) -> None:
    # The end of a connection during a send settled a future twice, and the call raised InvalidStateError.
    for _ in range(10):
        server = Server(Calculator(), endpoint)
        client = lp.CourierClient(endpoint, wait_for_ready=False)
        client.add(1, 1)
        futures: list[Any] = []
        failures: list[BaseException] = []

        def fire(client: Any = client, futures: Any = futures, failures: Any = failures) -> None:
            try:
                while not futures or not isinstance(futures[-1].exception(WITHIN_S), lp.Unavailable):
                    futures += [client.futures.add(1, 1) for _ in range(20)]
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=fire) for _ in range(2)]
        for thread in threads:
            thread.start()
        server.close()
        for thread in threads:
            thread.join(WITHIN_S)
        assert not failures
        for future in futures:
            assert future.exception(WITHIN_S) is None or isinstance(future.exception(), lp.Unavailable)


# Values.


class Colour(enum.Enum):
    RED = 1


def test_values_travel_by_value(serve: Serve) -> None:
    kept: list[Any] = []

    class Keeper:
        def keep(self, value: list[int]) -> list[int]:
            kept.append(value)
            return value

        def kept(self) -> Any:
            return kept[0]

    mine = [1, 2]
    client = serve(Keeper())
    theirs = client.keep(mine)
    mine.append(3)
    theirs.append(4)
    assert kept == [[1, 2]]
    client.kept().append(5)
    assert kept == [[1, 2]]


def test_a_hundred_megabytes_go_both_ways(serve: Serve) -> None:
    import numpy as np

    big = np.arange(100 << 17, dtype=np.int64)  # 100 MiB
    (back,), _ = serve(Calculator()).echo(big)
    assert back is not big
    assert np.array_equal(back, big)
    back[0] = 7
    assert big[0] == 0


def test_an_array_that_changes_after_the_call_was_sent_as_it_was(serve: Serve) -> None:
    import numpy as np

    gate = Gate()
    data = np.zeros(100_000)
    future = serve(gate).futures.wait(data)
    data += 1
    gate.open.set()
    assert not future.result(WITHIN_S).any()


def test_many_little_arrays_are_not_many_pieces(serve: Serve) -> None:
    import numpy as np

    arrays = [np.array([i]) for i in range(20_000)]
    (back,), _ = serve(Calculator()).echo(arrays)
    assert [int(array[0]) for array in back] == list(range(20_000))


def test_too_many_pieces_are_refused_on_both_sides(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    client = serve(Calculator())
    monkeypatch.setattr(connections.frames, "MAX_HEADER_BYTES", 100)
    if client.address.startswith("inproc"):
        return  # nothing is put into frames
    with pytest.raises(lp.SerializationError, match="add"):
        client.add([np.zeros(1000) for _ in range(200)], 1)

    class Maker:
        def make(self) -> Any:
            return [np.zeros(1000) for _ in range(200)]

    with pytest.raises(lp.SerializationError, match="too large"):
        serve(Maker()).make()


def test_an_argument_that_does_not_pickle_is_named_at_the_call(serve: Serve) -> None:
    client = serve(Calculator())
    for call in (client.echo, client.futures.echo):
        with pytest.raises(lp.SerializationError, match=r"echo.*args\[1\]\['inner'\].*lock"):
            call(0, {"inner": threading.Lock()})
        with pytest.raises(lp.SerializationError, match=r"echo.*key.*lock"):
            call(key=threading.Lock())
    nobody = lp.CourierClient("inproc:nobody")
    with pytest.raises(lp.SerializationError):  # at once, and not when the server is up
        nobody.echo(threading.Lock())


def test_a_result_that_does_not_pickle_is_named(serve: Serve) -> None:
    class Server:
        def make(self) -> Any:
            return {"lock": threading.Lock()}

    with pytest.raises((lp.SerializationError, lp.RemoteError), match=r"make.*lock"):
        serve(Server()).make()


class Closed(dict[str, int]):
    """An object like a group of a closed file: it does not pickle, and raises at every look."""

    def __reduce__(self) -> Any:
        raise TypeError("open files do not pickle")

    def items(self) -> Any:
        raise OSError("the file is closed")


def test_a_result_that_cannot_be_looked_at_is_an_error_and_not_a_hang(serve: Serve) -> None:
    """Regression: the search for what does not pickle ended the handler's thread, and the caller got no answer."""

    class Server:
        def make(self) -> Any:
            return Closed()

    client = serve(Server(), call_timeout=WITHIN_S, thread_pool_size=1)
    for _ in range(2):
        with pytest.raises(lp.SerializationError, match=r"make.*Closed: TypeError: open files do not pickle"):
            client.make()


def load_exits() -> None:
    raise SystemExit(3)


class ExitsWhenLoaded:
    def __reduce__(self) -> Any:
        return load_exits, ()


def test_an_argument_that_exits_as_it_is_loaded_is_an_error_and_not_a_hang(serve: Serve) -> None:
    client = serve(Calculator(), call_timeout=WITHIN_S, thread_pool_size=1)
    for _ in range(2):
        with pytest.raises(lp.SerializationError, match=r"echo.*SystemExit: 3"):
            client.echo(ExitsWhenLoaded())


def test_a_result_that_exits_as_it_is_loaded_is_an_error_and_not_the_callers_end(serve: Serve) -> None:
    class Server:
        def make(self) -> Any:
            return ExitsWhenLoaded()

    with pytest.raises(lp.SerializationError, match=r"make\(\): the result does not load here: SystemExit: 3"):
        serve(Server(), call_timeout=WITHIN_S).make()


class ExitsWhenPickled:
    def __reduce__(self) -> Any:
        raise SystemExit(3)


def test_a_result_or_argument_that_exits_as_it_is_pickled_is_an_error_and_not_a_hang(serve: Serve) -> None:
    class Server:
        def make(self) -> Any:
            return [ExitsWhenPickled()]

        def items(self) -> Iterator[Any]:
            yield ExitsWhenPickled()

        def take(self, value: Any) -> None: ...

    client = serve(Server(), call_timeout=WITHIN_S, thread_pool_size=1)
    for _ in range(2):
        with pytest.raises(lp.SerializationError, match=r"make.*result\[0\] of type ExitsWhenPickled: SystemExit: 3"):
            client.make()
        with pytest.raises(lp.SerializationError, match=r"items.*ExitsWhenPickled: SystemExit: 3"):
            next(client.items())
        with pytest.raises(lp.SerializationError, match=r"take.*args\[0\] of type ExitsWhenPickled: SystemExit: 3"):
            client.take(ExitsWhenPickled())


def load_broken() -> None:
    raise RuntimeError("does not load")


class DoesNotLoad:
    def __reduce__(self) -> Any:
        return load_broken, ()


def test_values_that_do_not_load_are_an_error_and_not_a_hang(serve: Serve) -> None:
    client = serve(Calculator())
    with pytest.raises(lp.SerializationError, match=r"echo.*does not load"):
        client.echo(DoesNotLoad())

    class Maker:
        def make(self) -> Any:
            return DoesNotLoad()

    with pytest.raises(lp.SerializationError, match=r"make.*does not load"):
        serve(Maker()).make()


def test_whatever_happens_in_looking_a_method_up_is_answered(serve: Serve) -> None:
    class Proxy:
        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            if name == "broken":
                raise ValueError("no such thing")
            return lambda *args: (name, *args)

    client = serve(Proxy())
    assert client.anything(1) == ("anything", 1)
    with pytest.raises(ValueError, match="no such thing"):
        client.broken()


def test_names_of_files_that_are_not_utf8_do_not_break_the_answer(serve: Serve) -> None:
    # Protobuf refuses lone surrogates; the handler's thread died of it, and the caller waited for ever.
    client = serve(Calculator(), thread_pool_size=1)
    with pytest.raises(FileNotFoundError, match="udcff"):
        client.fail(FileNotFoundError(2, "no such file", os.fsdecode(b"\xff")))
    assert client.add(1, 1) == 2
