"""A worker's stages, built from what the program says of them."""

import torch

from lp_pipe.pipeline.compute.stage import Stage
from lp_pipe.pipeline.config import PipelineConfig, WorkerConfig
from lp_pipe.pipeline.layers.build import build_layers
from lp_pipe.pipeline.layers.tied import tie


def stages_of(worker: WorkerConfig, pipeline: PipelineConfig, device: torch.device) -> dict[int, Stage]:
    """By their numbers, in order."""
    stages = {}
    for index, (first, sources) in sorted(worker.sources.items()):
        layers = build_layers(sources, first, pipeline.seed)
        tied = tie(layers, first, pipeline.tied, worker.owners, pipeline.seed)
        stages[index] = Stage(
            index,
            first,
            layers,
            pipeline.seed,
            tied,
            recompute=pipeline.recompute,
            precision=pipeline.precision,
            device=device,
            shared_buffers=pipeline.shared_buffers,
            is_asynchronous=pipeline.is_asynchronous,
        )
    return stages
