"""Planning of stages: a model's profile, a topology, and the search for a plan. Needs no torch."""

from lp_pipe.pipeline.partitioning.plan import Plan as Plan
from lp_pipe.pipeline.partitioning.plan import PlannedStage as PlannedStage
from lp_pipe.pipeline.partitioning.planner import partition as partition
from lp_pipe.pipeline.partitioning.profile import LayerProfile as LayerProfile
from lp_pipe.pipeline.partitioning.profile import Profile as Profile
from lp_pipe.pipeline.partitioning.topology import Level as Level
from lp_pipe.pipeline.partitioning.topology import Topology as Topology
