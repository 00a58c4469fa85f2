"""Records of this user's runs: one file each in a private folder, and `run.json` in each run's own folder.

The private folder is always below the user's state folder. $XDG_RUNTIME_DIR is not used, because cron does not set it,
and a run that cron has started must use the same folder as the terminal from which the user looks for it.
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
from lp_pipe.process_tree import start_time
from lp_pipe.telemetry.file_writing import write_atomically
from lp_pipe.telemetry.run_folder import RunFolder
from lp_pipe.user_folders import make_private, state_folder


@dataclass(frozen=True)
class RunRecord:
    """A record of a run: its launch, its end, and what other processes need to reach it and to clean up after it.

    pid, pid_started: of the launcher. A later process may have the same pid, but not the same start time.
    started, ended: seconds since the epoch. `ended` and the fields after it are set only in the run's own folder.
    control: the endpoint where the run answers (see control.py), inside `socket_dir`; "" for a run that is not listed.
    mark: the value of LP_PIPE_TEMPLATE in its node processes' environment; "" in thread mode.
    argv: the command that launched it. flags: the "target" and "options" of `lp_pipe launch`, and the arguments of the
        "program". cwd, terminal: where it was launched.
    versions: of python, lp_pipe and, if it was imported, torch. git: "commit" and "dirty" of the sources.
    parent: the earlier run in the same folder that this one continues: when and how it was launched and ended.
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
        """The name of the run's folder."""
        return Path(self.run_dir).name

    @property
    def is_here(self) -> bool:
        """Whether it was launched on this host. With a shared home, other hosts' runs have records here, too."""
        return self.host == socket.gethostname()

    @property
    def is_live(self) -> bool:
        return self.ended is None and self.is_here and start_time(self.pid) == self.pid_started

    def as_parent(self) -> dict[str, Any]:
        """Return the field `parent` for the record of a run that continues this one."""
        return {name: getattr(self, name) for name in ("started", "ended", "outcome", "failure", "argv", "git")}


class Outcome(NamedTuple):
    """The end of a run; the fields are those of RunRecord."""

    outcome: str
    exit_status: int
    failure: str = ""


class Entry:
    """A run's two files. The one in the folder of live runs is removed at its end; the one in its own folder stays.

    Any thread may call the methods.
    """

    def __init__(self, record: RunRecord) -> None:
        """Write both files or none. A run that is not listed has only the one in its own folder.

        Raises:
            OSError: a folder cannot be written, or the folder of live runs belongs to another user.
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
        """Record the end of the run at `when`, in seconds since the epoch."""
        self.add(ended=when, **outcome._asdict())
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.unlink()


def live_folder() -> Path:
    """Return the folder of live runs, $XDG_STATE_HOME/lp_pipe/live."""
    return state_folder() / "live"


def entries() -> dict[Path, RunRecord]:
    """Return all runs of this host that have an entry, live or dead, oldest first."""
    found = dict(_readable(live_folder()))
    return dict(sorted(found.items(), key=lambda item: item[1].started))


def dead_entries() -> dict[Path, RunRecord]:
    """Return the entries of killed launchers. A run that ends in order removes its entry, maybe just after the read."""
    return {path: record for path, record in entries().items() if not record.is_live and path.exists()}


def read_record(path: Path) -> RunRecord | None:
    """Read a record; None if there is no file, or if it is not a valid record.

    Any user may have written the one in a run's folder. Since what the server at `control` says is trusted, `control`
    must be a unix socket, since the kernel knows its owner. Fields that only a later version knows are ignored.
    """
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        record = RunRecord(**{name: value for name, value in said.items() if name in _FIELDS})
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return record if record.control == "" or str(record.control).startswith(unix.SCHEME) else None


def record_in(folder: Path) -> RunRecord | None:
    """Return the record of the run in this folder, with `run_dir` corrected, since the folder may have been moved."""
    record = read_record(RunFolder(folder).record)
    return record and replace(record, run_dir=str(folder.resolve()))


def _readable(folder: Path) -> Iterator[tuple[Path, RunRecord]]:
    for path in folder.glob("*.json"):
        record = read_record(path)
        if record is not None and record.is_here:
            yield path, record


def _write(path: Path, record: RunRecord) -> None:
    """Write the file as a whole, because other processes may read it at any time."""
    write_atomically(path, json.dumps(asdict(record), indent=1, default=str) + "\n")


_FIELDS = {one.name for one in fields(RunRecord)}
