"""How `lp_pipe schedule --compare` says which schedule is fastest."""

import json

from lp_pipe.cli.table import table
from lp_pipe.pipeline.schedule import Comparison, to_trace_events


def comparison_text(comparison: Comparison) -> str:
    """For people: the fastest first, then what is left out and why."""
    rows = [
        [
            party.name,
            str(party.chunks),
            f"{party.timeline.makespan:g} s",
            f"{party.timeline.bubble:.1%}",
            f"{party.peak_activations:g}",
        ]
        for party in comparison.ranked
    ]
    lines = [
        table(["SCHEDULE", "CHUNKS", "MAKESPAN", "BUBBLE", "PEAK ACTIVATIONS"], rows),
        "The same model on the same workers: c chunks share what one would take, and an activation of each counts 1/c.",
        *(["", "Left out:"] if comparison.left_out else []),
        *(f"  {name}: {reason}" for name, reason in comparison.left_out.items()),
    ]
    return "\n".join(lines) + "\n"


def comparison_json(comparison: Comparison) -> str:
    """For programs: one object in one line."""
    ranked = [party.as_json() for party in comparison.ranked]
    return json.dumps({"ranked": ranked, "left_out": dict(comparison.left_out)}) + "\n"


def comparison_trace(comparison: Comparison) -> str:
    """Trace events, a process for each schedule."""
    return to_trace_events({f"{party.name}, chunks={party.chunks}": party.timeline for party in comparison.ranked})
