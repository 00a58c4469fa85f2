"""Parameters to which forwards write, such as those of an Embedding with max_norm, where others have copies of them."""

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.compute.stage import Stage
from lp_pipe.pipeline.config import PipelineConfig


class CopiedParameters:
    """Those of a worker that other workers or stages have, too: replicas of a stage, and who borrows a tied one.

    All copies are the same only as long as nobody but the optimizer writes to one.
    """

    def __init__(self, config: PipelineConfig, stages: Mapping[int, Stage]) -> None:
        self._why: dict[str, str] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        if config.updates is not None:
            return  # its steps update in between
        for index, stage in stages.items():
            if config.replicas[config.placement[index]] > 1:
                self._add(stage.named_parameters(), "the stage's other replicas have it, too: give the stage one")
        for edge in config.channels.edges:
            for end in {edge.sender, edge.receiver} & stages.keys() if edge.kind == "tied weights" else ():
                tied = zip(edge.names, stages[end].tied_parameters(edge.names), strict=True)
                self._add(tied, f"stages {edge.sender} and {edge.receiver} have it both: leave its layers in one")

    def states(self) -> dict[str, tuple[int, Tensor]]:
        """To be checked after an operation's forwards and backwards. Holds their memory, or others might get it."""
        return {name: (parameter._version, parameter.data) for name, parameter in self._parameters.items()}

    def check(self, before: Mapping[str, tuple[int, Tensor]]) -> None:
        """
        Raises:
            PipelineError: a forward has written to one since.
        """
        for name, (version, memory) in before.items():
            parameter = self._parameters[name]
            if parameter._version != version or parameter.data_ptr() != memory.data_ptr():
                raise PipelineError(
                    f"a forward writes to parameter {name!r}, as an Embedding with max_norm does, but {self._why[name]}"
                )

    def _add(self, named: Iterable[tuple[str, nn.Parameter]], why: str) -> None:
        for name, parameter in named:
            self._parameters[name] = parameter
            self._why.setdefault(name, why)
