"""As whom the processes of a pod run, and what of its manifest follows from that. Pure.

By default a user without any right and without an entry in the image's /etc/passwd, so that a namespace which enforces
the Pod Security Standard `restricted` takes the pod.
"""

from typing import Any

NONROOT = 65532  # called "nonroot" in the distroless images
ROOT = 0
HOME = "/home/lp_pipe"

_NAME = "lp_pipe"
_LARGEST = (1 << 31) - 1  # of Kubernetes
_OWNER_READS, _GROUP_READS = 0o400, 0o440


def read_user(text: str) -> int:
    """What `run_as_user` says.

    Raises:
        ValueError: no number of a user.
    """
    if text.isdecimal() and int(text) <= _LARGEST:
        return int(text)
    raise ValueError(
        f"engine 'kubernetes': run_as_user={text!r} is no number of a user: write one of 0 (root) to {_LARGEST}; "
        f"default: {NONROOT}"
    )


def pod_security(user: int) -> dict[str, Any]:
    """Of the pod's `securityContext`. With `fsGroup` the kubelet gives the files of its volumes to that group."""
    seccomp = {"seccompProfile": {"type": "RuntimeDefault"}}
    if user == ROOT:
        return seccomp
    return {"runAsNonRoot": True, "runAsUser": user, "runAsGroup": user, "fsGroup": user, **seccomp}


def container_security(user: int) -> dict[str, Any]:
    """Of the container's `securityContext`: also root is without a single capability."""
    return {
        **({"runAsUser": ROOT} if user == ROOT else {}),
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }


def secret_mode(user: int) -> int:
    """Of a Secret's files: they are root's, whoever the pod runs as, and so another user reads them by its group."""
    return _OWNER_READS if user == ROOT else _GROUP_READS


def environment(user: int) -> dict[str, Any]:
    """Of the container. Caches (of --sync, of torch) are kept below ~, and are named after the user: who has no entry
    in /etc/passwd needs to be told both. Root has them from the image.
    """
    told = {} if user == ROOT else {"HOME": HOME, "USER": _NAME, "LOGNAME": _NAME}
    return {"env": [{"name": name, "value": value} for name, value in told.items()]} if told else {}


def home_volumes(user: int) -> list[dict[str, Any]]:
    """An empty folder: nothing of the image's needs to be writable."""
    return [] if user == ROOT else [{"name": "home", "emptyDir": {}}]


def home_mounts(user: int) -> list[dict[str, Any]]:
    """Where the container has it."""
    return [] if user == ROOT else [{"name": "home", "mountPath": HOME}]
