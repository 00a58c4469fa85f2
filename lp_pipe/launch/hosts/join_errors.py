"""The error that says why hosts have not joined: first the hosts with a reason, then the silent ones in one line."""

from collections.abc import Sequence

from lp_pipe.launch.engines.base import StartedAgent
from lp_pipe.telemetry.names import name_list

_MOST_TOLD = 3  # hosts with a reason of their own: an error has at most 15 lines
_LINES = 5  # of what one of them printed; where several are told of, fewer
_FEW_LINES = 2


def hosts_not_joined(
    missing: Sequence[str],
    of: int,
    refusals: Sequence[str],
    watched: Sequence[StartedAgent],
    waited_s: float,
    log_dir: str,
) -> str:
    """Return the error's text.

    watched: of all hosts. waited_s: since they were started. log_dir: has all that they print.
    """
    theirs = [one for one in watched if not set(one.hosts).isdisjoint(missing)]
    told = [one for one in theirs if one.how_it_ended() or one.last_lines()]
    told.sort(key=lambda one: one.how_it_ended() is None)  # an end says more than words on the way
    silent = [name for name in missing if not any(name in one.hosts for one in told)]
    lines = _LINES if len(told) == 1 else _FEW_LINES
    details = [*refusals[:_MOST_TOLD], *(_told(one, waited_s, lines) for one in told[:_MOST_TOLD])]
    if len(told) > _MOST_TOLD:
        details.append(f"and {len(told) - _MOST_TOLD} more that said why: all that they print is in {log_dir}")
    if silent:
        details.append(f"{name_list(silent)}: not there yet after {waited_s:.0f} s, without a word")
    return "\n  ".join([f"{len(missing)} of {of} hosts have not joined: {name_list(missing)}", *details])


def _told(one: StartedAgent, waited_s: float, most_lines: int) -> str:
    how = one.how_it_ended()
    state = f"its agent ended ({how})" if how else f"not there yet after {waited_s:.0f} s"
    lines = one.last_lines()[-most_lines:]
    said = "".join(f"\n      {line}" for line in lines) or "; it had printed nothing"
    return f"{name_list(one.hosts)}: {state}{said}"
