"""A node's failure that nobody catches: a plain script prints the short report instead of two long tracebacks.

`str(error)` keeps the whole remote traceback, and so does failure.txt in the run's folder.
"""

import sys
from types import TracebackType

from lp_pipe.errors import NodeError


def print_reports() -> None:
    """Use the report from now on, if Python's own hook is in place: debuggers, notebooks, error trackers keep theirs.

    It stays after the run, whose failure may leave the script at any later time.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_exception


def _print_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    is_plain = error.__cause__ is None and (error.__context__ is None or error.__suppress_context__)
    if isinstance(error, NodeError) and error.report and is_plain and sys.stderr is not None:
        print(error.report, file=sys.stderr, flush=True)
    else:  # everything else, and a failure that belongs to the story of another error
        sys.__excepthook__(kind, error, trace)
