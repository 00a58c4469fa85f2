"""What a process may have no more of, and what to do about it."""

import errno


def told(error: OSError) -> str:
    """The error in words; for one that a higher limit mends, which."""
    advice = "; raise the limit of that process (ulimit -n)" if error.errno == errno.EMFILE else ""
    return f"{error}{advice}"
