"""Hints for a node that did not find a module or file on its host, if the launcher's host has it."""

import importlib.util
import os
import re
import socket
import sys

_MODULE = re.compile(r"ModuleNotFoundError: No module named '(\w+)")
_FILE = re.compile(r"FileNotFoundError: .*: '(.+)'")


def missing_module_hint(summary: str, host: str) -> str:
    """summary: type and message of the failure of a node on `host`; "" where there is nothing to say."""
    if host == socket.gethostname():
        return ""
    first = summary.partition("\n")[0]
    module, file = _MODULE.search(first), _FILE.search(first)
    if module is not None and _is_module_here(module[1]):
        return f"{module[1]} is found here, but not on {host}: install it there, or send your sources with --sync=DIR"
    if file is not None and os.path.exists(file[1]):  # unlike Path.exists never an error
        return f"it is here, but not on {host}: send small files with --sync=DIR, or use a shared file system"
    return ""


def _is_module_here(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # of a module without a spec
        return False
