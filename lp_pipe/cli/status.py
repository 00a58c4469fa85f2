"""`lp_pipe status`: show the states of a running program's nodes."""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from lp_pipe.cli.find_run import add_run_argument, asking, find_live_run
from lp_pipe.cli.table import duration, table
from lp_pipe.launch.report import shown

_MAX_ERROR_LETTERS = 60


HELP = "show the nodes of a running program"
DESCRIPTION = "Print a table of the nodes of a running program: state, process, uptime, what each waits for."
USAGE = "lp_pipe status [RUN] [--json]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_run_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_command(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    """Ask the run and print its answer.

    Raises:
        UsageError, NotAnswered: there is no such run, or it does not answer.
    """
    record = find_live_run(arguments.target)
    with asking(record) as control:
        nodes = [
            {"node": f"{label}/{index}", **row, "pid": row["pid"] or None}  # never 0: `kill 0` kills the caller's group
            for label, rows in control.status().items()
            for index, row in enumerate(rows)
        ]
    if arguments.json:
        facts = ("name", "program", "mode", "run_dir", "pid", "started")
        print(json.dumps({**{fact: getattr(record, fact) for fact in facts}, "nodes": nodes}))
        return 0
    up = duration(time.time() - record.started)
    print(f"{record.program} in {record.mode} mode, process {record.pid}, up {up}, folder {shown(record.run_dir)}")
    has_hosts = record.mode == "multi_host"
    head = ("NODE", "STATE", "HOST", "PID", "UP", "RESTARTS", "CALLS/S", "WAITING", "ERROR")
    print(table(head, [_row(node, node.get("host", "") if has_hosts else "") for node in nodes]))
    return 0


def _row(node: Mapping[str, Any], host: str) -> tuple[str, ...]:
    """Return a node's row of the table; a column that the run does not count is empty."""
    uptime, rate = node.get("uptime_s"), node.get("calls_per_s")
    error = (node["error"] or "").partition("\n")[0]
    return (
        node["node"],
        node["state"],
        host,
        str(node["pid"] or ""),
        "" if uptime is None else duration(uptime),
        str(node.get("restarts", "")),
        "" if rate is None else f"{rate:.0f}",
        node.get("waiting") or "",
        error if len(error) <= _MAX_ERROR_LETTERS else f"{error[:_MAX_ERROR_LETTERS]}…",
    )
