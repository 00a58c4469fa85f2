"""`lp_pipe logs`: print what the nodes of a live or ended run have printed."""

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lp_pipe.cli.errors import NotAnswered, UsageError, nearest, whole_number
from lp_pipe.cli.find_run import asking, find_run, live_runs
from lp_pipe.launch.run_records import RunRecord, read_record
from lp_pipe.telemetry.plain_files import open_plain
from lp_pipe.telemetry.run_folder import RunFolder


class LogFile:
    """A node's log file; `new_lines` returns each line once.

    node: its node_id, "label/index"; for a process inside a colocation "label/index.place".
    """

    def __init__(self, path: Path, node: str) -> None:
        self.path = path
        self.node = node
        self.label, _, self._index = node.rpartition("/")
        self._place = 0
        self._unfinished = b""

    @property
    def order(self) -> tuple[str, list[int]]:
        """The sort key, with stage/2 before stage/10."""
        return self.label, [int(part) for part in self._index.split(".") if part.isdecimal()]

    def is_of(self, node: str) -> bool:
        """Return whether `node` is this node, the colocation around it, or its group."""
        return node in (self.node, self.label) or self.node.startswith(f"{node}.")

    def new_lines(self, with_unfinished: bool = False) -> list[str]:
        """Return the lines since the last call; `with_unfinished`: also the last one without its end."""
        try:
            with open_plain(self.path) as file:
                file.seek(self._place)
                data = file.read()
        except OSError as error:
            why = error.strerror or "it is no regular file"
            raise UsageError(f"cannot read the log {self.path}: {why} (links are not followed)") from error
        self._place += len(data)
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        if with_unfinished and self._unfinished:
            lines, self._unfinished = [*lines, self._unfinished], b""
        return [line.decode(errors="replace") for line in lines]


def log_files(folder: RunFolder) -> list[LogFile]:
    """Return the files of all nodes that have printed something."""
    return sorted((LogFile(path, node) for node, path in folder.node_logs().items()), key=lambda file: file.order)


# All control characters except tabs. Colors, the first alternative, are kept.
_CONTROL = re.compile(r"(\x1b\[[0-9;]*m)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def without_control(line: str) -> str:
    """Return the line without control characters: a node's output must not move the cursor or set a window's title."""
    return _CONTROL.sub(lambda found: found[1] or f"\\x{ord(found[0]):02x}", line)


_LOOK_EVERY_S = 0.2
_FIRST_LINES_WHEN_FOLLOWING = 10
EPILOG = """\
examples:
  lp_pipe logs                        all that the nodes of the only live run have printed
  lp_pipe logs -f                     the last lines, then new ones until the run ends
  lp_pipe logs runs/demo-… trainer    one node or group of any run
  lp_pipe logs trainer                one node or group of the only live run
  lp_pipe logs -n 5 runs/demo-…       the last five lines of each node
"""


HELP = "print what the nodes of a run have printed"
DESCRIPTION = (
    "Print what the nodes of a run have printed, node after node, and with -f new lines as they come. "
    "Each line has its node's label, unless NODE names a single node (label/index)."
)
USAGE = "lp_pipe logs [RUN] [NODE] [-f] [-n N]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "target", metavar="RUN", nargs="?", help="a run's folder or name; of a live run the beginning of the name"
    )
    parser.add_argument("node", metavar="NODE", nargs="?", help="label/index, or a label for its whole group")
    parser.add_argument("-f", "--follow", action="store_true", help="print new lines until the run ends")
    parser.add_argument(
        "-n", "--lines", type=whole_number("-n ", "lines", 20), metavar="N", help="only the last N lines of each node"
    )


def run_command(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    """Print the logs.

    Raises:
        UsageError: there is no such run or node, or this run has no log files.
    """
    record, node = _run_and_node(arguments.target, arguments.node)
    logs = _Logs(record.folder, node)
    if not logs.choose() and (record.mode == "thread" or not arguments.follow):
        raise UsageError(_nothing(record, logs, node))
    lines = arguments.lines
    if lines is None and arguments.follow:
        lines = _FIRST_LINES_WHEN_FOLLOWING
    logs.print_new(lines)
    while arguments.follow and _is_on(record):
        time.sleep(_LOOK_EVERY_S)
        logs.print_new()
    logs.print_new(with_unfinished=True)
    return 0


def _run_and_node(target: str | None, node: str | None) -> tuple[RunRecord, str | None]:
    """Return the run and the node; a single word that is no run may be a node of the only live run."""
    try:
        return find_run(target), node
    except UsageError:
        live = live_runs()
        if target is None or node is not None or len(live) != 1 or not _has_node(live[0], target):
            raise
        return live[0], target


def _has_node(record: RunRecord, name: str) -> bool:
    if any(file.is_of(name) for file in log_files(record.folder)):
        return True
    try:
        with asking(record) as control:  # a node that has printed nothing has no log file
            status = control.status()
    except NotAnswered:
        return False
    return name in status or name in [
        f"{label}/{index}" for label, rows in status.items() for index in range(len(rows))
    ]


class _Logs:
    """The log files of the chosen nodes of a run, including nodes that print their first line later."""

    def __init__(self, folder: RunFolder, node: str | None) -> None:
        self.folder = folder
        self._node = node
        self._files: dict[Path, LogFile] = {}

    def choose(self) -> list[LogFile]:
        for file in log_files(self.folder):
            if self._node is None or file.is_of(self._node):
                self._files.setdefault(file.path, file)
        return list(self._files.values())

    def print_new(self, last: int | None = None, with_unfinished: bool = False) -> None:
        """Print the lines since the last call; last: at most so many of each node."""
        shown = without_control if sys.stdout.isatty() else str
        for file in self.choose():
            label = "" if file.node == self._node else f"[{file.node}] "
            lines = file.new_lines(with_unfinished)
            skipped = 0 if last is None else max(0, len(lines) - last)
            for line in map(shown, lines[skipped:]):
                sys.stdout.write(f"{label}{line}\n")
        sys.stdout.flush()


def _is_on(record: RunRecord) -> bool:
    now = read_record(record.folder.record)
    return record.is_live and now is not None and now.ended is None


def _nothing(record: RunRecord, logs: _Logs, node: str | None) -> str:
    if record.mode == "thread":
        return f"run {record.name} has no log files: in thread mode nodes print to the launcher's own output"
    known = [file.node for file in log_files(logs.folder)]
    if node is None or not known:
        return f"no node of run {record.name} has printed anything{' yet: use -f to wait' if _is_on(record) else ''}"
    return f"node {node!r} of run {record.name} has printed nothing{nearest(node, known)} (nodes: {', '.join(known)})"
