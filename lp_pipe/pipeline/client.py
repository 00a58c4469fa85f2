"""The handle of a pipeline at setup, and its client, which looks like a model, at execution."""

import contextlib
import itertools
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from lp_pipe.address import Address
from lp_pipe.errors import EndOfData, PipelineError
from lp_pipe.handles import CourierHandle, Handle
from lp_pipe.pipeline.layers.model_names import formats_of, with_formats
from lp_pipe.pipeline.results import EvalResult, StageMemory, StepResult, StepTrace, Straggler
from lp_pipe.pipeline.schedule.numbers_given import as_int
from lp_pipe.rpc import CourierClient

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lp_pipe.pipeline.conductor.conductor import Conductor


T = TypeVar("T")

_WINDOW = 8  # batches; the same for any number of stages, because the mean's last bits depend on it
_NO_END = 1 << 30  # the number of steps still to come, if it is unknown
STEPS_AHEAD = 2  # of an asynchronous schedule: one step, and the first forwards of another


class PipelineClient:
    """A client that drives a pipeline; picklable, and usable from several nodes at once.

    Operations run in the order in which they arrive.

    Raises (every operation): RemoteError that is also the stage's own exception; its notes name the stage, the
    micro-batch and the step. Parameters and buffers are then as before the operation. (If an optimizer or scheduler
    itself has failed, only `load` makes the stages consistent again.)
    """

    def __init__(self, conductor: CourierClient, steps_ahead: int = 0) -> None:
        """steps_ahead: how many steps may be under way beside the awaited one."""
        self._client = conductor
        self._conductor = cast("Conductor", conductor)  # for mypy: each call is one of a method of that class
        self.steps_ahead = steps_ahead

    def step(
        self, batch: tuple[Any, Any] | None = None, *, outputs: bool = False, input_grad: bool = False
    ) -> StepResult:
        """Take one optimizer step, on `batch` = (input, target) or on the feeder's next one.

        outputs: return the model's output for the batch as `StepResult.outputs`.
        input_grad: return the gradient of the step's loss by the input as `StepResult.input_grad`, for what made the
            input: `hidden.backward(result.input_grad)` trains an encoder outside of the pipeline. Without it an input
            that requires a gradient is refused.

        Raises:
            EndOfData: the feeder has no more.
            PipelineError: a tensor of the batch requires a gradient that was not asked for; the schedule is
                asynchronous, and outputs or gradients are asked for.
        """
        more = {name: True for name, is_wanted in (("outputs", outputs), ("input_grad", input_grad)) if is_wanted}
        return self._conductor.step(batch, **more)

    def steps(self, n: int | None = None) -> Iterator[StepResult]:
        """Take steps on the feeder's batches until there were `n` more, or until the end of the data.

        With an asynchronous schedule the pipeline stays full: while you have one step's result, the next step is in
        progress. So what you do between two steps (evaluate, save) sees the weights after that next step, and if you
        leave the loop early, that step is done as well (`current_step`). At the end of the loop no step is in progress.
        The next loop first yields the result of a step that was done so, also after `load` of a checkpoint that was
        saved in the middle of a loop; `n` does not count it.

        Below 1 there are none: `steps(total - current_step())` is for a run that may have gone further already.

        Raises:
            PipelineError: `n` is no whole number.
        """
        return self._steps(None if n is None else _whole(n, "steps"))

    def _steps(self, n: int | None) -> Iterator[StepResult]:
        due = self._conductor.due() if self.steps_ahead else 0
        for more in itertools.count() if n is None else reversed(range(n + due)):
            try:
                yield self._conductor.step(None, _NO_END if n is None else more)
            except EndOfData:
                return

    def skip_step(self, why: str = "") -> StepResult:
        """Skip the next step: only its number and the learning-rate schedule advance, and its batch is not asked for.

        why: for the result and the log.
        """
        return self._conductor.skip_step(why)

    def scheduler_step(self, metric: float) -> None:
        """Step the scheduler with a number, on every stage: `scheduler.step(metric)` of a plain loop.

        It is for a model whose `lr_scheduler` makes one whose `step` needs an argument (ReduceLROnPlateau), which
        training steps leave alone. Call it where a plain loop would, as after `evaluate`. Parameters and random numbers
        stay as they are.

        Raises:
            PipelineError: there is no such scheduler, or the metric is no number.
        """
        self._conductor.scheduler_step(_number(metric))

    def learning_rates(self) -> dict[str, float]:
        """Return, by parameter name, the learning rate that the next step will use; in the order of `state_dict`.

        It has the parameters that are trained (a tied one has the first of its names) and whose optimizer group has an
        "lr". To log it: `lp.log_metrics({"lr": max(pipeline.learning_rates().values())}, pipeline.current_step())`.
        """
        return self._conductor.learning_rates()

    def evaluate(self, batches: Iterable[tuple[Any, Any]]) -> EvalResult:
        """Return the mean loss and the metrics in eval mode; no parameter, buffer or random state changes.

        batches: (input, target) pairs; a loader is read in windows of 8 batches, one window ahead, so it may be of any
            size. All are evaluated with the same weights: other operations, also of other clients, wait until the end.
            So the loader itself must not use this pipeline.
        """
        windows = _windows_of(iter(batches), _WINDOW)
        first, second = next(windows, []), next(windows, None)
        if second is None:
            result: EvalResult = self._conductor.evaluate(first)
            return result
        return self._evaluate_windows(itertools.chain([first, second], windows))

    def _evaluate_windows(self, windows: Iterator[list[tuple[Any, Any]]]) -> EvalResult:
        number = secrets.token_hex(8)
        with contextlib.closing(self._conductor.evaluation(number)) as evaluation:
            next(evaluation)
            done: Future[None] | None = None
            for window in windows:  # the stages work on the window before while this one is read
                if done is not None:
                    done.result()
                done = self._client.futures.evaluate_window(number, window)
            assert done is not None, "there are at least two windows"
            done.result()
            result: EvalResult = self._client.end_evaluation(number)
            return result

    def forward(self, input: Any) -> Any:
        """Return the model's output for one input, in eval mode; the input goes through as a whole.

        It equals to the bit that of `with torch.no_grad(): model.eval()(input)`, with as many torch threads. (With
        gradients on, torch may use other kernels: nn.TransformerEncoderLayer does, and has other last bits.)
        """
        return self._conductor.forward_many([input])[0]

    def forward_stream(self, inputs: Iterable[Any], *, in_flight: int | None = None) -> Iterator[Any]:
        """Yield the model's outputs in eval mode, in the order of the inputs.

        It works in windows: it takes up to `in_flight` inputs (default: twice the stage workers), runs them one behind
            the other through the stages, and takes no more before you have asked for all of their outputs. So an input
            may depend on any output that is `in_flight` or more before it, as when that many sequences generate their
            tokens in turn. The stages fill and drain in each window, and are free for other operations between two;
            nothing is left behind when you stop early.

        Raises:
            PipelineError: `in_flight` is below 1.
        """
        if in_flight is not None and in_flight < 1:
            raise PipelineError(f"in_flight={in_flight}: give a number of inputs, at least 1")
        return self._windows(iter(inputs), in_flight)

    def _windows(self, inputs: Iterator[Any], in_flight: int | None) -> Iterator[Any]:
        for window in _windows_of(inputs, in_flight or 2 * self._conductor.worker_count()):
            yield from self._conductor.forward_many(window)

    def apply(self, change: "Callable[[dict[str, nn.Module]], Any]") -> list[Any]:
        """Call `change(modules)` in every stage worker, between two steps; return its results, by worker.

        Use it to freeze layers, to set drop rates, to prune, to read norms. What it changes (numbers, strings and modes
        of modules, requires_grad, values of tensors) is in checkpoints, too, and every later step and evaluation sees
        it. It must do the same on all replicas.

        modules: the worker's own, by the names that their parameters begin with ("0", "0.attention"; "loss" is a loss
            that is a module), in train mode, under torch.no_grad().

        Raises:
            RemoteError: the function's own exception; if it had changed no tensor, all is as before.
            PipelineError: it has changed what a checkpoint could not keep, such as a submodule or a hook.
        """
        return self._conductor.apply(change)

    def state_dict(self) -> "dict[str, Tensor]":
        """Return the whole model under the names that nn.Sequential(*layers) gives; CPU tensors."""
        return self._conductor.state_dict()

    def load_state_dict(self, sd: "dict[str, Tensor]") -> None:
        """Replace parameters and buffers; optimizer state stays.

        Raises:
            PipelineError: names are missing or unknown, or it is no dict.
        """
        if not isinstance(sd, Mapping):
            raise PipelineError(
                f"load_state_dict() takes a dict of tensors by name, not {type(sd).__name__}: give what torch.load or "
                "safetensors.torch.load_file read from a file; give a checkpoint's folder to load()"
            )
        self._conductor.load_state_dict(with_formats(sd, formats_of(sd)))

    def save(self, path: str | Path) -> None:
        """Write a checkpoint: weights, optimizer, scheduler and step. Relative paths are the launcher's.

        Raises:
            CheckpointError: it cannot be written.
        """
        self._conductor.save(os.fspath(path))

    def save_async(self, path: str | Path) -> "Future[list[str]]":
        """Write a checkpoint as `save`, but return once every stage has copied its share in memory.

        So training pauses for the copy only. The future is done when the checkpoint is written; its result is the names
        of the files.
        """
        folder = os.fspath(path)
        copy = self._conductor.copy()
        return self._client.futures.write_copy(folder, copy)

    def load(self, path: str | Path, *, strict: bool = True) -> None:
        """Continue from a checkpoint that any number of stages wrote.

        Parameters that were frozen when it was written, and are trained now, begin with fresh optimizer state; the log
        names them.

        strict: its names and shapes must be those of this model. False: what is missing there, or has another shape (a
            new head), keeps its values and begins with fresh optimizer state; what this model lacks is left out.

        Raises:
            CheckpointError: it is incomplete or damaged.
            PipelineError: it is of another model.
        """
        self._conductor.load(os.fspath(path), strict)

    def recover(self) -> None:
        """Join the stage workers anew, after one of them has died and was restarted (`add_pipeline(on_failure=...)`).

        It waits until all are up. The healthy ones keep their processes. Then `load` brings all to the same step,
        unless nothing has been trained yet: `lp_pipe.checkpoint.Checkpoints.steps` and `.recovering` do both.

        Raises:
            Unavailable: one of them has died meanwhile; try again.
        """
        self._conductor.recover()

    def mirror(self) -> int:
        """Copy each stage worker's state in memory, for itself and for the next worker; return the step.

        Training pauses for the copy only. A worker keeps the last two states, its own and those of the one before it,
        so that after the death of one worker (or of several that are not neighbours) all can `go_back`.

        Raises:
            PipelineError: there is one worker only.
        """
        return self._conductor.mirror(self._client)

    def mirrored_steps(self) -> list[int]:
        """Return the numbers of finished steps to which `go_back` can go, in order; also after `recover`."""
        return self._conductor.mirrored_steps()

    def go_back(self, step: int) -> None:
        """Continue from the state after so many steps, of which every worker's state is in some memory.

        Raises:
            PipelineError: it is none of `mirrored_steps`; the pipeline is as before.
        """
        self._conductor.go_back(step, self._client)

    def export(self, path: str | Path) -> None:
        """Write the whole model as one .safetensors file, under the names of `state_dict`; relative paths as in `save`.

        Its metadata are {"format": "pt", "step": finished steps}. `safetensors.torch.load_file` reads it.

        Raises:
            PipelineError: there is no such folder, or safetensors is not installed.
        """
        self._conductor.export(os.fspath(path))

    def fingerprint(self) -> str:
        """Return the sha256 hex of all parameters and buffers in state_dict order (raw little-endian bytes)."""
        return self._conductor.fingerprint()

    def trace(self, n: int, batch: tuple[Any, Any] | None = None) -> list[StepTrace]:
        """Take `n` steps, and return the start and end of every action on every stage.

        Each step is on `batch`, or on the feeder's next one. With an asynchronous schedule the pipeline runs empty
        first, and with a given batch after each of the steps, too; in the middle of `steps()` the loop continues after
        the `n` steps.
        """
        return self._conductor.trace(_whole(n, "trace"), batch)

    def profile_memory(self, n: int = 1, batch: tuple[Any, Any] | None = None) -> list[StageMemory]:
        """Take `n` steps as `trace`, and return what each stage worker had in memory then; such steps take longer.

        With recompute, stages copy more than they need to in their first step: take one step before.
        """
        return self._conductor.profile_memory(_whole(n, "profile_memory"), batch)

    def stragglers(self) -> list[Straggler]:
        """Return the stage workers that take twice as long as expected, by the median of the last 15 steps.

        Expected is what the plan predicts; without a plan, what the other replicas of a stage take, and what it took in
        its first steps, if the other stages have not become slower, too. Each is in the log once, and in the metrics
        (`straggler/stages/1`: how many times slower).
        """
        return self._conductor.stragglers()

    def current_step(self) -> int:
        """Return how many steps are done, which is the index of the next one."""
        return self._conductor.current_step()

    def __repr__(self) -> str:
        return f"PipelineClient({self._client!r})"


def _windows_of(items: Iterator[T], size: int) -> Iterator[list[T]]:
    while window := list(itertools.islice(items, size)):
        yield window


def _whole(n: Any, method: str) -> int:
    number = as_int(n)
    if not isinstance(number, int) or isinstance(number, bool):
        raise PipelineError(f"{method}({n!r}): give a number of steps (int)")
    return number


def _number(metric: Any) -> float:
    try:
        return float(metric)
    except (TypeError, ValueError) as error:
        raise PipelineError(
            f"scheduler_step() takes a number, such as evaluate(batches).loss, not {type(metric).__name__}"
        ) from error


class PipelineHandle(Handle[PipelineClient]):
    """A handle to pass to the nodes that drive or evaluate the pipeline; they get a PipelineClient."""

    def __init__(
        self, conductor: CourierHandle, replicas_by_layer: Sequence[int], *, is_asynchronous: bool = False
    ) -> None:
        super().__init__()
        self.is_asynchronous = is_asynchronous
        self._conductor = conductor
        self.node_name = conductor.node_name
        self.replicas_by_layer = tuple(replicas_by_layer)

    @property
    def addresses(self) -> list[Address]:
        return self._conductor.addresses

    def dereference(self) -> PipelineClient:
        return PipelineClient(self._conductor.dereference(), STEPS_AHEAD if self.is_asynchronous else 0)
