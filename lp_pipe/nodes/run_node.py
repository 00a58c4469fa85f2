"""The run of one node's code, from its first line to its last stop handler."""

import logging
import sys
from collections.abc import Iterator
from typing import Any

from lp_pipe.context import NodeContext
from lp_pipe.errors import Unavailable
from lp_pipe.nodes.base import Node
from lp_pipe.rpc.remote_error import text_of
from lp_pipe.telemetry import waits
from lp_pipe.telemetry.tracebacks import stack_of

_log = logging.getLogger(__name__)


def run_to_end(node: Node[Any], context: NodeContext) -> BaseException | None:
    """Execute `node` in the calling thread; return the exception with which it failed, or None.

    SystemExit with status 0 or None is no failure. Stop handlers that were started are waited for.
    """
    failure: BaseException | None = None
    try:
        with waits.waiting(waits.MAIN, waits.Target(), node=context):
            node.execute()
    except SystemExit as error:
        failure = None if error.code in (None, 0) else error
    except BaseException as error:  # the node's end, whatever it is, must reach the launcher
        failure = error
    try:
        context.exit_stack.close()
    except BaseException as error:
        failure = error if failure is None else failure
    if (late := context.stop_signal.finish(context.grace_s)) is not None:
        _log.warning(
            "node %s: stop handlers did not end within %.1f s and are left behind. They are at:\n%s",
            context.name,
            context.grace_s,
            stack_of(late),
        )
    for handler_error in context.stop_signal.handler_errors:
        _log.warning("node %s: a stop handler raised %r", context.name, handler_error)
    return failure


def is_caused_by_peer(error: BaseException) -> bool:
    """Return whether another node's end may have caused the error.

    It is then, or was raised from or while handling, an Unavailable or a torch.distributed error of a lost rank.
    """
    return any(_tells_of_an_end(cause) for cause in _chain(error))


def is_only_caused_by_peer(error: BaseException) -> bool:
    """Return whether another node's end has caused the error, and no error of the node's own.

    An error of its own is, for example, one of an `except` or `finally` that could not save.
    """
    return any(_tells_of_an_end(cause) for cause in _chain(error, with_contexts=False))


def _tells_of_an_end(error: BaseException) -> bool:
    return isinstance(error, Unavailable) or _is_of_a_lost_rank(error)


def _is_of_a_lost_rank(error: BaseException) -> bool:
    """Return whether torch.distributed raised it because another rank has gone; gloo has no class for it."""
    torch = sys.modules.get("torch.distributed")
    if torch is None or not isinstance(error, RuntimeError):
        return False
    kinds = (torch.DistNetworkError, torch.DistStoreError, torch.DistBackendError)
    return isinstance(error, kinds) or "gloo/transport/" in text_of(error)


def _chain(error: BaseException | None, *, with_contexts: bool = True) -> Iterator[BaseException]:
    """Yield the exception and what it was raised from, since `raise MyError() from unavailable` counts as well.

    with_contexts: also what was being handled when it was raised.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (error.__context__ if with_contexts and not error.__suppress_context__ else None)
