"""Short reports of node failures, with the places of the full tracebacks and logs."""

import contextlib
import html
import importlib.util
import os
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from lp_pipe.errors import NodeError
from lp_pipe.launch.coordination.coordinator import Coordinator
from lp_pipe.launch.host import Host
from lp_pipe.launch.invocation import current_invocation
from lp_pipe.telemetry.run_folder import RunFolder
from lp_pipe.telemetry.tracebacks import fold_traceback, folded_message, notes, shortened

MAX_LINES = 13  # the run's folder and how to go on from its checkpoints follow, in two more lines
_MAX_MESSAGE_LINES = 3
_MAX_NOTES = 3
_MAX_CRASH_OUTPUT = 3
_KEPT_OUTER_LINES = 2


def status_html(
    program: str, run_dir: Path, status: Mapping[str, Sequence[Mapping[str, Any]]], *, is_over: bool
) -> str:
    """Return a table of the nodes, for notebooks."""
    rows = []
    for label, nodes in status.items():
        for index, node in enumerate(nodes):
            note = node["error"] or node["waiting"] or ""
            color = {"running": "#2b8a3e", "failed": "#c92a2a"}.get(node["state"], "#6b7685")
            cells = [
                f"<td>{html.escape(f'{label}/{index}')}</td>",
                f'<td style="color:{color}">{html.escape(node["state"])}</td>',
                f"<td>{node['restarts'] or ''}</td>",
                f"<td>{'' if node['calls_per_s'] is None else format(node['calls_per_s'], '.3g')}</td>",
                f'<td style="text-align:left">{html.escape(str(note).partition(chr(10))[0][:200])}</td>',
            ]
            rows.append(f"<tr>{''.join(cells)}</tr>")
    heads = "".join(f"<th>{name}</th>" for name in ("node", "state", "restarts", "calls/s", ""))
    title = f"<b>{html.escape(program)}</b> {'has ended' if is_over else 'runs'}; {html.escape(str(run_dir))}"
    return f"<div>{title}<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"


def save_failure(coordinator: Coordinator) -> None:
    """Write all failures to the run's folder. Without failures, remove those of an earlier run in this folder."""
    errors = coordinator.failures()
    path = coordinator.plan.folder.failures
    with contextlib.suppress(
        OSError
    ):  # the folder was removed, or its disk is full; the report then does not mention the file
        path.unlink(missing_ok=True)
        if errors:
            text = "\n\nLater:\n\n".join(str(error) for error in errors)
            path.write_text(f"{text}\n", encoding="utf-8", errors="backslashreplace")


def described_failure(coordinator: Coordinator, host: Host) -> NodeError | None:
    """Return the first failure of an ended run, with its report; None if there is none."""
    errors = coordinator.failures()
    if not errors:
        return None
    error = errors[0]
    folder = coordinator.plan.folder
    failures = folder.failures
    part = coordinator.main_part(f"{error.label}/{error.index}")
    log_path = host.log_path(part)
    where = host.where(part)
    text = failure_report(
        error,
        host=where,
        advice=missing_module_hint(f"{error.type_name}: {error.message}", where),
        later_failures=len(errors) - 1,
        last_lines=host.last_lines(part),
        log_path=shown(log_path) if log_path is not None and log_path.exists() else None,
        traceback_path=shown(failures) if failures.exists() else None,
        folder=_here(),
    )
    error.report = f"{text}\n{closing_lines(folder)}"
    return error


def closing_lines(folder: RunFolder) -> str:
    """Return the line about the run's folder and, if it has checkpoints, a line on how to go on from them."""
    if not folder.checkpoint_names():
        return run_folder(folder)
    run_dir = str(shown(folder.path))
    if current_invocation().is_command:
        how = f"lp_pipe launch --resume={shlex.quote(run_dir)}"
    else:
        how = f"lp.launch(…, run_dir={run_dir!r})"
    return f"{run_folder(folder)}\nto go on from its newest checkpoint: {how}"


def run_folder(folder: RunFolder) -> str:
    """Return the line about the run's folder and what was saved in it."""
    saved = folder.saved_names()
    contents = f" (with {', '.join(saved)})" if saved else ""
    return f"run folder {shown(folder.path)}{contents}"


def shown(path: str | Path) -> Path:
    """Return the path relative to the current folder, if it is below it."""
    here, path = Path(os.path.realpath(_here())), Path(path)
    return path.relative_to(here) if path.is_relative_to(here) else path


def _here() -> Path:
    """Return the current folder. If it was removed, return a path that nothing is below, so that reports still work."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path(os.devnull)


def failure_report(
    error: NodeError,
    *,
    host: str = "",
    advice: str = "",
    later_failures: int = 0,
    last_lines: Sequence[str] = (),
    log_path: Path | None = None,
    traceback_path: Path | None = None,
    folder: Path | None = None,
) -> str:
    """Return at most MAX_LINES lines: the node, what happened, in which of the user's lines, and where to read on.

    last_lines: the node's last output, shown if it left no traceback because its process was killed.
    folder: paths below it are shown relative to it.
    """
    where = f" on {host}" if host else ""
    said = error.message.splitlines()
    message = [shortened(line) for line in folded_message(error.message, folder)]
    head = [f"node {error.label}/{error.index}{where} failed: {error.type_name}: {message[0]}"]
    head += [f"  {line}" for line in message[1:_MAX_MESSAGE_LINES]]
    head += [f"  {shortened(note)}" for note in notes(error.remote_traceback) if note not in said][:_MAX_NOTES]
    head += [f"  {advice}"] if advice else []
    tail = []
    if later_failures:
        tail.append(f"  later failures, left out here: {later_failures}")
    if log_path is not None:
        tail.append(f"  all its output: {log_path}")
    body = fold_traceback(error.remote_traceback, folder)
    if body and error.type_name == "ProcessDied":
        return "\n".join([*head, *_crash(error, body, MAX_LINES - len(head) - len(tail)), *tail])
    if traceback_path is not None and (body or later_failures):
        tail.append(f"  {'all tracebacks' if later_failures else 'the whole traceback'}: {traceback_path}")
    body = body or _last_output(error, last_lines)
    body = _shortest(body, MAX_LINES - len(head) - len(tail))
    return "\n".join([*head, *(f"  {line}" for line in body), *tail])


def _crash(error: NodeError, stack: list[str], room: int) -> list[str]:
    """Return the process's last output and the Python stack of the crash, innermost frame first."""
    printed, _, _ = error.remote_traceback.partition("Traceback (most recent call last):")
    lines = [line.strip() for line in printed.splitlines()[1:] if line.strip()]
    output = ["  its last lines:", *(f"    {shortened(line)}" for line in lines[-_MAX_CRASH_OUTPUT:])] if lines else []
    frames = [line.strip() for line in reversed(stack)]
    is_below = len(frames) > 1 and frames[0].startswith(
        "…"
    )  # the crash was in a library that the user's code had called
    below = f", {frames.pop(0).removeprefix('… ')} further in" if is_below else ""
    return [*output, f"  where it crashed{below}, innermost call first:", *_first(frames, room - len(output) - 1)]


def _first(frames: list[str], room: int) -> list[str]:
    if len(frames) > room:
        frames = [*frames[: room - 1], f"… {len(frames) - room + 1} lines left out"]
    return [f"    {frame}" for frame in frames]


def _last_output(error: NodeError, last_lines: Sequence[str]) -> list[str]:
    lines = list(last_lines) or error.remote_traceback.splitlines()[1:]
    if not lines:
        return ["it had printed nothing"]
    return ["its last lines:", *(f"  {shortened(line.strip())}" for line in lines[-8:])]


def _shortest(lines: list[str], room: int) -> list[str]:
    """Shorten to the first lines and the last ones, which say more."""
    if len(lines) <= room:
        return lines
    kept = room - _KEPT_OUTER_LINES - 1
    left_out = len(lines) - kept - _KEPT_OUTER_LINES
    return [*lines[:_KEPT_OUTER_LINES], f"  … {left_out} lines left out", *lines[-kept:]]


def print_reports() -> None:
    """Print the short report for an uncaught NodeError, in place of the launcher's and the node's long tracebacks.

    Replaces only Python's own hook, so that debuggers, notebooks and error trackers keep theirs. The hook stays after
    the run, since its failure may be raised out of the script at any later time. `str(error)` and failure.txt in the
    run's folder have the whole remote traceback.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_exception


def _print_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    is_plain = error.__cause__ is None and (error.__context__ is None or error.__suppress_context__)
    if isinstance(error, NodeError) and error.report and is_plain and sys.stderr is not None:
        print(error.report, file=sys.stderr, flush=True)
    else:  # another exception, or a failure with a cause or context
        sys.__excepthook__(kind, error, trace)


_MODULE = re.compile(r"ModuleNotFoundError: No module named '(\w+)")
_FILE = re.compile(r"FileNotFoundError: .*: '(.+)'")


def missing_module_hint(summary: str, host: str) -> str:
    """summary: type and message of the failure of a node on `host`; "" where there is nothing to say."""
    if host == socket.gethostname():
        return ""
    first = summary.partition("\n")[0]
    module, file = _MODULE.search(first), _FILE.search(first)
    if module is not None and _is_module_here(module[1]):
        return f"{module[1]} is found here, but not on {host}: install it there, or send your sources with --sync=DIR"
    if file is not None and os.path.exists(file[1]):  # unlike Path.exists never an error
        return f"it is here, but not on {host}: send small files with --sync=DIR, or use a shared file system"
    return ""


def _is_module_here(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # of a module without a spec
        return False
