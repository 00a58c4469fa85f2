"""Share the launcher's sources, its own modules and the run's folder with the other hosts."""

import logging
import os
import sys
import sysconfig
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import ModuleType

from lp_pipe.errors import LaunchError
from lp_pipe.launch.hosts.agent_messages import KeepContents, LayOutTree, MissingContents, SeesFile
from lp_pipe.launch.hosts.source_tree import SourceTree, TreeFile, batches
from lp_pipe.launch.supervision.peer import Peer
from lp_pipe.rpc import codec
from lp_pipe.telemetry.names import name_list

_log = logging.getLogger(__name__)

_SEE_PATIENCE_S = 10.0  # for the answers; a host that gives none will soon be noticed
_SEND_PATIENCE_S = 60.0  # until one batch is on the host's disk
_HOSTS_AT_A_TIME = 16


def send_tree(tree: SourceTree, agents: Mapping[str, Peer], is_up: Callable[[str], bool]) -> None:
    """Send every host what it lacks of the tree, and let it lay the tree out.

    is_up: whether a host is still there; for those that are lost meanwhile nothing is raised.

    Raises:
        LaunchError: names the host, and what went wrong there.
    """
    with ThreadPoolExecutor(_HOSTS_AT_A_TIME, "sync") as pool:
        sent = {name: pool.submit(_send, tree, agent) for name, agent in agents.items()}
    for name, done in sent.items():
        error = done.exception()
        if error is None:
            lacked = done.result()
            size = sum(file.size for file in lacked)
            _log.info("host %s lacked %d of %d source files (%d bytes)", name, len(lacked), len(tree.files), size)
        elif is_up(name):
            raise LaunchError(f"host {name!r} has not got the sources of {tree.root}: {error}") from error


def warn_of_hosts_apart(run_dir: Path, agents: Mapping[str, Peer]) -> None:
    """Name the hosts that do not share the run's folder: a resumed training would begin anew there."""
    try:
        with tempfile.NamedTemporaryFile(prefix=".is-shared-", dir=run_dir) as mark:
            asked = {name: agent.ask(SeesFile(mark.name)) for name, agent in agents.items()}
            wait(asked.values(), _SEE_PATIENCE_S)
    except OSError as error:  # a full disk, which other code reports
        _log.info("it is not known which hosts share %s: %s", run_dir, error)
        return
    answers = {name: answer for name, answer in asked.items() if answer.done() and answer.exception() is None}
    apart = [name for name, answer in answers.items() if not answer.result()]
    if apart:
        _log.warning(
            "%s: the run's folder is not shared by %s: what nodes write to it there stays there, and a resumed run "
            "finds no checkpoints there (put it on a shared file system: --run-dir)",
            run_dir,
            name_list(apart),
        )


def _send(tree: SourceTree, agent: Peer) -> list[TreeFile]:
    """Send one host what it lacks, and return that."""
    files = tree.files_with(agent.ask(MissingContents(tree)).result(_SEND_PATIENCE_S))
    for batch in batches(files):
        agent.ask(KeepContents([tree.read(file) for file in batch])).result(_SEND_PATIENCE_S)
    agent.ask(LayOutTree(tree)).result(_SEND_PATIENCE_S)
    return files


_EVERYWHERE = frozenset({"__main__", "__mp_main__", "lp_pipe"})

_users: Counter[str] = Counter()
_lock = threading.Lock()


def local_modules(synced: str = "") -> list[ModuleType]:
    """Return the modules outside the standard library, the installed packages and the folder that was synced."""
    # `pip install --target` fills folders of PYTHONPATH, too.
    targets = [folder for folder in sys.path if any(Path(folder or ".").glob("*.dist-info"))]
    folders = [*sysconfig.get_paths().values(), *targets, *([synced] if synced else [])]
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
