"""The store of an experiment: one sqlite file that the searcher's node writes, and anyone reads.

    trials        a row each: parameters, state, attempts, newest checkpoint
    rows          what trials reported, in commit order; (trial, name, step) is unique
    superseded    rows of steps that a later attempt has run again
    checkpoints   those on the disk
    sampled       what a sampler that learns has drawn for each trial, and what it keeps with it (pickles)
    slots         the process that each slot is now; an earlier one gets no trial
    events        what happened to the experiment and its trials
    facts         its definition (a pickle), the run that is or was its newest launch, and the launch that is paused

A report is one transaction: its row, its checkpoint and the trial's state, or nothing of it.
"""

import contextlib
import fcntl
import json
import math
import os
import pickle
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle

from lp_pipe.errors import LpPipeError, Unrecoverable
from lp_pipe.process_tree import start_time
from lp_pipe.search.searchers import Outcome, Rows, TrialRows
from lp_pipe.search.space import Params

_SCHEMA = """
CREATE TABLE IF NOT EXISTS trials (
    id INTEGER PRIMARY KEY, params BLOB NOT NULL, shown TEXT NOT NULL, outcome TEXT NOT NULL DEFAULT '', error TEXT,
    attempt INTEGER NOT NULL DEFAULT 0, step INTEGER NOT NULL DEFAULT 0, deaths INTEGER NOT NULL DEFAULT 0,
    slot INTEGER, until_step INTEGER);
CREATE TABLE IF NOT EXISTS names (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS rows (
    n INTEGER PRIMARY KEY, trial INTEGER NOT NULL, step INTEGER NOT NULL, name INTEGER NOT NULL, value REAL,
    time REAL NOT NULL, attempt INTEGER NOT NULL);
CREATE UNIQUE INDEX IF NOT EXISTS one_row ON rows (trial, name, step);
CREATE TABLE IF NOT EXISTS superseded (
    trial INTEGER, step INTEGER, name INTEGER, value REAL, time REAL, attempt INTEGER);
CREATE TABLE IF NOT EXISTS checkpoints (
    path TEXT PRIMARY KEY, trial INTEGER NOT NULL, step INTEGER NOT NULL, value REAL);
CREATE TABLE IF NOT EXISTS sampled (trial INTEGER PRIMARY KEY, drawn BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS slots (id INTEGER PRIMARY KEY, incarnation TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value);
CREATE TABLE IF NOT EXISTS events (time REAL NOT NULL, event TEXT NOT NULL, trial INTEGER, what TEXT);
"""


@dataclass(frozen=True)
class ExperimentFolder:
    """The files of one experiment."""

    path: Path

    @property
    def database(self) -> Path:
        return self.path / "experiment.sqlite"

    @property
    def lock(self) -> Path:
        return self.path / "searcher.lock"

    def owner(self) -> int | None:
        """Return the pid of the process that writes the experiment now; None if there is none on this host."""
        with contextlib.suppress(OSError, ValueError):
            pid, started = map(int, self.lock.read_text(encoding="ascii").split())
            return pid if start_time(pid) == started else None
        return None


class ExperimentIsLive(Unrecoverable):
    """Another process runs the experiment."""


class StaleAttempt(LpPipeError, RuntimeError):
    """A report of a trial that was given to another slot meanwhile; nothing of it was stored."""


@dataclass
class TrialRecord:
    """The knowledge of one trial.

    step: the newest one that its present attempt has reported, or may start from. newest: the last step that has rows,
        of any attempt. deaths: of its slots, since the last row. slot: the one that runs it now.
    values: of the searcher's metric, by step. checkpoint: path and step of the newest.
    """

    id: int
    params: Params
    outcome: Outcome = ""
    error: str | None = None
    attempt: int = 0
    step: int = 0
    deaths: int = 0
    slot: int | None = None
    until_step: int | None = None
    newest: int = 0
    values: dict[int, float] = field(default_factory=dict)
    checkpoint: tuple[str, int] | None = None


class Reading:
    """All trials of an experiment's file as they are when it is opened. metric: the name that decides."""

    def __init__(self, folder: Path, metric: str | None) -> None:
        self._metric = metric
        self._db = self._open(folder)
        self._names: dict[str, int] = dict(self._db.execute("SELECT name, id FROM names"))
        self.trials: dict[int, TrialRecord] = {}
        self.reports: list[tuple[int, int]] = []  # (trial, step) of the metric's rows, in commit order
        self._read()

    def close(self) -> None:
        self._db.close()

    def rows(self) -> Rows:
        """Return what decides the search."""
        trials = {one.id: TrialRows(one.values, one.step, one.outcome) for one in self.trials.values()}
        return Rows(trials, self.reports)

    def checkpoints(self) -> list[tuple[str, int, int, float | None]]:
        """Return (path, trial, step, value) of every checkpoint on the disk, the oldest first."""
        return self._db.execute("SELECT path, trial, step, value FROM checkpoints ORDER BY step, rowid").fetchall()

    def facts(self) -> dict[str, Any]:
        """Return the definition (a pickle), the address and the pid of the searcher's node, and the run's folder."""
        return dict(self._db.execute("SELECT name, value FROM facts"))

    def is_paused(self) -> bool:
        """Return whether the newest launch is paused; a later launch goes on."""
        facts = self.facts()
        return facts.get("paused") is not None and facts.get("paused") == facts.get("launch")

    def history(self) -> list[tuple[float, int, int, float | None, str]]:
        """Return (time, trial, step, value, outcome) of all that ever decided, in the order of time.

        A report of the metric has no outcome; an outcome has step 0. Superseded reports are among them.
        """
        metric = self._names.get(self._metric or "", -1)
        query = (
            "SELECT time, trial, step, value, '' FROM superseded WHERE name=?1 "
            "UNION ALL SELECT * FROM (SELECT time, trial, step, value, '' FROM rows WHERE name=?1 ORDER BY n) "
            "UNION ALL SELECT time, trial, 0, NULL, event FROM events WHERE event IN ('finished', 'failed', 'invalid', "
            "'stopped')"
        )
        return sorted(self._db.execute(query, (metric,)), key=lambda found: found[0])

    def _open(self, folder: Path) -> sqlite3.Connection:
        return read_only(folder)

    def _read(self) -> None:
        columns = "id, params, outcome, error, attempt, step, deaths, slot, until_step"
        for number, params, *rest in self._db.execute(f"SELECT {columns} FROM trials"):
            self.trials[number] = TrialRecord(number, pickle.loads(params), *rest)
        metric = self._names.get(self._metric or "", -1)
        for trial, step, value in self._db.execute(
            "SELECT trial, step, value FROM rows WHERE name=? ORDER BY n", (metric,)
        ):
            self.trials[trial].values[step] = math.nan if value is None else value
            self.reports.append((trial, step))
        for trial, step in self._db.execute("SELECT trial, max(step) FROM rows GROUP BY trial"):
            self.trials[trial].newest = step
        for path, trial, step, _ in self.checkpoints():
            self.trials[trial].checkpoint = path, step


class Store(Reading):
    """The experiment's file, open for writing. facts: what readers know the experiment by; they replace earlier ones.

    Raises (constructor):
        ExperimentIsLive: another process has it open for writing.
    """

    def __init__(self, folder: Path, metric: str | None, facts: Mapping[str, bytes | str | int]) -> None:
        self._new_facts = facts
        super().__init__(folder, metric)

    def _open(self, folder: Path) -> sqlite3.Connection:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(ExperimentFolder(folder))
        db = sqlite3.connect(ExperimentFolder(folder).database, check_same_thread=False, isolation_level=None)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")  # a killed process loses nothing; a machine's crash, the newest
        with _Transaction(db):  # all at once: readers see an experiment whole, or not at all
            for statement in _SCHEMA.split(";"):
                db.execute(statement)
            db.executemany("INSERT OR REPLACE INTO facts VALUES (?,?)", self._new_facts.items())
        self._lock.truncate(0)
        self._lock.write(f"{os.getpid()} {start_time(os.getpid())}")
        self._lock.flush()
        return db

    def close(self) -> None:
        """Close the file, so that another process may write it."""
        super().close()
        self._lock.truncate(0)
        self._lock.close()

    def register(self, slot: int, incarnation: str) -> bool:
        """Make this the slot's present process; return False if it was that already."""
        if self.is_present(slot, incarnation):
            return False
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO slots VALUES (?,?)", (slot, incarnation))
        return True

    def is_present(self, slot: int, incarnation: str) -> bool:
        """Return whether this is the slot's present process, and not one that was taken for dead."""
        found = self._db.execute("SELECT incarnation FROM slots WHERE id=?", (slot,)).fetchone()
        return found is not None and bool(found[0] == incarnation)

    def pause(self, launch: str | None) -> None:
        """Record which launch is paused; None: none is."""
        with self._transaction("resume" if launch is None else "pause"):
            self._db.execute("INSERT OR REPLACE INTO facts VALUES ('paused',?)", (launch,))

    def sampled(self) -> dict[int, Any]:
        """Return what was drawn for each trial by a sampler that learns."""
        found = self._db.execute("SELECT trial, drawn FROM sampled")
        return {trial: pickle.loads(drawn) for trial, drawn in found}

    def begin(self, trial: int, params: Params, slot: int, until_step: int | None, sampled: Any = None) -> TrialRecord:
        """Start the next attempt of a trial on a slot; it goes on from the trial's newest checkpoint.

        sampled: what a sampler that learns has drawn for a new trial.
        """
        record = self.trials.get(trial) or TrialRecord(trial, params)
        step = record.checkpoint[1] if record.checkpoint else 0
        with self._transaction("attempt", trial, f"slot {slot}"):
            self._db.execute(
                "INSERT INTO trials (id, params, shown, attempt, step, slot, until_step) VALUES (?,?,?,1,?,?,?) "
                "ON CONFLICT (id) DO UPDATE SET attempt=attempt+1, step=excluded.step, slot=excluded.slot, "
                "until_step=excluded.until_step",
                (trial, cloudpickle.dumps(params), json.dumps(params, default=repr), step, slot, until_step),
            )
            if sampled is not None:
                self._db.execute("INSERT INTO sampled VALUES (?,?)", (trial, cloudpickle.dumps(sampled)))
        record.attempt, record.step, record.slot, record.until_step = record.attempt + 1, step, slot, until_step
        self.trials[trial] = record
        return record

    def adopt(self, params: Params, rows: Sequence[Any], checkpoint: str, step: int) -> None:
        """Begin trial 0 with another trial's rows and the checkpoint after them, in one commit."""
        record = self.trials[0] = TrialRecord(0, params)
        with self._transaction("adopt", 0, checkpoint):
            self._db.execute(
                "INSERT INTO trials (id, params, shown, step) VALUES (0,?,?,?)",
                (cloudpickle.dumps(params), json.dumps(params, default=repr), step),
            )
            self._db.executemany(
                "INSERT INTO rows (trial, step, name, value, time, attempt) VALUES (0,?,?,?,?,0)",
                [
                    (row.step, self._name(row.name), None if math.isnan(row.value) else row.value, row.time)
                    for row in rows
                ],
            )
            self._db.execute("INSERT INTO checkpoints VALUES (?,0,?,NULL)", (checkpoint, step))
        record.step = record.newest = step
        record.checkpoint = checkpoint, step
        for row in rows:
            if row.name == self._metric:
                record.values[row.step] = row.value
                self.reports.append((0, row.step))

    def report(
        self, trial: int, attempt: int, step: int, values: Mapping[str, float], checkpoint: str | None = None
    ) -> TrialRecord:
        """Commit a step's values, and the checkpoint that holds the state after it. A second report changes nothing.

        Raises:
            StaleAttempt: the trial has a newer attempt, or has ended.
            ValueError: steps between the last reported one and this one are missing.
        """
        record = self.of(trial, attempt)
        if step <= record.step:
            return record  # sent twice, because the reply to the first was lost
        if step != record.step + 1:
            raise ValueError(
                f"trial {trial} reports step {step}, but its last one was {record.step}: steps are reported one by one"
            )
        now = time.time()
        with self._transaction():
            self._supersede(record, step)
            self._db.executemany(
                "INSERT INTO rows (trial, step, name, value, time, attempt) VALUES (?,?,?,?,?,?)",
                [
                    (trial, step, self._name(name), None if math.isnan(value) else value, now, attempt)
                    for name, value in values.items()
                ],
            )
            self._db.execute("UPDATE trials SET step=?, deaths=0 WHERE id=?", (step, trial))
            if checkpoint is not None:
                value = values.get(self._metric or "")
                self._db.execute(
                    "INSERT OR REPLACE INTO checkpoints VALUES (?,?,?,?)", (checkpoint, trial, step, value)
                )
        for old in [old for old in record.values if old >= step]:
            del record.values[old]
            self.reports.remove((trial, old))
        record.step, record.newest, record.deaths = step, step, 0
        if checkpoint is not None:
            record.checkpoint = checkpoint, step
        if self._metric is not None and self._metric in values:
            record.values[step] = values[self._metric]
            self.reports.append((trial, step))
        return record

    def release(self, trial: int, attempt: int) -> None:
        """Take a trial off its slot, because it has reached its step or is paused."""
        record = self.of(trial, attempt)
        with self._transaction():
            self._db.execute("UPDATE trials SET slot=NULL WHERE id=?", (trial,))
        record.slot = None

    def end(self, trial: int, attempt: int, outcome: Outcome, error: str | None = None) -> None:
        """Record how a trial's own code ended."""
        record = self.of(trial, attempt)
        with self._transaction(outcome, trial, error):
            self._db.execute("UPDATE trials SET slot=NULL, outcome=?, error=? WHERE id=?", (outcome, error, trial))
        record.slot, record.outcome, record.error = None, outcome, error

    def kill(self, record: TrialRecord) -> None:
        """End a trial for good: reports of its slot, if one runs it, are stale from now on."""
        with self._transaction("stopped", record.id, "kill"):
            self._db.execute("UPDATE trials SET slot=NULL, outcome='stopped' WHERE id=?", (record.id,))
        record.slot, record.outcome = None, "stopped"

    def slot_died(self, record: TrialRecord) -> None:
        """Record that the slot of a running trial has died; the trial waits for another one."""
        with self._transaction("slot died", record.id, f"slot {record.slot}"):
            self._db.execute("UPDATE trials SET slot=NULL, deaths=deaths+1 WHERE id=?", (record.id,))
        record.slot, record.deaths = None, record.deaths + 1

    def of(self, trial: int, attempt: int) -> TrialRecord:
        """Return the record of the trial; its attempt must be this one and be running.

        Raises:
            StaleAttempt: it is not.
        """
        record = self.trials.get(trial)
        if record is None or record.attempt != attempt or record.slot is None:
            newest = record.attempt if record else 0
            raise StaleAttempt(
                f"attempt {attempt} of trial {trial} is over (the newest is {newest}): its slot was taken for dead, or "
                "the trial was killed"
            )
        return record

    def forget_checkpoint(self, path: str) -> None:
        with self._transaction():
            self._db.execute("DELETE FROM checkpoints WHERE path=?", (path,))

    def log_event(self, event: str, what: str = "") -> None:
        with self._transaction(event, None, what):
            pass

    def _supersede(self, record: TrialRecord, step: int) -> None:
        """Set aside the rows of this step and later ones: an earlier attempt made them, from states that are gone."""
        if record.newest < step:
            return
        where = "FROM rows WHERE trial=? AND step>=?"
        self._db.execute(
            f"INSERT INTO superseded SELECT trial, step, name, value, time, attempt {where}", (record.id, step)
        )
        self._db.execute(f"DELETE {where}", (record.id, step))

    def _name(self, name: str) -> int:
        if name not in self._names:
            self._db.execute("INSERT OR IGNORE INTO names (name) VALUES (?)", (name,))
            (self._names[name],) = self._db.execute("SELECT id FROM names WHERE name=?", (name,)).fetchone()
        return self._names[name]

    @contextlib.contextmanager
    def _transaction(self, event: str = "", trial: int | None = None, what: str | None = None) -> Iterator[None]:
        try:
            with _Transaction(self._db, event, trial, what):
                yield
        except BaseException:
            self._names.clear()  # the file may not have a name that this transaction has added
            raise


class _Transaction:
    """A transaction that also stores an event; it is rolled back when the body raises."""

    def __init__(
        self, db: sqlite3.Connection, event: str = "", trial: int | None = None, what: str | None = None
    ) -> None:
        self._db, self._event = db, (time.time(), event, trial, what)

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            if kind is None:
                if self._event[1]:
                    self._db.execute("INSERT INTO events VALUES (?,?,?,?)", self._event)
                self._db.execute("COMMIT")
        finally:
            if self._db.in_transaction:  # a failed write may have rolled it back already
                self._db.execute("ROLLBACK")


def _locked(folder: ExperimentFolder) -> Any:
    """Return the lock file, locked for this process.

    Raises:
        ExperimentIsLive: another process holds it; its pid is named.
    """
    file = folder.lock.open("a+", encoding="ascii")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ExperimentIsLive(f"the experiment in {folder.path} runs already, in process {folder.owner()}") from error
    return file


def read_only(folder: Path) -> sqlite3.Connection:
    """Open an experiment's file for reading, also while it is written.

    Raises:
        FileNotFoundError: there is none.
    """
    path = ExperimentFolder(folder).database
    if not path.exists():
        raise FileNotFoundError(f"{folder} is no experiment that has started: it has no {path.name}")
    db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name='facts'").fetchone():
        db.close()
        raise FileNotFoundError(f"the experiment in {folder} is about to start")
    return db


def rows_in(db: sqlite3.Connection) -> Iterator[tuple[int, int, str, float, float, int]]:
    """Yield (trial, step, name, value, time, attempt) of every row, in commit order."""
    query = "SELECT trial, step, names.name, value, time, attempt FROM rows JOIN names ON rows.name=names.id ORDER BY n"
    for trial, step, name, value, when, attempt in db.execute(query):
        yield trial, step, name, math.nan if value is None else value, when, attempt
