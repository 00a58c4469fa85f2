"""Explanations in words of why a plan was chosen."""

from collections.abc import Sequence
from dataclasses import replace

from lp_pipe.pipeline.partitioning.plan import Plan
from lp_pipe.pipeline.partitioning.profile import Profile, total_seconds
from lp_pipe.pipeline.partitioning.step_time import StageTiming

_WORTH = 2  # a stage worth its cut computes so many times what the engine takes, beside its messages


def reason(plan: Plan, profile: Profile, devices: int, recompute: str, inexact: str) -> str:
    """Say what limits the plan, how much it gains over one device, and by how much it beats the others."""
    parts = [f"{_counted(len(plan.stages), 'stage')} on {plan.devices} of {_counted(devices, 'device')}", _limit(plan)]
    one_device = total_seconds(profile)
    if plan.slowest_seconds > 0:
        parts.append(f"{one_device / plan.slowest_seconds:.2f} times as fast as one device ({seconds(one_device)})")
    if plan.runners_up:
        parts.append("; ".join(f"{other.reason}: {_against(other, plan)}" for other in plan.runners_up))
    again = [str(index) for index, stage in enumerate(plan.stages) if stage.recompute == "full"]
    if again and recompute == "auto":
        parts.append(f"stage{'s' if len(again) > 1 else ''} {', '.join(again)} must recompute to fit the memory")
    if plan.devices < devices:
        parts.append(f"{_counted(devices - plan.devices, 'device')} idle, since more would make the slowest no faster")
    if plan.proven_gap:
        parts.append(
            f"{inexact}; of what was searched this is the best, and no plan takes less than "
            f"{seconds(plan.slowest_seconds / (1 + plan.proven_gap))} ({plan.proven_gap:.1%} gap)"
        )
    return ". ".join(part[:1].upper() + part[1:] for part in parts) + "."


def too_short(plan: Plan, timings: Sequence[StageTiming], action_seconds: float) -> str:
    """Return a warning of the shortest stage where it computes little beside what its cut costs, else "".

    For each micro-batch a cut costs two actions of the engine, and a message each way, which travel at the same time.
    """
    if len(timings) == 1:
        return ""
    engine = 2 * action_seconds
    links = [timing.link_s for timing in timings]  # the first stage has none before it
    messages = [max(before, behind) for before, behind in zip(links, [*links[1:], 0.0], strict=True)]
    compute = [timing.forward_s + timing.backward_s for timing in timings]
    left = [own - link - _WORTH * engine for own, link in zip(compute, messages, strict=True)]
    index = left.index(min(left))
    if left[index] >= 0:
        return ""
    layers, cost = plan.stages[index].layers, engine + messages[index]
    names = layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"
    return (
        f"stage {index} ({names}) is too short to be worth a cut: it computes {seconds(compute[index])} for a "
        f"micro-batch, while the engine and the messages of the cut take {seconds(cost)}: use fewer stages "
        "(fewer devices in the topology), or fewer micro-batches, which are larger then"
    )


def with_schedule_chosen(plans: Sequence[Plan]) -> Plan:
    """Return the plan with the shortest step; of several, its reason says what the others take."""
    best = min(plans, key=_step)
    if len(plans) == 1:
        return best
    others = "; ".join(f"{plan.schedule}: {seconds(_step(plan))}" for plan in plans if plan is not best)
    steps = f"A step of {best.microbatches} micro-batches takes {seconds(_step(best))} with {best.schedule} ({others})."
    return replace(best, reason=f"{best.reason} {steps}")


def seconds(value: float) -> str:
    """Return the seconds with a unit: 1.2 s, 35 ms, 8 µs."""
    for unit, factor in (("s", 1), ("ms", 1e3), ("µs", 1e6)):
        if value * factor >= 1:
            return f"{value * factor:.4g} {unit}"
    return f"{value * 1e9:.4g} ns" if value else "0 s"


def _step(plan: Plan) -> float:
    return plan.step_seconds or 0.0


def _limit(plan: Plan) -> str:
    index, stage = max(
        enumerate(plan.stages), key=lambda item: max(item[1].predicted_seconds, item[1].boundary_seconds)
    )
    first, last = stage.layers[0], stage.layers[-1]
    where = f"stage {index} ({first}{f' to {last}' if last != first else ''}, {_counted(stage.replicas, 'replica')})"
    if stage.boundary_seconds > stage.predicted_seconds:
        return f"what limits it are the tensors that enter or leave {where}, {seconds(stage.boundary_seconds)}"
    return f"the slowest is {where}, {seconds(stage.predicted_seconds)} per micro-batch"


def _against(other: Plan, plan: Plan) -> str:
    if not plan.slowest_seconds:
        return seconds(other.slowest_seconds)
    return f"{seconds(other.slowest_seconds)} ({other.slowest_seconds / plan.slowest_seconds - 1:+.0%})"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
