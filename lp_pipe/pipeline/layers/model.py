"""The model that a pipeline trains: layers in order, a loss, an optimizer. Data only; stages build their own layers."""

import itertools
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any

from lp_pipe.errors import PipelineError, add_note

if TYPE_CHECKING:
    import torch
    from torch import nn

Loss = Callable[[Any, Any], Any]
OptimizerFactory = Callable[[list[tuple[str, "nn.Parameter"]]], "torch.optim.Optimizer"]
SchedulerFactory = Callable[["torch.optim.Optimizer"], Any]
LossWeight = str | Callable[[Any], float]

_SEEDS = 1 << 63  # rng.py packs a seed into 64 bits


class Layer:
    """A layer that only the stage that owns it builds: `Layer(nn.Linear, 8, 8, name="hidden")`."""

    def __init__(self, factory: "Callable[..., nn.Module]", /, *args: Any, name: str | None = None, **kwargs: Any):
        if not callable(factory) or (hasattr(factory, "named_parameters") and not isinstance(factory, type)):
            raise TypeError(f"Layer takes a function that returns a module, not {factory!r}; pass modules as they are")
        self.factory = factory
        self.args = args
        self.kwargs = kwargs
        self.name = name or getattr(factory, "__name__", type(factory).__name__)

    def build(self) -> "nn.Module":
        """Build the module; the caller seeds the generator."""
        try:
            return self.factory(*self.args, **self.kwargs)
        except Exception as error:
            add_note(error, f"in the factory of {self!r}, which was given {self._arguments()}")
            raise

    def _arguments(self) -> str:
        given = [reprlib.repr(value) for value in self.args]
        given += [f"{name}={reprlib.repr(value)}" for name, value in self.kwargs.items()]
        return f"({', '.join(given)})"

    def __repr__(self) -> str:
        return f"Layer({self.name})"


@dataclass(frozen=True)
class Model:
    """A model as a sequence of layers, each fed with the output of the one before it.

    layers: modules, an nn.Sequential, `Layer` factories (in any mixture), or a function that returns such a sequence.
        Modules are copied, never trained in place. A function is called once in every stage, under `layer_rng(seed,
        0)`; if it returns an iterator (a generator), layer i is made under `layer_rng(seed, i)`, as factories are.
    loss: (output, target) -> scalar tensor, or (scalar, {name: metric}). A module may write to its buffers, which
        checkpoints contain. Its mode stays as it is. It must have no parameters to train.
    optimizer: (list of (name, parameter)) -> torch optimizer; called once in every stage that has parameters.
    lr_scheduler: (optimizer) -> torch LR scheduler, stepped once a step; one with a `step` that needs a metric
        (ReduceLROnPlateau) is stepped by `PipelineClient.scheduler_step` alone.
    loss_weight: a micro-batch's share of the loss: "samples" (its size over the batch's, for mean losses), "one" (1,
        for losses that are sums), or a function of its target (a number such as its tokens; divided by the sum).
    tied: pairs of parameter names (nn.Sequential's, such as "0.weight") that are one parameter, with the initial values
        of the first in the order of layers. A Parameter object that is in two ready-made layers needs no pair.
    seed: decides initial weights, dropout and what the loss draws, the same for every number of stages.
    batch_dims: where the samples are: an int for all tensors of input, target and output (1: time first), or a tuple
        (input, target[, output]) of ints, None for what every micro-batch gets whole, and dicts, tuples or lists of
        these in the structure of the value. None: along the first dimension. `pp.cut` and `pp.whole` mark leaves.
    callbacks: {step: function of the stage's modules}, each called in every stage before that step, as by
        `PipelineClient.apply`; also after a resume, if it was not called before the checkpoint.
    """

    layers: Any
    loss: Loss
    optimizer: OptimizerFactory
    lr_scheduler: SchedulerFactory | None = None
    loss_weight: LossWeight = "samples"
    tied: Sequence[tuple[str, str]] = ()
    seed: int = 0
    batch_dims: Any = None
    callbacks: Mapping[int, Callable[[dict[str, Any]], Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.loss_weight not in ("samples", "one") and not callable(self.loss_weight):
            raise PipelineError(f"loss_weight={self.loss_weight!r}: give 'samples', 'one', or a function of the target")
        if not callable(self.loss):
            raise PipelineError(f"loss={self.loss!r} is not callable: give a function of (output, target)")
        if _is_module_class(self.loss):
            name = getattr(self.loss, "__name__", "")
            raise PipelineError(f"loss={name} is a class of modules: give an instance, loss={name}()")
        if not callable(self.optimizer):
            raise PipelineError(
                f"optimizer={self.optimizer!r} is not callable: give a function of the stage's named parameters, such "
                "as lambda parameters: torch.optim.Adam(parameters, lr=1e-3)"
            )
        if self.lr_scheduler is not None and not callable(self.lr_scheduler):
            raise PipelineError(f"lr_scheduler={self.lr_scheduler!r} is not callable: give a function of the optimizer")
        if not isinstance(self.seed, Integral) or not -_SEEDS <= self.seed < _SEEDS:
            raise PipelineError(f"seed={self.seed!r}: give a whole number (int) from -2**63 to 2**63 - 1")
        object.__setattr__(self, "seed", int(self.seed))  # another library's integer cannot be in a checkpoint
        if not isinstance(self.callbacks, Mapping) or not all(
            isinstance(step, int) and callable(change) for step, change in self.callbacks.items()
        ):
            raise PipelineError(f"callbacks must be a dict of step (int) to function, got {self.callbacks!r}")
        tied = tuple(self.tied) if isinstance(self.tied, Iterable) else (self.tied,)
        for pair in tied:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(isinstance(name, str) for name in pair):
                raise PipelineError(
                    f"tied={self.tied!r}: give pairs of parameter names, such as (('0.weight', '3.weight'),)"
                )
        object.__setattr__(self, "tied", tied)  # read once, because a generator gives its items once


def sources_of(model: Model) -> list[Any]:
    """Return the layers as a list of modules and `Layer`s; a function is called once to count its layers.

    Raises:
        PipelineError: there are none, or one is neither a module nor a Layer.
    """
    from torch import nn

    layers = model.layers
    if callable(layers) and not isinstance(layers, nn.Module):
        built = built_by_function(layers, model.seed)
        _check(built)
        return [FromFunction(layers, index, module) for index, module in enumerate(built)]
    if not isinstance(layers, (nn.Sequential, nn.ModuleList, Sequence)):
        kind = type(layers).__name__
        raise PipelineError(
            "layers must be a sequence of modules or pp.Layer, or a function that returns one, not "
            f"{kind}{_sequence_hint(layers)}"
        )
    check_in_order(layers)
    sources = list(layers)
    _check(sources, Layer)
    return sources


def check_in_order(layers: Any) -> None:
    """Refuse a Sequential that does more than call its layers, which is all that the stages will do.

    Raises:
        PipelineError: the error names what it does.
    """
    from torch import nn

    from lp_pipe.private_torch import buffers_of, hooks_of, parameters_of

    if isinstance(layers, nn.Sequential):
        kind = type(layers)
        own = {
            "a forward of its own": kind.forward is not nn.Sequential.forward and not hasattr(kind, "calls_in_order"),
            "hooks": bool(hooks_of(layers, "forward_pre", "forward", "backward_pre", "backward")),
            "parameters or buffers of its own": bool(parameters_of(layers) or buffers_of(layers)),
        }
        for what, has_it in own.items():
            if has_it:
                raise PipelineError(
                    f"layers is a {kind.__name__} with {what}, which the stages would leave out, because they call "
                    "the layers in it: cut it with pp.split(), or put all that it does into its layers"
                )


def _check(sources: Sequence[Any], *or_else: type) -> None:
    from torch import nn

    if not sources:
        raise PipelineError("the model has no layers")
    for index, source in enumerate(sources):
        if not isinstance(source, (nn.Module, *or_else)):
            what = "must be a module or a pp.Layer" if or_else else "must be a module (a function returns modules only)"
            raise PipelineError(f"layer {index} is {source!r}, but {what}{_hint(source)}")


def _sequence_hint(layers: Any) -> str:
    from torch import nn

    if isinstance(layers, (Mapping, nn.ModuleDict)):
        return ": write list(layers.values())"
    if isinstance(layers, nn.Module):
        return ": cut it by pp.split()" if type(layers).forward is not nn.Module.forward else ""
    return ": write list(layers)" if isinstance(layers, Iterator) else ""


def _hint(source: Any) -> str:
    if isinstance(source, (list, tuple)):
        return "; write the layers one after another, or those that belong together as nn.Sequential(...)"
    if isinstance(source, type):
        return f"; write {source.__name__}(...), or pp.Layer({source.__name__}, ...) for a layer that its stage builds"
    if not callable(source):
        return ""
    return (
        "; wrap a function of the input (x -> y) in a module: nn.ReLU() for torch.relu, or a class with that forward; "
        "write a function that makes a layer as pp.Layer(function, ...)"
    )


def _is_module_class(given: Any) -> bool:
    """Return whether `given` is a class of modules, as nn.CrossEntropyLoss in place of nn.CrossEntropyLoss()."""
    return isinstance(given, type) and hasattr(given, "named_parameters")


class FromFunction:
    """Layer `index` of the sequence that a function returns; it travels as the function, without the weights."""

    def __init__(self, function: Callable[[], Any], index: int, module: "nn.Module | None" = None) -> None:
        self.function = function
        self.index = index
        self.module = module

    def __getstate__(self) -> dict[str, Any]:
        return {"function": self.function, "index": self.index, "module": None}


def built_by_function(function: Callable[[], Any], seed: int) -> "list[nn.Module]":
    """Call a function that returns layers, with the generator seeded as `Model` says.

    Raises:
        PipelineError: it returned something else.
    """
    from lp_pipe.training.rng import layer_rng

    with layer_rng(seed, 0):
        made = function()
    if not isinstance(made, Iterable):
        raise PipelineError(f"the function must return a sequence of modules, not {type(made).__name__}")
    check_in_order(made)
    return list(_one_by_one(iter(made), seed))


def _one_by_one(made: "Iterator[nn.Module]", seed: int) -> "Iterator[nn.Module]":
    """Yield layers that may be built only now: by a generator, a `map`, or a sequence that builds its items."""
    from lp_pipe.training.rng import layer_rng

    for index in itertools.count():
        with layer_rng(seed, index):
            try:
                layer = next(made)
            except StopIteration:
                return
        yield layer
