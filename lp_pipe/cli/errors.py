"""The exit statuses of commands, and the errors that lead to them."""

import difflib
import signal
from collections.abc import Callable, Iterable

from lp_pipe.launch.signals import Terminated

DONE = 0
NODE_FAILED = 1
WRONG_USAGE = 2
NOT_ANSWERED = 1
UNHEALTHY = 1
NOT_LAUNCHED = 3
INTERRUPTED = 128  # plus the signal's number: 130 for Ctrl+C, 143 for SIGTERM


class CommandError(Exception):
    """An error that ends the command: its message goes to stderr, its status is the exit status."""

    status = NOT_LAUNCHED


class UsageError(CommandError):
    """A wrong command line. The message is one line that says how to correct it.

    choices: a table of valid values, printed below the message.
    """

    status = WRONG_USAGE

    def __init__(self, message: str, choices: str = "") -> None:
        super().__init__("\n".join([" ".join(message.split()), *choices.splitlines()]))


class NotLaunched(CommandError):
    """The target's own code failed, or its program cannot be started."""


class NotAnswered(CommandError):
    """A live run does not answer."""

    status = NOT_ANSWERED


def status_of(interrupt: KeyboardInterrupt) -> int:
    """Return the exit status: 130 for Ctrl+C, 143 for SIGTERM, 129 for a terminal that was closed."""
    return interrupt.code if isinstance(interrupt, Terminated) else INTERRUPTED + signal.SIGINT


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: "1 node", "2 nodes", "3 processes"."""
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count} {noun}{ending}"


def nearest(wrong: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """Return "; did you mean 'RIGHT'?" with the most similar known name; "" if none is similar."""
    found = difflib.get_close_matches(wrong, list(known), n=1, cutoff=likeness)
    return f"; did you mean {found[0]!r}?" if found else ""


def whole_number(option: str, what: str, example: int, least: int = 0) -> Callable[[str], int]:
    """Return a function that reads the value of an option, such as "--keep=", as a number of `what`.

    It raises UsageError if the value is no whole number, or below `least`.
    """

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise UsageError(f"{option}{text}: give a number of {what}, such as {option}{example}")
        return int(text)

    return read
