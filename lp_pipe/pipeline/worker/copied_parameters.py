"""Parameters that have copies elsewhere, to which no forward may write, as that of an Embedding with max_norm does."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.compute.stage import Stage
from lp_pipe.pipeline.config import PipelineConfig
from lp_pipe.private_torch import parameters_of, version_of
from lp_pipe.training.device import CPU
from lp_pipe.training.forward_writes import parameters_of_user_modules

_Named = Iterable[tuple[str, nn.Parameter]]

_KEPT = (
    "an asynchronous schedule keeps older weights of it: let the layer register it as a buffer, if no optimizer is to "
    "change it (an average of other weights), or take a synchronous schedule"
)


class CopiedParameters:
    """The parameters of a worker that have copies: in replicas, in stages with the same tied one, as older weights.

    The copies stay equal, and older weights what they were, only as long as nothing but the optimizer writes to them.
    """

    def __init__(self, config: PipelineConfig, stages: Mapping[int, Stage]) -> None:
        self._why: dict[str, str] = {}
        copied: dict[str, nn.Parameter] = {}
        for named, why in _copied(config, stages):
            for name, parameter in named:
                copied[name] = parameter
                self._why.setdefault(name, why)
        modules = [module for stage in stages.values() for module in stage.modules()]
        places = {id(p): (module, own) for module in modules for own, p in parameters_of(module).items()}
        self._places = {name: places[id(p)] for name, p in copied.items()}  # a parameter's or its older weights'
        users = parameters_of_user_modules(modules)
        self._suspects = {name for name, p in copied.items() if id(p) in users}  # none after the first check
        self._held: dict[str, Tensor] = {}  # the suspects' values before the first check

    def states(self, *, trains: bool) -> dict[str, tuple[int, Tensor]]:
        """Return the parameters' states before an operation, for `check` after it.

        A state holds the parameter's memory, which could otherwise be given to another tensor."""
        if trains:  # at first, copies show what is written to .data, as by an ActNorm
            self._held = {name: self._now(name).detach().to(CPU, copy=True) for name in self._suspects}
        present = {name: self._now(name) for name in self._places}
        return {name: (version_of(parameter), parameter.data) for name, parameter in present.items()}

    def check(self, before: Mapping[str, tuple[int, Tensor]]) -> None:
        """Refuse forwards that have written to a parameter since `states`.

        Raises:
            PipelineError: one has.
        """
        for name, (version, memory) in before.items():
            parameter = self._now(name)
            is_other = version_of(parameter) != version or parameter.data_ptr() != memory.data_ptr()
            if is_other or self._holds_something_else(name):
                raise PipelineError(
                    f"a forward writes to parameter {name!r}, as Embedding(max_norm=…) does, but {self._why[name]}"
                )
        if self._held:
            self._suspects, self._held = set(), {}

    def _holds_something_else(self, name: str) -> bool:
        held = self._held.get(name)
        return held is not None and not torch.equal(held, self._now(name).detach().to(CPU))

    def _now(self, name: str) -> nn.Parameter:
        module, own = self._places[name]
        parameter = parameters_of(module)[own]
        assert parameter is not None, "a place is that of a parameter"
        return parameter


def _copied(config: PipelineConfig, stages: Mapping[int, Stage]) -> Iterator[tuple[_Named, str]]:
    """Yield the parameters that have copies, and the rest of the message if a forward writes to one."""
    for index, stage in stages.items():
        if config.is_asynchronous and config.timings[index].delay:
            yield stage.named_parameters(), _KEPT
        if config.replicas[config.placement[index]] > 1:
            yield stage.named_parameters(), "the stage's other replicas have it, too: give the stage one"
    for edge in config.channels.edges:
        for end in {edge.sender, edge.receiver} & stages.keys() if edge.kind == "tied weights" else ():
            tied = zip(edge.names, stages[end].tied_parameters(edge.names), strict=True)
            yield tied, f"stages {edge.sender} and {edge.receiver} have it both: leave its layers in one"
