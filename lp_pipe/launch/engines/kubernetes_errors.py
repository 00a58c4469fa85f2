"""What an API server answers, as one clear sentence with what to do."""

import json
import re

from lp_pipe.errors import LaunchError

_RIGHTS = "the rights that a launcher needs are in docs/multi_host.md"


class NoAnswer(LaunchError):
    """What was asked for may have been done, or not."""


class NotThere(LaunchError):
    """Nothing of that name, or no such namespace or kind."""


def explained(what: str, namespace: str, status: int | None, body: str | bytes | None, reason: str | None) -> str:
    """For an answer with an HTTP `status` that is not 2xx."""
    said = _message(body) or reason or "no reason given"
    return f"engine 'kubernetes': cannot {what} in namespace {namespace!r}: {_advice(what, namespace, status, said)}"


def unreachable(what: str, server: str, error: BaseException) -> str:
    """For no answer at all."""
    why = str(error).rpartition("Caused by ")[2]
    return (
        f"engine 'kubernetes': cannot {what}: the API server {server} does not answer: {why}; "
        "does `kubectl get pods` work here, with the same kubeconfig?"
    )


def _advice(what: str, namespace: str, status: int | None, said: str) -> str:
    if status == 401:
        return f"the API server does not know who this is ({said}); log in again, and see `kubectl auth whoami`"
    if status == 403:
        return f"it is not allowed ({said}); {_RIGHTS}, and `kubectl auth can-i` tells which of them are missing"
    if status == 404 and re.search(r"namespaces? .* not found", said):
        return f"there is no such namespace; `kubectl create namespace {namespace}`, or give another by --namespace"
    if status == 404 and "JobSet" in what:
        return "the cluster has no JobSets; have them installed (jobset.sigs.k8s.io), or use --kind=job"
    if status == 409:
        return f"there is one of that name already ({said}), which is left alone; launch again: names are random"
    return f"HTTP status {status}: {said}"


def _message(body: str | bytes | None) -> str:
    text = body.decode(errors="replace") if isinstance(body, bytes) else body or ""
    try:
        found = json.loads(text)
    except ValueError:
        return text.strip()[:500]
    return str(found.get("message", "")) if isinstance(found, dict) else ""
