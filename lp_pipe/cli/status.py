"""`lp_pipe status`: show the states of a running program's nodes."""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from lp_pipe.cli.find_run import add_run_argument, asking, find_live_run
from lp_pipe.cli.table import duration, table
from lp_pipe.launch.report import shown
from lp_pipe.launch.run_records import RunRecord
from lp_pipe.rpc import CourierClient

_MAX_ERROR_LETTERS = 60
_CLEAR = "\x1b[H\x1b[J"


HELP = "show the nodes of a running program"
DESCRIPTION = "Print a table of the nodes of a running program: state, process, uptime, what each waits for."
USAGE = "lp_pipe status [RUN] [--watch] [--json]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_run_argument(parser)
    parser.add_argument("--watch", action="store_true", help="go on until the run is over, and show what changes")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object; with --watch one for each change, also metrics"
    )


def run_command(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    """Ask the run and print its answer.

    Raises:
        UsageError, NotAnswered: there is no such run, or it does not answer.
    """
    record = find_live_run(arguments.target)
    if arguments.watch:
        with asking(record) as control:
            _watch(record, control, is_json=arguments.json)
        return 0
    with asking(record) as control:
        nodes = _nodes(control.status())
    if arguments.json:
        facts = ("name", "program", "mode", "run_dir", "pid", "started")
        print(json.dumps({**{fact: getattr(record, fact) for fact in facts}, "nodes": nodes}))
        return 0
    print(_text(record, nodes))
    return 0


def _watch(record: RunRecord, control: CourierClient, *, is_json: bool) -> None:
    """Print what changes: on a terminal the table again and again, else a line for each change of a state."""
    can_redraw = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not is_json
    states: dict[str, Any] = {}
    for message in control.watch():
        if is_json:
            print(json.dumps(message), flush=True)
        elif can_redraw and message["kind"] in ("states", "live"):
            print(f"{_CLEAR}{_text(record, _nodes(control.status()))}", flush=True)
        elif message["kind"] == "states":
            for node, row in message["states"].items():
                if states.get(node, {}).get("state") != row["state"]:
                    why = f": {_first_line(row['error'])}" if row["error"] and row["state"] != "running" else ""
                    print(f"{time.strftime('%H:%M:%S')} {node} {row['state']}{why}", flush=True)
            states.update(message["states"])


def _nodes(status: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    return [
        {"node": f"{label}/{index}", **row, "pid": row["pid"] or None}  # never 0: `kill 0` kills the caller's group
        for label, rows in status.items()
        for index, row in enumerate(rows)
    ]


def _text(record: RunRecord, nodes: Sequence[Mapping[str, Any]]) -> str:
    up = duration(time.time() - record.started)
    head = f"{record.program} in {record.mode} mode, process {record.pid}, up {up}, folder {shown(record.run_dir)}"
    has_hosts = record.mode == "multi_host"
    columns = ("NODE", "STATE", "HOST", "PID", "UP", "RESTARTS", "CALLS/S", "WAITING", "ERROR")
    return f"{head}\n{table(columns, [_row(node, node.get('host', '') if has_hosts else '') for node in nodes])}"


def _row(node: Mapping[str, Any], host: str) -> tuple[str, ...]:
    """Return a node's row of the table; a column that the run does not count is empty."""
    uptime, rate = node.get("uptime_s"), node.get("calls_per_s")
    error = _first_line(node["error"])
    return (
        node["node"],
        node["state"],
        host,
        str(node["pid"] or ""),
        "" if uptime is None else duration(uptime),
        str(node.get("restarts", "")),
        "" if rate is None else f"{rate:.0f}",
        node.get("waiting") or "",
        error,
    )


def _first_line(error: str | None) -> str:
    line = (error or "").partition("\n")[0]
    return line if len(line) <= _MAX_ERROR_LETTERS else f"{line[:_MAX_ERROR_LETTERS]}…"
