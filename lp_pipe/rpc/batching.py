"""Handlers that answer several calls at once (Launchpad's batched_handler)."""

import inspect
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import update_wrapper
from typing import Any, NamedTuple

from lp_pipe.connections import io_thread
from lp_pipe.connections.finalizer import add_finalizer
from lp_pipe.context import current_context
from lp_pipe.rpc.daemon_pool import DaemonPool

# The array classes by the library that has their stack(); masked arrays come before their base class, as its stack()
# loses the masks.
_ARRAYS = (("numpy.ma", "MaskedArray"), ("numpy", "ndarray"), ("torch", "Tensor"))


def batched_handler(
    batch_size: int,
    max_parallelism: int = 1,
    timeout: float | timedelta = 0.2,
    pad_batch: bool = False,
) -> "Callable[[Callable[..., Any]], BatchedHandler]":
    """Answer up to `batch_size` calls with one call of the function.

    Apply it to a bound method in `__init__`, or to a plain function:
        self.predict = lp.batched_handler(batch_size=8)(self.predict)

    Arrays and tensors are stacked on a new axis 0, members of dicts and tuples are stacked one by one, and everything
    else becomes a list. The result is split in the same way. An exception, or a result of the wrong length, goes to
    every caller of the batch.

    max_parallelism: batches at a time; while all run, waiting ones go on filling.
    timeout: a batch that is not full starts this many seconds after its first call.
    pad_batch: repeat a call until the batch is full.

    Raises:
        ValueError: a size is below 1, or the timeout is negative.
        TypeError: it is used as a decorator in a class body or without a batch size, or the function is async or a
            generator.
    """
    if callable(batch_size):
        raise TypeError("batched_handler takes a size, then the function: lp.batched_handler(batch_size=8)(self.act)")
    timeout_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if batch_size < 1 or max_parallelism < 1 or timeout_s < 0:
        raise ValueError(
            "batched_handler: batch_size and max_parallelism must be at least 1 and timeout at least 0, "
            f"got batch_size={batch_size}, max_parallelism={max_parallelism}, timeout={timeout}"
        )
    return lambda function: BatchedHandler(function, batch_size, max_parallelism, timeout_s, pad_batch)


def _is_first_parameter_self(function: Callable[..., Any]) -> bool:
    try:
        return next(iter(inspect.signature(function).parameters), "") == "self"
    except ValueError:  # a function in C without a signature, such as torch.relu
        return False


def _not_in_batches(function: Callable[..., Any]) -> str:
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return "async def"
    return "a generator" if inspect.isgeneratorfunction(function) else ""


class _Request(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reply: "Future[Any]"
    due: float


class BatchedHandler:
    """A function that is called in batches: a call waits for its batch, and `submit`, which servers use, does not."""

    def __init__(
        self, function: Callable[..., Any], batch_size: int, max_parallelism: int, timeout_s: float, pad_batch: bool
    ) -> None:
        if _is_first_parameter_self(function):
            raise TypeError(
                f"batched_handler cannot decorate {function.__name__} in the class body, where it is not bound yet: "
                f"in __init__ write self.{function.__name__} = batched_handler(...)(self.{function.__name__})"
            )
        if kind := _not_in_batches(function):
            raise TypeError(
                f"batched_handler cannot take {getattr(function, '__name__', function)}, which is {kind}: "
                "it must return the results of a batch"
            )
        update_wrapper(self, function)
        self._function = function
        self._batch_size = batch_size
        self._timeout_s = timeout_s
        self._pad_batch = pad_batch
        self._slots = max_parallelism
        self._name = getattr(function, "__name__", "the handler")
        self._pool = DaemonPool(max_parallelism, f"batches of {self._name}")
        add_finalizer(self, self._pool.close)
        node = current_context()
        # the function is a bound method of the object that has this attribute: a cycle, which is freed late
        if node is not None:
            node.exit_stack.callback(self._pool.close)
        self._timer_due = 0.0
        self._waiting: deque[_Request] = deque()
        self._lock = threading.Lock()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.submit(args, kwargs).result()

    def submit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Future[Any]":
        """Add a call to the next batch."""
        reply: Future[Any] = Future()
        with self._lock:
            self._waiting.append(_Request(args, kwargs, reply, time.monotonic() + self._timeout_s))
        self._start_batches()
        return reply

    def _start_batches(self) -> None:
        while batch := self._next_batch():
            self._pool.submit(self._run, batch)

    def _next_batch(self) -> list[_Request]:
        """Return the batch that may start now; empty without a free slot, or while the calls may wait for others."""
        with self._lock:
            if not self._slots or not self._waiting:
                return []
            due = self._waiting[0].due
            if len(self._waiting) < self._batch_size and time.monotonic() < due:
                if self._timer_due != due:
                    self._timer_due = due
                    io_thread.shared.at(due, self._start_batches)
                return []
            self._slots -= 1
            return [self._waiting.popleft() for _ in range(min(self._batch_size, len(self._waiting)))]

    def _run(self, batch: list[_Request]) -> None:
        try:
            results = self._results(batch)
        except BaseException as error:  # also SystemExit, which goes to the callers
            for request in batch:
                request.reply.set_exception(error)
        else:
            for request, result in zip(batch, results, strict=True):
                request.reply.set_result(result)
        finally:
            with self._lock:
                self._slots += 1
            self._start_batches()

    def _results(self, batch: list[_Request]) -> list[Any]:
        padding = self._batch_size - len(batch) if self._pad_batch else 0
        requests = [*batch, *batch[:1] * padding]
        shapes = {(len(request.args), tuple(sorted(request.kwargs))) for request in requests}
        if len(shapes) > 1:
            raise TypeError(f"calls of {self._name}() in one batch differ in their arguments: {sorted(shapes)}")
        args = [_stack(column) for column in zip(*(request.args for request in requests), strict=True)]
        kwargs = {name: _stack([request.kwargs[name] for request in requests]) for name in batch[0].kwargs}
        return _split(self._function(*args, **kwargs), len(requests))[: len(batch)]


def _stack(values: list[Any] | tuple[Any, ...]) -> Any:
    """Stack arrays and tensors on a new axis 0, dicts and tuples member by member, and everything else as a list.

    Raises:
        ValueError: shapes, keys or lengths differ.
    """
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        return list(values)
    for library, kind in _ARRAYS:
        if _is_a(first, library, kind):
            return sys.modules[library].stack(list(values))
    if isinstance(first, dict):
        _same([sorted(value, key=repr) for value in values], "keys")
        return {key: _stack([value[key] for value in values]) for key in first}
    if isinstance(first, tuple):
        _same([len(value) for value in values], "lengths")
        return _like(first, [_stack(column) for column in zip(*values, strict=True)])
    return list(values)


def _split(result: Any, count: int) -> list[Any]:
    """Undo `_stack`: return one value for each of `count` calls.

    Raises:
        ValueError: the result has another length.
        TypeError: the result cannot be split.
    """
    if isinstance(result, dict):
        columns = {key: _split(value, count) for key, value in result.items()}
        return [{key: column[index] for key, column in columns.items()} for index in range(count)]
    if isinstance(result, tuple):
        parts = [_split(value, count) for value in result]
        return [_like(result, [part[index] for part in parts]) for index in range(count)]
    if result is None:
        return [None] * count
    if not (isinstance(result, list) or any(_is_a(result, library, kind) for library, kind in _ARRAYS)):
        raise TypeError(f"a batched handler returned {type(result).__name__}; it must be a list, array, dict or tuple")
    length = len(result) if not hasattr(result, "shape") or result.shape else 0
    if length != count:
        raise ValueError(f"a batched handler returned {length} results for a batch of {count}")
    return list(result)


def _like(example: tuple[Any, ...], items: list[Any]) -> Any:
    return type(example)(*items) if hasattr(example, "_fields") else tuple(items)


def _is_a(value: Any, library: str, kind: str) -> bool:
    module = sys.modules.get(library)  # a library that was not imported has no values
    return module is not None and isinstance(value, getattr(module, kind))


def _same(properties: list[Any], what: str) -> None:
    for other in properties:
        if other != properties[0]:
            raise ValueError(f"calls in one batch differ in their {what}: {properties[0]} and {other}")
