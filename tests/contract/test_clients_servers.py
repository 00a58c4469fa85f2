"""The contract's section on clients and servers, in every mode."""

import collections
import concurrent.futures
import dataclasses
import enum
import itertools
import pickle
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import lp_pipe as lp

WITHIN_S = 20.0


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Item:
    name: str
    values: list[int]


Pair = collections.namedtuple("Pair", ["a", "b"])


class Server:
    """A server with all methods that the tests below call."""

    public_data = 5

    def __init__(self) -> None:
        self._gate = threading.Event()
        self._seen: list[Any] = []
        self.assigned = lambda x: x + 1
        self._closed = 0
        self._produced = 0
        self._mine = {"list": [1], "array": np.zeros(3000), "small": np.zeros(3)}

    def echo(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def back(self, value: Any) -> Any:
        return value

    def any_name(self, **self_: Any) -> dict[str, Any]:
        return self_

    def spoil(self, values: Any) -> None:
        if isinstance(values, list):
            values.append("spoiled")
        else:
            values[...] = 7

    def mine(self) -> Any:
        return self._mine

    def wait(self, x: Any = None) -> Any:
        assert self._gate.wait(WITHIN_S)
        self._seen.append(str(x))
        return x

    def open(self) -> None:
        self._gate.set()

    def seen(self) -> list[Any]:
        return self._seen

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def lock(self) -> Any:
        return {"fine": 1, "lock": threading.Lock()}

    def numbers(self) -> Iterator[int]:
        try:
            for number in itertools.count():
                self._produced += 1
                yield number
        finally:
            self._closed += 1

    def counts(self) -> tuple[int, int]:
        return self._produced, self._closed

    async def later(self, x: int) -> int:
        return x + 1

    async def agen(self, n: int) -> Any:
        for number in range(n):
            yield number

    @staticmethod
    def static() -> str:
        return "static"

    @classmethod
    def klass(cls) -> str:
        return cls.__name__

    @property
    def computed(self) -> int:
        raise AssertionError("a property was looked at")

    def _private(self) -> str:
        return "secret"

    def __call__(self, x: int) -> int:
        return -x


@pytest.fixture
def client(serve: Any) -> Any:
    return serve(Server)


def test_any_keyword_name_is_allowed(client: Any) -> None:
    own_names = ["method", "timeout", "name", "args", "kwargs", "client", "address", "call", "cls", "fn", "link"]
    for name in ["self", *own_names]:
        if name != "self":  # the handler's own first parameter
            assert client.any_name(**{name: 1}) == {name: 1}
            assert client.futures.any_name(**{name: 1}).result(WITHIN_S) == {name: 1}
        with pytest.raises(lp.MethodNotFound):
            client.nothing(**{name: 1})
        with pytest.raises(lp.MethodNotFound):
            client.futures.nothing(**{name: 1}).result(WITHIN_S)
        with pytest.raises(TypeError):
            client(**{name: 1})


def test_what_a_handler_does_to_its_argument_is_not_seen_by_the_caller(client: Any) -> None:
    for mutable in ([1], np.zeros(3), np.zeros(100_000)):
        before = pickle.dumps(mutable)
        client.spoil(mutable)
        client.futures.spoil(mutable).result(WITHIN_S)
        assert pickle.dumps(mutable) == before


def test_what_a_caller_does_to_a_result_is_not_seen_by_the_server(client: Any) -> None:
    mine = client.mine()
    mine["list"].append(2)
    mine["array"][:] = 9
    mine["small"][:] = 9
    again = client.mine()
    assert again["list"] == [1] and not again["array"].any() and not again["small"].any()


KEPT_VALUES: list[Any] = [
    (1, [2, (3,)], {"a": (4,)}),
    [(), [], {}, set(), frozenset({1}), b"", bytearray(b"x"), "", None, True],
    Pair(1, [2]),
    Item("x", [1]),
    Color.RED,
    2**300,
    float("inf"),
    1 + 2j,
    collections.OrderedDict([("b", 1), ("a", 2)]),
    collections.deque([1, 2], maxlen=5),
    collections.defaultdict(list, {"a": [1]}),
    range(3),
    slice(1, 2, 3),
    timedelta(seconds=3),
    int,
    len,
    Item,
    ValueError,
    np.float32(1.5),
    np.datetime64("2020-01-01"),
]


def test_types_are_kept(client: Any) -> None:
    for value in KEPT_VALUES:
        back = client.back(value)
        assert back == value and type(back).__name__ == type(value).__name__


ARRAYS: list[Any] = [
    np.array(3.5),
    np.zeros((0, 3)),
    np.arange(20_000.0).reshape(100, 200)[::2, ::-3],
    np.asfortranarray(np.arange(6000).reshape(60, 100)),
    np.array([{"a": 1}, None], dtype=object),
    np.array([(1, 2.0)], dtype=[("x", "i4"), ("y", "f8")]),
    np.array(["2020-01-01", "NaT"], dtype="M8[D]"),
    np.array(["a", "bcd"]),
    np.array([b"a", b"bcd"]),
    np.array([True, False]),
    np.arange(5, dtype=">i4"),
    np.float16([1, np.nan]),
]


def test_arrays_of_every_kind_come_back(client: Any) -> None:
    for array in ARRAYS:
        back = client.back(array)
        assert back.dtype == array.dtype and back.shape == array.shape
        np.testing.assert_array_equal(back, array)
        writable = client.back([array])[0]
        if array.size and array.dtype.kind in "fiub":
            writable[...] = array.flat[0]


def test_tensors_of_every_kind_come_back(client: Any) -> None:
    torch = pytest.importorskip("torch")
    for tensor in (
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.arange(10_000.0).reshape(100, 100)[::2, ::3],
        torch.ones(1, 3).expand(500, 3),
        torch.tensor(4),
        torch.empty(0, 3),
    ):
        back = client.back(tensor)
        assert back.dtype == tensor.dtype and back.shape == tensor.shape and torch.equal(back, tensor)
    huge = torch.zeros(20_000_000)
    assert client.back(huge[:2]).untyped_storage().nbytes() < 1000


def test_functions_and_classes_that_nobody_can_import_travel(client: Any) -> None:
    factor = 3

    class Local:
        x = factor

        def times(self, y: int) -> int:
            return factor * y

    assert client.back(lambda x: factor * x)(2) == 6
    assert client.back(Local)().times(2) == 6
    assert client.back(Local()).times(2) == 6


def test_a_hundred_megabytes_go_both_ways(client: Any) -> None:
    array = np.arange(13_200_000.0)
    back = client.back(array)
    assert np.array_equal(array, back)
    blob = bytes(105_000_000)
    assert client.back(blob) == blob


def test_what_does_not_pickle_is_named_at_the_call(client: Any) -> None:
    lock = threading.Lock()
    with pytest.raises(lp.SerializationError) as caught:
        client.back({"fine": 1, "culprit": [lock]})
    for part in ("back", "args[0]", "'culprit'", "lock"):
        assert part in str(caught.value)
    with pytest.raises(lp.SerializationError, match=r"any_name.*culprit.*lock"):
        client.any_name(fine=[1], culprit=lock)
    with pytest.raises(lp.SerializationError, match=r"back.*args\[0\].*lock"):
        client.futures.back(lock)
    with pytest.raises((lp.SerializationError, lp.RemoteError), match=r"(?s)lock\(\).*'lock'"):
        client.lock()
    assert client.back(1) == 1


def test_only_public_callables_are_exposed(client: Any) -> None:
    assert client.static() == "static" and client.klass() == "Server" and client.assigned(1) == 2 and client(3) == -3
    for name in ("public_data", "computed", "nothing"):
        with pytest.raises(lp.MethodNotFound, match=name):
            getattr(client, name)()
    for name in ("_private", "__len__"):
        with pytest.raises(AttributeError):
            getattr(client, name)
    listed = lp.list_methods(client)
    assert listed == sorted(listed)
    assert {"echo", "static", "klass", "assigned", "__call__", "numbers", "later"} <= set(listed)
    assert not {"_private", "public_data", "computed", "__init__"} & set(listed)


def test_probing_is_local_and_does_not_need_a_server() -> None:
    client = lp.CourierClient("unix:/nowhere/at/all", call_timeout=0.5)
    assert not any(hasattr(client, name) for name in ("__len__", "__iter__", "__array__", "_x", "__next__"))
    assert "nowhere" in repr(client) and client == client and client != 3 and hash(client) == hash(client)
    assert pickle.loads(pickle.dumps(client)).address == client.address


def test_a_client_travels_and_is_made_from_its_address(mode: str, own_templates: None, serve: Any) -> None:
    if mode == "multi_host":
        pytest.skip("these are two programs, and each has credentials of its own")

    class User:
        def use(self, client: Any) -> Any:
            return client.back("through"), lp.CourierClient(client.address).back("address")

    server, user = serve(Server), serve(User)
    assert isinstance(server.address, str)
    assert user.use(lp.CourierClient(server.address)) == ("through", "address")
    assert pickle.loads(pickle.dumps(server)).back(1) == 1


def test_timeouts_of_every_kind(serve: Any) -> None:
    server = serve(Server)
    for none in (None, 0, 0.0, timedelta(0)):
        assert lp.CourierClient(server.address, call_timeout=none).sleep(0.05) is None
    for short in (0.05, timedelta(milliseconds=50)):
        impatient = lp.CourierClient(server.address, call_timeout=short)
        with pytest.raises(lp.DeadlineExceeded, match="sleep"):
            impatient.sleep(0.5)
        with pytest.raises(lp.DeadlineExceeded, match="sleep"):
            impatient.futures.sleep(0.5).result(WITHIN_S)
    for negative in (-1, -0.1, timedelta(seconds=-1)):
        with pytest.raises(ValueError, match="negative"):
            lp.CourierClient(server.address, call_timeout=negative)
    assert lp.CourierClient(server.address, call_timeout=30).back(1) == 1


def test_nobody_there(socket_home: Any) -> None:
    began = time.monotonic()
    with pytest.raises(lp.Unavailable):
        lp.CourierClient(f"unix:{socket_home}/nobody", wait_for_ready=False).back(1)
    with pytest.raises(lp.Unavailable):
        lp.CourierClient(f"unix:{socket_home}/nobody", wait_for_ready=False).futures.back(1).result(WITHIN_S)
    assert time.monotonic() - began < WITHIN_S
    with pytest.raises(lp.DeadlineExceeded):
        lp.CourierClient(f"unix:{socket_home}/nobody", call_timeout=0.2).back(1)


def test_futures(client: Any) -> None:
    argument = [1]
    arrays = np.zeros(50_000)
    future = client.futures.wait(argument)
    other = client.futures.wait(arrays)
    argument.append(2)
    arrays[:] = 1
    assert not future.done()
    with pytest.raises(concurrent.futures.TimeoutError):
        future.result(0.05)
    with pytest.raises(concurrent.futures.TimeoutError):
        future.exception(timeout=0)
    done, pending = concurrent.futures.wait([future, other], timeout=0.05)
    assert not done and len(pending) == 2
    abandoned = client.futures.wait("abandoned")
    assert abandoned.cancel() and abandoned.cancelled() and abandoned.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        abandoned.result(0)
    client.open()
    assert future.result(WITHIN_S) == [1] and future.exception() is None and not future.cancel()
    assert not other.result(WITHIN_S).any()
    failed = client.futures.back()
    assert isinstance(failed.exception(WITHIN_S), TypeError)
    while "abandoned" not in client.seen():  # its handler was not interrupted
        time.sleep(0.01)


def test_as_completed_sees_every_future_and_callbacks_may_call(client: Any) -> None:
    futures = [client.futures.back(i) for i in range(50)]
    assert sorted(f.result() for f in concurrent.futures.as_completed(futures, timeout=WITHIN_S)) == list(range(50))
    answers: concurrent.futures.Future[Any] = concurrent.futures.Future()
    client.futures.back(3).add_done_callback(lambda done: answers.set_result(client.back(done.result() + 1)))
    assert answers.result(WITHIN_S) == 4


def test_a_cancelled_future_wakes_who_waits_for_it(client: Any) -> None:
    future = client.futures.wait()
    threading.Timer(0.1, future.cancel).start()
    began = time.monotonic()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(WITHIN_S)
    assert time.monotonic() - began < 5
    client.open()


def test_a_generator_is_iterated_with_back_pressure_and_closed(client: Any) -> None:
    stream = client.numbers()
    assert list(itertools.islice(stream, 100)) == list(range(100))
    time.sleep(0.2)
    produced, closed = client.counts()
    assert produced < 200 and closed == 0
    stream.close()
    deadline = time.monotonic() + WITHIN_S
    while client.counts()[1] == 0:
        assert time.monotonic() < deadline
    assert list(client.agen(40)) == list(range(40))
    assert client.later(1) == 2


def test_many_threads_may_share_a_client_with_futures_streams_and_calls(client: Any) -> None:
    errors: list[BaseException] = []

    def use(number: int) -> None:
        try:
            for i in range(100):
                assert client.back((number, i)) == (number, i)
                assert client.futures.back(i).result(WITHIN_S) == i
                if i % 25 == 0:
                    assert list(client.agen(5)) == list(range(5))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and not any(thread.is_alive() for thread in threads)
