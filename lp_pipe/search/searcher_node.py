"""The searcher's node: hands trials to slots, commits their reports, and ends the experiment."""

import contextlib
import logging
import os
import shutil
import threading
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lp_pipe as lp
from lp_pipe.checkpoint import folder as folders
from lp_pipe.errors import Unrecoverable
from lp_pipe.rpc.changes import Changes
from lp_pipe.search.samplers import Sampled, suggest
from lp_pipe.search.searchers import Grid, Searcher
from lp_pipe.search.space import Params
from lp_pipe.search.store import Store, TrialRecord

_log = logging.getLogger(__name__)


class AllTrialsFailed(Unrecoverable):
    """An experiment in which no trial has finished, and none is left to run."""


@dataclass(frozen=True)
class Keep:
    """The checkpoints that stay on the disk: those that any of the three numbers keeps.

    experiment_best: the checkpoints of the so many best reports of all. trial_best, trial_latest: of each trial. The
        newest checkpoint of a trial that may go on always stays.
    """

    experiment_best: int = 1
    trial_best: int = 1
    trial_latest: int = 1


@dataclass(frozen=True)
class Fork:
    """The beginning of trial 0, which another experiment's trial has made: its rows, and the checkpoint after them."""

    rows: Sequence[Any]
    checkpoint: tuple[str, int]


@dataclass(frozen=True)
class ExperimentSettings:
    """The options of an experiment that its searcher's node follows. facts: pickles for readers of the folder."""

    folder: Path
    searcher: Searcher
    space: Mapping[str, Any]
    seed: int
    num_slots: int
    max_restarts: int
    keep: Keep
    facts: Mapping[str, bytes]
    fork: Fork | None = None
    launch: str = field(default_factory=lambda: uuid.uuid4().hex)  # tells a restart of the node from a later launch


@dataclass(frozen=True)
class Lease:
    """A trial that a slot shall run now, and the state that it starts from."""

    trial: int
    params: Params
    attempt: int
    step: int
    until_step: int | None
    checkpoint: str | None


@dataclass(frozen=True)
class Directive:
    """The searcher's reply to a report: whether the trial goes on in its slot, and until which step."""

    goes_on: bool
    until_step: int | None


class SearcherNode:
    """The node that alone writes the experiment's store. Its decisions follow from the committed rows.

    Every call may be sent twice: a caller that gets no reply calls again.
    """

    def __init__(self, settings: ExperimentSettings, own_client: Any) -> None:
        self._settings = settings
        self._searcher = settings.searcher
        facts = {
            **settings.facts,
            "address": own_client.address,
            "pid": os.getpid(),
            "run_dir": str(lp.context().run_dir),
            "launch": settings.launch,
        }
        self._store = Store(settings.folder, self._searcher.metric, facts)
        lp.context().exit_stack.callback(self._store.close)
        self._changes = Changes()
        self._is_paused = self._store.is_paused()
        self._deleting = ThreadPoolExecutor(1, "delete checkpoints")
        lp.context().exit_stack.callback(self._deleting.shutdown)
        self._flushing = ThreadPoolExecutor(1, "flush checkpoints")
        lp.context().exit_stack.callback(self._flushing.shutdown)
        self._kept: set[str] = set()  # the checkpoints on the disk
        self._over = threading.Event()
        lp.register_stop_handler(self._over.set)
        if settings.fork is not None and not self._store.trials:
            path, step = settings.fork.checkpoint
            own = settings.folder / "trials" / "0" / "checkpoints" / "attempt-0" / Path(path).name
            shutil.copytree(path, own, dirs_exist_ok=True)  # the parent may delete its checkpoint, and a fork its own
            self._store.adopt(self._params(0), settings.fork.rows, str(own), step)
        for record in self._running():
            if record.slot is not None and record.slot >= settings.num_slots:  # an earlier launch had more slots
                self._slot_died(record)

    async def register(self, slot: int, incarnation: str, own_end: str | None = None) -> None:
        """Take note of a slot that has started: what it ran before its death is free for other slots.

        own_end: how the slot's last process ended by itself; None if it was killed. What it ran then has failed.
        """
        if not self._store.register(slot, incarnation):
            return
        for record in self._running():
            if record.slot == slot and own_end is not None:
                self._store.end(record.id, record.attempt, "failed", own_end)
            elif record.slot == slot:
                self._slot_died(record)
        self._changes.notify()

    async def lease(self, slot: int, incarnation: str) -> Lease | None:
        """Wait for a trial that this slot should run; return None once the experiment is over, or the program stops.

        A slot that was taken for dead gets None too: its successor may run the trial that it asks for.
        """
        while self._store.is_present(slot, incarnation):
            held = next((record for record in self._running() if record.slot == slot), None)
            if held is not None:
                return _lease_of(held)
            if self._is_over():
                if not self._over.is_set():
                    self._delete_checkpoints()
                self._over.set()
                return None
            running = [record.id for record in self._running()]
            for work in [] if self._is_paused else self._searcher.next(self._store.rows(), running)[:1]:
                known = self._store.trials.get(work.trial)
                params, sampled = (known.params, None) if known else self._suggestion(work.trial)
                return _lease_of(self._store.begin(work.trial, params, slot, work.until_step, sampled))
            if not await self._changes.wait():
                return None
        return None

    async def report(
        self, trial: int, attempt: int, step: int, values: Mapping[str, float], checkpoint: str | None
    ) -> Directive:
        """Commit a step of a trial, and say whether it goes on.

        Raises:
            StaleAttempt: the trial was given to another slot.
        """
        record = self._store.report(trial, attempt, step, values, checkpoint)
        if checkpoint is not None:
            self._delete_checkpoints()
            self._flushing.submit(self._flush, checkpoint)
        if record.until_step is not None and step >= record.until_step:
            record.until_step = self._searcher.target(self._store.rows(), trial)
            self._changes.notify()  # the report may have promoted other trials
        return self._directive_for(record)

    async def progress(self, trial: int, attempt: int) -> tuple[int, Directive]:
        """Return the newest step of a running trial, and whether it goes on.

        Raises:
            StaleAttempt: the trial was given to another slot.
        """
        record = self._store.of(trial, attempt)
        return record.step, self._directive_for(record)

    async def release(self, trial: int, attempt: int) -> None:
        """Take back a trial that has stopped where the searcher said."""
        if self._is_held(trial, attempt):
            self._store.release(trial, attempt)
        self._changes.notify()

    async def end(self, trial: int, attempt: int, outcome: Any, error: str | None) -> None:
        """Take note that a trial's own code has ended by itself."""
        if self._is_held(trial, attempt):
            if outcome == "invalid" and not isinstance(self._searcher, Grid) and not self._has_others(trial):
                outcome, error = "failed", f"InvalidParams, and the space has no other parameters to draw: {error}"
            self._store.end(trial, attempt, outcome, error)
            if error:
                _log.warning("trial %d %s: %s", trial, outcome, error.strip().splitlines()[-1])
        self._changes.notify()

    async def pause(self) -> None:
        """Stop every trial at its next report, and start none."""
        if not self._is_paused:
            self._store.pause(self._settings.launch)
        self._is_paused = True

    async def resume(self) -> bool:
        """Go on after `pause`; return False if the experiment was not paused."""
        if not self._is_paused:
            return False
        self._store.pause(None)
        self._is_paused = False
        self._changes.notify()
        return True

    async def state(self) -> str:
        """Return "running", "pausing" (trials still run to their next report) or "paused"."""
        if not self._is_paused:
            return "running"
        return "pausing" if self._running() else "paused"

    async def kill(self, trial: int | None = None) -> None:
        """End one trial for good, or the whole experiment; then its program stops.

        Raises:
            KeyError: the trial has not started.
        """
        if trial is None:
            self._store.log_event("kill")
            lp.stop()
            return
        record = self._store.trials[trial]
        if not record.outcome:
            self._store.kill(record)
        self._changes.notify()

    def run(self) -> None:
        """Wait until no trial is left to run, then end the program.

        Raises:
            AllTrialsFailed: every trial has failed.
        """
        self._over.wait()
        if lp.stop_event().is_set():
            return
        records = list(self._store.trials.values())
        failed = [record for record in records if record.outcome in ("failed", "invalid")]
        if failed and len(failed) == len(records):
            last = failed[-1].error or ""
            raise AllTrialsFailed(f"all {len(failed)} trials failed; the last one, trial {failed[-1].id}:\n{last}")
        lp.stop()

    def _directive_for(self, record: TrialRecord) -> Directive:
        goes_on = not self._is_paused and (record.until_step is None or record.step < record.until_step)
        return Directive(goes_on, record.until_step)

    def _running(self) -> list[TrialRecord]:
        return [record for record in self._store.trials.values() if record.slot is not None]

    def _is_held(self, trial: int, attempt: int) -> bool:
        record = self._store.trials[trial]
        return record.attempt == attempt and record.slot is not None

    def _is_over(self) -> bool:
        return not self._running() and not self._searcher.next(self._store.rows())

    def _params(self, trial: int) -> Params:
        return self._searcher.params(self._settings.space, self._settings.seed, trial)

    def _suggestion(self, trial: int) -> tuple[Params, Sampled | None]:
        """Return the parameters of a new trial, and what a sampler that learns keeps with it."""
        if self._searcher.sampler == "random":
            return self._params(trial), None
        settings, rows = self._settings, self._store.rows()
        return suggest(self._searcher, settings.space, settings.seed, trial, rows, self._store.sampled())

    def _has_others(self, trial: int) -> bool:
        """Return whether another trial may have other parameters; else one that is invalid would follow the other."""
        return any(self._params(trial) != self._params(trial + n * self._searcher.size) for n in range(1, 17))

    def _slot_died(self, record: TrialRecord) -> None:
        attempt = record.attempt
        self._store.slot_died(record)
        if record.deaths > self._settings.max_restarts:
            why = f"its slot died {record.deaths} times in a row without a new row (attempts up to {attempt})"
            record.slot = -1
            self._store.end(record.id, attempt, "failed", why)

    def _delete_checkpoints(self) -> None:
        keep, sign = self._settings.keep, 1.0 if self._searcher.mode == "min" else -1.0
        latest = keep.trial_latest if self._is_over() else max(1, keep.trial_latest)
        found = self._store.checkpoints()
        ranked = sorted((sign * value, trial, step, path) for path, trial, step, value in found if value is not None)
        kept = {path for *_, path in ranked[: keep.experiment_best]}
        newest_first, best_first = defaultdict[int, list[str]](list), defaultdict[int, list[str]](list)  # by trial
        for path, trial, _, _ in reversed(found):
            newest_first[trial].append(path)
        for _, trial, _, path in ranked:
            best_first[trial].append(path)
        for trial, paths in newest_first.items():
            kept |= {*paths[:latest], *best_first[trial][: keep.trial_best]}
        self._kept = kept
        for path, *_ in found:
            if path not in kept:
                self._store.forget_checkpoint(path)
                self._deleting.submit(shutil.rmtree, path, True)

    def _flush(self, checkpoint: str) -> None:
        """Flush a checkpoint to the disk, unless it was deleted meanwhile. Trials do not wait for this."""
        if checkpoint in self._kept:
            with contextlib.suppress(FileNotFoundError):
                folders.flush(Path(checkpoint))


def _lease_of(record: TrialRecord) -> Lease:
    checkpoint = record.checkpoint[0] if record.checkpoint else None
    return Lease(record.id, record.params, record.attempt, record.step, record.until_step, checkpoint)
