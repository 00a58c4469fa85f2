"""Serves `lp_pipe` commands: imports it once and forks a process for each, which then costs no more than its own work.

Reads a line of JSON for each: arguments, folder, environment, where its output goes. Answers with its exit status.
"""

import gc
import json
import os
import signal
import sys
from importlib import import_module
from typing import NoReturn

from lp_pipe.cli.main import COMMANDS, main


def serve() -> None:
    for command in COMMANDS:
        import_module(f"lp_pipe.cli.{command}")
    gc.collect()
    gc.freeze()  # the collector of a forked command would copy all pages of the imports, at its end at the latest
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if not child:
            become(**asked)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def become(arguments: list[str], folder: str, env: dict[str, str], out: str, err: str, patience_s: int) -> NoReturn:
    """The command, as `python -m lp_pipe` in that folder would be it."""
    signal.alarm(patience_s)
    redirect(0, os.devnull, os.O_RDONLY)
    redirect(1, out, os.O_WRONLY | os.O_CREAT)
    redirect(2, err, os.O_WRONLY | os.O_CREAT)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    sys.argv[1:], sys.path[0] = arguments, folder
    sys.exit(main())


def redirect(number: int, path: str, flags: int) -> None:
    file = os.open(path, flags)
    os.dup2(file, number)
    os.close(file)


if __name__ == "__main__":
    serve()
