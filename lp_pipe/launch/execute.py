"""Run one node's code to its end, the same way in every launch mode."""

import logging
from collections.abc import Iterator
from typing import Any

from lp_pipe.context import NodeContext
from lp_pipe.errors import Unavailable
from lp_pipe.launch.record import Failure
from lp_pipe.nodes import Node
from lp_pipe.rpc.remote_error import format_traceback, innermost_type_name

_log = logging.getLogger(__name__)


def run_node(node: Node[Any], context: NodeContext) -> Failure | None:
    """Execute `node` in the calling thread; returns how it failed, or None when it ended well.

    SystemExit with status 0 or None ends well. Stop handlers that were started are waited for.
    """
    try:
        node.execute()
        failure = None
    except SystemExit as error:
        failure = None if error.code in (None, 0) else failure_from(error)
    except BaseException as error:  # the node's end, whatever it is, must reach the launcher
        failure = failure_from(error)
    try:
        context.exit_stack.close()
    except BaseException as error:
        failure = failure or failure_from(error)
    context.stop_signal.finish(context.grace_s)
    for handler_error in context.stop_signal.handler_errors:
        _log.warning("node %s: a stop handler raised %r", context.name, handler_error)
    return failure


def failure_from(error: BaseException) -> Failure:
    """What the launcher needs to know of an exception; without the frames of lp_pipe that lead to the user's code."""
    message = f"exit status {error.code}" if isinstance(error, SystemExit) else _first_part(error)
    return Failure(
        type_name=innermost_type_name(error),
        message=message,
        traceback=format_traceback(error),
        is_unavailable=any(isinstance(cause, Unavailable) for cause in _chain(error)),
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The exception and what it was raised from: `raise MyError() from unavailable` is an echo as well."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _first_part(error: BaseException) -> str:
    """The message without the remote traceback that a RemoteError carries (the full traceback has it)."""
    try:
        return str(error).split("\n\n", 1)[0]
    except Exception as broken:  # a user's __str__ may raise
        return f"<str() of the exception raised {type(broken).__name__}>"
