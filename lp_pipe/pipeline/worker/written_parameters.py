"""Parameters to which forwards write, such as those of an Embedding with max_norm, where others have copies of them."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.compute.device import CPU
from lp_pipe.pipeline.compute.forward_writes import are_users
from lp_pipe.pipeline.compute.stage import Stage
from lp_pipe.pipeline.config import PipelineConfig


class CopiedParameters:
    """Those of a worker that other workers or stages have, too: replicas of a stage, and who borrows a tied one.

    All copies are the same only as long as nobody but the optimizer writes to one.
    """

    def __init__(self, config: PipelineConfig, stages: Mapping[int, Stage]) -> None:
        self._why: dict[str, str] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        modules = [module for stage in stages.values() for layer in stage.layers for module in layer.modules()]
        self._suspects = are_users(modules)  # nobody is after the first operation that trains
        self._held: dict[str, Tensor] = {}  # by the suspects, before it
        if config.updates is not None:
            return  # its steps update in between
        for index, stage in stages.items():
            if config.replicas[config.placement[index]] > 1:
                self._add(stage.named_parameters(), "the stage's other replicas have it, too: give the stage one")
        for edge in config.channels.edges:
            for end in {edge.sender, edge.receiver} & stages.keys() if edge.kind == "tied weights" else ():
                tied = zip(edge.names, stages[end].tied_parameters(edge.names), strict=True)
                self._add(tied, f"stages {edge.sender} and {edge.receiver} have it both: leave its layers in one")

    def states(self, *, trains: bool) -> dict[str, tuple[int, Tensor]]:
        """To be checked after an operation's forwards and backwards. Holds their memory, or others might get it."""
        if trains:  # the first time with copies, which show what is written to .data, as by an ActNorm
            suspects = {name: p for name, p in self._parameters.items() if id(p) in self._suspects}
            self._held = {name: parameter.detach().to(CPU, copy=True) for name, parameter in suspects.items()}
        return {name: (parameter._version, parameter.data) for name, parameter in self._parameters.items()}

    def check(self, before: Mapping[str, tuple[int, Tensor]]) -> None:
        """
        Raises:
            PipelineError: a forward has written to one since.
        """
        for name, (version, memory) in before.items():
            parameter = self._parameters[name]
            is_other = parameter._version != version or parameter.data_ptr() != memory.data_ptr()
            if is_other or self._holds_something_else(name):
                raise PipelineError(
                    f"a forward writes to parameter {name!r}, as an Embedding with max_norm does, but {self._why[name]}"
                )
        if self._held:
            self._suspects, self._held = set(), {}

    def _holds_something_else(self, name: str) -> bool:
        held = self._held.get(name)
        return held is not None and not torch.equal(held, self._parameters[name].detach().to(CPU))

    def _add(self, named: Iterable[tuple[str, nn.Parameter]], why: str) -> None:
        for name, parameter in named:
            self._parameters[name] = parameter
            self._why.setdefault(name, why)
