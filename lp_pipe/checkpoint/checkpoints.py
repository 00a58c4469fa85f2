"""Saving and restoring the parts of a program together."""

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
from lp_pipe.checkpoint.parts import SavesItself, Stateful, Trainable, saves_itself
from lp_pipe.checkpoint.poison import PoisonSteps, TryAgain
from lp_pipe.checkpoint.recovery import LostParts, StatesInMemory, check_can_mirror
from lp_pipe.checkpoint.shared_folder import check_is_shared
from lp_pipe.context import context, current_context, stop_event
from lp_pipe.errors import CheckpointError, StateLost, Unavailable, add_note
from lp_pipe.telemetry.events import EventLog
from lp_pipe.telemetry.metrics import as_numbers
from lp_pipe.telemetry.run_folder import RunFolder

_log = logging.getLogger(__name__)

_Write = Future[list[str]] | Future[None]


class Checkpoints:
    """The checkpoints of a run, in `folder`.

        checkpoints = Checkpoints({"pipeline": pipeline, "replay": replay, "trainer": self})
        checkpoints.restore()          # after `lp_pipe launch … --resume=RUN`: go on from the newest good one
        ...
        checkpoints.save(step)         # between two steps: nothing else may change a part meanwhile

    Made and used in the node that drives the others, so that a checkpoint is one consistent cut: whatever happens
    before the call of `save` is in it on every part, whatever comes after it on none.

    A part that is a client of another node has lost its state when that node is started again. From now on the node
    then answers each call with a StateLost, whichever node calls, until it was restored.

    folder: default: `checkpoints` in the run's folder. keep: how many of the newest; older ones are deleted.
    keep_best: how many of the best are kept besides, by the metric `monitor` that `save` or `record` was given; of
        equal ones the oldest. mode: "min" or "max": which value is the best. One without that metric, or with NaN, is
        never among them.
    may_fail: a checkpoint that cannot be written (the disk is full) is a warning in the log, not an error. That hosts
        do not share the folder is always one.
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
        ValueError: `keep` is below 1, or `keep_best`, `monitor` or `mode` makes no sense.
        RuntimeError: outside of a node there is no run's folder.
        """
        if keep < 1:
            raise ValueError(f"keep={keep}: keep at least 1 checkpoint")
        self._ranking = Ranking(keep_best, monitor, mode)
        self._recorded: dict[str, float] = {}  # of the next checkpoint
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
        if self._node is not None:  # however it ends: a resumed program in the same process would find half of it
            self._node.exit_stack.callback(self._join)

    def save(self, step: int, *, wait: bool = True, metrics: Mapping[str, Any] | None = None) -> None:
        """Save all parts as they are now.

        metrics: numbers that are kept with the checkpoint, such as {"validation_loss": 0.5}; see `record`.
        wait: until it is on the disk. Else only until every part has been copied in memory: training goes on while it
        is written, and `wait_until_written` or the next `save` says whether that went well.

        Raises:
            CheckpointError: this one or the one before cannot be written (unless `may_fail`); older ones stay good.
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
        writing.start()  # before it counts: the system may have no more
        self._writing = writing
        if wait:
            self.wait_until_written()

    def record(self, metrics: Mapping[str, Any]) -> None:
        """Keep numbers with the next checkpoint, as `save(metrics=…)` does: for the body of a loop over `steps`.

        They belong to the model as it is now: `steps` forgets them where it saves nothing after this step.

        Raises:
            TypeError: a value is no number, a name no text.
        """
        self._recorded |= as_numbers(metrics, None)[0]

    def best(self) -> Checkpoint | None:
        """Return the best checkpoint without damage, by its metric `monitor`; None when none has it.

        `best.step`, `best.metrics`; a pipeline that is the part "pipeline" loads `best.path / "pipeline"`. One that is
        being written is waited for.

        Raises:
            ValueError: there is no `monitor`.
        """
        self._join()
        return next((found for found in self._ranking.best_first(self.folder) if not found.damage()), None)

    def wait_until_written(self) -> None:
        """Until no checkpoint is being written.

        Raises:
            CheckpointError: the last one cannot be written (unless `may_fail`).
        """
        self._join()
        self._writing = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def restore(self) -> Checkpoint | None:
        """Bring all parts to the newest checkpoint without damage; None when there is none at all.

        A damaged one is left out, with a warning that names its files. One that is being written is waited for.

        Raises:
            CheckpointError: all are damaged, or it has other parts.
        """
        self._join()
        folders.put_back(self.folder)
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
            _log.warning("checkpoint %s is damaged and left out", damaged[-1])
        if damaged:
            raise CheckpointError("no checkpoint is without damage: " + "\n".join(damaged))
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
        """The results of `pipeline.steps` until `total` are done, with a checkpoint after every `save_every` of them.

        Begins where the newest checkpoint is. When a node that takes part dies and is restarted in its place
        (`on_failure="restart"`), all parts go back to the newest checkpoint, and the steps since then come again, with
        the same results. Without restarts, or after too many, the program ends as usual.

        A step whose batch kills a stage would do so after every restart. Once it has failed `tries` times in a row,
        that is a PoisonBatchError, or with on_poison="skip" it is left out, as by a loop that goes on without its
        update: `StepResult.why_skipped` says so. Then this is also for a step that raises, which else ends the loop at
        once. Each try costs a restart: `max_restarts` must allow for them.

        pipeline: one of the parts. Fewer results come when the feeder has no more.
        mirror_every: steps after which all parts are kept in memory as well: of a pipeline each stage worker's state by
            the next worker (PipelineClient.mirror), of other parts here. Then the death of a stage worker costs at most
            so many steps; where neighbours have died at a time, or it is newer, all go back to the newest checkpoint.

        Raises:
            PoisonBatchError: a step has failed too often.
            CheckpointError: as `save` and `restore`.
            ValueError: mirror_every with a part that writes itself, but cannot keep its state in memory.
            Unavailable: a node is gone, and the program is ending.
        """
        if mirror_every is not None:
            check_can_mirror(mirror_every, self._parts)
        poison = PoisonSteps(tries, on_poison, getattr(pipeline, "steps_ahead", 0))
        self.begin(pipeline)
        while True:
            with self.recovering(pipeline):
                for result in poison.results(pipeline, pipeline.current_step(), total):
                    poison.check(result.step + 1, self._lost_parts.loss())  # the caller may be about to use the part
                    self._recorded = {}
                    yield result
                    poison.check(result.step + 1, self._lost_parts.loss())
                    # Behind a step that is left out at once: to go back before it would be to try it again.
                    is_left_out = result.step in poison
                    with poison.ahead_of(result.step):
                        if mirror_every is not None and (is_left_out or (result.step + 1) % mirror_every == 0):
                            self._in_memory.keep(pipeline.current_step())
                        if is_left_out or (result.step + 1) % save_every == 0:
                            self.save(pipeline.current_step(), wait=False)
                self.wait_until_written()
                return

    def begin(self, pipeline: Trainable) -> Checkpoint | None:
        """As `restore`; where there is no checkpoint, save the beginning, so that there is one to go back to.

        What dies meanwhile is waited for, as in `recovering`.

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
    def recovering(self, pipeline: Trainable) -> Iterator[None]:
        """For a loop of your own, when `steps` does not fit: what becomes of it when a node dies and is restarted.

        The death of a node that takes part ends the body, which is no error: all parts are back at the newest
        checkpoint then, and `pipeline.current_step()` is where to go on. Comes after `begin`; save in the body.

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

    def _recover(self, pipeline: Trainable, error: Exception) -> None:
        if isinstance(error, TryAgain):
            self._end_writing()  # else it might take the place of the one that is being read
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
            except Unavailable:  # another one has died meanwhile
                if stop_event().is_set():
                    raise

    def _end_writing(self) -> None:
        """One that cannot be written is no reason not to go back to an older one: a dead stage could not write it."""
        try:
            self.wait_until_written()
        except CheckpointError as error:
            _log.warning("%s", str(error).partition("\n")[0])

    def _go_back(self, pipeline: Trainable) -> None:
        step = self._in_memory.go_back(least=folders.newest_step(self.folder))
        if step is not None:
            self._goes_on_from(step)
        elif self.restore() is None:
            self._begin_as_built(pipeline)

    def _begin_as_built(self, pipeline: Trainable) -> None:
        """Begin without a checkpoint: lost parts serve their initial state, unless something was trained already."""
        if pipeline.current_step() == 0:
            self._lost_parts.begin_as_built()
            self._lost_parts.watch()

    def _goes_on_from(self, step: int) -> None:
        """Watch the parts, which have been restored to this step, and mark the step in the run's metrics."""
        self._lost_parts.watch()
        self._tell("resumed", step=step)
        if self._node is not None:
            self._node.services.log_event("resumed", step)

    def _join(self) -> None:
        if self._writing is not None:
            self._writing.join()

    def _begin_parts(self, aside: Path) -> "dict[str, _Write]":
        """The writes of those that save themselves, which go on."""
        writes: dict[str, _Write] = {}
        for name, part in self._parts.items():
            try:
                if saves_itself(part):
                    writes[name] = part.save_async(aside / self._names[name])
                else:
                    folders.write_state(aside, self._names[name], part.state_dict())
            except Exception as error:
                for write in writes.values():
                    write.exception()  # else it might come after the folder's end
                shutil.rmtree(aside, ignore_errors=True)  # a full disk has its room back
                add_note(error, f"part {name!r} of a checkpoint in {self.folder}")
                raise
        return writes

    def _write(self, step: int, aside: Path, writes: "dict[str, _Write]", metrics: Mapping[str, float]) -> None:
        try:
            written = {name: _files_of(self._names[name], writes.get(name)) for name in self._parts}
            check_is_shared(aside, written)
            saved = folders.finish(aside, step, written, metrics)
            self._tell("checkpoint", step=saved.step, path=str(saved.path))
            folders.prune(self.folder, step, self._keep, self._ranking.kept(self.folder))
        except Exception as error:  # whatever a part raises; it belongs to who waits
            shutil.rmtree(aside, ignore_errors=True)
            try:
                self._failed(step, error)
            except CheckpointError as failure:
                self._error = failure

    def _tell(self, event: str, **facts: Any) -> None:
        """Add an event to the run's, if it keeps them and this host sees its folder."""
        if self._node is None:
            return
        path = RunFolder(Path(self._node.run_dir)).events
        if path.exists():
            events = EventLog(path)
            events.write(event, self._node.name, **facts)
            events.close()

    def _failed(self, step: int, error: Exception) -> None:
        what = str(error).partition("\n")[0]  # a stage's has its traceback behind that
        message = f"the checkpoint of step {step} could not be written to {self.folder}: {what}"
        is_final = isinstance(error, CheckpointError) and not error.may_pass  # no later one would be better (shared.py)
        if not self._may_fail or is_final or isinstance(error, StateLost):
            raise CheckpointError(f"{message}; older ones are as they were") from error
        _log.warning("%s; going on without it", message)

    def _load(self, checkpoint: Checkpoint) -> None:
        if set(checkpoint.parts) != set(self._parts):
            raise CheckpointError(
                f"{checkpoint.path} has the parts {', '.join(sorted(checkpoint.parts))}; this program has "
                f"{', '.join(sorted(self._parts))}"
            )
        self._in_memory.forget()
        # Pipelines first: `load` ends a step that a dead trainer has left under way. Its batches must not come from a
        # feeder that has gone back.
        for name, part in self._parts.items():
            if saves_itself(part):
                part.load(checkpoint.path / self._names[name])
        for name, part in self._parts.items():
            if not saves_itself(part):
                part.load_state_dict(folders.read_state(checkpoint.path, self._names[name]))
        self._goes_on_from(checkpoint.step)


def _files_of(name: str, write: "_Write | None") -> list[str]:
    """What it has written, in the order in which another host may see it. Waits for the end of the write."""
    if write is None:
        return [folders.state_file(name)]
    return [name, *(f"{name}/{file}" for file in write.result() or ())]
