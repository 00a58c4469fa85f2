"""Which worker runs what in which order: schedules, their proof, and their simulation. Needs no torch."""

from lp_pipe.pipeline.schedule.costs import Costs as Costs
from lp_pipe.pipeline.schedule.draw import to_text as to_text
from lp_pipe.pipeline.schedule.dualpipev import dualpipev as dualpipev
from lp_pipe.pipeline.schedule.forward import forward as forward
from lp_pipe.pipeline.schedule.forward import forward_on as forward_on
from lp_pipe.pipeline.schedule.gpipe import gpipe as gpipe
from lp_pipe.pipeline.schedule.interleaved import interleaved as interleaved
from lp_pipe.pipeline.schedule.ir import Action as Action
from lp_pipe.pipeline.schedule.ir import Schedule as Schedule
from lp_pipe.pipeline.schedule.looped_bfs import looped_bfs as looped_bfs
from lp_pipe.pipeline.schedule.one_f_one_b import one_f_one_b as one_f_one_b
from lp_pipe.pipeline.schedule.registry import default_chunks as default_chunks
from lp_pipe.pipeline.schedule.registry import make_schedule as make_schedule
from lp_pipe.pipeline.schedule.registry import register_schedule as register_schedule
from lp_pipe.pipeline.schedule.registry import schedules as schedules
from lp_pipe.pipeline.schedule.search import search_schedule as search_schedule
from lp_pipe.pipeline.schedule.simulate import Span as Span
from lp_pipe.pipeline.schedule.simulate import Timeline as Timeline
from lp_pipe.pipeline.schedule.simulate import simulate as simulate
from lp_pipe.pipeline.schedule.stash import peak_activations as peak_activations
from lp_pipe.pipeline.schedule.verify import verify as verify
from lp_pipe.pipeline.schedule.zb_h1 import zb_h1 as zb_h1
from lp_pipe.pipeline.schedule.zbv import zbv as zbv
