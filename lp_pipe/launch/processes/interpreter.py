"""How a new interpreter is started, so that it is as this one."""

from lp_pipe import private_python


def interpreter_flags() -> list[str]:
    """This interpreter's flags for a new one that runs `-c`: -O, -W, -X dev.

    -P, because with `-c` alone a json.py of the current folder comes before Python's own until sys.path is set; and
    where that folder has been removed, Python 3.13.0 to 3.13.2 look there at each missing attribute of a module, and
    raise a SystemError (https://github.com/python/cpython/issues/130932).
    """
    return [*private_python.interpreter_flags(), "-P"]
