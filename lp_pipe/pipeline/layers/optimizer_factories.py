"""Call the user's functions for optimizers and schedulers, and check what they return before anything is trained."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lp_pipe.errors import PipelineError, noting
from lp_pipe.pipeline.layers.model import OptimizerFactory, SchedulerFactory

_EACH_STAGE = "which every stage worker calls with"
_MAKE_LISTS = "make lists for groups from optimizer.param_groups"


def make_optimizer(factory: OptimizerFactory, named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return the optimizer that the user's function makes for a worker's parameters.

    Raises:
        PipelineError: it is no optimizer, has other parameters (of the modules that the stages have copied), or needs a
            closure.
    """
    own = f"its own parameters, here {_some([name for name, _ in named])}"
    try:
        with noting(f"in optimizer={_name(factory)}, {_EACH_STAGE} {own}"):
            optimizer = factory(list(named))
    except ValueError as error:
        if "param groups should be with/without names" in str(error):
            raise PipelineError(
                f"optimizer={_name(factory)} makes groups of (name, parameter) pairs, one of which is empty on this "
                f"stage worker ({', '.join(name for name, _ in named)}), and torch takes an empty group for one "
                "without names: give groups of parameters alone"
            ) from error
        if "empty parameter list" not in str(error):
            raise
        names = [name for name, parameter in named if parameter.requires_grad]
        raise PipelineError(
            "the optimizer function, which every stage worker calls with its own parameters, has left out all of "
            f"these: {', '.join(names)}: give parameters that are not to be trained requires_grad_(False) (a worker "
            "without any to train does not call the function), or cut elsewhere"
        ) from error
    if not callable(getattr(optimizer, "step", None)) or not isinstance(getattr(optimizer, "param_groups", None), list):
        several = ": combine them into one (docs/pipeline.md, Optimizers)" if isinstance(optimizer, Sequence) else ""
        raise PipelineError(
            f"optimizer={_name(factory)} has returned {optimizer!r}, which is no torch optimizer{several}"
        )
    _refuse_closures(optimizer)
    given = {id(parameter) for _, parameter in named}
    if not all(id(parameter) in given for group in optimizer.param_groups for parameter in group["params"]):
        raise PipelineError(
            f"optimizer={_name(factory)} has made a {type(optimizer).__name__} of other parameters than it was given: "
            "stages train copies of the model's modules, so use the function's argument, a list of (name, parameter), "
            "instead of module.parameters()"
        )
    _own_options(optimizer)
    return optimizer


def make_scheduler(factory: SchedulerFactory, optimizer: torch.optim.Optimizer) -> Any:
    """Return the scheduler that the user's function makes; it is stepped without arguments, or with a metric.

    Raises:
        PipelineError: it is no scheduler, or its step needs more than a metric.
    """
    groups = len(optimizer.param_groups)
    own = f"the optimizer of its own parameters, which has {groups} group{'s' * (groups != 1)} here: {_MAKE_LISTS}"
    with noting(f"in lr_scheduler={_name(factory)}, {_EACH_STAGE} {own}"):
        scheduler = factory(optimizer)
    if not callable(getattr(scheduler, "step", None)):
        raise PipelineError(f"lr_scheduler={_name(factory)} has returned {scheduler!r}, which is no torch scheduler")
    if not _takes(scheduler.step) and not _takes(scheduler.step, 0.0):
        raise PipelineError(
            f"{type(scheduler).__name__}.step() needs {', '.join(_required(scheduler.step))}, but a pipeline steps "
            "its scheduler without arguments after every training step, or with one number by scheduler_step(metric)"
        )
    return scheduler


def wants_metric(scheduler: Any) -> bool:
    """Return whether the scheduler's `step` needs an argument: then training steps do not step it."""
    return not _takes(scheduler.step)


def _own_options(optimizer: torch.optim.Optimizer) -> None:
    """Copy options that are tensors (`lr=torch.tensor(0.1)`), which schedulers write to in place.

    One that the program has made is the same object for all workers that are threads, and each scheduler would change
    it.
    """
    copies: dict[int, Tensor] = {}  # groups that share a tensor share its copy
    for group in optimizer.param_groups:
        for key, value in group.items():
            if isinstance(value, Tensor):
                group[key] = copies.setdefault(id(value), value.detach().clone())


def _refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    if "closure" in _required(optimizer.step):
        raise PipelineError(
            f"{type(optimizer).__name__} needs a closure, to evaluate the loss several times a step, which a pipeline "
            "cannot do; use Adam, SGD, …"
        )


def _takes(method: Callable[..., Any], *arguments: Any) -> bool:
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError:
        return False
    return True


def _required(method: Callable[..., Any]) -> list[str]:
    """Return the names of the method's parameters without a default."""
    parameters = inspect.signature(method).parameters.values()
    has_default = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in has_default]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _name(factory: Callable[..., Any]) -> str:
    return getattr(factory, "__qualname__", None) or repr(factory)
