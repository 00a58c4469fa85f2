"""Save and restore the parts of a program together."""

import contextlib
import logging
import shutil
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from lp_pipe.checkpoint import folder as folders
from lp_pipe.checkpoint.folder import Checkpoint, Ranking, checkpoints_in, open_checkpoint
from lp_pipe.checkpoint.host_visibility import check_is_shared
from lp_pipe.checkpoint.parts import Recoverable, SavesItself, Stateful, Trainable, saves_itself
from lp_pipe.checkpoint.poison import PoisonSteps, TryAgain
from lp_pipe.checkpoint.recovery import LostParts, StatesInMemory, check_can_mirror
from lp_pipe.context import context, current_context, stop_event
from lp_pipe.errors import CheckpointError, StateLost, Unavailable, add_note
from lp_pipe.telemetry.metrics import as_numbers
from lp_pipe.telemetry.run_folder import RunFolder

_log = logging.getLogger(__name__)

_Write = Future[dict[str, str]] | Future[list[str]] | Future[None]


class Checkpoints:
    """The checkpoints of a run, in `folder`.

        checkpoints = Checkpoints({"pipeline": pipeline, "replay": replay, "trainer": self})
        checkpoints.restore()          # after `lp_pipe launch … --resume=RUN`: continue from the newest undamaged one
        ...
        checkpoints.save(step)         # between two steps: nothing else may change a part meanwhile

    Create and use it in the node that drives the others. Then a checkpoint is one consistent cut: it contains all that
    happened before the call of `save`, in every part, and nothing that happened after it.

    A part that is a client of another node loses its state when that node is restarted. Once this object exists, a
    restarted node answers every call, of any caller, with StateLost until its state is restored.

    folder: default: `checkpoints` in the run's folder.
    keep: how many of the newest checkpoints are kept; older ones are deleted.
    keep_best: how many of the best checkpoints are kept besides, by the metric `monitor` that was given to `save` or
        `record`; of equal ones the oldest. mode: "min" or "max", which value is the best. A checkpoint without that
        metric, or with NaN, is never among the best.
    may_fail: log a warning instead of raising when a checkpoint cannot be written (the disk is full). A folder that the
        hosts do not share is always an error.
    """

    def __init__(
        self,
        parts: Mapping[str, Stateful | SavesItself],
        folder: Path | str | None = None,
        *,
        keep: int = 3,
        keep_best: int = 0,
        monitor: str | None = None,
        mode: str = "min",
        may_fail: bool = False,
    ) -> None:
        """Raises:
        ValueError: `keep` is below 1, or `keep_best`, `monitor` or `mode` is invalid.
        RuntimeError: called outside of a node without `folder`: there is no run's folder.
        """
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got keep={keep}")
        self._ranking = Ranking(keep_best, monitor, mode)
        self._recorded: dict[str, float] = {}  # metrics for the next checkpoint
        self._parts: dict[str, Any] = dict(parts)
        self._names = folders.part_names(self._parts)
        self.folder = Path(folder) if folder is not None else RunFolder(Path(context().run_dir)).checkpoints
        self._keep = keep
        self._may_fail = may_fail
        self._in_memory = StatesInMemory(self._parts)
        self._lost_parts = LostParts(self._parts)
        self._lost_parts.watch()
        self._writing: threading.Thread | None = None
        self._error: Exception | None = None
        self._node = current_context()
        if self._node is not None:  # else a program that resumes in this process could find a half-written checkpoint
            self._node.exit_stack.callback(self._join)

    def save(self, step: int, *, wait: bool = True, metrics: Mapping[str, Any] | None = None) -> None:
        """Save all parts as they are now.

        metrics: numbers that are kept with the checkpoint, such as {"validation_loss": 0.5}; see `record`.
        wait: return once the checkpoint is on the disk. Otherwise return once every part has been copied in memory:
            training continues during the write, and `wait_until_written` or the next `save` raises its error.

        Raises:
            CheckpointError: this checkpoint or the one before cannot be written (unless `may_fail`); older ones stay.
            ValueError: there are metrics, but not the one that `monitor` names.
        """
        self.record(metrics or {})
        metrics, self._recorded = self._recorded, {}
        self._ranking.check(metrics)
        self.wait_until_written()
        try:
            aside = folders.begin(self.folder, step)
            writes = self._begin_parts(aside)
        except OSError as error:
            return self._failed(step, error)
        writing = threading.Thread(target=self._write, args=(step, aside, writes, metrics), name="checkpoint")
        writing.start()  # before the assignment: it raises if the system has no more threads
        self._writing = writing
        if wait:
            self.wait_until_written()

    def record(self, metrics: Mapping[str, Any]) -> None:
        """Keep numbers with the next checkpoint, as `save(metrics=…)` does. For the body of a loop over `steps`.

        The numbers describe the model as it is now: if `steps` saves nothing after this step, it drops them.

        Raises:
            TypeError: a value is no number, or a name no str.
        """
        self._recorded |= as_numbers(metrics, None)[0]

    def best(self) -> Checkpoint | None:
        """Return the undamaged checkpoint with the best `monitor`; None if none has that metric.

        It has `step` and `metrics`; a pipeline that is the part "pipeline" loads `best().path / "pipeline"`.
        Waits for a checkpoint that is being written.

        Raises:
            ValueError: no `monitor` was given.
        """
        self._join()
        return next((found for found in self._ranking.best_first(self.folder) if not found.damage()), None)

    def wait_until_written(self) -> None:
        """Wait until no checkpoint is being written.

        Raises:
            CheckpointError: the last one could not be written (unless `may_fail`).
        """
        self._join()
        self._writing = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def restore(self) -> Checkpoint | None:
        """Load the newest undamaged checkpoint into all parts and return it; None if there is no checkpoint.

        Skips damaged checkpoints, with a warning that names their files. Waits for one that is being written.

        Raises:
            CheckpointError: all checkpoints are damaged, or the newest undamaged one has other parts.
        """
        self._join()
        folders.restore_replaced(self.folder)
        paths = checkpoints_in(self.folder)
        damaged = []
        for path in reversed(paths):
            try:
                found = open_checkpoint(path)
                wrong = found.damage()
            except CheckpointError as error:
                wrong = [str(error)]
            if not wrong:
                self._load(found)
                return found
            damaged.append(f"{path}: {'; '.join(wrong)}")
            _log.warning("skipping a damaged checkpoint, %s", damaged[-1])
        if damaged:
            raise CheckpointError("all checkpoints are damaged: " + "\n".join(damaged))
        return None

    def steps(
        self,
        pipeline: Trainable,
        total: int,
        *,
        save_every: int,
        mirror_every: int | None = None,
        tries: int = 3,
        on_poison: str = "stop",
    ) -> Iterator[Any]:
        """Yield the results of `pipeline.steps` until `total` are done; save a checkpoint every `save_every` steps.

        Starts at the newest checkpoint. When one of the program's nodes dies and is restarted (`on_failure="restart"`),
        all parts go back to the newest checkpoint, and the steps since then are repeated, with the same results.
        Without restarts, or after too many, the program ends as usual.

        A batch that kills a stage would do so after every restart. Once its step has failed `tries` times in a row, a
        PoisonBatchError is raised. With on_poison="skip" the step is skipped instead, without an update, and
        `StepResult.why_skipped` is set; this then also holds for a step that raises, which otherwise ends the loop at
        once. Each try costs a restart: `max_restarts` must allow for them.

        pipeline: one of the parts. There are fewer results if the feeder has no more batches.
        mirror_every: after this many steps all parts are also kept in memory: each stage worker's state by the next
            worker (PipelineClient.mirror), other parts in this node. The death of a stage worker then costs at most
            that many steps. If two neighbouring workers die at once, or the newest checkpoint is newer than the states
            in memory, all parts go back to the checkpoint.

        Raises:
            PoisonBatchError: a step has failed `tries` times.
            CheckpointError: as `save` and `restore`.
            ValueError: mirror_every, but a part that writes itself cannot keep its state in memory.
            Unavailable: a node is gone, and the program is ending.
        """
        if mirror_every is not None:
            check_can_mirror(mirror_every, self._parts)
        poison = PoisonSteps(tries, on_poison, getattr(pipeline, "steps_ahead", 0))
        self.begin(pipeline)
        while True:
            with self.recovering(pipeline):
                for result in poison.results(pipeline, pipeline.current_step(), total):
                    poison.check(result.step + 1, self._lost_parts.loss())  # before the caller uses the lost part
                    self._recorded = {}
                    yield result
                    poison.check(result.step + 1, self._lost_parts.loss())
                    # Save after a skipped step: going back to before it would try its batch again.
                    is_left_out = result.step in poison
                    with poison.ahead_of(result.step):
                        if mirror_every is not None and (is_left_out or (result.step + 1) % mirror_every == 0):
                            self._in_memory.keep(pipeline.current_step())
                        if is_left_out or (result.step + 1) % save_every == 0:
                            self.save(pipeline.current_step(), wait=False)
                self.wait_until_written()
                return

    def begin(self, pipeline: Recoverable) -> Checkpoint | None:
        """Restore the newest checkpoint; if there is none, save the initial state, so that there is one to go back to.

        Waits for nodes that die meanwhile, as `recovering` does.

        Raises:
            CheckpointError: as `save` and `restore`.
            Unavailable: a node is gone, and the program is ending.
        """
        while True:
            with self.recovering(pipeline):
                found = self.restore()
                if found is None:
                    self._begin_as_built(pipeline)
                    self.save(pipeline.current_step())
                return found

    @contextlib.contextmanager
    def recovering(self, pipeline: Recoverable) -> Iterator[None]:
        """Recover from the death of a node in the body: for a training loop of your own, when `steps` does not fit.

        The death of one of the program's nodes ends the body without an error. Then all parts are back at the newest
        checkpoint, and `pipeline.current_step()` is where to continue. Call `begin` first, and `save` in the body.

        Raises:
            CheckpointError: as `save` and `restore`.
            Unavailable: a node is gone, and the program is ending.
        """
        if (loss := self._lost_parts.loss()) is not None:
            self._recover(pipeline, loss)
        try:
            yield
        except (Unavailable, CheckpointError, TryAgain) as error:
            self._recover(pipeline, error)

    def _recover(self, pipeline: Recoverable, error: Exception) -> None:
        if isinstance(error, TryAgain):
            self._end_writing()  # else a late write could replace the checkpoint that is being read
            with contextlib.suppress(Unavailable):
                self._go_back(pipeline)
                return
        elif stop_event().is_set() or not isinstance(error.__cause__ or error, Unavailable):
            raise error
        _log.warning("going back: %s", str(error).splitlines()[0])
        self._end_writing()
        while True:
            try:
                pipeline.recover()
                self._go_back(pipeline)
                return
            except Unavailable:  # another node has died meanwhile
                if stop_event().is_set():
                    raise

    def _end_writing(self) -> None:
        """Wait for a running write and log its error: a dead stage cannot write, and an older checkpoint is used."""
        try:
            self.wait_until_written()
        except CheckpointError as error:
            _log.warning("%s", str(error).partition("\n")[0])

    def _go_back(self, pipeline: Recoverable) -> None:
        step = self._in_memory.go_back(least=folders.newest_step(self.folder))
        if step is not None:
            self._goes_on_from(step)
        elif self.restore() is None:
            self._begin_as_built(pipeline)

    def _begin_as_built(self, pipeline: Recoverable) -> None:
        """Start without a checkpoint: lost parts serve their initial state, unless something was trained already."""
        if pipeline.current_step() == 0:
            self._lost_parts.begin_as_built()
            self._lost_parts.watch()

    def _goes_on_from(self, step: int) -> None:
        """Watch the parts again, which are now restored to `step`, and record that in the run's events and metrics."""
        self._lost_parts.watch()
        self._tell("resumed", step=step)

    def _join(self) -> None:
        if self._writing is not None:
            self._writing.join()

    def _begin_parts(self, aside: Path) -> "dict[str, _Write]":
        """Copy or write every part's state; return the running writes of parts that save themselves."""
        writes: dict[str, _Write] = {}
        for name, part in self._parts.items():
            try:
                if saves_itself(part):
                    writes[name] = part.save_async(aside / self._names[name])
                else:
                    folders.write_state(aside, self._names[name], part.state_dict())
            except Exception as error:
                for write in writes.values():
                    write.exception()  # wait: it must not write after the folder is deleted
                shutil.rmtree(aside, ignore_errors=True)  # frees a full disk
                add_note(error, f"part {name!r} of a checkpoint in {self.folder}")
                raise
        return writes

    def _write(self, step: int, aside: Path, writes: "dict[str, _Write]", metrics: Mapping[str, float]) -> None:
        try:
            written = {name: _files_of(self._names[name], writes.get(name)) for name in self._parts}
            check_is_shared(aside, written)
            saved = folders.finish(aside, step, written, metrics, digests=self._digests_of(writes))
            self._tell("checkpoint", step=saved.step, path=str(saved.path))
            folders.prune(self.folder, step, self._keep, self._ranking.kept(self.folder))
        except Exception as error:  # parts are user code; the thread that waits for this write raises the error
            shutil.rmtree(aside, ignore_errors=True)
            try:
                self._failed(step, error)
            except CheckpointError as failure:
                self._error = failure

    def _digests_of(self, writes: "dict[str, _Write]") -> dict[str, str]:
        """Return the sha256 of those files of which the parts know it."""
        results = {self._names[name]: write.result() for name, write in writes.items()}
        known = {name: result for name, result in results.items() if isinstance(result, dict)}
        return {f"{name}/{file}": sha256 for name, files in known.items() for file, sha256 in files.items()}

    def _tell(self, event: str, **facts: Any) -> None:
        """Add an event to the run's event log, if this is part of a run."""
        if self._node is not None:
            with contextlib.suppress(Unavailable):  # the launcher is gone; what was saved or restored is valid
                self._node.services.log_event(event, **facts)

    def _failed(self, step: int, error: Exception) -> None:
        what = str(error).partition("\n")[0]  # an error of a stage has its traceback in the other lines
        message = f"the checkpoint of step {step} could not be written to {self.folder}: {what}"
        is_final = isinstance(error, CheckpointError) and not error.may_pass  # would fail again: see host_visibility.py
        if not self._may_fail or is_final or isinstance(error, StateLost):
            raise CheckpointError(f"{message}; older checkpoints are unchanged") from error
        _log.warning("%s; training continues without it", message)

    def _load(self, checkpoint: Checkpoint) -> None:
        if set(checkpoint.parts) != set(self._parts):
            raise CheckpointError(
                f"{checkpoint.path} has the parts {', '.join(sorted(checkpoint.parts))}, but this program has "
                f"{', '.join(sorted(self._parts))}: resume it with the program that saved it"
            )
        self._in_memory.forget()
        # Pipelines first: `load` ends a step that a dead trainer has left running. That step must not get batches from
        # a feeder that was already restored.
        for name, part in self._parts.items():
            if saves_itself(part):
                part.load(checkpoint.path / self._names[name])
        for name, part in self._parts.items():
            if not saves_itself(part):
                part.load_state_dict(folders.read_state(checkpoint.path, self._names[name]))
        self._goes_on_from(checkpoint.step)


def _files_of(name: str, write: "_Write | None") -> list[str]:
    """Wait for a part's write and return the files that it wrote, in the order in which another host may see them."""
    if write is None:
        return [folders.state_file(name)]
    return [name, *(f"{name}/{file}" for file in write.result() or ())]
