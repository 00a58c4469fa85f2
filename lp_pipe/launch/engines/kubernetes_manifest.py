"""The manifest: objects that make a cluster start one agent in each of several equal pods. Pure: dicts in, dicts out.

By default the pods run as a user without any rights and without an entry in the image's /etc/passwd, so that a
namespace which enforces the Pod Security Standard `restricted` accepts them.

Secret (the run's)  ◄── owned by ──  JobSet, or Job + headless Service  ── makes ──►  N pods, one agent each
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lp_pipe.launch.engines.base import HostOffer

Object = dict[str, Any]

NONROOT = 65532  # called "nonroot" in the distroless images
ROOT = 0
HOME = "/home/lp_pipe"

_NAME = "lp_pipe"
_LARGEST = (1 << 31) - 1  # user number that Kubernetes accepts
_OWNER_READS, _GROUP_READS = 0o400, 0o440

CONTAINER = "agent"
SECRET_FILE = "/run/lp_pipe/secret"
# The agent's name, in which Kubernetes replaces the variable by the pod's number. Otherwise the pods are equal.
HOST = "host-$(JOB_COMPLETION_INDEX)"
RUN_LABEL = "lp-pipe/run"
INSTANCE_LABEL = "app.kubernetes.io/instance"

_GPU = "nvidia.com/gpu"
# If the launcher was killed and could not delete the objects, the cluster deletes them so long after the pods' end.
_TTL_S = 300
# An agent listens on no port. It is healthy while it has a connection to the launcher, which drops a silent one. So the
# kubelet ends an agent that hangs and cannot end itself.
_PROBE = """\
import sys
for table in ("/proc/net/tcp", "/proc/net/tcp6"):
    try:
        lines = open(table).readlines()[1:]
    except OSError:
        continue
    for _, _, remote, state in (line.split()[:4] for line in lines):
        if state == "01" and remote.rpartition(":")[2] in sys.argv[1:]:
            sys.exit(0)
sys.exit("no connection to the launcher")
"""


@dataclass(frozen=True)
class PodGroup:
    """`count` equal pods of one run.

    name: the name of all their objects. run: the run's name, as a label's value. limits: what each pod may use (its
    name is not used). arguments: of the interpreter. ports: of the launcher. user: the number that the pods run as.
    """

    name: str
    run: str
    namespace: str
    image: str
    count: int
    limits: HostOffer
    arguments: Sequence[str]
    ports: Sequence[int]
    user: int = NONROOT


def jobset_objects(group: PodGroup, secret: str) -> list[Object]:
    """Return the Secret and, last, the JobSet, which makes the pods and their headless service."""
    spec = {
        "failurePolicy": {"maxRestarts": 0},
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "replicatedJobs": [
            {"name": "host", "replicas": 1, "template": {"metadata": _labels(group), "spec": _job_spec(group, {})}}
        ],
        "ttlSecondsAfterFinished": _TTL_S,
    }
    return [_secret(group, secret), _object("jobset.x-k8s.io/v1alpha2", "JobSet", group, {"spec": spec})]


def job_objects(group: PodGroup, secret: str) -> list[Object]:
    """Return the Secret, the Service and, last, the Job that makes the pods: `NAME-INDEX.NAME` in the cluster's DNS."""
    job = {**_job_spec(group, {"subdomain": group.name}), "ttlSecondsAfterFinished": _TTL_S}
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {INSTANCE_LABEL: group.name},
    }
    return [
        _secret(group, secret),
        _object("v1", "Service", group, {"spec": service}),
        _object("batch/v1", "Job", group, {"spec": job}),
    ]


KINDS: Mapping[str, Callable[[PodGroup, str], list[Object]]] = {"jobset": jobset_objects, "job": job_objects}


def ownership(owner: Object, uid: str) -> Object:
    """Return the change to an object that makes the cluster delete it together with `owner`."""
    reference = {key: owner[key] for key in ("apiVersion", "kind")} | {"name": owner["metadata"]["name"], "uid": uid}
    return {"metadata": {"ownerReferences": [reference]}}


def _object(version: str, kind: str, group: PodGroup, rest: Object) -> Object:
    metadata = {"name": group.name, "namespace": group.namespace, **_labels(group)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **rest}


def _labels(group: PodGroup) -> Object:
    ours = {"app.kubernetes.io/name": "lp-pipe", "app.kubernetes.io/managed-by": "lp-pipe"}
    return {"labels": {**ours, INSTANCE_LABEL: group.name, RUN_LABEL: group.run}}


def _secret(group: PodGroup, secret: str) -> Object:
    return _object(
        "v1", "Secret", group, {"type": "Opaque", "immutable": True, "stringData": {SECRET_FILE.split("/")[-1]: secret}}
    )


def _job_spec(group: PodGroup, more: Object) -> Object:
    return {
        "completionMode": "Indexed",
        "completions": group.count,
        "parallelism": group.count,
        "backoffLimit": 0,  # no new pods: a run that has lost a host has failed
        "template": {"metadata": _labels(group), "spec": {**_pod_spec(group), **more}},
    }


def _pod_spec(group: PodGroup) -> Object:
    secret = {"secretName": group.name, "defaultMode": secret_mode(group.user)}
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {INSTANCE_LABEL: group.name}},
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 10,  # an agent that ends has ended its nodes after 5 s
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # So the agent is not process 1, which would ignore SIGTERM and would have to reap orphans.
        "shareProcessNamespace": True,
        "securityContext": pod_security(group.user),
        "topologySpreadConstraints": [spread],
        "containers": [_container(group)],
        "volumes": [
            {"name": "secret", "secret": secret},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # the default of 64 MiB is too small for channels
            *home_volumes(group.user),
        ],
    }


def _container(group: PodGroup) -> Object:
    is_joined = {"exec": {"command": ["python", "-c", _PROBE, *(f"{port:04X}" for port in group.ports)]}}
    return {
        "name": CONTAINER,
        "image": group.image,
        "command": ["python"],
        "args": [*group.arguments],
        **environment(group.user),
        "resources": _resources(group.limits),
        "startupProbe": {**is_joined, "periodSeconds": 2, "timeoutSeconds": 5, "failureThreshold": 30},
        "livenessProbe": {**is_joined, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 3},
        "securityContext": container_security(group.user),
        "volumeMounts": [
            {"name": "secret", "mountPath": SECRET_FILE.rpartition("/")[0], "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            *home_mounts(group.user),
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _resources(limits: HostOffer) -> Object:
    """Return requests equal to the limits, so that a pod shares nothing. A GPU needs no request of its own."""
    asked = {
        **({"cpu": str(limits.cpus)} if limits.cpus else {}),
        **({"memory": f"{limits.memory >> 20}Mi"} if limits.memory else {}),
    }
    gpus = {_GPU: str(limits.gpus)} if limits.gpus else {}
    return {"requests": asked, "limits": {**asked, **gpus}} if asked or gpus else {}


def read_user(text: str) -> int:
    """Read the option `run_as_user`.

    Raises:
        ValueError: the text is not the number of a user.
    """
    if text.isdecimal() and int(text) <= _LARGEST:
        return int(text)
    raise ValueError(
        f"engine 'kubernetes': run_as_user must be a number from 0 (root) to {_LARGEST}, got {text!r}; the default is "
        f"{NONROOT}"
    )


def pod_security(user: int) -> dict[str, Any]:
    """Return the pod's `securityContext`. With `fsGroup` the kubelet gives the volumes' files to that group."""
    seccomp = {"seccompProfile": {"type": "RuntimeDefault"}}
    if user == ROOT:
        return seccomp
    return {"runAsNonRoot": True, "runAsUser": user, "runAsGroup": user, "fsGroup": user, **seccomp}


def container_security(user: int) -> dict[str, Any]:
    """Return the container's `securityContext`, without any capability, also for root."""
    return {
        **({"runAsUser": ROOT} if user == ROOT else {}),
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }


def secret_mode(user: int) -> int:
    """Return the mode of a Secret's files. root owns them, so any other user of the pod reads them by its group."""
    return _OWNER_READS if user == ROOT else _GROUP_READS


def environment(user: int) -> dict[str, Any]:
    """Return the container's `env`: home folder and user name, for a user that has no entry in /etc/passwd.

    Caches (of --sync, of torch) are below ~ and named after the user. Root has both from the image.
    """
    told = {} if user == ROOT else {"HOME": HOME, "USER": _NAME, "LOGNAME": _NAME}
    return {"env": [{"name": name, "value": value} for name, value in told.items()]} if told else {}


def home_volumes(user: int) -> list[dict[str, Any]]:
    """Return an empty folder as home, so that nothing in the image needs to be writable."""
    return [] if user == ROOT else [{"name": "home", "emptyDir": {}}]


def home_mounts(user: int) -> list[dict[str, Any]]:
    """Return where the container mounts `home_volumes`."""
    return [] if user == ROOT else [{"name": "home", "mountPath": HOME}]
