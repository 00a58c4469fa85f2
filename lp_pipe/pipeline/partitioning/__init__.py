"""How to cut and replicate a model: its profile, the topology, and the plan that a search finds. Needs no torch."""

from lp_pipe.pipeline.partitioning.plan import Plan as Plan
from lp_pipe.pipeline.partitioning.plan import PlannedStage as PlannedStage
from lp_pipe.pipeline.partitioning.planner import partition as partition
from lp_pipe.pipeline.partitioning.profile import LayerProfile as LayerProfile
from lp_pipe.pipeline.partitioning.profile import Profile as Profile
from lp_pipe.pipeline.partitioning.topology import Level as Level
from lp_pipe.pipeline.partitioning.topology import Topology as Topology
