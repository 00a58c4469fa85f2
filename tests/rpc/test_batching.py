"""Handlers that answer several calls at once."""

import operator
import threading
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import lp_pipe as lp

WITHIN_S = 20.0


class Model:
    """A server whose handlers also tell how large their batch was."""

    def __init__(self, batch_size: int = 4, **options: Any) -> None:
        batched = lp.batched_handler(batch_size, **options)
        self.double, self.members = batched(self.double), batched(self.members)  # type: ignore[method-assign]
        self.fail, self.short = batched(self.fail), batched(self.short)  # type: ignore[method-assign]
        self._barrier = threading.Barrier(2)
        self.meet = batched(self.meet)  # type: ignore[method-assign]

    def double(self, x: Any) -> Any:
        """Twice x."""
        return 2 * x, [len(x)] * len(x)

    def members(self, pair: Any, options: Any, name: str) -> Any:
        assert isinstance(name, list)
        return {"sum": pair[0] + pair[1], "k": options["k"], "name": name}

    def fail(self, x: Any) -> Any:
        raise ValueError("no such layer")

    def short(self, x: Any) -> Any:
        return [1]

    def meet(self, x: Any) -> Any:
        self._barrier.wait(WITHIN_S)
        return [len(x)] * len(x)


def served(mode: str, pool: int = 16, **options: Any) -> tuple[lp.Run, Any]:
    program = lp.Program("batches")
    node = lp.CourierNode(Model, courier_kwargs={"thread_pool_size": pool}, **options)
    handle = program.add_node(node, label="model")
    run = lp.launch(program, mode)
    return run, handle.dereference()


def results(futures: list[Any]) -> list[Any]:
    return [future.result(WITHIN_S) for future in futures]


@pytest.mark.parametrize("pool", [0, 1, 16])
def test_calls_are_answered_together_and_need_no_threads(mode: str, pool: int) -> None:
    run, client = served(mode, pool, timeout=WITHIN_S)  # a batch starts only when it is full
    with run:
        answers = results([client.futures.double(np.full(3, i)) for i in range(4)])
        assert [(list(x), size) for x, size in answers] == [([2 * i] * 3, 4) for i in range(4)]
        assert "double" in lp.list_methods(client)


def test_dicts_and_tuples_are_batched_member_by_member(mode: str) -> None:
    run, client = served(mode, timeout=WITHIN_S)
    with run:
        calls = [client.futures.members((np.ones(1), np.ones(1) * i), {"k": np.ones(2)}, name=str(i)) for i in range(4)]
        for i, answer in enumerate(results(calls)):
            assert (float(answer["sum"][0]), answer["k"].shape, answer["name"]) == (1 + i, (2,), str(i))


def test_masked_arrays_keep_their_masks(mode: str) -> None:
    run, client = served(mode, batch_size=2, timeout=WITHIN_S)
    with run:
        calls = [client.futures.double(np.ma.array([[1, 2]], mask=[[i, not i]])) for i in range(2)]
        assert [answer.tolist() for answer, _ in results(calls)] == [[[2, None]], [[None, 4]]]


def test_a_batch_starts_when_its_time_has_come(mode: str) -> None:
    run, client = served(mode, timeout=timedelta(milliseconds=50))
    with run:
        assert client.double(np.ones(1))[1] == 1
        assert results([client.futures.double(np.ones(1)) for _ in range(9)])[-1][1] in (1, 2, 3, 4)


def test_padding_fills_the_batch(mode: str) -> None:
    run, client = served(mode, timeout=0.01, pad_batch=True)
    with run:
        assert client.double(np.ones(1))[1] == 4


def test_several_batches_run_at_once_and_waiting_ones_fill_up(mode: str) -> None:
    run, client = served(mode, max_parallelism=2, timeout=WITHIN_S)
    with run:
        assert results([client.futures.meet(i) for i in range(16)]) == [4] * 16


@pytest.mark.parametrize(("method", "error"), [("fail", ValueError), ("short", ValueError)])
def test_an_error_goes_to_every_caller_of_the_batch(mode: str, method: str, error: Any) -> None:
    run, client = served(mode, timeout=WITHIN_S)
    with run:
        for future in [getattr(client.futures, method)(i) for i in range(4)]:
            caught = future.exception(WITHIN_S)
            assert isinstance(caught, error)
            assert isinstance(caught, lp.RemoteError)
        mixed = [client.futures.double(np.ones(i + 1)) for i in range(4)]
        assert all(isinstance(future.exception(WITHIN_S), lp.RemoteError) for future in mixed)
        mixed = [client.futures.double(1, 2), *(client.futures.double(1) for _ in range(3))]
        assert all(isinstance(future.exception(WITHIN_S), TypeError) for future in mixed)


def test_it_works_outside_of_a_server() -> None:
    @lp.batched_handler(batch_size=2, timeout=0.05)
    def square(x: Any) -> Any:
        """The square."""
        return [a * a for a in x]

    found: list[int] = []
    threads = [threading.Thread(target=lambda i=i: found.append(square(i))) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN_S)
    assert sorted(found) == [0, 1, 4, 9, 16]
    assert (square.__name__, square.__doc__) == ("square", "The square.")


def test_functions_that_do_not_tell_their_parameters_are_taken() -> None:
    assert lp.batched_handler(batch_size=1)(operator.itemgetter(slice(None)))(4) == 4


def test_functions_that_return_no_batch_are_refused() -> None:
    """Regression: calls of an async one failed, with a warning at the end: "coroutine was never awaited"."""

    async def predict(x: Any) -> Any:
        return x

    def items(x: Any) -> Any:
        yield x

    with pytest.raises(TypeError, match=r"batched_handler cannot take predict, which is async def"):
        lp.batched_handler(batch_size=2)(predict)
    with pytest.raises(TypeError, match=r"batched_handler cannot take items, which is a generator"):
        lp.batched_handler(batch_size=2)(items)


def test_wrong_uses_are_found_at_once() -> None:
    with pytest.raises(TypeError, match="__init__"):

        class Wrong:
            @lp.batched_handler(batch_size=2)
            def method(self, x: Any) -> Any: ...

    with pytest.raises(TypeError, match=r"takes a size, then the function: lp.batched_handler\(batch_size=8\)"):
        lp.batched_handler(print)  # type: ignore[arg-type]
    for options in ({"batch_size": 0}, {"batch_size": 1, "max_parallelism": 0}, {"batch_size": 1, "timeout": -1}):
        with pytest.raises(ValueError, match="batched_handler"):
            lp.batched_handler(**options)
