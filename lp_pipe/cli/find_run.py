"""Find the run that RUN on the command line means, and connect to its launcher."""

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
from lp_pipe.launch.report import shown
from lp_pipe.launch.run_dir import usual_runs
from lp_pipe.launch.run_records import RunRecord, entries, record_in
from lp_pipe.process_tree import owner_of, terminal_of
from lp_pipe.rpc import CourierClient
from lp_pipe.telemetry.run_folder import RunFolder

FOLDER = Path("runs")  # where `lp_pipe launch` makes the folders of its runs
_RECORD = RunFolder(Path()).record.name
_PATIENCE_S = 5.0


def add_run_argument(parser: argparse.ArgumentParser, without: str = "the only one") -> None:
    """Add the positional RUN; `without` says which run is meant if RUN is not given."""
    parser.add_argument(
        "target", metavar="RUN", nargs="?", help=f"a run's folder, or the beginning of its name (default: {without})"
    )


def find_run(text: str | None) -> RunRecord:
    """Return the run that RUN means; a folder may also be that of a run that has ended.

    Raises:
        UsageError: there is no such run, or there are several; the message lists them.
    """
    live = live_runs()
    if text is None:
        if len(live) == 1:
            return live[0]
        raise UsageError(f"{len(live)} runs of yours are live; name one:", run_table(live)) if live else no_runs()
    record = record_in(Path(text))
    if record is not None:
        return record
    if Path(text).is_dir():
        raise UsageError(f"{Path(text)} is not the folder of a run: it has no {_RECORD} of lp_pipe")
    return _by_name(text, live)


def find_live_run(text: str | None) -> RunRecord:
    """Return the live run that RUN means.

    Raises:
        UsageError: there is no such run, there are several, or it has ended or is another user's.
    """
    record = find_run(text)
    if record.is_live and not record.control:
        raise UsageError(f"run {record.name} takes no commands: launch it with listed=True")
    if not record.is_here:
        raise UsageError(f"run {record.name} is on host {record.host}: run this command there")
    if not record.is_live:
        folder = shlex.quote(str(shown(record.run_dir)))
        raise UsageError(f"run {record.name} {how_ended(record)}; its logs: lp_pipe logs {folder}")
    if owner_of(record.pid) not in (None, os.getuid()):  # its socket refuses other users
        raise UsageError(f"run {record.name} is another user's: only that user can query or stop it")
    return record


def find_run_to_stop(text: str | None) -> RunRecord:
    """Return the live run that RUN means; without RUN only one that was launched in this folder or this terminal.

    A command that ends a run must not choose the user's only run: that may belong to other work.

    Raises:
        UsageError: there is no such run, or there are several; the message lists them. Also as `find_live_run`.
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
        raise UsageError(f"{len(near)} runs were launched in this folder or terminal; name one:", run_table(near))
    raise UsageError("no live run was launched in this folder or terminal; name the run to stop:", run_table(live))


def find_ended_run(text: str) -> RunRecord:
    """Return the ended run in the folder `text`, or of this name in ./runs or in the folder of scripts' runs.

    Raises:
        UsageError: there is no such run, or it has not ended.
    """
    found = record_in(Path(text)) or _ended_by_name(text)
    if found is None:
        raise UsageError(f"no run {text!r}: neither that folder nor runs/{text} has a {_RECORD}")
    if found.is_live:
        raise UsageError(f"run {found.name} is live: stop it with `lp_pipe stop {shlex.quote(found.name)}`")
    return found


@contextlib.contextmanager
def asking(record: RunRecord, *, may_take_long: bool = False) -> Iterator[CourierClient]:
    """Yield a client of the run's Control; its calls have a deadline of 5 s.

    may_take_long: only the first call, which checks that the run answers, has a deadline.

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
        raise NotAnswered(f"run {record.name} has just ended, or accepts no connections: {error}") from error
    except DeadlineExceeded as error:
        raise NotAnswered(
            f"run {record.name} gave no answer within {_PATIENCE_S:.0f} s: its launcher, process {record.pid}, is "
            f"stopped or very busy; to end it and its nodes, run `kill -9 {record.pid}`"
        ) from error


def live_runs() -> list[RunRecord]:
    """Return this user's live runs on this host, oldest first."""
    return [record for record in entries().values() if record.is_live]


def run_table(records: Sequence[RunRecord]) -> str:
    """Return a table with one line per run."""
    now = time.time()
    rows = [
        (record.name, record.program, record.mode, str(record.pid), duration(now - record.started), record.run_dir)
        for record in records
    ]
    return table(("RUN", "PROGRAM", "MODE", "PID", "UP", "FOLDER"), rows)


def how_ended(record: RunRecord) -> str:
    """Return how a run that is not live ended. Reads its record again: the run may have ended since it was read."""
    record = record_in(Path(record.run_dir)) or record
    if record.ended is None:
        return f"is gone: its launcher, process {record.pid}, was killed"
    how = "" if record.outcome in ("", "done") else f" ({record.outcome})"
    took = duration(record.ended - record.started)
    return f"ended {duration(time.time() - record.ended)} ago, after {took}{how}"


def no_runs(beginning: str = "") -> UsageError:
    """Return the error that no run is live; it names the newest run in ./runs with this beginning of its name."""
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
        raise UsageError(f"{text!r} matches {len(found)} runs; give more of the name, or a folder:", run_table(found))
    names = [record.name for record in live]
    raise UsageError(f"no run {text!r}{nearest(text, names) or ';'} these are live:", run_table(live))
