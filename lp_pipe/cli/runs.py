"""From RUN on the command line to a run, and to the one who answers for it."""

import argparse
import contextlib
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lp_pipe.cli.errors import NotAnswered, UsageError, nearest
from lp_pipe.cli.table import duration, table
from lp_pipe.errors import DeadlineExceeded, Unavailable
from lp_pipe.launch.processes.proctree import owner_of
from lp_pipe.launch.registry import RUN_FILE, RunRecord, entries, read_record
from lp_pipe.launch.report import shown
from lp_pipe.rpc import CourierClient

_FOLDER = Path("runs")  # where `lp_pipe launch` makes those of its runs
_PATIENCE_S = 5.0


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    """The positional RUN, which may be left out while one run is live."""
    parser.add_argument(
        "target", metavar="RUN", nargs="?", help="a run's folder, or the beginning of its name; without: the only one"
    )


def find_run(text: str | None) -> RunRecord:
    """The run that RUN means; a folder may also be that of a run that has ended.

    Raises:
        UsageError: no such run, or several; the message lists them.
    """
    live = live_runs()
    if text is None:
        if len(live) == 1:
            return live[0]
        raise UsageError(f"{len(live)} runs of yours are live; say which:", run_table(live)) if live else no_runs()
    record = _record_in(Path(text))
    if record is not None:
        return record
    if Path(text).is_dir():
        raise UsageError(
            f"{Path(text)} is not the folder of a run that can be asked: it has no {RUN_FILE} of lp_pipe's"
        )
    return _by_name(text, live)


def find_live_run(text: str | None) -> RunRecord:
    """The same, if it has not ended.

    Raises:
        UsageError: no such run, or several, or it has ended, or is another user's.
    """
    record = find_run(text)
    if not record.is_here:
        raise UsageError(f"run {record.name} is on host {record.host}: ask it there")
    if not record.is_live:
        folder = shlex.quote(str(shown(record.run_dir)))
        raise UsageError(f"run {record.name} {how_ended(record)}; its logs: lp_pipe logs {folder}")
    if owner_of(record.pid) not in (None, os.getuid()):  # whose socket would take nobody else's call
        raise UsageError(f"run {record.name} is another user's: only that user can ask it, or stop it")
    return record


def find_ended_run(text: str) -> RunRecord:
    """The run in this folder, or of this name below ./runs, which nothing of may be left running.

    Raises:
        UsageError: no such run, or it has not ended.
    """
    found = _record_in(Path(text)) or _record_in(_FOLDER / text)
    if found is None:
        raise UsageError(f"no run {text!r}: neither that folder nor runs/{text} has a {RUN_FILE}")
    if found.is_live:
        raise UsageError(f"run {found.name} is live: `lp_pipe stop {shlex.quote(found.name)}` ends it")
    return found


@contextlib.contextmanager
def asking(record: RunRecord, *, may_take_long: bool = False) -> Iterator[CourierClient]:
    """A client of the run's Control; one whose calls may take long has no deadline once the run has answered at all.

    Raises:
        NotAnswered: the run has just ended, or its launcher hangs.
    """
    try:
        client = CourierClient(record.control, call_timeout=_PATIENCE_S, wait_for_ready=False, peer=record.name)
        if may_take_long:
            client.status()
            client = CourierClient(record.control, wait_for_ready=False, peer=record.name)
        yield client
    except Unavailable as error:
        raise NotAnswered(f"run {record.name} has just ended, or does not listen: {error}") from error
    except DeadlineExceeded as error:
        raise NotAnswered(
            f"run {record.name} gave no answer within {_PATIENCE_S:.0f} s: its launcher, process {record.pid}, is "
            f"stopped or very busy; `kill -9 {record.pid}` ends it, and its nodes with it"
        ) from error


def live_runs() -> list[RunRecord]:
    """This user's, on this host, oldest first."""
    return [record for record in entries().values() if record.is_live]


def run_table(records: Sequence[RunRecord]) -> str:
    """One line a run."""
    now = time.time()
    rows = [
        (record.name, record.program, record.mode, str(record.pid), duration(now - record.started), record.run_dir)
        for record in records
    ]
    return table(("RUN", "PROGRAM", "MODE", "PID", "UP", "FOLDER"), rows)


def how_ended(record: RunRecord) -> str:
    """For a run that is not live; it may have been when the record was read, and has ended in order since."""
    record = _record_in(Path(record.run_dir)) or record
    if record.ended is None:
        return f"is gone: its launcher, process {record.pid}, was killed"
    return f"ended {duration(time.time() - record.ended)} ago, after {duration(record.ended - record.started)}"


def no_runs(beginning: str = "") -> UsageError:
    """Says which one has ended last here, if its name begins so."""
    named = (file for file in _FOLDER.glob(f"*/{RUN_FILE}") if file.parent.name.startswith(beginning))
    ended = max(named, key=_changed, default=None)
    logs = f"; the newest that has ended: lp_pipe logs {shlex.quote(str(ended.parent))}" if ended else ""
    unknown = f"no run {beginning!r}: there is no such folder, and " if beginning and not ended else ""
    return UsageError(f"{unknown}no run of yours is live on this host{logs or '; `lp_pipe launch TARGET` starts one'}")


def _changed(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _record_in(folder: Path) -> RunRecord | None:
    """That of the run in this folder, which may have been moved since."""
    record = read_record(folder / RUN_FILE)
    return record and replace(record, run_dir=str(folder.resolve()))


def _by_name(text: str, live: Sequence[RunRecord]) -> RunRecord:
    exact = [record for record in live if record.name == text]
    if not exact and (ended := _record_in(_FOLDER / text)):
        return ended
    if not live:
        raise no_runs(text)
    found = exact or [record for record in live if record.name.startswith(text)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{text!r} may be {len(found)} runs; say more of the name, or a folder:", run_table(found))
    names = [record.name for record in live]
    raise UsageError(f"no run {text!r}{nearest(text, names) or ';'} these are live:", run_table(live))
