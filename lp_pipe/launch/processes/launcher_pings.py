"""Pings that show the template and the nodes that the launcher lives. A launcher that is silent counts as dead."""

import logging
import threading
import time
from collections.abc import Mapping

from lp_pipe.launch.processes.node_stream import NodeStream
from lp_pipe.launch.processes.template import Template
from lp_pipe.launch.processes.template_process import LAUNCHER_PATIENCE_S
from lp_pipe.protos import supervision_pb2 as wire

_log = logging.getLogger(__name__)

_PING_EVERY_S = 1.0


class LauncherPings:
    """Pings every second, in a thread of its own, until `end`. From `suspend` to `resume` the template expects none.

    streams: of the nodes, by node_id; nodes may be added later.
    """

    def __init__(self, template: Template, streams: Mapping[str, NodeStream]) -> None:
        self._template = template
        self._streams = streams
        self._is_over = threading.Event()
        self._last = time.monotonic()
        self._is_suspended = False
        threading.Thread(target=self._run, name="launcher pings", daemon=True).start()

    def suspend(self) -> None:
        """Stop the nodes until `resume`, because this process is about to be stopped."""
        self._is_suspended = True
        self._template.suspend()

    def resume(self) -> None:
        self._last = time.monotonic()
        self._is_suspended = False
        self._template.resume()

    def end(self) -> None:
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.wait(_PING_EVERY_S):
            silence_s, self._last = time.monotonic() - self._last, time.monotonic()
            if silence_s > LAUNCHER_PATIENCE_S and not self._is_suspended:
                _log.warning(
                    "this process was frozen for %.0f s: its nodes have ended unless they were frozen, too", silence_s
                )
            self._template.ping()
            for stream in list(self._streams.values()):
                stream.mention(ping=wire.Ping())
