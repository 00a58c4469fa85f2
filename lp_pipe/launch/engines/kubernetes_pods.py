"""The pods of a run: one thread watches them, and one thread per pod reads its log."""

import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from lp_pipe.errors import LaunchError
from lp_pipe.launch.engines.base import StartedAgent
from lp_pipe.launch.engines.kubernetes_api import Cluster, NoAnswer
from lp_pipe.launch.engines.kubernetes_manifest import CONTAINER, INSTANCE_LABEL, Object, ownership

Pod = Mapping[str, Any]  # the API's JSON, in camelCase

DELETED = "its pod was deleted: by a user, or because another pod of the run had failed"

_INDEX = "batch.kubernetes.io/job-completion-index"
_PYTHON = "check that the image has a `python` that the pod's user may run (root only with --run-as-user=0)"
# A container that waits for one of these reasons waits for ever. ErrImagePull, without BackOff, is retried at once.
_HOPELESS = {
    "ImagePullBackOff": "check --image, and that the cluster may pull it (imagePullSecrets of the service account)",
    "InvalidImageName": "check --image",
    "ErrImageNeverPull": "load the image on the cluster's nodes, or push it where they can pull it",
    "CreateContainerConfigError": "see `kubectl describe pod`",
    "CreateContainerError": "see `kubectl describe pod`",
    "RunContainerError": _PYTHON,
}
_ENDED_BY = {
    "Evicted": "request what it needs, such as --hosts=2:memory_gib=32, so that it is not evicted first",
    "OOMKilled": "it used more memory than its limit: request more, such as --hosts=2:memory_gib=32",
    "StartError": _PYTHON,
}

_log = logging.getLogger(__name__)

_KEPT_LINES = 20
_KEPT_LINE_CHARS = 4096
_AGAIN_S = 1.0
_LAST_LINES_S = 0.25
_GONE_PATIENCE_S = 15.0


class PodHost(StartedAgent):
    """The pod of one host; exists before the cluster has made the pod."""

    LAST_NEWS_S: ClassVar[float] = 4.0  # a kubelet checks its pods every second, then reports to the API server

    def __init__(self, host: str, log_file: Path, pods: "Pods") -> None:
        super().__init__([host])
        self._log_file = log_file
        self._pods = pods
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._reader: threading.Thread | None = None
        self._seen: Pod | None = None
        self._end: str | None = None

    def how_it_ended(self) -> str | None:
        if self._end is not None and self._reader is not None:
            self._reader.join(_LAST_LINES_S)  # the last lines say why
        return self._end

    def last_lines(self) -> list[str]:
        return list(self._lines) or [self._pods.trouble or self._state()]

    def kill(self) -> None:
        """Delete all pods of the run: a Job that has lost its first pod has failed anyway."""
        if not self._pods.delete():
            return
        deadline = time.monotonic() + _GONE_PATIENCE_S
        while self._seen is not None and self._end is None and time.monotonic() < deadline:
            self._pods.wait_for_change(_AGAIN_S)

    # The methods below are called by the thread that watches the pods.

    def note(self, pod: Pod) -> None:
        self._seen = pod
        if has_started(pod) and self._reader is None:
            name = pod["metadata"]["name"]
            reader = threading.Thread(target=self._read, args=(name,), name=f"output of {name}", daemon=True)
            reader.start()
            self._reader = reader
        self._end = how_it_ended(pod)

    def gone(self) -> None:
        if self._seen is not None and self._end is None:
            self._end = DELETED

    def finish(self) -> None:
        if self._reader is not None:
            self._reader.join(_AGAIN_S)

    def _state(self) -> str:
        if self._seen is None:
            return f"the cluster has made no pod for it; `{self._pods.describe}` says why"
        return waits_for(self._seen)

    def _read(self, pod: str) -> None:
        try:
            with self._log_file.open("a", encoding="utf-8") as log:
                for line in self._pods.cluster.log_lines(pod, CONTAINER):
                    self._lines.append(line[:_KEPT_LINE_CHARS])
                    log.write(line + "\n")
                    log.flush()
        except (LaunchError, OSError) as error:
            self._lines.append(f"(its log cannot be read any further: {error})")


class Pods:
    """The objects of a run in the cluster, and its pods.

    objects: the last one owns the others. log_paths: by host, in the order of the pods' numbers.

    Raises (constructor):
        LaunchError: an object cannot be made; the others have been deleted.
    """

    def __init__(self, cluster: Cluster, objects: Sequence[Object], log_paths: Mapping[str, Path]) -> None:
        for path in log_paths.values():
            path.parent.mkdir(parents=True, exist_ok=True)
        self.cluster = cluster
        self.hosts = [PodHost(host, path, self) for host, path in log_paths.items()]
        self.trouble = ""
        owner = objects[-1]["metadata"]["name"]
        self.describe = f"kubectl -n {cluster.namespace} describe job -l {INSTANCE_LABEL}={owner}"
        self._selector = f"{INSTANCE_LABEL}={owner}"
        self._made: list[Object] = []
        self._is_over = threading.Event()
        self._changed = threading.Condition()
        self._deleting = threading.Lock()
        self._is_deleted = True
        try:
            self._make(objects)
            version = self._list()
        except BaseException:
            self.delete()
            cluster.close()
            raise
        self._thread = threading.Thread(target=self._watch, args=(version,), name=f"pods of {owner}", daemon=True)
        self._thread.start()

    def delete(self) -> bool:
        """Ask the cluster to delete every object; repeated calls do nothing more.

        False: some could not be deleted; a warning names them.
        """
        with self._deleting:
            while self._made:
                one = self._made.pop()
                try:
                    self.cluster.delete(one)
                except LaunchError as error:
                    left = [one]
                    if isinstance(error, NoAnswer):  # waiting for a timeout per object would take minutes
                        left += self._made
                        self._made.clear()
                    names = ", ".join(f"{one['kind']} {one['metadata']['name']}" for one in left)
                    _log.warning("%s. Delete with kubectl what is left: %s", error, names)
                    self._is_deleted = False
            return self._is_deleted

    def wait_for_change(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait(timeout_s)

    def close(self) -> None:
        self._is_over.set()
        self.delete()
        self.cluster.close()
        self._thread.join(_AGAIN_S)
        for host in self.hosts:
            host.finish()

    def _make(self, objects: Sequence[Object]) -> None:
        """Create the objects in order, then make the last one own the others, so that they go together with it."""
        for one in objects:
            try:
                uid = self.cluster.create(one)
            except NoAnswer:
                self._made.append(one)  # it may exist
                raise
            self._made.append(one)
        for child in objects[:-1]:
            self.cluster.change(child, ownership(objects[-1], uid))

    def _watch(self, version: str | None) -> None:
        while not self._is_over.is_set():
            try:
                if version is None:
                    version = self._list()
                self.trouble = ""
                for kind, pod in self.cluster.changes(self._selector, version):
                    self._note(pod, is_gone=kind == "DELETED")
            except LaunchError as error:  # the run goes on: agents have connections of their own
                self.trouble = str(error)
                self._is_over.wait(_AGAIN_S)
            version = None  # a new list has what happened since

    def _list(self) -> str:
        pods, version = self.cluster.pods(self._selector)
        numbers = {index_of(pod) for pod in pods}
        for number, host in enumerate(self.hosts):
            if number not in numbers:
                host.gone()
        for pod in pods:
            self._note(pod, is_gone=False)
        return version

    def _note(self, pod: Pod, is_gone: bool) -> None:
        number = index_of(pod)
        if number is None or number >= len(self.hosts):
            return
        self.hosts[number].gone() if is_gone else self.hosts[number].note(pod)
        with self._changed:
            self._changed.notify_all()


def index_of(pod: Pod) -> int | None:
    """Return the pod's number in its Job."""
    metadata = pod["metadata"]
    text = (metadata.get("annotations") or {}).get(_INDEX) or (metadata.get("labels") or {}).get(_INDEX)
    return int(text) if text is not None else None


def has_started(pod: Pod) -> bool:
    """Return whether the pod's container has a log to read."""
    state = _container_state(pod)
    return "running" in state or "terminated" in state


def how_it_ended(pod: Pod) -> str | None:
    """Return in words how the pod ended, with advice; None while its agent runs or may still start."""
    status = pod.get("status") or {}
    waiting = _container_state(pod).get("waiting") or {}
    if waiting.get("reason") in _HOPELESS:
        return _with_advice(waiting["reason"], waiting.get("message"), _HOPELESS)
    if status.get("phase") not in ("Succeeded", "Failed"):
        return None
    ended = _container_state(pod).get("terminated") or {}
    if status.get("reason"):  # the kubelet's own: Evicted, NodeShutdown, ...
        return _with_advice(status["reason"], status.get("message"), _ENDED_BY)
    disruption = _condition(pod, "DisruptionTarget")
    if disruption.get("status") == "True":
        return _with_advice(disruption.get("reason", "disrupted"), disruption.get("message"), _ENDED_BY)
    if ended.get("reason") in _ENDED_BY:
        return _with_advice(ended["reason"], ended.get("message"), _ENDED_BY)
    return _exit_text(ended.get("exitCode", 0 if status["phase"] == "Succeeded" else None))


def waits_for(pod: Pod) -> str:
    """Return the phase of a pod without a log, and the reason, if the cluster gives one."""
    waiting = _container_state(pod).get("waiting") or {}
    scheduled = _condition(pod, "PodScheduled")
    why = waiting if waiting.get("reason") else scheduled if scheduled.get("status") == "False" else {}
    said = ": ".join(part for part in (why.get("reason"), why.get("message")) if part)
    phase = (pod.get("status") or {}).get("phase", "Pending")
    where = (pod.get("spec") or {}).get("nodeName")
    return f"pod {pod['metadata']['name']} is {phase}{f' on {where}' if where else ''}{f': {said}' if said else ''}"


def _with_advice(reason: str, message: str | None, advice: Mapping[str, str]) -> str:
    said = f"{reason}: {message}" if message else reason
    return f"{said}; {advice[reason]}" if reason in advice else said


def _exit_text(code: int | None) -> str:
    if code is None:
        return "its pod failed; the cluster gives no reason"
    if code > 128 and code - 128 in {one.value for one in signal.Signals}:
        return f"killed by {signal.Signals(code - 128).name}"
    return f"exit status {code}"


def _container_state(pod: Pod) -> Mapping[str, Any]:
    containers = (pod.get("status") or {}).get("containerStatuses") or []
    ours: Pod = next((one for one in containers if one["name"] == CONTAINER), {})  # clusters may add sidecars
    return ours.get("state") or {}


def _condition(pod: Pod, kind: str) -> Mapping[str, Any]:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return next((one for one in conditions if one.get("type") == kind), {})
