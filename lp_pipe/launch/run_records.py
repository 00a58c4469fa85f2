"""Which runs of this user there are: one file each in a private folder, and `run.json` in each run's own folder.

The private folder is always below the user's state folder, and not in $XDG_RUNTIME_DIR: a run that cron has started
and the terminal that asks for it must agree on it, and only some of them have that variable.
"""

import contextlib
import json
import socket
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from lp_pipe.connections import unix
from lp_pipe.launch.processes.process_tree import start_time
from lp_pipe.launch.user_folders import make_private, state_folder
from lp_pipe.telemetry.run_folder import RunFolder
from lp_pipe.telemetry.whole_file import write_whole


@dataclass(frozen=True)
class RunRecord:
    """How a run was launched and how it ended; and what another process must know to ask it, and to clean up after it.

    pid: the launcher's; a pid alone may be another process's by now, so its `start_time` is kept with it.
    started, ended: seconds since the epoch; `ended` and what follows it is only ever set in the run's own folder.
    control: where it answers (see control.py), inside `socket_dir`; "" for a run that is not listed.
    mark: the value of LP_PIPE_TEMPLATE that its node processes carry; "" in thread mode.
    argv: the command that launched it. flags: of `lp_pipe launch` the "target" and the "options", and what the
        "program" was given. cwd, terminal: where it was launched.
    versions: of python, lp_pipe and, where it was imported, torch. git: "commit" and "dirty" of the sources.
    parent: the run in the same folder that this one goes on from: when and how it was launched and ended.
    outcome: "done", "stopped", "failed" or "interrupted". exit_status: as of `lp_pipe launch`. failure: the first
        line of the first failure.
    """

    program: str
    mode: str
    run_dir: str
    host: str
    pid: int
    pid_started: int
    started: float
    control: str
    socket_dir: str
    mark: str = ""
    argv: Sequence[str] = field(default_factory=list)
    flags: Mapping[str, Any] = field(default_factory=dict)
    cwd: str = ""
    terminal: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    git: Mapping[str, Any] | None = None
    parent: Mapping[str, Any] | None = None
    ended: float | None = None
    outcome: str = ""
    exit_status: int | None = None
    failure: str = ""

    @property
    def folder(self) -> RunFolder:
        return RunFolder(Path(self.run_dir))

    @property
    def name(self) -> str:
        """The last part of the run's folder."""
        return Path(self.run_dir).name

    @property
    def is_here(self) -> bool:
        """Whether it runs, or ran, on this host; of others (a shared home) nothing can be said."""
        return self.host == socket.gethostname()

    @property
    def is_live(self) -> bool:
        return self.ended is None and self.is_here and start_time(self.pid) == self.pid_started

    def as_parent(self) -> dict[str, Any]:
        """Return what the record of a run that goes on from this one says of it."""
        return {name: getattr(self, name) for name in ("started", "ended", "outcome", "failure", "argv", "git")}


class Outcome(NamedTuple):
    """The end of a run: see RunRecord."""

    outcome: str
    exit_status: int
    failure: str = ""


class Entry:
    """A run's two files: the one among the live runs is removed at its end, the one in its own folder stays.

    Any thread may call it.
    """

    def __init__(self, record: RunRecord) -> None:
        """Write both, or none; of a run that is not listed only the one in its own folder.

        Raises:
            OSError: a folder cannot be written, or the folder of live runs is another user's.
        """
        self._record = record
        self._lock = threading.Lock()
        self._live: Path | None = None
        if record.control:
            make_private(live_folder())
            self._live = live_folder() / f"{record.pid}-{uuid.uuid4().hex[:12]}.json"
            _write(self._live, record)
        try:
            _write(record.folder.record, record)
        except OSError:
            if self._live is not None:
                self._live.unlink()
            raise

    def add(self, **facts: Any) -> None:
        """Set fields of the record in the run's own folder."""
        with self._lock, contextlib.suppress(OSError):  # the folder was removed, or its disk is full
            self._record = replace(self._record, **facts)
            _write(self._record.folder.record, self._record)

    def end(self, when: float, outcome: Outcome) -> None:
        """Write that the run is over; `when` in seconds since the epoch."""
        self.add(ended=when, **outcome._asdict())
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.unlink()


def live_folder() -> Path:
    """$XDG_STATE_HOME/lp_pipe/live."""
    return state_folder() / "live"


def entries() -> dict[Path, RunRecord]:
    """Every run of this host that has an entry, live or dead, oldest first."""
    found = dict(_readable(live_folder()))
    return dict(sorted(found.items(), key=lambda item: item[1].started))


def dead_entries() -> dict[Path, RunRecord]:
    """Those whose launchers were killed. One that ends in order takes its entry back, maybe just after it was read."""
    return {path: record for path, record in entries().items() if not record.is_live and path.exists()}


def read_record(path: Path) -> RunRecord | None:
    """Return what such a file says; None when there is none, or none of ours.

    Any user may have written the one in a run's folder. A server at `control` is believed, so it must be a unix
    socket, of which the kernel says whose it is. Fields that only a later version knows are left out.
    """
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        record = RunRecord(**{name: value for name, value in said.items() if name in _FIELDS})
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return record if record.control == "" or str(record.control).startswith(unix.SCHEME) else None


def record_in(folder: Path) -> RunRecord | None:
    """Return the record of the run in this folder, which may have been moved since."""
    record = read_record(RunFolder(folder).record)
    return record and replace(record, run_dir=str(folder.resolve()))


def _readable(folder: Path) -> Iterator[tuple[Path, RunRecord]]:
    for path in folder.glob("*.json"):
        record = read_record(path)
        if record is not None and record.is_here:
            yield path, record


def _write(path: Path, record: RunRecord) -> None:
    """Whole or not at all: others read it at any time."""
    write_whole(path, json.dumps(asdict(record), indent=1, default=str) + "\n")


_FIELDS = {one.name for one in fields(RunRecord)}
