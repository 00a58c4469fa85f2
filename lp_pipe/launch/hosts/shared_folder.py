"""The check whether hosts see the run's folder, or have one of their own in its place."""

import logging
import tempfile
from collections.abc import Mapping
from concurrent.futures import wait
from pathlib import Path

from lp_pipe.launch.hosts.agent_link import AgentLink
from lp_pipe.telemetry.names import name_list

_log = logging.getLogger(__name__)

_PATIENCE_S = 10.0  # for the answers; of a host that gives none it will be known soon


def warn_of_hosts_apart(run_dir: Path, links: Mapping[str, AgentLink]) -> None:
    """Say which hosts do not share the folder: a resumed training would begin anew there, without an error."""
    try:
        with tempfile.NamedTemporaryFile(prefix=".is-shared-", dir=run_dir) as mark:
            asked = {name: link.ask("sees", mark.name) for name, link in links.items()}
            wait(asked.values(), _PATIENCE_S)
    except OSError as error:  # a full disk; that is for others to say
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
