"""A model as a pipeline of stages. Schedules and plans work without torch, which is loaded when it is first needed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lp_pipe.errors import CheckpointError as CheckpointError
from lp_pipe.errors import EndOfData as EndOfData
from lp_pipe.errors import NonFiniteError as NonFiniteError
from lp_pipe.errors import PartitionError as PartitionError
from lp_pipe.errors import PipelineError as PipelineError
from lp_pipe.errors import ScheduleError as ScheduleError
from lp_pipe.pipeline.early_stopping import EarlyStopping as EarlyStopping
from lp_pipe.pipeline.layers.model import Layer as Layer
from lp_pipe.pipeline.layers.model import Model as Model
from lp_pipe.pipeline.loss_metrics import Max as Max
from lp_pipe.pipeline.loss_metrics import Mean as Mean
from lp_pipe.pipeline.loss_metrics import Sum as Sum
from lp_pipe.pipeline.results import EvalResult as EvalResult
from lp_pipe.pipeline.results import StageMemory as StageMemory
from lp_pipe.pipeline.results import StepResult as StepResult
from lp_pipe.pipeline.results import StepTrace as StepTrace
from lp_pipe.pipeline.results import Straggler as Straggler
from lp_pipe.pipeline.schedule import Action as Action
from lp_pipe.pipeline.schedule import Costs as Costs
from lp_pipe.pipeline.schedule import Schedule as Schedule
from lp_pipe.pipeline.schedule import Timeline as Timeline
from lp_pipe.pipeline.schedule import Updates as Updates
from lp_pipe.pipeline.schedule import make_schedule as make_schedule
from lp_pipe.pipeline.schedule import peak_activations as peak_activations
from lp_pipe.pipeline.schedule import register_schedule as register_schedule
from lp_pipe.pipeline.schedule import schedules as schedules
from lp_pipe.pipeline.schedule import search_schedule as search_schedule
from lp_pipe.pipeline.schedule import simulate as simulate
from lp_pipe.pipeline.schedule import to_text as to_text
from lp_pipe.pipeline.schedule import verify as verify
from lp_pipe.pipeline.schedule import vertical_sync as vertical_sync

if TYPE_CHECKING:
    from lp_pipe.measuring.exactness_check import CheckReport as CheckReport
    from lp_pipe.measuring.exactness_check import check as check
    from lp_pipe.measuring.link_profile import measure_links as measure_links
    from lp_pipe.measuring.link_profile import topology_of as topology_of
    from lp_pipe.measuring.memory_estimate import MemoryEstimate as MemoryEstimate
    from lp_pipe.measuring.memory_estimate import memory as memory
    from lp_pipe.measuring.profiling import profile as profile
    from lp_pipe.pipeline.add import add_pipeline as add_pipeline
    from lp_pipe.pipeline.client import PipelineClient as PipelineClient
    from lp_pipe.pipeline.client import PipelineHandle as PipelineHandle
    from lp_pipe.pipeline.data_loader_feeder import DataLoaderFeeder as DataLoaderFeeder
    from lp_pipe.pipeline.layers.batch_dims import cut as cut
    from lp_pipe.pipeline.layers.batch_dims import whole as whole
    from lp_pipe.pipeline.layers.skips import Pop as Pop
    from lp_pipe.pipeline.layers.skips import Sequential as Sequential
    from lp_pipe.pipeline.layers.skips import Stash as Stash
    from lp_pipe.pipeline.layers.splitting import split as split
    from lp_pipe.pipeline.partitioning import LayerProfile as LayerProfile
    from lp_pipe.pipeline.partitioning import Level as Level
    from lp_pipe.pipeline.partitioning import Plan as Plan
    from lp_pipe.pipeline.partitioning import PlannedStage as PlannedStage
    from lp_pipe.pipeline.partitioning import Profile as Profile
    from lp_pipe.pipeline.partitioning import Topology as Topology
    from lp_pipe.pipeline.partitioning import partition as partition
    from lp_pipe.training.rng import layer_rng as layer_rng
    from lp_pipe.training.rng import step_rng as step_rng

_ON_FIRST_USE = {  # these need torch or numpy
    "add_pipeline": ".add",
    "check": "..measuring.exactness_check",
    "CheckReport": "..measuring.exactness_check",
    "DataLoaderFeeder": ".data_loader_feeder",
    "PipelineClient": ".client",
    "PipelineHandle": ".client",
    "cut": ".layers.batch_dims",
    "whole": ".layers.batch_dims",
    "layer_rng": "..training.rng",
    "step_rng": "..training.rng",
    "measure_links": "..measuring.link_profile",
    "topology_of": "..measuring.link_profile",
    "LayerProfile": ".partitioning",
    "Level": ".partitioning",
    "Plan": ".partitioning",
    "PlannedStage": ".partitioning",
    "Profile": ".partitioning",
    "Topology": ".partitioning",
    "partition": ".partitioning",
    "MemoryEstimate": "..measuring.memory_estimate",
    "memory": "..measuring.memory_estimate",
    "profile": "..measuring.profiling",
    "Pop": ".layers.skips",
    "Sequential": ".layers.skips",
    "Stash": ".layers.skips",
    "split": ".layers.splitting",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ON_FIRST_USE[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_FIRST_USE} - {"import_module", "TYPE_CHECKING", "Any"})
