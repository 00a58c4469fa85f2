"""The typed commands from the conductor of a pipeline to its stage workers, and their replies."""

import enum
import re
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from torch import Tensor, nn

from lp_pipe.pipeline.loss_metrics import Totals
from lp_pipe.pipeline.results import NonFinite, StageMemory
from lp_pipe.pipeline.saving.contents import Manifest, Saved
from lp_pipe.rpc import CourierClient
from lp_pipe.rpc.calls import Reader
from lp_pipe.rpc.futures import read_by
from lp_pipe.training.gradients import GradientNorm
from lp_pipe.training.share_file import Described, EntryKey, Written

Reply = TypeVar("Reply", covariant=True)

Handlers = Mapping[type["Command[Any]"], Callable[[Any], Any]]
Modules = dict[str, nn.Module]
Change = Callable[[Modules], Any]  # what a user gives to `PipelineClient.apply`
Settings = dict[str, dict[str, Any]]  # attributes of modules: by the module's name, by the attribute's


class Command(Generic[Reply]):
    """A request to a stage worker, which answers with a `Reply`. Each kind of request is a frozen dataclass.

    method: the remote method that takes the command. Its name is that of the class: ReadCheckpoint is sent to
        "read_checkpoint", which is what error messages and hang reports show.
    """

    method: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.method = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    @classmethod
    def by(cls, handle: Callable[[Self], Reply]) -> tuple[type[Self], Callable[[Self], Reply]]:
        """Return an item of `Handlers`: commands of this type are done by `handle`."""
        return cls, handle


class CommandService:
    """An object that a node serves, with one remote method for each type of command."""

    def __init__(self) -> None:
        self._handlers: dict[type[Command[Any]], Callable[[Any], Any]] = {}

    def _add_handlers(self, handlers: Handlers) -> None:
        """Let the service do these types of commands, each under its `Command.method`."""
        self._handlers.update(handlers)
        vars(self).update({kind.method: handle for kind, handle in handlers.items()})

    def do(self, command: Command[Reply]) -> Reply:
        """Do a command of the same process."""
        reply: Reply = self._handlers[type(command)](command)
        return reply


class WorkerClient:
    """A stage worker in another node."""

    def __init__(self, client: CourierClient) -> None:
        self._client = client

    def do(self, command: Command[Reply]) -> Reply:
        """Send a command, and wait for the reply."""
        reply: Reply = getattr(self._client, command.method)(command)
        return reply

    def start(self, command: Command[Reply], reader: Reader) -> "Future[Reply]":
        """Send a command. reader: the thread that reads the reply, see `read_by`."""
        reply: Future[Reply] = getattr(read_by(reader, self._client), command.method)(command)
        return reply


# Replies, and parts of commands


class WorkerInfo(NamedTuple):
    """The node and host of a stage worker. stages: the virtual stages that it has."""

    node: str
    host: str
    stages: tuple[int, ...]


class Wanted(NamedTuple):
    """The values that a step returns beside its loss and metrics."""

    outputs: bool = False
    input_grad: bool = False


NOTHING_MORE = Wanted()


class StepTask(NamedTuple):
    """The work of one step of training.

    given: the batch's input, for the first stage. target: for the last stage. None: the worker asks the feeder. The
        workers split them into micro-batches: memory that was split before it was sent would have other addresses.
    target_checksum: of the feeder's target, for workers that ask the feeder, too.
    wanted: what the first and the last stage report beside loss and metrics.
    """

    tag: int
    step: int
    microbatches: int
    given: tuple[Any] | None = None
    target: tuple[Any] | None = None
    target_checksum: int | None = None
    wanted: Wanted = NOTHING_MORE


@dataclass
class Report:
    """A worker's report after its share of an operation. Times are time.monotonic() of the worker's host.

    gradient_norms: by parameter name. overflowed: whether a gradient is infinite or NaN; False where none is checked.
    nonfinite: of a step that was run again to find what is not finite.
    outputs, input_gradients: by micro-batch; an input gradient has the shape of the input.
    versions: the version of the weights that each action of an asynchronous schedule used.
    """

    busy_s: float = 0.0
    loss: float = 0.0
    metrics: Totals = field(default_factory=dict)
    gradient_norms: dict[str, GradientNorm] = field(default_factory=dict)
    overflowed: bool = False
    nonfinite: list[NonFinite] = field(default_factory=list)
    outputs: dict[int, Any] = field(default_factory=dict)
    input_gradients: dict[int, Any] = field(default_factory=dict)
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    versions: list[tuple[str, int]] = field(default_factory=list)


class UpdateProgress(enum.Enum):
    """The point that a worker has reached with the last update that it was asked for."""

    NOTHING_TO_DO = "has nothing to update"
    NOT_BEGUN = "has not done the update"
    PARTIAL = "has failed in the update"
    WITHOUT_SCHEDULER = "has done the update, and failed in the scheduler"
    DONE = "has done the update"


class SchedulerKind(NamedTuple):
    """A learning-rate scheduler's class, and whether its `step` takes a metric."""

    name: str
    waits_for_metric: bool


class Mirror(NamedTuple):
    """A copy of a worker's state in memory. share: what a checkpoint would hold of the worker."""

    manifest: Manifest
    share: Saved


# The life of a worker


@dataclass(frozen=True)
class Ping(Command[None]):
    """Answer, once the worker is up."""


@dataclass(frozen=True)
class Join(Command[None]):
    """Take part in a pipeline, before the conductor's first operation.

    Raises:
        Unavailable: another conductor was there before, which has died.
    """


@dataclass(frozen=True)
class Reconnect(Command[None]):
    """Open new channels to all neighbours, one of which was restarted. epoch: the same for all workers."""

    epoch: str


@dataclass(frozen=True)
class IsAsBuilt(Command[bool]):
    """Tell whether this process has trained and loaded nothing yet."""


@dataclass(frozen=True)
class GetInfo(Command[WorkerInfo]):
    """Tell where the worker runs."""


# Operations. `tag` numbers them: each operation has a higher one than those before it.


@dataclass(frozen=True)
class Train(Command[Report]):
    """Run the forwards and backwards of one step; the gradients stay until `Apply` or `Discard`.

    scale: a factor of the losses in the backwards. It is taken out of the gradients afterwards.
    """

    task: StepTask
    scale: float | None


@dataclass(frozen=True)
class SearchNonFinite(Command[Report]):
    """Run a step as `Train` does, and report what is not finite; `Discard` follows."""

    task: StepTask
    scale: float | None


@dataclass(frozen=True)
class TrainAsync(Command[Report]):
    """Run one step of an asynchronous schedule, with its updates.

    following: the next step; its first forwards are done on the way. after: the tag of the step before; 0: none.
    """

    task: StepTask
    following: StepTask | None
    after: int


@dataclass(frozen=True)
class Infer(Command[Report]):
    """Run forwards in eval mode. The last stage reports the loss, or without targets the outputs.

    inputs: for the first stage, those of this replica, by micro-batch.
    """

    tag: int
    microbatches: int
    inputs: dict[int, Any]
    targets: list[Any]


@dataclass(frozen=True)
class Apply(Command[None]):
    """Clip by the norm of all stages' gradients, step the optimizer and its scheduler, clear the gradients.

    skip: leave the parameters as they are; only the scheduler goes on.
    tag: of the operation, where replicas exchange what they have updated.

    Raises:
        Exception: the optimizer's or scheduler's own; other workers may have done the step.
    """

    step: int
    total_norm: Tensor | None
    skip: bool
    tag: int = 0


@dataclass(frozen=True)
class GetUpdateProgress(Command[tuple[str, UpdateProgress]]):
    """Tell the worker's name, and how far the last `Apply` came, which may have failed."""


@dataclass(frozen=True)
class ShareTiedWeights(Command[None]):
    """Exchange the tied parameters that a step has changed with the other workers."""

    tag: int


@dataclass(frozen=True)
class ConfirmEnd(Command[None]):
    """Check that the feeder gives this worker no batch for this step either: it gave the first stage none."""

    step: int


@dataclass(frozen=True)
class Discard(Command[None]):
    """Forget what the failed operation `tag` has left behind; it may have failed before it came to this worker."""

    tag: int


@dataclass(frozen=True)
class Abort(Command[None]):
    """Make operation `tag` fail wherever it waits. Sent while it runs."""

    tag: int
    reason: str


@dataclass(frozen=True)
class StartMetering(Command[None]):
    """Measure from now on what steps hold in memory; they take longer."""


@dataclass(frozen=True)
class StopMetering(Command[StageMemory]):
    """Tell what was measured since `StartMetering`."""


# Settings of modules, and learning rates


@dataclass(frozen=True)
class ChangeModules(Command[Any]):
    """Call a user's function with the worker's modules; the reply is what it returns.

    Raises:
        Exception: the function's own.
    """

    change: Change
    step: int


@dataclass(frozen=True)
class GetSettings(Command[Settings]):
    """Tell what `ChangeModules` has changed beside tensors since the layers were built."""


@dataclass(frozen=True)
class RestoreSettings(Command[bool]):
    """Undo what `ChangeModules` has changed beside tensors; tell whether it has changed tensors."""

    settings: Settings


@dataclass(frozen=True)
class GetSchedulerKind(Command[SchedulerKind | None]):
    """Tell which scheduler the worker has; None: none."""


@dataclass(frozen=True)
class StepScheduler(Command[None]):
    """Step a scheduler that waits for a metric, if the worker has one.

    Raises:
        Exception: the scheduler's own; those of other workers may have made the step.
        Unavailable: this process was started again.
    """

    metric: float


@dataclass(frozen=True)
class GetLearningRates(Command[dict[str, float]]):
    """Tell the learning rates of the next step, by parameter name.

    Raises:
        Unavailable: this process was started again, and has the initial rates.
    """


# The worker's part of the model


@dataclass(frozen=True)
class GetState(Command[dict[str, Tensor]]):
    """Return the worker's parameters and buffers, on the host, with the versions of the modules that have them.

    tag: of the operation, where replicas have shards of parameters: all of them get the command.

    Raises:
        Unavailable: this process was started again, with the initial weights.
    """

    tag: int = 0


@dataclass(frozen=True)
class GetStateNames(Command[list[str]]):
    """Return the names in the reply to `GetState`."""


@dataclass(frozen=True)
class FindLoadable(Command[set[str]]):
    """Return the names of tensors that have another shape than here, and which `LoadState` takes even so."""

    state: dict[str, Tensor]


@dataclass(frozen=True)
class LoadState(Command[None]):
    """Take the worker's part of a whole model's state; optimizer state stays."""

    state: Mapping[str, Tensor]


@dataclass(frozen=True)
class ReadCheckpoint(Command[dict[str, list[str]]]):
    """Read what belongs to the worker's layers. Nothing changes before `AdoptCheckpoint`: other workers may fail.

    strict: the checkpoint must have all of the worker's names, in the same shapes.
    The reply: the names that do not begin with the checkpoint's values, by the reason.

    Raises:
        CheckpointError: a file is missing or damaged.
        PipelineError: the checkpoint is of another model.
    """

    path: str
    strict: bool


@dataclass(frozen=True)
class AdoptCheckpoint(Command[None]):
    """Go on from what `ReadCheckpoint` has read."""


# The worker's share of a checkpoint that is written. version: the checkpoint's.


@dataclass(frozen=True)
class HoldShare(Command[None]):
    """Take the worker's share of a checkpoint. copy: in memory, so that the next steps may go on."""

    version: str
    copy: bool


@dataclass(frozen=True)
class PlanShare(Command[Described]):
    """Tell what the worker could write of the checkpoint.

    Raises:
        Unavailable: this process does not hold the share.
    """

    version: str
    manifest: Manifest


@dataclass(frozen=True)
class WriteShare(Command[Written]):
    """Write the share into a folder, without what other workers write; tell where each entry is.

    Raises:
        Unavailable: this process does not hold the share.
        CheckpointError: this host does not have the folder, which the conductor has made.
    """

    folder: str
    version: str
    left_out: Collection[EntryKey]


@dataclass(frozen=True)
class RemoveShare(Command[None]):
    """Remove files that were written of a checkpoint that has failed. The folder may be on this host only."""

    folder: str
    version: str


@dataclass(frozen=True)
class ForgetShare(Command[None]):
    """Drop the share of a checkpoint that has failed."""

    version: str


# Mirrors: copies of states in memory


@dataclass(frozen=True)
class SetGuard(Command[None]):
    """Keep the worker's mirrors in `guard`, too: the worker after it in rank, or for the last one the first."""

    guard: WorkerClient


@dataclass(frozen=True)
class MakeMirror(Command[None]):
    """Copy the worker's state in memory; the copy goes to the guard while training goes on.

    Waits until the mirror before has gone, so that no more than two are ever on their way.
    """

    manifest: Manifest


@dataclass(frozen=True)
class SettleMirrors(Command[None]):
    """Wait until the guard has what is on its way to it, which could otherwise come after it was to forget it."""


@dataclass(frozen=True)
class KeepMirror(Command[None]):
    """Hold the state of the worker `rank`, and its state before; forget older ones."""

    rank: int
    mirror: Mirror


@dataclass(frozen=True)
class ListMirrors(Command[dict[int, list[int]]]):
    """Tell the steps of which this worker holds mirrors, by the rank that they are a state of."""


@dataclass(frozen=True)
class GetMirror(Command[Mirror]):
    """Return a mirror that `ListMirrors` has named."""

    rank: int
    step: int


@dataclass(frozen=True)
class GoBack(Command[Manifest]):
    """Go on from the worker's state after so many steps, from its own memory or its guard's."""

    step: int


@dataclass(frozen=True)
class ForgetMirrors(Command[None]):
    """Forget mirrors from step `first` on: the state is another one now, which does not follow from theirs."""

    first: int
