"""How `lp_pipe schedule --compare` says which schedule is fastest."""

import json

from lp_pipe.cli.table import table
from lp_pipe.pipeline.schedule import Compared, Comparison, to_trace_events


def comparison_text(comparison: Comparison, named: Compared | None = None) -> str:
    """For people: the fastest first, then what is left out and why.

    named: one of them; each has a column with what it takes of that one's makespan.
    """
    rows = [
        [
            party.name,
            str(party.chunks),
            f"{party.timeline.makespan:g} s",
            f"{_share(party, named):.1%}" if named else "",
            f"{party.timeline.bubble:.1%}",
            f"{party.peak_activations:g}",
        ]
        for party in comparison.ranked
    ]
    share = f"OF {named.name}" if named else ""
    lines = [
        table(["SCHEDULE", "CHUNKS", "MAKESPAN", share, "BUBBLE", "PEAK ACTIVATIONS"], rows),
        "The same model on the same workers: c chunks share what one would take, and an activation of each counts 1/c.",
        *(["", "Left out:"] if comparison.left_out else []),
        *(f"  {name}: {reason}" for name, reason in comparison.left_out.items()),
    ]
    return "\n".join(lines) + "\n"


def comparison_json(comparison: Comparison, named: Compared | None = None) -> str:
    """For programs: one object in one line; with `named`, of each "of_named", its makespan divided by that one's."""
    ranked = [
        {**party.as_json(), **({"of_named": _share(party, named)} if named else {})} for party in comparison.ranked
    ]
    return json.dumps({"ranked": ranked, "left_out": dict(comparison.left_out)}) + "\n"


def comparison_trace(comparison: Comparison) -> str:
    """Trace events, a process for each schedule."""
    return to_trace_events({f"{party.name}, chunks={party.chunks}": party.timeline for party in comparison.ranked})


def _share(party: Compared, named: Compared) -> float:
    """Where nothing takes any time, all are equal."""
    return party.timeline.makespan / named.timeline.makespan if named.timeline.makespan else 1.0
