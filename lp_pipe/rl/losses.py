"""Targets and errors of value and policy learning. Time is the first axis; other axes are batches. Works on tensors."""

from typing import NamedTuple

import torch
from torch import Tensor


class VTrace(NamedTuple):
    """vs: targets of the values. advantages: for the policy's gradient."""

    vs: Tensor
    advantages: Tensor


def n_step_return(rewards: Tensor, discounts: Tensor, bootstrap: Tensor) -> Tensor:
    """Return the discounted sum of all rewards, and of `bootstrap` after the last one, for each step.

    rewards, discounts [T, …]: of step t, and what counts of all that comes after it. bootstrap […]: the value at T.
    Source: Sutton and Barto, "Reinforcement Learning" (2018), equation 7.1.
    """
    returns, following = [], bootstrap
    for reward, discount in zip(reversed(rewards.unbind(0)), reversed(discounts.unbind(0)), strict=True):
        following = reward + discount * following
        returns.append(following)
    return torch.stack(returns[::-1])


def gae(
    rewards: Tensor, discounts: Tensor, values: Tensor, next_values: Tensor, ends: Tensor, lambda_: float
) -> Tensor:
    """Return generalized advantage estimates [T, …].

    discounts: 0 after termination, else γ. values, next_values: before and after each step, in the same episode. ends:
    1 where the episode ended at the step, terminated or truncated: no later step counts there.
    Source: Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (2016),
    equation 16.
    """
    errors = rewards + discounts * next_values - values
    factors = discounts * lambda_ * (1 - ends.to(values.dtype))
    return n_step_return(errors, factors, torch.zeros_like(values[0]))


def vtrace(
    log_rhos: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    clip_rho: float = 1.0,
    clip_c: float = 1.0,
) -> VTrace:
    """Return V-trace targets and advantages [T, …], without gradients.

    log_rhos: log of the target policy's probability of the action over the acting policy's.
    Source: Espeholt et al., "IMPALA" (2018), section 4.1, equation 1 and remark 1.
    """
    with torch.no_grad():
        rhos = log_rhos.exp()
        clipped, traces = rhos.clamp(max=clip_rho), rhos.clamp(max=clip_c)
        next_values = torch.cat([values[1:], bootstrap_value[None]])
        errors = clipped * (rewards + discounts * next_values - values)
        vs = values + n_step_return(errors, discounts * traces, torch.zeros_like(bootstrap_value))
        next_vs = torch.cat([vs[1:], bootstrap_value[None]])
        return VTrace(vs, clipped * (rewards + discounts * next_vs - values))


def double_q(
    q: Tensor, action: Tensor, reward: Tensor, discount: Tensor, next_q_online: Tensor, next_q_target: Tensor
) -> Tensor:
    """Return the temporal-difference errors […] of double Q-learning; only `q` has a gradient.

    q, next_q_online, next_q_target […, A]: the online network chooses the next action, the target network values it.
    Source: van Hasselt, Guez and Silver, "Deep Reinforcement Learning with Double Q-learning" (2016), equation 4.
    """
    with torch.no_grad():
        best = next_q_online.argmax(-1, keepdim=True)
        target = reward + discount * next_q_target.gather(-1, best).squeeze(-1)
    return target - q.gather(-1, action.long().unsqueeze(-1)).squeeze(-1)
