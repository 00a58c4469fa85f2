"""From RUN on the command line to a run, and to the one who answers for it."""

import argparse
import contextlib
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from lp_pipe.cli.errors import NotAnswered, UsageError, nearest
from lp_pipe.cli.table import duration, table
from lp_pipe.errors import DeadlineExceeded, Unavailable
from lp_pipe.launch.invocation import current_folder
from lp_pipe.launch.processes.process_tree import owner_of, terminal_of
from lp_pipe.launch.report import shown
from lp_pipe.launch.run_dir import usual_runs
from lp_pipe.launch.run_records import RunRecord, entries, record_in
from lp_pipe.rpc import CourierClient
from lp_pipe.telemetry.run_folder import RunFolder

FOLDER = Path("runs")  # where `lp_pipe launch` makes those of its runs
_RECORD = RunFolder(Path()).record.name
_PATIENCE_S = 5.0


def add_run_argument(parser: argparse.ArgumentParser, without: str = "the only one") -> None:
    """Add the positional RUN; `without` says which run is meant where it is left out."""
    parser.add_argument(
        "target", metavar="RUN", nargs="?", help=f"a run's folder, or the beginning of its name; without: {without}"
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
    record = record_in(Path(text))
    if record is not None:
        return record
    if Path(text).is_dir():
        raise UsageError(f"{Path(text)} is not the folder of a run that can be asked: it has no {_RECORD} of lp_pipe's")
    return _by_name(text, live)


def find_live_run(text: str | None) -> RunRecord:
    """The same, if it has not ended.

    Raises:
        UsageError: no such run, or several, or it has ended, or is another user's.
    """
    record = find_run(text)
    if record.is_live and not record.control:
        raise UsageError(f"run {record.name} is not listed: launch it with listed=True to ask it")
    if not record.is_here:
        raise UsageError(f"run {record.name} is on host {record.host}: ask it there")
    if not record.is_live:
        folder = shlex.quote(str(shown(record.run_dir)))
        raise UsageError(f"run {record.name} {how_ended(record)}; its logs: lp_pipe logs {folder}")
    if owner_of(record.pid) not in (None, os.getuid()):  # whose socket would take nobody else's call
        raise UsageError(f"run {record.name} is another user's: only that user can ask it, or stop it")
    return record


def find_run_to_stop(text: str | None) -> RunRecord:
    """Return the live run that RUN means; without RUN only one that was launched in this folder or this terminal.

    A command that changes a run must not take the user's only one for it: that may be at work elsewhere.

    Raises:
        UsageError: no such run, or several; it lists them. As `find_live_run`.
    """
    if text is not None:
        return find_live_run(text)
    live = live_runs()
    if not live:
        raise no_runs()
    folder, terminal = current_folder(), terminal_of(os.getpid())
    near = [one for one in live if (folder and one.cwd == folder) or (terminal and one.terminal == terminal)]
    if len(near) == 1:
        return near[0]
    if near:
        raise UsageError(f"{len(near)} runs were launched in this folder or terminal; say which:", run_table(near))
    raise UsageError("no live run was launched in this folder or terminal; say which to stop:", run_table(live))


def find_ended_run(text: str) -> RunRecord:
    """Return the run in this folder, or of this name below ./runs or the usual folder, which must have ended.

    Raises:
        UsageError: no such run, or it has not ended.
    """
    found = record_in(Path(text)) or _ended_by_name(text)
    if found is None:
        raise UsageError(f"no run {text!r}: neither that folder nor runs/{text} has a {_RECORD}")
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
    record = record_in(Path(record.run_dir)) or record
    if record.ended is None:
        return f"is gone: its launcher, process {record.pid}, was killed"
    how = "" if record.outcome in ("", "done") else f" ({record.outcome})"
    took = duration(record.ended - record.started)
    return f"ended {duration(time.time() - record.ended)} ago, after {took}{how}"


def no_runs(beginning: str = "") -> UsageError:
    """Says which one has ended last here, if its name begins so."""
    named = (file for file in FOLDER.glob(f"*/{_RECORD}") if file.parent.name.startswith(beginning))
    ended = max(named, key=_changed, default=None)
    logs = f"; the newest that has ended: lp_pipe logs {shlex.quote(str(ended.parent))}" if ended else ""
    unknown = f"no run {beginning!r}: there is no such folder, and " if beginning and not ended else ""
    return UsageError(f"{unknown}no run of yours is live on this host{logs or '; `lp_pipe launch TARGET` starts one'}")


def _changed(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _ended_by_name(text: str) -> RunRecord | None:
    """Return the run of this name where `lp_pipe launch` and scripts make the folders of their runs."""
    return record_in(FOLDER / text) or record_in(usual_runs() / text)


def _by_name(text: str, live: Sequence[RunRecord]) -> RunRecord:
    exact = [record for record in live if record.name == text]
    if not exact and (ended := _ended_by_name(text)):
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
