"""Agents, replay and adders. Replay, adders and limiters need no torch."""

from lp_pipe.rl.replay.node import ReplayNode as ReplayNode
from lp_pipe.rl.replay.rate_limiter import MinSize as MinSize
from lp_pipe.rl.replay.rate_limiter import RateLimiter as RateLimiter
from lp_pipe.rl.replay.rate_limiter import SampleToInsertRatio as SampleToInsertRatio
from lp_pipe.rl.replay.selectors import Fifo as Fifo
from lp_pipe.rl.replay.selectors import Lifo as Lifo
from lp_pipe.rl.replay.selectors import Prioritized as Prioritized
from lp_pipe.rl.replay.selectors import Uniform as Uniform
from lp_pipe.rl.replay.table import Sample as Sample
from lp_pipe.rl.replay.table import Table as Table
