"""What gRPC's server runs its streams in."""

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any


class ThreadPerCall(concurrent.futures.Executor):
    """A stream needs its thread for as long as it lives: no number of threads is enough, and none may outlive us."""

    def __init__(self, on_failure: Callable[[Exception], None]) -> None:
        self._on_failure = on_failure

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "concurrent.futures.Future[Any]":
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # belongs to gRPC, which asks the future
                future.set_exception(error)

        try:
            threading.Thread(target=run, name="grpc stream", daemon=True).start()
        except RuntimeError as error:  # out of threads; gRPC's own, which calls this, would end, and nobody be taken in
            future.set_exception(error)
            self._on_failure(error)
        return future
