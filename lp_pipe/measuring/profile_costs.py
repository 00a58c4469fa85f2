"""The costs of a measured model's stages, for schedules. Needs no torch."""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lp_pipe.errors import PipelineError, ScheduleError
from lp_pipe.pipeline.layers.cuts import balanced_cuts
from lp_pipe.pipeline.partitioning import LayerProfile, Profile
from lp_pipe.pipeline.schedule import Costs


@dataclass(frozen=True)
class ProfileCosts:
    """The costs of a profiled model, which may be cut into any number of stages."""

    profile: Profile

    def cut_into(self, stages: int, workers: int) -> Costs:
        """Return the costs of stages that are whole layers, cut so that the slowest stage is as fast as can be.

        Where a layer's backward was not measured in parts, each part is half of it.

        Raises:
            ScheduleError: there are fewer layers than stages.
        """
        layers = [self.profile.layers[index] for index in self.profile.order()]
        try:
            cuts = balanced_cuts([layer.forward_s + layer.backward_s for layer in layers], stages, stages // workers)
        except PipelineError as error:
            raise ScheduleError(f"the profile: {error}") from error
        own = [layers[first:end] for first, end in pairwise([0, *cuts, len(layers)])]
        weights = [sum(map(_weight_s, each)) for each in own]
        return Costs(
            forward=[sum(layer.forward_s for layer in each) for each in own],
            backward_input=[
                max(0.0, sum(layer.backward_s for layer in each) - weight_s)  # not -1e-19, by rounding
                for each, weight_s in zip(own, weights, strict=True)
            ],
            backward_weight=weights,
        )


def is_profile(path: str | Path) -> bool:
    """Return whether a file is a profile's JSON, or looks like one; False where it cannot be read."""
    try:
        read = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(read, dict) and "layers" in read


def _weight_s(layer: LayerProfile) -> float:
    return layer.backward_s / 2 if layer.backward_weight_s is None else layer.backward_weight_s
