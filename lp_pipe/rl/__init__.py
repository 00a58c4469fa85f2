"""Agents, replay and adders. Replay, adders and limiters need no torch."""

import importlib
from typing import TYPE_CHECKING, Any

from lp_pipe.rl import tree as tree
from lp_pipe.rl.adders import NStepAdder as NStepAdder
from lp_pipe.rl.adders import RolloutAdder as RolloutAdder
from lp_pipe.rl.adders import SequenceAdder as SequenceAdder
from lp_pipe.rl.adders import Transition as Transition
from lp_pipe.rl.environment_loop import Counter as Counter
from lp_pipe.rl.environment_loop import EnvironmentFailed as EnvironmentFailed
from lp_pipe.rl.environment_loop import EnvironmentLoop as EnvironmentLoop
from lp_pipe.rl.environment_loop import Observer as Observer
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

if TYPE_CHECKING:
    from lp_pipe.rl import losses as losses


def __getattr__(name: str) -> Any:
    if name == "losses":  # it loads torch
        return importlib.import_module("lp_pipe.rl.losses")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
