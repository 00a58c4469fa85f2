"""Agents, replay and adders. Replay, adders and limiters need no torch."""

import importlib
from typing import TYPE_CHECKING, Any

from lp_pipe.rl import tree as tree
from lp_pipe.rl.adders import Adder as Adder
from lp_pipe.rl.adders import NStepAdder as NStepAdder
from lp_pipe.rl.adders import RolloutAdder as RolloutAdder
from lp_pipe.rl.adders import SequenceAdder as SequenceAdder
from lp_pipe.rl.adders import Transition as Transition
from lp_pipe.rl.curves import CurvePoint as CurvePoint
from lp_pipe.rl.curves import Estimate as Estimate
from lp_pipe.rl.curves import iqm as iqm
from lp_pipe.rl.curves import iqm_curve as iqm_curve
from lp_pipe.rl.curves import run_curve as run_curve
from lp_pipe.rl.distributed.program import make_distributed_experiment as make_distributed_experiment
from lp_pipe.rl.environment_loop import Counter as Counter
from lp_pipe.rl.environment_loop import EnvironmentFailed as EnvironmentFailed
from lp_pipe.rl.environment_loop import EnvironmentLoop as EnvironmentLoop
from lp_pipe.rl.experiment import Builder as Builder
from lp_pipe.rl.experiment import Evaluation as Evaluation
from lp_pipe.rl.experiment import ExperimentConfig as ExperimentConfig
from lp_pipe.rl.experiment import Free as Free
from lp_pipe.rl.experiment import Inference as Inference
from lp_pipe.rl.experiment import Learner as Learner
from lp_pipe.rl.experiment import Network as Network
from lp_pipe.rl.experiment import Policy as Policy
from lp_pipe.rl.experiment import Result as Result
from lp_pipe.rl.experiment import Rounds as Rounds
from lp_pipe.rl.experiment import Spec as Spec
from lp_pipe.rl.experiment import Update as Update
from lp_pipe.rl.experiment import VariableClient as VariableClient
from lp_pipe.rl.observers import Observer as Observer
from lp_pipe.rl.replay.node import ReplayNode as ReplayNode
from lp_pipe.rl.replay.node import ReplayPart as ReplayPart
from lp_pipe.rl.replay.rate_limiter import MinSize as MinSize
from lp_pipe.rl.replay.rate_limiter import RateLimiter as RateLimiter
from lp_pipe.rl.replay.rate_limiter import SampleToInsertRatio as SampleToInsertRatio
from lp_pipe.rl.replay.selectors import Fifo as Fifo
from lp_pipe.rl.replay.selectors import Lifo as Lifo
from lp_pipe.rl.replay.selectors import Prioritized as Prioritized
from lp_pipe.rl.replay.selectors import Uniform as Uniform
from lp_pipe.rl.replay.table import Sample as Sample
from lp_pipe.rl.replay.table import Table as Table
from lp_pipe.rl.results import load as load
from lp_pipe.rl.run_experiment import run_experiment as run_experiment

if TYPE_CHECKING:
    from lp_pipe.rl import losses as losses
    from lp_pipe.rl.agents.dqn import DQNBuilder as DQNBuilder
    from lp_pipe.rl.agents.dqn import DQNConfig as DQNConfig
    from lp_pipe.rl.agents.impala import IMPALABuilder as IMPALABuilder
    from lp_pipe.rl.agents.impala import IMPALAConfig as IMPALAConfig
    from lp_pipe.rl.agents.ppo import PPOBuilder as PPOBuilder
    from lp_pipe.rl.agents.ppo import PPOConfig as PPOConfig
    from lp_pipe.rl.agents.sac import SACBuilder as SACBuilder
    from lp_pipe.rl.agents.sac import SACConfig as SACConfig

_NEEDS_TORCH = {
    f"{agent}{part}": f"lp_pipe.rl.agents.{agent.lower()}"
    for agent in ("DQN", "IMPALA", "PPO", "SAC")
    for part in ("Builder", "Config")
}


def __getattr__(name: str) -> Any:
    if name == "losses":  # it loads torch
        return importlib.import_module("lp_pipe.rl.losses")
    if name in _NEEDS_TORCH:
        return getattr(importlib.import_module(_NEEDS_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
