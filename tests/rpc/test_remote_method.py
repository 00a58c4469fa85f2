"""`client.step` is something to call and nothing else."""

import copy
import functools
import operator
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest

import lp_pipe as lp
from lp_pipe.rpc import Server


class Counter:
    count = 3

    def add(self, x: int) -> int:
        return x + 1


@pytest.fixture
def client() -> Iterator[lp.CourierClient]:
    server = Server(Counter(), "inproc:test_remote_method", name="counter/0")
    yield lp.CourierClient(server.endpoint, peer="counter/0")
    server.close()


_MISTAKES: dict[str, Callable[[Any], object]] = {
    "bool": bool,
    "not": operator.not_,
    "equal": lambda count: count == 3,
    "unequal": lambda count: count != 3,
    "none": lambda count: count == None,  # noqa: E711
    "less": lambda count: count < 3,
    "largest": lambda count: max(count, 3),
    "add": lambda count: count + 1,
    "add to": lambda count: 1 + count,
    "negative": operator.neg,
    "length": len,
    "iterate": list,
    "contains": lambda count: 3 in count,
    "index": lambda count: count[0],
    "as index": lambda count: [1, 2][count],
    "range": range,
    "format": lambda count: f"{count}",
    "print": str,
    "int": int,
    "float": float,
}


@pytest.mark.parametrize("view", ["client", "futures", "aio"])
@pytest.mark.parametrize("mistake", _MISTAKES)
def test_a_method_that_is_taken_for_a_value_is_an_error(client: lp.CourierClient, mistake: str, view: str) -> None:
    owner = client if view == "client" else getattr(client, view)
    with pytest.raises(TypeError, match=r"counter/0.*count"):
        _MISTAKES[mistake](owner.count)


def test_attributes_of_the_result_and_of_the_node_are_errors(client: lp.CourierClient) -> None:
    with pytest.raises(AttributeError, match=r"count\(\)\.shape"):
        client.count.shape  # noqa: B018
    with pytest.raises(AttributeError, match="shape"):
        client.count.shape = 1
    with pytest.raises(AttributeError, match="count"):
        client.count = 7
    with pytest.raises(TypeError, match="count"):
        client.count += 1
    assert client.add(1) == 2


def test_a_handle_takes_no_attributes() -> None:
    handle = lp.Program("p").add_node(lp.CourierNode(Counter), label="counter")
    with pytest.raises(AttributeError, match="counter/0"):
        handle.count = 7
    with pytest.raises(AttributeError, match="counter/0"):
        handle.count  # noqa: B018


def test_what_takes_callables_takes_a_remote_method(client: lp.CourierClient) -> None:
    assert list(map(client.add, [1, 2])) == [2, 3]
    assert functools.partial(client.add, 4)() == 5
    assert copy.deepcopy(client.add)(1) == pickle.loads(pickle.dumps(client.add))(1) == 2
    assert callable(client.add) and client.add == client.add and client.add in [client.add]
    assert repr(client.add) == "CourierClient(counter/0).add"
    with ThreadPoolExecutor() as pool:
        assert pool.submit(client.add, 1).result() == 2
    thread = threading.Thread(target=client.add, args=(1,))
    thread.start()
    thread.join()
    assert "add" in thread.name


def test_a_test_may_replace_a_method(client: lp.CourierClient) -> None:
    with mock.patch.object(client, "add", lambda x: "a stand-in"):
        assert client.add(1) == "a stand-in"
    assert client.add(1) == 2
