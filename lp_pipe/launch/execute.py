"""Run one node's code to its end, the same way in every launch mode."""

from typing import Any

from lp_pipe.context import NodeContext
from lp_pipe.launch.record import Failure
from lp_pipe.nodes import Node, is_echo, run_to_end
from lp_pipe.rpc.remote_error import format_traceback, innermost_type_name


def run_node(node: Node[Any], context: NodeContext) -> Failure | None:
    """Execute `node` in the calling thread; returns how it failed, or None when it ended well.

    SystemExit with status 0 or None ends well. Stop handlers that were started are waited for.
    """
    error = run_to_end(node, context)
    return None if error is None else failure_from(error)


def failure_from(error: BaseException) -> Failure:
    """What the launcher needs to know of an exception; without the frames of lp_pipe that lead to the user's code."""
    message = f"exit status {error.code}" if isinstance(error, SystemExit) else _first_part(error)
    return Failure(
        type_name=innermost_type_name(error),
        message=message,
        traceback=format_traceback(error),
        is_unavailable=is_echo(error),
    )


def _first_part(error: BaseException) -> str:
    """The message without the remote traceback that a RemoteError carries (the full traceback has it)."""
    try:
        return str(error).split("\n\n", 1)[0]
    except Exception as broken:  # a user's __str__ may raise
        return f"<str() of the exception raised {type(broken).__name__}>"
