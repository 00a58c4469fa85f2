"""Run one node's code to its end, the same way in every launch mode."""

import dataclasses
from collections.abc import Callable
from typing import Any

from lp_pipe.context import NodeContext
from lp_pipe.errors import Unrecoverable
from lp_pipe.launch.supervision.messages import Failure
from lp_pipe.nodes import Node, is_caused_by_peer, is_only_caused_by_peer, run_to_end
from lp_pipe.rpc.remote_error import format_traceback, innermost_type_name, text_of


def run_node(node: Node[Any], context: NodeContext) -> Failure | None:
    """Execute `node` in the calling thread; returns its failure, or None if it succeeded.

    SystemExit with status 0 or None is success. Returns after all started stop handlers have ended.
    """
    try:
        error = run_to_end(node, context)
        return None if error is None else failure_from(error)
    except BaseException as broken:  # inspecting a user's exception may raise, which is a failure, too
        return failure_from(broken)


def run_setup(setup: Callable[[], Any]) -> Failure | None:
    """Call the program's setup function; returns its failure, or None. It is part of what a node loads."""
    try:
        setup()
    except BaseException as error:
        failure = failure_from(error)
        return dataclasses.replace(failure, message=f"setup() failed: {failure.message}", is_loading=True)
    return None


def failure_from(error: BaseException) -> Failure:
    """Convert an exception to a Failure, without the frames of lp_pipe that lead to the user's code."""
    if isinstance(error, SystemExit) and not isinstance(
        error.code, str
    ):  # the text of sys.exit("no data") is the message
        message = f"exit status {text_of(error.code)}"
    else:
        message = text_of(error).split("\n\n", 1)[0]  # a RemoteError contains its traceback, which `traceback` has, too
    return Failure(
        type_name=innermost_type_name(error),
        message=message,
        traceback=format_traceback(error),
        is_unavailable=is_caused_by_peer(error),
        is_plain_echo=is_only_caused_by_peer(error),
        is_final=isinstance(error, Unrecoverable),
    )
