"""What an Unavailable is the consequence of, for callers in the launcher: nobody else has to ask `wait` for that."""

from lp_pipe.context import NodeServices
from lp_pipe.errors import Unavailable


def because_of(services: NodeServices | None, error: Unavailable, text: str) -> Unavailable:
    """What to raise from the error, with this text: the failure that has ended the program is the error's cause."""
    failure = give_cause(services, error)
    if failure is not None:
        cause = str(failure).partition("\n")[0]
        text = text if cause in text else f"{text}; the first failure of the program: {cause}"
    return Unavailable(text)


def give_cause(services: NodeServices | None, error: Unavailable) -> Exception | None:
    """The failure that has ended the program, if one has: from now on the error's cause."""
    failure = services.first_failure() if services is not None else None
    if failure is not None:
        error.__cause__ = failure
    return failure
