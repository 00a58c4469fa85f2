"""The user's own modules, of which other hosts have no copy: what they define travels by value."""

import os
import sys
import sysconfig
import threading
from collections import Counter
from types import ModuleType

from lp_pipe.rpc import codec

_EVERYWHERE = frozenset({"__main__", "__mp_main__", "lp_pipe"})

_users: Counter[str] = Counter()
_lock = threading.Lock()


def local_modules(synced: str = "") -> list[ModuleType]:
    """Return the modules outside the standard library, the installed packages and the folder that was synced."""
    folders = [*sysconfig.get_paths().values(), *([synced] if synced else [])]
    installed = {os.path.realpath(path) + os.sep for path in folders}
    return [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] not in _EVERYWHERE and _is_local(module, name, installed)
    ]


def ship_local_modules(synced: str = "") -> list[ModuleType]:
    """Send them by value from now on; returns which, for `stop_shipping`. Several runs may ask for it at a time."""
    found = local_modules(synced)
    with _lock:
        codec.ship_by_value([module for module in found if not _users[module.__name__]])
        _users.update(module.__name__ for module in found)
    return found


def stop_shipping(modules: list[ModuleType]) -> None:
    """End the shipping for one run: modules that no other run ships travel by name again."""
    with _lock:
        _users.subtract(module.__name__ for module in modules)
        codec.ship_by_name([module for module in modules if not _users[module.__name__]])


def _is_local(module: ModuleType, name: str, installed: set[str]) -> bool:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or getattr(module, "__name__", None) != name:
        return False
    path = os.path.realpath(file)
    return not any(path.startswith(folder) for folder in installed) and not path.endswith((".so", ".pyd"))
