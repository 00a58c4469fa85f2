"""The rules that refuse improbable misuse: one table that says when each is checked, and the hook that checks steps.

Rules of "build" look at the model in `add_pipeline`, and those of "split" at the module in `pp.split`. Rules of
"first_step" watch a worker's first step, its first evaluation, and the first ones after a change of its modules; with
`add_pipeline(checks="always")` they watch all. Rules of "always" cost next to nothing where they are. What restores or
separates state is no rule, and always on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Literal, NamedTuple

from torch import nn

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.compute.split_backward import SplitBackward
from lp_pipe.pipeline.compute.stage import EVALUATION, Stage
from lp_pipe.pipeline.compute.untrained_parameters import refuse_detached, refuse_untrained
from lp_pipe.pipeline.config import PipelineConfig
from lp_pipe.pipeline.layers import graph_memory, model_checks, repeatability
from lp_pipe.pipeline.layers.model import Model
from lp_pipe.pipeline.schedule import Action
from lp_pipe.pipeline.worker.execution import Hook, Operation, RunAction
from lp_pipe.pipeline.worker.late_writes import LateWrites
from lp_pipe.training.write_tracker import WriteTracker

CHECKS = ("first_step", "always")
_Watch = Callable[[RunAction, Action, Operation], None]
_OLDER_WEIGHTS = (
    "an asynchronous schedule keeps older weights of it: let the layer register it as a buffer, if no optimizer is to "
    "change it (an average of other weights), or take a synchronous schedule"
)


def check_model(model: Model, sources: Sequence[Any]) -> None:
    """Check the rules of "build".

    Raises:
        PipelineError: the model has parts that stages cannot copy or train.
    """
    for rule in RULES:
        if rule.when == "build":
            rule.check(model, sources)


class StepRules(Hook):
    """The rules of "first_step", for the worker that has these stages."""

    def __init__(self, config: PipelineConfig, stages: Mapping[int, Stage], replicas: int) -> None:
        self._are_always_on = config.checks == "always"
        # A step of one micro-batch does not show what overlaps with the next one.
        self._wanted = min(2, max(1, config.microbatches // replicas))
        of_steps = [rule for rule in RULES if rule.when == "first_step"]
        self._watches = {
            trains: [rule.check(config, stages) for rule in of_steps if trains or rule.also_in_evaluation]
            for trains in (True, False)
        }
        self._seen: set[int] = set()  # micro-batches of the operation
        self._is_done = {True: False, False: False}  # by whether the operation trains
        self._trains = True

    def are_due(self, *, trains: bool) -> bool:
        """Return whether the next operation is to be watched."""
        return self._are_always_on or not self._is_done[trains]

    def note_change(self) -> None:
        """Note that a user's function has changed modules: the next step counts as the first one."""
        self._is_done = dict.fromkeys(self._is_done, False)

    @contextmanager
    def operation(self) -> Iterator[None]:
        self._seen = set()
        yield
        if len(self._seen) >= (self._wanted if self._trains else 1):
            self._is_done[self._trains] = True

    def around(self, run: RunAction, action: Action, operation: Operation) -> None:
        self._trains = operation.step != EVALUATION
        self._seen.add(action.microbatch)
        for watch in self._watches[self._trains]:
            run = _watched(watch, run)
        run(action, operation)


def _watched(watch: _Watch, run: RunAction) -> RunAction:
    return lambda action, operation: watch(run, action, operation)


def copied_parameters(config: PipelineConfig, stages: Mapping[int, Stage]) -> Iterator[tuple[str, nn.Parameter, str]]:
    """Yield the parameters that have copies elsewhere, with their names, and the error for a write to one.

    The copies, in replicas, in stages with the same tied one, or as older weights, stay equal or what they were only as
    long as nothing but the optimizer writes to them.
    """
    for index, stage in stages.items():
        if config.is_asynchronous and config.timings[index].delay:
            yield from ((*named, _OLDER_WEIGHTS) for named in stage.named_parameters())
        if config.replicas[config.placement[index]] > 1:
            why = "the stage's other replicas have it, too: give the stage one"
            yield from ((*named, why) for named in stage.named_parameters())
    for edge in config.channels.edges:
        for end in {edge.sender, edge.receiver} & stages.keys() if edge.kind == "tied weights" else ():
            why = f"stages {edge.sender} and {edge.receiver} have it both: leave its layers in one"
            for name, parameter in zip(edge.names, stages[end].tied_parameters(edge.names), strict=True):
                yield name, parameter, why


def _time_first(model: Model, sources: Sequence[Any]) -> None:
    if model.batch_dims is None:
        model_checks.refuse_time_first(sources)


def _untrained(config: PipelineConfig, stages: Mapping[int, Stage]) -> _Watch:
    def watch(run: RunAction, action: Action, operation: Operation) -> None:
        run(action, operation)
        if action.op != "F":
            return
        stash = stages[action.stage].activation_stash[operation.first_number + action.microbatch]
        of_last = operation.losses if action.stage == config.last_stage else {}
        loss, _ = of_last.get(action.microbatch, (None, None))
        if loss is not None:
            refuse_detached(loss, has_output_gradient=bool(stash.outputs))
        outputs = [*stash.outputs, *chain.from_iterable(stash.stashed.values())]
        refuse_untrained(stages.values(), outputs, loss, is_asynchronous=config.is_asynchronous)

    return watch


def _late_writes(config: PipelineConfig, stages: Mapping[int, Stage]) -> _Watch:
    checks = {index: LateWrites(stage, is_asynchronous=config.is_asynchronous) for index, stage in stages.items()}

    return lambda run, action, operation: checks[action.stage].around(run, action, operation)


def _recomputed_writers(config: PipelineConfig, stages: Mapping[int, Stage]) -> _Watch:
    def watch(run: RunAction, action: Action, operation: Operation) -> None:
        segments = stages[action.stage].recomputed if action.op == "F" else ()
        before = [segment.states_of_parameters() for segment in segments]
        run(action, operation)
        for segment, states in zip(segments, before, strict=True):
            if segment.states_of_parameters() != states:
                raise PipelineError(
                    f"{segment.name}: cannot be recomputed, because a forward writes to a parameter, and a second run "
                    "would do so again: leave these layers out of recompute"
                )

    return watch


def _shared_memory(config: PipelineConfig, stages: Mapping[int, Stage]) -> _Watch:
    def watch(run: RunAction, action: Action, operation: Operation) -> None:
        stage = stages[action.stage]
        stage.marks_shared_memory = True
        try:
            run(action, operation)
        finally:
            stage.marks_shared_memory = False

    return watch


def _writers_of_older_weights(config: PipelineConfig, stages: Mapping[int, Stage]) -> _Watch:
    copied = list(copied_parameters(config, stages)) if config.is_asynchronous else []
    named = {name: parameter for name, parameter, _ in copied}
    modules = [module for stage in stages.values() for module in stage.modules()]
    tracker = WriteTracker(
        modules, named.items(), refused={name: why for name, _, why in reversed(copied)}, can_undo=False
    )

    def watch(run: RunAction, action: Action, operation: Operation) -> None:
        with tracker.tracked():
            run(action, operation)

    return watch


class Rule(NamedTuple):
    """A kind of misuse that is refused.

    also_in_evaluation: whether a rule of "first_step" watches the first evaluation, too.
    check: of "build" a function of the model and its layers' sources; of "first_step" a function of the worker's
        configuration and stages that returns a function to run actions through; of others where the check is.
    """

    refuses: str
    when: Literal["build", "split", "first_step", "always"]
    check: Callable[..., Any]
    also_in_evaluation: bool = False


RULES = (
    Rule("parameters without a shape", "build", model_checks.refuse_lazy_layers),
    Rule("parameters with hooks, which copies would not have", "build", model_checks.refuse_hooks),
    Rule("scripted modules, which cannot be copied", "build", model_checks.refuse_scripted),
    Rule("a loss with parameters, which no stage would train", "build", model_checks.refuse_trained_loss),
    Rule("modules that would be cut in time", "build", _time_first),
    Rule("draws, counts and new buffers that a graph would repeat", "split", repeatability.unrepeatable_refused),
    Rule("a forward that depends on earlier calls", "split", repeatability.is_same_again),
    Rule("writes to values that share memory behind a cut", "split", graph_memory.refuse_shared_memory),
    Rule("a loss without a gradient, and parameters that no stage trains", "first_step", _untrained),
    Rule("backwards that write what later forwards have used", "first_step", _late_writes),
    Rule("recomputed layers that write to parameters", "first_step", _recomputed_writers),
    Rule("writes to received tensors that share memory", "first_step", _shared_memory, also_in_evaluation=True),
    Rule("writes to parameters of which older weights are kept", "first_step", _writers_of_older_weights),
    Rule("writes to parameters and buffers with copies elsewhere", "always", WriteTracker.end),
    Rule("writes to gradients between the parts of a split backward", "always", SplitBackward.accumulate),
)
