"""Parameters to which forwards write, such as those of an Embedding with max_norm, where others have copies of them."""

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
    """Those of a worker of which there are copies: replicas of a stage, who borrows a tied one, and older weights.

    All copies are the same (older weights are what they were) only as long as nobody but the optimizer writes to one.
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
        self._places = {name: places[id(p)] for name, p in copied.items()}  # where older weights may stand in for it
        users = parameters_of_user_modules(modules)
        self._suspects = {name for name, p in copied.items() if id(p) in users}  # none after the first check
        self._held: dict[str, Tensor] = {}  # by the suspects, before it

    def states(self, *, trains: bool) -> dict[str, tuple[int, Tensor]]:
        """To be checked after an operation's forwards and backwards. Holds their memory, or others might get it."""
        if trains:  # the first time with copies, which show what is written to .data, as by an ActNorm
            self._held = {name: self._now(name).detach().to(CPU, copy=True) for name in self._suspects}
        present = {name: self._now(name) for name in self._places}
        return {name: (version_of(parameter), parameter.data) for name, parameter in present.items()}

    def check(self, before: Mapping[str, tuple[int, Tensor]]) -> None:
        """
        Raises:
            PipelineError: a forward has written to one since.
        """
        for name, (version, memory) in before.items():
            parameter = self._now(name)
            is_other = version_of(parameter) != version or parameter.data_ptr() != memory.data_ptr()
            if is_other or self._holds_something_else(name):
                raise PipelineError(
                    f"a forward writes to parameter {name!r}, as an Embedding with max_norm does, but {self._why[name]}"
                )
        if self._held:
            self._suspects, self._held = set(), {}

    def _holds_something_else(self, name: str) -> bool:
        held = self._held.get(name)
        return held is not None and not torch.equal(held, self._now(name).detach().to(CPU))

    def _now(self, name: str) -> nn.Parameter:
        module, own = self._places[name]
        parameter = parameters_of(module)[own]
        assert parameter is not None, "only those that there are have a place"
        return parameter


def _copied(config: PipelineConfig, stages: Mapping[int, Stage]) -> Iterator[tuple[_Named, str]]:
    """Which there are copies of, and why none may be written to."""
    for index, stage in stages.items():
        if config.is_asynchronous and config.timings[index].delay:
            yield stage.named_parameters(), _KEPT
        if config.replicas[config.placement[index]] > 1:
            yield stage.named_parameters(), "the stage's other replicas have it, too: give the stage one"
    for edge in config.channels.edges:
        for end in {edge.sender, edge.receiver} & stages.keys() if edge.kind == "tied weights" else ():
            tied = zip(edge.names, stages[end].tied_parameters(edge.names), strict=True)
            yield tied, f"stages {edge.sender} and {edge.receiver} have it both: leave its layers in one"
