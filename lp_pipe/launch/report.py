"""A node's failure for people: short enough to be read, with the way to everything else."""

from collections.abc import Sequence
from pathlib import Path

from lp_pipe.errors import NodeError
from lp_pipe.telemetry.tracebacks import fold_traceback, shortened

MAX_LINES = 14  # one less than a report may have: who prints it adds where the run's folder is
_MAX_MESSAGE_LINES = 3
_KEPT_OUTER_LINES = 2


def failure_report(
    error: NodeError,
    *,
    host: str = "",
    later_failures: int = 0,
    last_lines: Sequence[str] = (),
    log_path: Path | None = None,
    folder: Path | None = None,
) -> str:
    """At most MAX_LINES lines: which node, what happened, in which of the user's lines, where to read on.

    last_lines: what the node printed last; shown when it left no traceback, because its process was killed.
    folder: file names below it are shown relative to it.
    """
    where = f" on {host}" if host else ""
    message = [shortened(line) for line in error.message.splitlines() or [""]]
    head = [f"node {error.label}/{error.index}{where} failed: {error.type_name}: {message[0]}"]
    head += [f"  {line}" for line in message[1:_MAX_MESSAGE_LINES]]
    tail = []
    if later_failures:
        tail.append(f"  later failures, left out here: {later_failures}")
    if log_path is not None:
        tail.append(f"  all its output: {log_path}")
    body = fold_traceback(error.remote_traceback, folder) or _last_output(error, last_lines)
    body = _shortest(body, MAX_LINES - len(head) - len(tail))
    return "\n".join([*head, *(f"  {line}" for line in body), *tail])


def _last_output(error: NodeError, last_lines: Sequence[str]) -> list[str]:
    lines = list(last_lines) or error.remote_traceback.splitlines()[1:]
    if not lines:
        return ["it had printed nothing"]
    return ["its last lines:", *(f"  {shortened(line.strip())}" for line in lines[-8:])]


def _shortest(lines: list[str], room: int) -> list[str]:
    """The first lines and, of more interest, the last ones."""
    if len(lines) <= room:
        return lines
    kept = room - _KEPT_OUTER_LINES - 1
    left_out = len(lines) - kept - _KEPT_OUTER_LINES
    return [*lines[:_KEPT_OUTER_LINES], f"  … {left_out} lines left out", *lines[-kept:]]
