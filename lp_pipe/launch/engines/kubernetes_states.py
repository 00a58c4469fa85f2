"""What the cluster says of a pod, in words of ours: whether it has ended, how, what to do, or what it waits for."""

import signal
from collections.abc import Mapping
from typing import Any

from lp_pipe.launch.engines.kubernetes_manifest import CONTAINER

Pod = Mapping[str, Any]  # as the API has it: camelCase

DELETED = "its pod was deleted: by somebody, or because another pod of the run had failed"

_INDEX = "batch.kubernetes.io/job-completion-index"
_PYTHON = "is there a `python` in the image, which the pod's user may run? It is not root without --run-as-user=0"
# A container that waits for one of these waits for ever; ErrImagePull, without BackOff, is tried again at once.
_HOPELESS = {
    "ImagePullBackOff": "check --image, and that the cluster may pull it (imagePullSecrets of its service account)",
    "InvalidImageName": "check --image",
    "ErrImageNeverPull": "load the image on the cluster's nodes, or push it where they can pull it",
    "CreateContainerConfigError": "see `kubectl describe pod`",
    "CreateContainerError": "see `kubectl describe pod`",
    "RunContainerError": _PYTHON,
}
_ENDED_BY = {
    "Evicted": "ask for what it needs, such as --hosts=2:memory_gib=32, so that it is not the first to go",
    "OOMKilled": "it used more memory than its limit: ask for more, such as --hosts=2:memory_gib=32",
    "StartError": _PYTHON,
}


def index_of(pod: Pod) -> int | None:
    """Which of the Job's pods it is."""
    metadata = pod["metadata"]
    text = (metadata.get("annotations") or {}).get(_INDEX) or (metadata.get("labels") or {}).get(_INDEX)
    return int(text) if text is not None else None


def has_started(pod: Pod) -> bool:
    """Whether there is a log to read."""
    state = _container_state(pod)
    return "running" in state or "terminated" in state


def how_it_ended(pod: Pod) -> str | None:
    """None while it may still become, or is, a running agent."""
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
    """Of a pod without a log: its phase and, where the cluster says so, the reason."""
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
        return "its pod failed, and the cluster does not say why"
    if code > 128 and code - 128 in {one.value for one in signal.Signals}:
        return f"killed by {signal.Signals(code - 128).name}"
    return f"exit status {code}"


def _container_state(pod: Pod) -> Mapping[str, Any]:
    containers = (pod.get("status") or {}).get("containerStatuses") or []
    ours: Pod = next((one for one in containers if one["name"] == CONTAINER), {})  # others may be put beside it
    return ours.get("state") or {}


def _condition(pod: Pod, kind: str) -> Mapping[str, Any]:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return next((one for one in conditions if one.get("type") == kind), {})
