"""Every exception that users may catch: one class per thing that a caller would do differently."""

import contextlib
from collections.abc import Iterator


class LpPipeError(Exception):
    """The base of every error that lp_pipe raises on purpose."""


def add_note(error: BaseException, text: str) -> None:
    """Add a note to the exception; one that cannot take notes stays as it is."""
    # Not error.add_note(): it asks a user's `__getattr__` for missing notes, which may raise anything.
    with contextlib.suppress(Exception):
        vars(error).setdefault("__notes__", []).append(text)


@contextlib.contextmanager
def noting(text: str) -> Iterator[None]:
    """Add a note that says where to whatever is raised in the body: layers and optimizers may also raise SystemExit."""
    try:
        yield
    except BaseException as error:
        add_note(error, text)
        raise


class NodeError(LpPipeError, RuntimeError):
    """A node of the program failed; raised in the launcher by `run.wait()`.

    `label` and `index` name the node, `type_name` is the bare name of the original exception's class,
    `remote_traceback` is the traceback as it was printed in the node ("" when the process was killed). `report`, set by
    `run.wait()`, is what people want to read first: 15 lines at most.
    """

    report: str = ""

    def __init__(self, label: str, index: int, type_name: str, message: str, remote_traceback: str = "") -> None:
        self.label = label
        self.index = index
        self.type_name = type_name
        self.message = message
        self.remote_traceback = remote_traceback
        text = f"node {label}/{index} failed: {type_name}: {message}"
        if remote_traceback:
            text += f"\n\n{remote_traceback.rstrip()}"
        super().__init__(text)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.label, self.index, self.type_name, self.message, self.remote_traceback)


class Unrecoverable(LpPipeError, RuntimeError):
    """A failure that a restart of its node cannot mend: the program ends, also under on_failure="restart"."""


class RemoteError(LpPipeError, RuntimeError):
    """A handler raised in another node; where possible also an instance of the exception's own class.

    `type_name` is the bare name of the innermost original class, `remote_traceback` its traceback as text.
    """

    type_name: str = ""
    remote_traceback: str = ""


class DeadlineExceeded(LpPipeError, TimeoutError):
    """A call's `call_timeout` ran out; the handler may still be running."""


class Unavailable(LpPipeError, ConnectionError):
    """The peer is not there: it never came up, it ended, or the connection broke during the call."""


class StateLost(Unavailable):
    """A node that takes part in `Checkpoints` died and was started again: its state is still to be loaded."""


class Unauthenticated(Unavailable):
    """The peer and this process do not accept each other as processes of one run; waiting does not help."""


class ChannelClosed(Unavailable):
    """The other end of a tensor channel closed or failed; the message holds its reason."""


class MethodNotFound(LpPipeError, AttributeError):
    """The server has no public method of that name."""


class SerializationError(LpPipeError, RuntimeError):
    """A value cannot be pickled; the message names its path (such as `args[1]['lock']`) and type."""


class LaunchError(LpPipeError, RuntimeError):
    """The program could not be started; nothing of it is left running."""


class ScheduleError(LpPipeError, ValueError):
    """A pipeline schedule does not exist for these numbers, or is not a correct order of work."""


class PipelineError(LpPipeError, ValueError):
    """A pipeline cannot be built or run as asked; the message says what to change."""


class NonFiniteError(PipelineError):
    """A step's loss or gradients held NaN or infinity (`add_pipeline(on_nan="stop")`); nothing was updated.

    step, microbatch, stage, layer: where that began; None where no layer is to blame. order: of several errors, the one
        with the lowest order comes first.
    """

    step: int
    microbatch: int | None = None
    stage: int | None = None
    layer: str | None = None
    order: tuple[int, ...] = ()


class CollectiveMismatch(Unrecoverable):
    """The ranks of a group are in different collective operations: another call, op, root, shape, dtype or order."""


class DataParallelError(Unrecoverable, ValueError):
    """Replicas cannot be trained as asked, or have not all done the same, which no restart mends."""


class NotSupported(LpPipeError, NotImplementedError):
    """A documented option that this version of lp_pipe does not have yet."""


class EndOfData(LpPipeError, EOFError):
    """The feeder returned None: there is no batch for this step."""


class CheckpointError(LpPipeError, RuntimeError):
    """A checkpoint cannot be written, or is missing, incomplete, or belongs to another model.

    may_pass: the system has refused to write it, so a later one may succeed (a full disk has room again).
    """

    may_pass: bool = False


class PoisonBatchError(LpPipeError, RuntimeError):
    """A step has failed as often as it may be tried (`Checkpoints.steps(tries=...)`): its batch seems to be the cause.

    step: the number of the step.
    """

    step: int = -1

    @classmethod
    def at(cls, step: int, message: str) -> "PoisonBatchError":
        """Return an error that knows its step."""
        error = cls(message)
        error.step = step
        return error


class PartitionError(LpPipeError, ValueError):
    """A profile, topology or plan is wrong, or no plan can keep to the limits; the message says which and where."""
