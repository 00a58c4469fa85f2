"""A trial as its code sees it, and the slot that runs trials one after another."""

import contextlib
import re
import sys
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import lp_pipe as lp
from lp_pipe.checkpoint import folder as folders
from lp_pipe.checkpoint.parts import saves_itself
from lp_pipe.context import current_context
from lp_pipe.errors import CheckpointError
from lp_pipe.launch.processes import template
from lp_pipe.nodes import user_code
from lp_pipe.programs.waiting import until_the_stop
from lp_pipe.search.searcher_node import Directive, Lease
from lp_pipe.search.space import Params
from lp_pipe.search.store import StaleAttempt
from lp_pipe.telemetry.metrics import as_numbers

_STOP_PATIENCE_S = 0.2  # how much later a trial's program learns of a stop
_PAUSE_S = 0.05  # before a call that failed is sent again


class InvalidParams(Exception):
    """Raised by a trial that cannot try its parameters: it is not counted, and another one is drawn."""


class Trial:
    """A trial: its parameters, and its connection to the searcher.

    id: from 0. params: nested as the space. seed: of this trial, the same in every attempt. attempt: from 1, one more
    at each start. folder: for files of its own, the same in every attempt.
    """

    def __init__(self, lease: Lease, searcher: Any, folder: Path, seed: int) -> None:
        self.id = lease.trial
        self.params: Params = lease.params
        self.seed = seed
        self.attempt = lease.attempt
        self.folder = folder
        self._searcher = searcher
        self._step = lease.step  # the newest that is reported
        self._directive = Directive(True, lease.until_step)
        self._checkpoint = lease.checkpoint
        self._logged: dict[str, float] = {}
        self.printed: _PrintedLines | None = None

    @property
    def should_stop(self) -> bool:
        """Whether the searcher, a pause or the program's stop has said that this trial ends now."""
        has_failed = self.printed is not None and bool(self.printed.found)
        return has_failed or not self._directive.goes_on or lp.stop_event().is_set()

    def steps(self) -> Iterator[int]:
        """Yield the number of each step to run, from 1 or the one after the newest checkpoint on.

        Raises:
            RuntimeError: the body has reported nothing in its step.
        """
        while not self.should_stop:
            step = self._step + 1
            yield step
            if self._step < step and not lp.stop_event().is_set():
                raise RuntimeError(
                    f"trial {self.id} reported nothing in step {step}: call t.report({{…}}) in each step"
                )

    def report(self, metrics: Mapping[str, Any], checkpoint: Any = None, step: int | None = None) -> None:
        """Report a step's numbers, and the state after it: they are committed together, or neither is.

        checkpoint: a part, or a tuple of parts, as `lp_pipe.checkpoint` takes them. step: default: the next one. A step
            that was reported before is left as it is.

        Raises:
            StaleAttempt: the trial was given to another slot, because this one was taken for dead.
            CheckpointError: the checkpoint cannot be written.
            TypeError: a value is no number, or a name no str.
            ValueError: steps before this one were not reported.
        """
        step = self._step + 1 if step is None else step
        if step <= self._step:
            return
        values, _ = as_numbers({**self._logged, **metrics}, None)
        path = None if checkpoint is None else self._save(step, _parts_of(checkpoint))
        self._directive = ask(self._searcher, "report", self.id, self.attempt, step, dict(values), path)
        self._step, self._logged = step, {}
        self._checkpoint = path or self._checkpoint

    def log_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Add numbers to the next report; they decide nothing.

        Raises:
            TypeError: a value is no number, or a name no str.
        """
        self._logged |= as_numbers(metrics, None)[0]

    def restore(self, *parts: Any) -> bool:
        """Load the trial's newest checkpoint into the parts, in the order of `report`; return whether there is one.

        Raises:
            CheckpointError: the checkpoint is damaged, or has another number of parts.
        """
        if self._checkpoint is None:
            return False
        found = folders.open_checkpoint(Path(self._checkpoint))
        if wrong := found.damage():
            raise CheckpointError(f"trial {self.id}: the checkpoint {found.path} is damaged: {'; '.join(wrong)}")
        if len(parts) != len(found.parts):
            raise CheckpointError(
                f"trial {self.id}: restore got {len(parts)} parts, but {found.path} has {len(found.parts)}"
            )
        for name, part in zip(found.parts, parts, strict=True):
            if saves_itself(part):
                part.load(found.path / name)
            else:
                part.load_state_dict(folders.read_state(found.path, name))
        return True

    def learn(self) -> None:
        """Ask the searcher how far this trial is: another node may have reported for it."""
        self._step, self._directive = ask(self._searcher, "progress", self.id, self.attempt)

    def _save(self, step: int, parts: Mapping[str, Any]) -> str:
        """Write a checkpoint into this attempt's own folder: a stale attempt must not replace another's files."""
        try:
            aside = folders.begin(self.folder / "checkpoints" / f"attempt-{self.attempt}", step)
            written = {}
            for name, part in parts.items():
                if saves_itself(part):
                    part.save_async(aside / name).result()
                    written[name] = [name]
                else:
                    folders.write_state(aside, name, part.state_dict())
                    written[name] = [folders.state_file(name)]
            return str(folders.finish(aside, step, written, is_flushed=False).path)  # the searcher flushes it
        except OSError as error:
            raise CheckpointError(
                f"trial {self.id}: the checkpoint of step {step} cannot be written: {error}"
            ) from error


class ProgramTrial:
    """A trial that is a program, made by `make(t)`: one of its nodes reports for it."""

    def __init__(self, make: Callable[[Trial], lp.Program], mode: str) -> None:
        self._make = make
        self._mode = mode
        self.__module__ = make.__module__
        self.__code__ = getattr(make, "__code__", None)  # by which another experiment in the same folder is told

    def __call__(self, t: Trial) -> None:
        with lp.launch(self._make(t), self._mode, run_dir=t.folder / f"run-{t.attempt}", listed=False) as run:
            while not lp.stop_event().is_set():  # then the `with` stops the program, too
                try:
                    run.wait(_STOP_PATIENCE_S)
                    break
                except TimeoutError:
                    continue
        t.learn()


def program(make: Callable[[Trial], lp.Program], mode: str = "thread") -> ProgramTrial:
    """Return a trial for `ls.experiment` that launches `make(t)` in its slot.

    A node of that program takes `t` as an argument, trains over `t.steps()`, calls `t.report`, and stops the program.
    Its death is the slot's, and with it all nodes end.

    mode: "thread" starts at once; "process" starts the program's nodes as processes, below the slot's.
    """
    return ProgramTrial(make, mode)


class TrialSlot:
    """A node that runs trials one after another, each until the searcher says otherwise."""

    def __init__(
        self,
        searcher: Any,
        run_trial: Callable[[Trial], Any],
        folder: Path,
        seed: int,
        patterns: Sequence[re.Pattern[str]] = (),
    ) -> None:
        """patterns: of lines that fail a trial which prints them."""
        self._searcher = searcher
        self._run_trial = run_trial
        self._folder = folder
        self._seed = seed
        self._patterns = patterns
        self._index = lp.context().index
        if isinstance(run_trial, ProgramTrial):  # so that each trial but the first starts at once, with torch imported
            lp.context().exit_stack.enter_context(template.kept_warm())
        self._incarnation = uuid.uuid4().hex
        previous_end = lp.context().previous_end
        was_killed = not previous_end or previous_end.startswith(template.KILLED)
        ask(searcher, "register", self._index, self._incarnation, None if was_killed else previous_end)

    @until_the_stop()
    def run(self) -> None:
        while (lease := ask(self._searcher, "lease", self._index, self._incarnation)) is not None:
            folder = self._folder / "trials" / str(lease.trial)
            trial = Trial(lease, self._searcher, folder, self._seed + lease.trial)
            print(f"trial {trial.id}, attempt {trial.attempt}: after step {lease.step}, {trial.params}", flush=True)
            outcome, error = self._outcome(trial)
            if lp.stop_event().is_set():
                return  # the trial goes on from its newest checkpoint when the experiment is resumed
            if outcome:
                ask(self._searcher, "end", trial.id, trial.attempt, outcome, error)
            else:
                ask(self._searcher, "release", trial.id, trial.attempt)

    def _outcome(self, trial: Trial) -> tuple[str, str | None]:
        """Run the trial; return how its code ended: "" if it was told to."""
        printed = trial.printed = _PrintedLines(self._patterns)
        try:
            with printed.watched():
                user_code.call(self._run_trial, trial)
        except InvalidParams as error:
            return "invalid", str(error)
        except StaleAttempt:
            return "", None
        except (Exception, SystemExit):
            if lp.stop_event().is_set():
                return "", None
            return "failed", traceback.format_exc()
        if printed.found:
            return "failed", f"it printed {printed.found!r}, which on_log says is a failure"
        return ("" if trial.should_stop else "finished"), None


class _PrintedLines:
    """Looks for patterns in what this node prints. found: the first line with one; "" while there is none."""

    _watching: ClassVar[dict[str, "_PrintedLines"]] = {}  # by node: slots may be threads of one process
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, patterns: Sequence[re.Pattern[str]]) -> None:
        self._patterns = patterns
        self._node = lp.context().name
        self.found = ""

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Look at all that is printed in the body."""
        if not self._patterns:
            yield
            return
        with self._lock:
            if not self._watching:
                sys.stdout, sys.stderr = _Tee(sys.stdout), _Tee(sys.stderr)
            self._watching[self._node] = self
        try:
            yield
        finally:
            with self._lock:
                del self._watching[self._node]
                if not self._watching:
                    sys.stdout, sys.stderr = _without_tee(sys.stdout), _without_tee(sys.stderr)

    @classmethod
    def look(cls, text: str) -> None:
        node = current_context()
        watcher = cls._watching.get(node.name) if node is not None else None
        if watcher is not None and not watcher.found:
            lines = (line for line in text.splitlines() if any(one.search(line) for one in watcher._patterns))
            watcher.found = next(lines, "")


class _Tee:
    """A stream that shows its texts to the patterns. Everything else is the stream's own."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        _PrintedLines.look(text)
        return int(self.stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _without_tee(stream: Any) -> Any:
    return stream.stream if isinstance(stream, _Tee) else stream


def ask(searcher: Any, method: str, *arguments: Any) -> Any:
    """Call the searcher; if it dies, call its successor again: every call may arrive twice.

    Raises:
        Unavailable: the program stops.
    """
    while True:
        try:
            return getattr(searcher, method)(*arguments)
        except lp.Unavailable:
            if lp.wait_for_stop(_PAUSE_S):
                raise


def _parts_of(checkpoint: Any) -> dict[str, Any]:
    parts = checkpoint if isinstance(checkpoint, tuple) else (checkpoint,)
    return {f"part{index}": part for index, part in enumerate(parts)}
